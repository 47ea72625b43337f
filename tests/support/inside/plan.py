"""What tests know of the insides of `hxla._plan`."""

from hxla._plan import _plan as _plan
from hxla._plan._layout import to_spec as to_spec
from hxla._plan._linked_dims import LinkedDims as LinkedDims
from hxla._plan._linked_dims import planned_parts as planned_parts
from hxla._plan._numerics import deciding as deciding
from hxla._plan._ownership import Shares as Shares
from hxla._plan._precision import MOST_SCALE_EXPONENT as MOST_SCALE_EXPONENT
from hxla._plan._precision import as_precision as as_precision
from hxla._plan._sharding import Sharded as Sharded
from hxla._plan._shares import in_shares as in_shares
from hxla._plan._stage_storage import storage_specs as storage_specs
from hxla._plan._stage_storage import without_stages as without_stages
from hxla._plan._virtual_devices import Request as Request
from hxla._plan._virtual_devices import assign_devices as assign_devices
