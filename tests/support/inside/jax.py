"""What tests know of the insides of `hxla._src.jax`."""

from hxla._src.jax import fused_attention as attention
from hxla._src.jax import xla_protos as _hlo_proto
from hxla._src.jax.activations import recomputed
from hxla._src.jax.coordination import connect, get, is_lost_peer, put, serve
from hxla._src.jax.cpu_dots import row_major, uncross, uncrossed
from hxla._src.jax.devices import multiprocessors, trim_heap
from hxla._src.jax.digest import program_digest
from hxla._src.jax.jaxpr import (
    Literal,
    as_function,
    checkpoint_like,
    inner_jaxpr,
    read_arguments,
    run_equation,
    scan_counts,
)
from hxla._src.jax.known_indices import constant, results_of, unknown
from hxla._src.jax.lookups import lookups_of
from hxla._src.jax.min_cut import halve
from hxla._src.jax.ordered_adds import ordered
from hxla._src.jax.partition_invariant import partition_invariant
from hxla._src.jax.portable import lowered_for, num_compilations, portable
from hxla._src.jax.program_parts import apart, balanced, in_groups
from hxla._src.jax.separable_update import independent
from hxla._src.jax.settings import bit_settings, unlike_settings
from hxla._src.jax.tracing import brief_absence
