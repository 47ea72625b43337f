"""The gradient of a whole microbatch, where it is one program.

It serves forms that need all of a gradient at once, or the traced program unchanged: clipping
before the sum, rows of tables, shards of unlike sizes, several microbatches in a call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..jax.jaxpr import as_function
from ..jax.lookups import Lookups, lookups_of
from .bitcast_packing import BitcastPacking
from .chain_spec import ChainSpec
from .contribution import DeviceSums, gradient_of, largest, peak_bits, row_gradient_of
from .padding import Cut, Granules, narrow, replaced
from .uneven import Uneven

_LEAST_ROWS_PER_LOOKUP = 4  # of a table; of fewer its whole gradient is as cheap

#: `(params, aux, key, batch) -> ((loss, [sums[S], *new aux]), gradients)`.
Gradient = Callable[..., tuple[Any, list[Any]]]
#: `(values, limbs, exponents, keep) -> (limbs, peaks)`.
Join = Callable[..., tuple[list[tuple[jax.Array, ...]], jax.Array]]


def whole_gradient(
    spec: ChainSpec, mesh: Mesh | None, uneven: Uneven | None, on_cpu: bool
) -> Gradient:
    """The gradient of each trained parameter; `Rows` for tables that are looked up only.

    Args:
        mesh: Mesh of the replica; None: it has one device.
    """
    if mesh is not None and uneven is not None:
        return uneven.gradient(mesh, spec.trained, on_cpu)
    if mesh is not None:
        return gradient_of(spec.sharded.function(mesh), spec.trained, on_cpu)
    lookups = _lookups(spec)
    if lookups is not None:
        return row_gradient_of(lookups, spec.trained, on_cpu)
    program = as_function(spec.graph.program)

    def run(params: Any, aux: Any, key: Any, batch: Any) -> list[Any]:
        return program(*params, *aux, key, *batch)

    return gradient_of(run, spec.trained, on_cpu)


def _lookups(spec: ChainSpec) -> Lookups | None:
    """The tables with `Rows` as gradients: only for exact sums, equal in any order of terms."""
    if not spec.contribution.is_exact or spec.clip_norm is not None:
        return None
    heights = {i: shape[0] for i in spec.trained if (shape := spec.graph.param_shapes[i])}
    most = {i: height // _LEAST_ROWS_PER_LOOKUP for i, height in heights.items()}
    return lookups_of(spec.graph.program, most)


def clipped(spec: ChainSpec, grads: list[jax.Array], weight: jax.Array) -> list[jax.Array]:
    """The gradients of a microbatch, clipped to `clip_norm` as those of its mean loss.

    Args:
        weight: By which the mean loss is multiplied.
    """
    if spec.clip_norm is None:
        return grads
    tiny = jnp.finfo(jnp.float32).tiny
    share = jnp.maximum(weight, tiny) if spec.mean else 1.0
    scaled = clip([g.astype(jnp.float32) / share for g in grads], spec.clip_norm)
    return [g * share for g in scaled]


def clip(grads: list[jax.Array], norm: float) -> list[jax.Array]:
    """Clip to a global norm; gradients that are not finite stay, so that errors can name them."""
    clipped, _ = optax.clip_by_global_norm(norm).update(grads, optax.EmptyState())
    finite = jnp.isfinite(optax.tree.norm(grads))
    return [jnp.where(finite, c, g) for c, g in zip(clipped, grads, strict=True)]


def joining_uneven(
    spec: ChainSpec, mesh: Mesh, uneven: Uneven, lay_out: Callable[[jax.Array], jax.Array]
) -> Join:
    """How a microbatch joins the sums if shards are of unlike sizes: each device adds its shard."""
    specs, num = list(spec.specs), spec.contribution.form.num_parts
    cuts = uneven.cuts_of_sums(spec.trained, spec.tensors.is_summed)

    def one(x: jax.Array, before: Any, exponent: jax.Array, keep: Any, cut: Cut | None) -> Any:
        if cut is None:
            x = lay_out(x)
            return spec.contribution.add(before, x, exponent, keep), largest(x)
        if cut.place is not None:
            size = cut.sizes[cut.place]
            x, *old = (narrow(whole, cut.dim, size) for whole in (x, *before))
            x = lay_out(x)
            new = spec.contribution.add(old, x, exponent, keep)
            return tuple(replaced(b, n) for b, n in zip(before, new, strict=True)), largest(x)
        x = lay_out(x)
        granules = Granules.of(cut)

        def step(i: Any, old: list[jax.Array], peak: jax.Array) -> Any:
            new = granules.take(x, i)
            added = spec.contribution.add(old, new, exponent, keep)
            return added, jnp.maximum(peak, largest(new))

        parts, peak = granules.loop(step, before, jnp.zeros(()))
        return tuple(parts), peak

    def local(values: Any, before: Any, exponents_T: jax.Array, keep: Any) -> Any:
        pairs = [
            one(x, before[p], exponents_T[i], keep, cuts[i])
            for p, [i] in enumerate(spec.packs)
            for x in [values[i]]
        ]
        peaks_T = peak_bits(jnp.stack([peak for _, peak in pairs]))
        return [parts for parts, _ in pairs], jax.lax.pmax(peaks_T, mesh.axis_names)

    of_parts = [(s,) * num for s in specs]
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, of_parts, P(), P()),
        out_specs=(of_parts, P()),
        check_vma=False,
    )


def whole_program(
    loss: Callable[..., Any], per_call: int, packing: BitcastPacking | None
) -> Callable[..., Any]:
    """`SegmentPart.loss` of a whole microbatch, or of several, one after another.

    Of several, `where` has a fourth number, the count of microbatches to run. All counts share one
    body, so no bit depends on them.

    Args:
        packing: How one array has all arrays of a microbatch; None: they are several.
    """

    def hxla_micro(
        params: Any,
        starts: Any,
        inputs: Any,
        aux: Any,
        sums: DeviceSums,
        exponents_T: jax.Array,
        where: Any,
        batch: Sequence[Any],
    ) -> tuple[DeviceSums, jax.Array, list[jax.Array]]:
        def one(sums: DeviceSums, where: Any, batch: Sequence[Any]) -> Any:
            return loss(params, starts, inputs, aux, sums, exponents_T, where, batch)

        if per_call == 1:
            return one(sums, where, batch)  # type: ignore[no-any-return]
        step, first, keep, num = where[0], where[1], where[2], where[3]

        def body(i: jax.Array, carry: tuple[DeviceSums, jax.Array]) -> tuple[DeviceSums, jax.Array]:
            leaves = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in batch]
            leaves = leaves if packing is None else packing.unpack(leaves[0])
            here = jnp.stack([step, first + i, jnp.where(i == 0, keep, 1)])
            sums, tick, _ = one(carry[0], here, leaves)
            return sums, tick

        sums, tick = jax.lax.fori_loop(0, num, body, (sums, jnp.float32(0)))
        return sums, tick, []

    return hxla_micro
