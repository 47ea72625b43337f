"""What tests know of the insides of `hxla._jax`."""

from hxla._jax import _coordination, _hlo_proto
from hxla._jax._absent_sharding import brief_absence
from hxla._jax._apart import apart
from hxla._jax._compilation_events import num_compilations
from hxla._jax._cpu_dots import row_major, uncross, uncrossed
from hxla._jax._digest import program_digest
from hxla._jax._grouping import balanced, in_groups
from hxla._jax._heap import trim_heap
from hxla._jax._independent import independent
from hxla._jax._jaxpr import (
    Literal,
    as_function,
    checkpoint_like,
    inner_jaxpr,
    run_equation,
    scan_counts,
)
from hxla._jax._lookups import lookups_of
from hxla._jax._lost_peers import is_lost_peer
from hxla._jax._min_cut import halve
from hxla._jax._multiprocessors import multiprocessors
from hxla._jax._portable import lowered_for, portable
from hxla._jax._result_sources import read_arguments
from hxla._jax._settings import bit_settings, unlike_settings
