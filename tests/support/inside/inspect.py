"""What tests know of the insides of `hxla._inspect`."""

from hxla._inspect import (
    _alike_names,
    _bits_runs,
    _hlo_text,
    _origin,
    _profiler_trace,
    _replica_groups,
    _shapes,
    _shard_pictures,
    _step_pictures,
)
from hxla._inspect._bits_compare import compare_bits
from hxla._inspect._bits_runs import EquationRuns
from hxla._inspect._profiler_trace import last_step
from hxla._inspect._split_tables import waiting_table
from hxla._inspect._step_pictures import lanes_of_file
