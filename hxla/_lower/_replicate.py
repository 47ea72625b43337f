"""Programs of replicated training: one microbatch, one update, both for a single device.

Legend of shape suffixes: M microbatches of a step, D devices, T float tensors (parameters, then
auxiliary state), S sums per microbatch (loss, weight, metrics).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._types import PyTree
from . import _exact

Reduction = Literal["exact", "float"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Compiled on first use, once per device.

    Attributes:
        micro: `(params, aux, sums, exponents, where, batch) -> (sums, tick)`; donates `sums`.
            `where` is int32[4]: step, microbatch, device, and 0 to start the sums anew or 1 to
            add to them. `tick` is a small array to wait on.
        clear: `sums -> zeros`; donates.
        update: `(params, opt_state, aux, totals, exponents, weight) ->
            (params, opt_state, aux, tick)`; donates the first three.
        zeros: Makes the sums of one device, on the default device.
        num_tensors: T.
        tensor_names: T names.
        float_aux: For each aux leaf, whether it is averaged (else microbatch 0's value is taken).
    """

    micro: Any  # jax.jit's type has no public name
    clear: Any
    update: Any
    zeros: Callable[[], list[jax.Array]]
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


def build(
    *,
    sums_of: Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[jax.Array, jax.Array, PyTree]],
    params: PyTree,
    aux: PyTree,
    names: tuple[str, ...],
    num_sums: int,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
    num_devices: int,
    seed: int,
    reduction: Reduction,
    platform: str,
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
        num_devices: D.
        seed: Root of all random keys.
        reduction: `exact` (two int32 limbs per element) or `float` (float32).
        platform: Backend for which `compiler_options` are chosen.
    """
    param_leaves, param_def = jax.tree.flatten(params)
    aux_leaves, aux_def = jax.tree.flatten(aux)
    float_aux = tuple(bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in aux_leaves)
    floats = param_leaves + [x for x, f in zip(aux_leaves, float_aux, strict=True) if f]
    others = [x for x, f in zip(aux_leaves, float_aux, strict=True) if not f]
    num_tensors = len(floats)
    exact = reduction == "exact"
    bits = _exact.num_bits(num_microbatches) if exact else 0
    options = compiler_options(platform, reduction)

    def shape(x: Any) -> tuple[int, ...]:
        return x.shape or (1,)  # at least 1-D, so that shards can be stacked

    def zeros() -> list[jax.Array]:
        dtype = jnp.int32 if exact else jnp.float32
        small = [
            jnp.zeros((num_microbatches, num_sums), jnp.int32),
            jnp.zeros((num_devices, num_tensors), jnp.int32),
        ]
        limbs = [jnp.zeros(shape(x), dtype) for x in floats for _ in range(1 + exact)]
        return small + limbs + [jnp.zeros(shape(x), jnp.int32) for x in others]

    def micro(
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        sums: Sequence[jax.Array],
        exponents_T: jax.Array,
        where: jax.Array,
        batch: PyTree,
    ) -> tuple[list[jax.Array], jax.Array]:
        step, index, device, keep = where[0], where[1], where[2], where[3]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), index)

        def loss(leaves: Sequence[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, PyTree]]:
            tree = jax.tree.unflatten(param_def, leaves)
            value, sums_S, new_aux = sums_of(tree, jax.tree.unflatten(aux_def, aux), key, batch)
            return value, (sums_S, new_aux)

        (_, (sums_S, new_aux)), grads = jax.value_and_grad(loss, has_aux=True)(list(params))
        new_leaves = jax.tree.leaves(new_aux)
        deltas = [
            new.astype(jnp.float32) - old.astype(jnp.float32)
            for new, old, is_float in zip(new_leaves, aux, float_aux, strict=True)
            if is_float
        ]
        values = [x.astype(jnp.float32) for x in grads] + deltas
        maxima_T = jnp.stack([jnp.abs(jnp.max(jnp.abs(x), initial=0.0)) for x in values])
        # Bit patterns of non-negative floats sort as the floats do, NaN above all.
        peaks_T = jax.lax.bitcast_convert_type(maxima_T, jnp.int32)

        it = iter(sums)
        small_MS = next(it) * keep
        small_MS = small_MS.at[index].set(jax.lax.bitcast_convert_type(sums_S, jnp.int32))
        maxima_DT = next(it) * keep
        maxima_DT = maxima_DT.at[device].max(peaks_T)
        out = [small_MS, maxima_DT]
        for i, value in enumerate(values):
            x = value.reshape(shape(value))
            if exact:
                hi, lo = _exact.encode(x, exponents_T[i], bits)
                out += [next(it) * keep + hi, next(it) * keep + lo]
            else:
                out.append(jnp.where(keep, next(it), 0) + x)
        for new, is_float in zip(new_leaves, float_aux, strict=True):
            if not is_float:
                first = jnp.where(index == 0, new.astype(jnp.int32), 0)
                out.append(next(it) * keep + first.reshape(shape(first)))
        return out, sums_S[1]

    def update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        totals: Sequence[jax.Array],
        exponents_T: jax.Array,
        weight: jax.Array,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        it = iter(totals)

        def total(i: int, like: jax.Array) -> jax.Array:
            if exact:
                return _exact.decode(next(it), next(it), exponents_T[i], bits).reshape(like.shape)
            return next(it).reshape(like.shape)

        grads = [(total(i, p) / weight).astype(p.dtype) for i, p in enumerate(params)]
        tree = jax.tree.unflatten(param_def, params)
        updates, opt_state = optimizer.update(jax.tree.unflatten(param_def, grads), opt_state, tree)
        new_params = jax.tree.leaves(optax.apply_updates(tree, updates))
        new_aux: list[Any] = list(aux)
        means = iter(range(len(params), num_tensors))
        for j, is_float in enumerate(float_aux):
            if is_float:
                mean = total(next(means), aux[j]) / num_microbatches
                new_aux[j] = (aux[j].astype(jnp.float32) + mean).astype(aux[j].dtype)
        for j, is_float in enumerate(float_aux):
            if not is_float:
                new_aux[j] = next(it).reshape(aux[j].shape).astype(aux[j].dtype)
        return new_params, opt_state, new_aux, weight + 0

    return Programs(
        micro=jax.jit(micro, donate_argnums=2, compiler_options=options),
        clear=jax.jit(lambda sums: [x * 0 for x in sums], donate_argnums=0),
        update=jax.jit(update, donate_argnums=(0, 1, 2), compiler_options=options),
        zeros=zeros,
        num_tensors=num_tensors,
        tensor_names=tuple(names[: len(param_leaves)])
        + tuple(n for n, f in zip(names[len(param_leaves) :], float_aux, strict=True) if f),
        float_aux=float_aux,
    )


def peaks_to_maxima(peaks_DT: np.ndarray) -> np.ndarray:
    """float32[T] maxima over devices from the bit patterns that `micro` recorded."""
    return np.ascontiguousarray(peaks_DT.max(axis=0)).view(np.float32)
