"""What tests know of the insides of `hxla._lower`."""

from hxla._lower import (
    _actions,
    _chunks,
    _exact,
    _lower,
    _own_update,
    _pipeline,
    _state_sums,
    _streamed_update,
    _update_groups,
)
from hxla._lower._across import Cut
from hxla._lower._actions import FIELDS, KINDS, crossed, exchanges
from hxla._lower._array_sums import digits_of, exponents_for, value_of
from hxla._lower._chunks import Chunks, all_gather, reduce_scatter
from hxla._lower._contribution import Contribution, Tensors, packs_of
from hxla._lower._determinism import _equations, dependent
from hxla._lower._disk_shelf import _AHEAD, DirectFile, DiskShelf, _buffers
from hxla._lower._exact import Limbs
from hxla._lower._granules import Granules
from hxla._lower._inputs import Training, sharded_of, uneven_of
from hxla._lower._inside import check_permutes
from hxla._lower._lower import Programs, lower
from hxla._lower._microbatch import Microbatches
from hxla._lower._num_terms import num_terms
from hxla._lower._options import extra_bytes
from hxla._lower._padding import NOT_PADDED, Padding, padded, unpadded
from hxla._lower._padding_kept import keeps_padding
from hxla._lower._pipeline import Pipeline
from hxla._lower._pipeline_times import PieceTimes
from hxla._lower._replica import Replica
from hxla._lower._segment_costs import segment_costs
from hxla._lower._segment_part import direct_parts
from hxla._lower._segmented import Segmented
from hxla._lower._sharded_params import ShardedParams
from hxla._lower._shelves import Away
from hxla._lower._slots import make_slots
from hxla._lower._stage import StagePart
from hxla._lower._store import Store
from hxla._lower._sum import Reducer
from hxla._lower._update import Given
from hxla._lower._update_groups import Unit, UpdateGroups
from hxla._lower._words import Words
