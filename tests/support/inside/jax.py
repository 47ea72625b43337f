"""What tests know of the insides of `hxla._jax`."""

from hxla._jax import _coordination as _coordination
from hxla._jax import _hlo_proto as _hlo_proto
from hxla._jax._absent_sharding import brief_absence as brief_absence
from hxla._jax._apart import apart as apart
from hxla._jax._compilation_events import num_compilations as num_compilations
from hxla._jax._cpu_dots import row_major as row_major
from hxla._jax._cpu_dots import uncross as uncross
from hxla._jax._cpu_dots import uncrossed as uncrossed
from hxla._jax._grouping import balanced as balanced
from hxla._jax._grouping import in_groups as in_groups
from hxla._jax._heap import trim_heap as trim_heap
from hxla._jax._independent import independent as independent
from hxla._jax._jaxpr import Literal as Literal
from hxla._jax._jaxpr import as_function as as_function
from hxla._jax._jaxpr import checkpoint_like as checkpoint_like
from hxla._jax._jaxpr import inner_jaxpr as inner_jaxpr
from hxla._jax._jaxpr import run_equation as run_equation
from hxla._jax._jaxpr import scan_counts as scan_counts
from hxla._jax._lost_peers import is_lost_peer as is_lost_peer
from hxla._jax._min_cut import halve as halve
from hxla._jax._multiprocessors import multiprocessors as multiprocessors
from hxla._jax._portable import lowered_for as lowered_for
from hxla._jax._portable import portable as portable
