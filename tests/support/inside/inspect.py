"""What tests know of the insides of `hxla._src.inspect`."""

from hxla._src.inspect import annotated_module as _annotated_module
from hxla._src.inspect import collectives as _collectives
from hxla._src.inspect import hlo_text as _hlo_text
from hxla._src.inspect import hlo_text as _shapes
from hxla._src.inspect import inspection_page as _shard_pictures
from hxla._src.inspect import profiler_trace as _profiler_trace
from hxla._src.inspect import profiler_trace as _step_pictures
from hxla._src.inspect import tables as _tables
from hxla._src.inspect.bits import compare_bits
from hxla._src.inspect.cost_analysis import Costs
from hxla._src.inspect.profiler_trace import lanes_of_file, last_step
from hxla._src.inspect.tables import waiting_table
