"""The gradient of a whole microbatch, where it is one program.

It serves forms that need all of a gradient at once, or the traced program unchanged: clipping
before the sum, rows of tables, shards of unlike sizes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..jax.activations import recomputed
from ..jax.jaxpr import ClosedJaxpr, as_function
from ..jax.lookups import Lookups, lookups_of
from ..model.loss_scale import scale_of_sum
from .chain_spec import ChainSpec
from .contribution import gradient_of, largest, peak_bits, row_gradient_of
from .padding import Cut, Granules, narrow, replaced
from .uneven import Uneven

_LEAST_ROWS_PER_LOOKUP = 4  # of a table; of fewer its whole gradient is as cheap

#: `(params, aux, key, batch) -> ((loss, [sums[S], *new aux]), gradients)`.
Gradient = Callable[..., tuple[Any, list[Any]]]
#: `(values, limbs, exponents, keep) -> (limbs, peaks)`.
Join = Callable[..., tuple[list[tuple[jax.Array, ...]], jax.Array]]


def whole_gradient(
    spec: ChainSpec, mesh: Mesh | None, uneven: Uneven | None, on_cpu: bool, in_order: bool
) -> Gradient:
    """The gradient of each trained parameter; `Rows` for tables that are looked up only.

    Args:
        mesh: Mesh of the replica; None: it has one device.
        in_order: Whether it is an exact program of a GPU, see `compile.adds_in_order`.
    """
    if mesh is not None and uneven is not None:
        return uneven.gradient(mesh, spec.trained, on_cpu)
    if mesh is not None:
        return gradient_of(spec.sharded.function(mesh), spec.trained_entries, on_cpu)
    loss = recomputed(spec.graph.program) if in_order else spec.graph.program
    lookups = _lookups(spec, loss)
    if lookups is not None:
        return row_gradient_of(lookups, spec.trained, on_cpu)
    program = as_function(loss)

    def run(params: Any, aux: Any, key: Any, batch: Any) -> list[Any]:
        return program(*params, *aux, key, *batch)

    return gradient_of(run, spec.trained, on_cpu)


def _lookups(spec: ChainSpec, loss: ClosedJaxpr) -> Lookups | None:
    """The tables with `Rows` as gradients: only for exact sums, equal in any order of terms."""
    if not spec.contribution.is_exact or spec.clip_norm is not None:
        return None
    heights = {i: shape[0] for i in spec.trained if (shape := spec.graph.param_shapes[i])}
    most = {i: height // _LEAST_ROWS_PER_LOOKUP for i, height in heights.items()}
    return lookups_of(loss, most)


def factor_of(spec: ChainSpec, weight: jax.Array, aux: Sequence[jax.Array]) -> jax.Array:
    """By which the loss that is clipped, and not scaled, was multiplied before its gradient.

    Args:
        weight: Of the microbatch in the mean loss.
    """
    if spec.clip_norm is None or not spec.num_scaled:
        return weight
    scale = scale_of_sum(aux[-1], spec.num_scaled)
    return weight * scale if spec.mean else scale


def clipped(spec: ChainSpec, grads: list[jax.Array], factor: jax.Array) -> list[jax.Array]:
    """The gradients of a microbatch, clipped to `clip_norm` as those of its mean loss."""
    if spec.clip_norm is None:
        return grads
    tiny = jnp.finfo(jnp.float32).tiny
    share = jnp.maximum(factor, tiny) if spec.mean or spec.num_scaled else 1.0
    scaled = clip([g.astype(jnp.float32) / share for g in grads], spec.clip_norm)
    return [g * share for g in scaled]


def clip(grads: list[jax.Array], norm: float) -> list[jax.Array]:
    """Clip to a global norm; gradients that are not finite stay, so that errors can name them."""
    clipped, _ = optax.clip_by_global_norm(norm).update(grads, optax.EmptyState())
    finite = jnp.isfinite(optax.tree.norm(grads))
    return [jnp.where(finite, c, g) for c, g in zip(clipped, grads, strict=True)]


def joining_uneven(
    spec: ChainSpec,
    mesh: Mesh,
    uneven: Uneven,
    lay_out: Callable[[jax.Array], jax.Array],
    packs: Sequence[Sequence[int]],
    of_terms: Sequence[int],
) -> Join:
    """How a microbatch joins the sums if shards are of unlike sizes: each device adds its shard.

    Args:
        packs: Of the sums, each of one tensor.
        of_terms: The tensor of each term; of several terms of one, its sum goes on.
    """
    num = spec.contribution.form.num_parts
    cuts = uneven.cuts_of_sums(spec.trained, spec.tensors.is_summed)
    if not spec.is_whole:  # other variables leave a part whole
        cuts = [cut if i < len(spec.trained) else None for i, cut in enumerate(cuts)]
    tensors = [i for [i] in packs]
    rows = sorted(tensors)  # of exponents and peaks

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

        parts, peak = granules.loop(step, before, jnp.zeros((), jnp.float32))
        return tuple(parts), peak

    def local(values: Any, before: Any, exponents_T: jax.Array, keep: Any) -> Any:
        sums, peaks = list(before), dict[int, jax.Array]()
        for t, x in zip(of_terms, values, strict=True):
            p, exponent = tensors.index(t), exponents_T[rows.index(t)]
            sums[p], peak = one(x, sums[p], exponent, keep, cuts[t])
            peaks[t] = jnp.maximum(peaks[t], peak) if t in peaks else peak
        peaks_T = peak_bits(jnp.stack([peaks[t] for t in rows]))
        return sums, jax.lax.pmax(peaks_T, mesh.axis_names)

    of_parts = [(spec.specs[t],) * num for t in tensors]
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([spec.specs[t] for t in of_terms], of_parts, P(), P()),
        out_specs=(of_parts, P()),
        check_vma=False,
    )
