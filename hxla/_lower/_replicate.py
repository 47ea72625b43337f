"""Programs of replicated training: one microbatch, one update, both for a single device.

Legend of shape suffixes: M microbatches of a step, T float tensors (parameters, then auxiliary
state), S sums per microbatch (loss, weight, metrics).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._core._types import PyTree
from .._jax._cpu_dots import row_major, uncrossed
from .._jax._grouping import balanced, in_groups
from . import _exact
from ._reduce import BUCKET_ELEMENTS, Combine, buckets

Reduction = Literal["exact", "float"]


class Sums(NamedTuple):
    """What one device adds up over its microbatches.

    Attributes:
        small_MS: Bit patterns of each microbatch's loss, weight and metrics; zero where another
            device ran it.
        peaks_T: Bit patterns of the largest magnitude of each tensor.
        values: For each float tensor its parts: two int32 limbs, or one float32.
        ints: The integer leaves of aux, as microbatch 0 left them; zero on other devices.
    """

    small_MS: jax.Array
    peaks_T: jax.Array
    values: list[tuple[jax.Array, ...]]
    ints: list[jax.Array]


def num_parts(reduction: Reduction) -> int:
    """Arrays of its size in which a tensor is summed: two limbs, or the floats themselves."""
    return 2 if reduction == "exact" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the leaves lie on the mesh of a replica of several devices.

    Attributes:
        mesh: Of the replica.
        params: PartitionSpec of each parameter.
        aux: Of each other variable.
        opt_state: Of each leaf of the optimizer's state.
    """

    mesh: Mesh
    params: tuple[P, ...]
    aux: tuple[P, ...]
    opt_state: tuple[P, ...]

    def place(self, x: jax.Array, spec: P) -> jax.Array:
        """Constrain an array of a traced program."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def shardings(self, specs: Any) -> Any:
        """A tree of specs as `jax.jit` takes them."""
        return jax.tree.map(
            lambda s: NamedSharding(self.mesh, s), specs, is_leaf=lambda s: isinstance(s, P)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled on first use, once per device.

    Attributes:
        micro: `(params, aux, sums, exponents, where, batch) -> (sums, tick)`; donates `sums`.
            `where` is int32[3]: step, microbatch, and 0 to start the sums anew or 1 to add to
            them. `tick` is a small array to wait on.
        clear: `sums -> zeros`; donates.
        update: `(params, opt_state, aux, totals, ints, exponents, weight) ->
            (params, opt_state, aux, tick)`; donates the first three. `totals` are those of
            `Reducer.sums`, `ints` the summed integer leaves of aux.
        combine: What `Reducer.sums` needs to know of one device's sums.
        zeros: Makes the sums of one device, on the default device.
        specs: How each float tensor lies on the replica's mesh.
        num_parts: Arrays in which each is summed.
        num_tensors: T.
        tensor_names: T names.
        float_aux: For each aux leaf, whether it is averaged (else microbatch 0's value is taken).
    """

    micro: Any  # jax.jit's type has no public name
    clear: Any
    update: Any
    combine: Combine
    zeros: Callable[[], "Sums"]
    specs: tuple[P, ...]
    num_parts: int
    num_tensors: int
    tensor_names: tuple[str, ...]
    float_aux: tuple[bool, ...]


def compiler_options(platform: str, reduction: Reduction) -> dict[str, Any]:
    """XLA options without which the same microbatch may give other bits in another process.

    Args:
        platform: `cpu`, `gpu` or another backend's name.
        reduction: Only exact sums ask for determinism.

    Returns:
        Options for `jax.jit(..., compiler_options=...)`.
    """
    if reduction == "exact" and platform == "cpu":
        # The number of threads may decide how a contraction is cut.
        return {"xla_cpu_multi_thread_eigen": False}
    if reduction == "exact" and platform in ("gpu", "cuda", "rocm"):
        return {"xla_gpu_exclude_nondeterministic_ops": True}
    return {}


def _update_options(platform: str, reduction: Reduction) -> dict[str, Any]:
    """Those of `compiler_options`, and an order in which few temporaries live at once."""
    options = compiler_options(platform, reduction)
    if platform == "cpu":
        # Breadth first, as is usual there, the gradient of every tensor would wait for the last.
        options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    return options


