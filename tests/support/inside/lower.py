"""What tests know of the insides of `hxla._src.lower`."""

from hxla._src.lower import actions as _actions
from hxla._src.lower import chunks as _chunks
from hxla._src.lower import compile as _compile
from hxla._src.lower import decisions as _decisions
from hxla._src.lower import exact as _exact
from hxla._src.lower import lower as _lower
from hxla._src.lower import pipeline as _pipeline
from hxla._src.lower import state_sums as _state_sums
from hxla._src.lower import step_program as _step_program
from hxla._src.lower import uneven_collectives as _uneven_collectives
from hxla._src.lower import units as _units
from hxla._src.lower import updates as _updates
from hxla._src.lower.actions import FIELDS, KINDS, crossed, exchanges
from hxla._src.lower.bitcast_packing import BitcastPacking
from hxla._src.lower.chain_runner import ChainRunner
from hxla._src.lower.chain_spec import direct_parts
from hxla._src.lower.chunks import Chunks, all_gather, reduce_scatter
from hxla._src.lower.compile import compiler_options, extra_bytes
from hxla._src.lower.contribution import (
    Contribution,
    Tensors,
    largest_bits_of,
    largest_in_rows,
    num_terms,
    packs_of,
)
from hxla._src.lower.decisions import DecisionSpec
from hxla._src.lower.determinism import Determinism, _equations, dependent
from hxla._src.lower.disk import _AHEAD, DirectFile, DiskBuffer, _buffers
from hxla._src.lower.exact import Limbs
from hxla._src.lower.exact_norms import (
    digits_of,
    exponents_for,
    row_sums,
    value_of,
    values_of,
)
from hxla._src.lower.inputs import Training, sharded_of, uneven_of
from hxla._src.lower.islands import Meetings
from hxla._src.lower.lower import Programs, lower
from hxla._src.lower.offload import OffloadedLeaf
from hxla._src.lower.padding import NOT_PADDED, Cut, Granules, Padding, padded, unpadded
from hxla._src.lower.pipeline import PieceTimes, Pipeline
from hxla._src.lower.replica import Replica
from hxla._src.lower.route import Route, RouteEnd
from hxla._src.lower.segment_programs import segment_costs
from hxla._src.lower.sharded_params import ShardedParams
from hxla._src.lower.slots import make_slots
from hxla._src.lower.stage import StagePart, check_permutes
from hxla._src.lower.store import Store
from hxla._src.lower.sum import Reducer
from hxla._src.lower.sum_layout import SumLayout
from hxla._src.lower.units import Unit, UpdateGroups
from hxla._src.lower.update import UpdateInputs
