"""What tests know of the insides of `hxla._inspect`."""

from hxla._inspect import _alike_names as _alike_names
from hxla._inspect import _bits_runs as _bits_runs
from hxla._inspect import _hlo_text as _hlo_text
from hxla._inspect import _origin as _origin
from hxla._inspect import _profiler_trace as _profiler_trace
from hxla._inspect import _replica_groups as _replica_groups
from hxla._inspect import _shapes as _shapes
from hxla._inspect import _shard_pictures as _shard_pictures
from hxla._inspect import _step_pictures as _step_pictures
from hxla._inspect._bits_compare import compare_bits as compare_bits
from hxla._inspect._bits_runs import EquationRuns as EquationRuns
from hxla._inspect._profiler_trace import last_step as last_step
from hxla._inspect._split_tables import waiting_table as waiting_table
from hxla._inspect._step_pictures import lanes_of_file as lanes_of_file