def build(
    *,
    sums_of: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[jax.Array, jax.Array, PyTree]],
    params: PyTree,
    aux: PyTree,
    names: tuple[str, ...],
    num_sums: int,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
    seed: int,
    reduction: Reduction,
    platform: str,
    num_terms: int | None = None,
    layout: Layout | None = None,
    bucket_elements: int = BUCKET_ELEMENTS,
    alone: Collection[int] = (),
    mean: bool = True,
    clip_before: float | None = None,
    clip_after: float | None = None,
    num_groups: int = 1,
) -> Programs:
    """Lower a model's loss to the programs of a training step.

    Args:
        sums_of: `(params, aux, key, batch) -> (loss sum, sums[S], aux)`; the first is what is
            differentiated.
        params: Parameters (arrays or shapes), the user's own tree.
        aux: Auxiliary state, the user's own tree.
        names: Names of the parameters' and then the auxiliary leaves.
        num_sums: S.
        optimizer: The user's own.
        num_microbatches: M.
        seed: Root of all random keys.
        reduction: `exact` (two int32 limbs per element) or `float` (float32).
        platform: Backend for which `compiler_options` are chosen.
        num_terms: Terms of one element's sum, if more than M.
        layout: Of a replica of several devices; None for a single one.
        bucket_elements: Those of the `Reducer`.
        alone: Tensors that the `Reducer` sums by rows.
        mean: Whether a microbatch's own gradient is that of its mean loss, or of its sum.
        clip_before: Global norm to which each microbatch's own gradient is clipped.
        clip_after: Global norm to which the update's gradient is clipped.
        num_groups: Parts in which parameters are updated one after another, at most as many as
            there are.
    """
    param_leaves, param_def = jax.tree.flatten(params)
    aux_leaves, aux_def = jax.tree.flatten(aux)
    float_aux = tuple(bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in aux_leaves)
    floats = param_leaves + [x for x, f in zip(aux_leaves, float_aux, strict=True) if f]
    others = [x for x, f in zip(aux_leaves, float_aux, strict=True) if not f]
    num_tensors = len(floats)
    exact = reduction == "exact"
    parts = num_parts(reduction)
    bits = _exact.num_bits(num_terms or num_microbatches) if exact else 0
    options = compiler_options(platform, reduction)

    specs = [P()] * num_tensors
    if layout is not None:
        chosen = [s for s, f in zip(layout.aux, float_aux, strict=True) if f]
        specs = [*layout.params, *chosen]

    def shape(x: Any) -> tuple[int, ...]:
        return x.shape or (1,)  # at least 1-D, so that shards can be stacked

    def zeros() -> Sums:
        dtype = jnp.int32 if exact else jnp.float32
        return Sums(
            jnp.zeros((num_microbatches, num_sums), jnp.int32),
            jnp.zeros(num_tensors, jnp.int32),
            [tuple(jnp.zeros(shape(x), dtype) for _ in range(parts)) for x in floats],
            [jnp.zeros(shape(x), jnp.int32) for x in others],
        )

    def with_largest(values: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        """The values as the sums read them, and the largest magnitude of each."""

        def local(values: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            if platform == "cpu":
                values = [row_major(x) for x in values]
            largest = jnp.stack([jnp.abs(jnp.max(jnp.abs(x), initial=0.0)) for x in values])
            return values, largest

        if layout is None:
            return local(values)
        axes = layout.mesh.axis_names

        def run(values: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            values, largest = local(values)
            return values, jax.lax.pmax(largest, axes)  # one collective for all tensors

        mapped = jax.shard_map(
            run, mesh=layout.mesh, in_specs=(specs,), out_specs=(specs, P()), check_vma=False
        )
        return mapped(values)  # type: ignore[no-any-return]

    def hxla_micro(
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        sums: Sums,
        exponents_T: jax.Array,
        where: jax.Array,
        batch: PyTree,
    ) -> tuple[Sums, jax.Array]:
        step, index, keep = where[0], where[1], where[2]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), index)

        def loss(leaves: Sequence[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            tree = jax.tree.unflatten(param_def, leaves)
            value, sums_S, new_aux = sums_of(tree, jax.tree.unflatten(aux_def, aux), key, batch)
            return value, (sums_S, new_aux)

        gradient = jax.value_and_grad(loss, has_aux=True)
        if platform == "cpu":
            gradient = uncrossed(gradient)
        (_, (sums_S, new_aux)), grads = gradient(list(params))
        if clip_before is not None:
            share = jnp.maximum(sums_S[1], jnp.finfo(jnp.float32).tiny) if mean else 1.0
            own = _clip([g.astype(jnp.float32) / share for g in grads], clip_before)
            grads = [g * share for g in own]
        new_leaves = jax.tree.leaves(new_aux)
        deltas = [
            new.astype(jnp.float32) - old.astype(jnp.float32)
            for new, old, is_float in zip(new_leaves, aux, float_aux, strict=True)
            if is_float
        ]
        values = [x.astype(jnp.float32) for x in grads] + deltas
        if layout is not None:
            values = [layout.place(x, s) for x, s in zip(values, specs, strict=True)]
        values, maxima_T = with_largest(values)
        # Bit patterns of non-negative floats sort as the floats do, NaN above all.
        peaks_T = jax.lax.bitcast_convert_type(maxima_T, jnp.int32)

        def add(i: int, value: jax.Array) -> tuple[jax.Array, ...]:
            x, before = value.reshape(shape(value)), sums.values[i]
            if not exact:
                return (jnp.where(keep, before[0], 0) + x,)
            limbs = _exact.encode(x, exponents_T[i], bits)
            return tuple(old * keep + new for old, new in zip(before, limbs, strict=True))

        def first(old: jax.Array, new: jax.Array) -> jax.Array:
            mine = jnp.where(index == 0, new.astype(jnp.int32), 0)
            return old * keep + mine.reshape(old.shape)

        small_MS = sums.small_MS * keep
        new_ints = [x for x, f in zip(new_leaves, float_aux, strict=True) if not f]
        out = Sums(
            small_MS.at[index].set(jax.lax.bitcast_convert_type(sums_S, jnp.int32)),
            jnp.maximum(sums.peaks_T * keep, peaks_T),
            [add(i, value) for i, value in enumerate(values)],
            [first(old, new) for old, new in zip(sums.ints, new_ints, strict=True)],
        )
        return out, sums_S[1]

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        totals: Sequence[jax.Array],
        ints: Sequence[jax.Array],
        exponents_T: jax.Array,
        weight: jax.Array,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        parts = list(totals)
        if layout is None:
            parts = []
            groups = buckets([x.size for x in floats], bucket_elements, alone)
            for flat, bucket in zip(totals, groups, strict=True):
                ends = np.cumsum([floats[i].size for i in bucket])
                parts += jnp.split(flat, ends[:-1])
        sums = [
            (_exact.rescale(part, exponents_T[i]) if exact else part).reshape(floats[i].shape)
            for i, part in enumerate(parts)
        ]
        grads = [(sums[i] / weight).astype(p.dtype) for i, p in enumerate(params)]
        if clip_after is not None:
            grads = _clip(grads, clip_after)
        tree = jax.tree.unflatten(param_def, params)
        updates, opt_state = optimizer.update(jax.tree.unflatten(param_def, grads), opt_state, tree)
        new_params = jax.tree.leaves(optax.apply_updates(tree, updates))
        means = (sums[i] / num_microbatches for i in range(len(params), num_tensors))
        firsts = iter(ints)
        new_aux = [
            (x.astype(jnp.float32) + next(means)).astype(x.dtype)
            if is_float
            else next(firsts).reshape(x.shape).astype(x.dtype)
            for x, is_float in zip(aux, float_aux, strict=True)
        ]
        return new_params, opt_state, new_aux, weight + 0

    def combine(*parts: jax.Array) -> jax.Array:
        return _exact.combine(parts[0], parts[1], bits) if exact else parts[0]

    update: Callable[..., Any] = hxla_update
    if num_groups > 1:
        sizes = [x.size * x.dtype.itemsize for x in param_leaves]
        update = in_groups(hxla_update, balanced(sizes, num_groups))
    of_micro: Any = None
    of_update: Any = None
    if layout is not None:
        opt_def = jax.tree.structure(jax.eval_shape(optimizer.init, params))
        each: Any = [(s,) * parts for s in specs]
        whole: Any = P()
        of_sums = Sums(whole, whole, each, [whole] * len(others))
        of_micro = layout.shardings((of_sums, P()))
        opt_specs = jax.tree.unflatten(opt_def, layout.opt_state)
        of_update = layout.shardings((list(layout.params), opt_specs, list(layout.aux), P()))
    return Programs(
        micro=jax.jit(
            hxla_micro, donate_argnums=2, compiler_options=options, out_shardings=of_micro
        ),
        clear=jax.jit(
            lambda sums: jax.tree.map(lambda x: x * 0, sums),
            donate_argnums=0,
            out_shardings=of_micro and of_micro[0],
        ),
        update=jax.jit(
            update,
            donate_argnums=(0, 1, 2),
            compiler_options=_update_options(platform, reduction),
            out_shardings=of_update,
        ),
        specs=tuple(specs),
        num_parts=parts,
        combine=combine,
        zeros=zeros,
        num_tensors=num_tensors,
        tensor_names=tuple(names[: len(param_leaves)])
        + tuple(n for n, f in zip(names[len(param_leaves) :], float_aux, strict=True) if f),
        float_aux=float_aux,
    )


def _clip(grads: list[jax.Array], norm: float) -> list[jax.Array]:
    """Clip to a global norm; what is not finite stays, so that it can be named."""
    clipped, _ = optax.clip_by_global_norm(norm).update(grads, optax.EmptyState())
    finite = jnp.isfinite(optax.tree.norm(grads))
    return [jnp.where(finite, c, g) for c, g in zip(clipped, grads, strict=True)]


def peaks_to_maxima(peaks_DT: np.ndarray) -> np.ndarray:
    """float32[T] maxima over devices (leading dimension) from the patterns `micro` recorded."""
    return np.ascontiguousarray(peaks_DT.max(axis=0)).view(np.float32)
