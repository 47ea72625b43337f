"""What tests know of the insides of `hxla._plan`."""

from hxla._plan import _assignment_problem, _plan
from hxla._plan._assign import assign, shard_graph
from hxla._plan._assignment_problem import ChoiceNode, Edge, Problem, cost, solve
from hxla._plan._elimination import least_cost
from hxla._plan._layout import to_spec
from hxla._plan._linked_dims import LinkedDims, planned_parts
from hxla._plan._numerics import deciding
from hxla._plan._ownership import Shares
from hxla._plan._precision import MOST_SCALE_EXPONENT, as_precision
from hxla._plan._sharding import Sharded
from hxla._plan._shares import in_shares
from hxla._plan._stage_storage import storage_specs, without_stages
from hxla._plan._virtual_devices import Request, assign_devices
