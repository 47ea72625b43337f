"""What tests know of the insides of `hxla._src.plan`."""

from hxla._src.plan import assignment_problem as _assignment_problem
from hxla._src.plan import plan as _plan
from hxla._src.plan.assignment_problem import ChoiceNode, Edge, Problem, cost, least_cost, solve
from hxla._src.plan.axis_assignment import assign, shard_graph
from hxla._src.plan.granule_products import GranuleProduct
from hxla._src.plan.layout import storage_specs, to_spec, without_stages
from hxla._src.plan.linked_dims import LinkedDims, in_shares, planned_parts
from hxla._src.plan.ownership import Shares
from hxla._src.plan.plan import deciding
from hxla._src.plan.precision import MOST_SCALE_EXPONENT, as_precision
from hxla._src.plan.sharding import Sharded
from hxla._src.plan.token_assignment import assign_tokens
