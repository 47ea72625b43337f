"""The update of what a copy of the model owns, and how its parameters come to all copies.

Each copy updates its own pieces with its own part of the optimizer's state; then all parameters are
gathered. Element by element it is the arithmetic of an update of everything, so which copy owns
what changes no bit.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .._core._types import DATA_AXIS, PyTree
from .._jax._independent import MISSING
from .._jax._rounded import rounded
from .._plan._ownership import Ownership
from ._chunks import Chunks, all_gather
from ._options import compiler_options, update_options
from ._own_part import OwnPart
from ._replica import Replica
from ._sum import Reducer
from ._update import UpdateSpec, new_aux


def own_arguments(
    spec: UpdateSpec,
    own: Ownership,
    chunks: Sequence[Chunks],
    copy: int,
    params: Sequence[jax.Array],
    opt_state: PyTree,
    totals: Sequence[jax.Array],
    exponents_T: jax.Array,
    weight: jax.Array,
    value: jax.Array,
    where: jax.Array,
) -> tuple[list[Any], OwnPart]:
    """Those of the traced update that a copy has.

    Args:
        spec: What the update is made from.
        own: Who updates what.
        chunks: For each bucket of the sums.
        copy: Number of the copy.
        params: Whole, or its own parts of them.
        opt_state: Its own.
        totals: Its own.
        exponents_T: Of the sums.
        weight: Of the examples.
        value: The loss.
        where: int32[2], its first granule and a zero.
    """
    sums = own_sums(spec, chunks, copy, totals, exponents_T)
    part, leaves = OwnPart(own, copy, where[0]), jax.tree.leaves(opt_state)
    pieces = params if own.cuts_params else [part.of(i, p) for i, p in enumerate(params)]
    grads = [mean_of(sums[i], weight, where[1]).astype(p.dtype) for i, p in enumerate(params)]
    grads = [g if part.cuts(i) else _of_shape(g, params[i].shape) for i, g in enumerate(grads)]
    return [*pieces, *leaves, *grads, value], part


def own_update_program(
    spec: UpdateSpec, own: Ownership, chunks: Sequence[Chunks], replica: Replica
) -> Any:
    """The program of a copy's own update: its state and other variables are donated.

    The arguments are those of `update_program`, `opt_state` and `totals` the copy's own part, and
    two more: `where`, int32[2], its first granule and a zero, and `sums`, what `summed` gave. The
    results are chunks of its new parameters, for each bucket, and as there its state, the other
    variables, and a tick. Where it has only its own parts of the parameters, they are donated, and
    the results are these parts.

    Args:
        spec: What the update is made from.
        own: Who updates what.
        chunks: For each bucket of the sums.
        replica: The copy.
    """
    tensors, copy = spec.tensors, replica.index
    floats, num = tensors.floats, len(tensors.params)
    dtype = gathered_dtype(tensors.params)

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        totals: Sequence[jax.Array],
        ints: Sequence[jax.Array],
        exponents_T: jax.Array,
        weight: jax.Array,
        value: jax.Array,
        where: jax.Array,
        sums: jax.Array,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        given = params, opt_state, totals, exponents_T, weight, value, where
        arguments, part = own_arguments(spec, own, chunks, copy, *given)
        results = own.update.run(arguments, part, where[1], sums)
        leaves, state_tree = jax.tree.flatten(opt_state)
        empty = [
            jnp.zeros(1, x.dtype) if new is MISSING else new
            for x, new in zip((*params, *leaves), results, strict=True)
        ]
        sent = empty[:num]
        if not own.cuts_params:
            sent = [
                chunk.chunk([empty[i].reshape(-1).astype(dtype) for i in chunk.tensors], copy)
                for chunk in chunks
                if chunk.tensors
            ]
        values = own_sums(spec, chunks, copy, totals, exponents_T)
        changed = [values[i].reshape(floats[i].shape) for i in range(num, len(floats))]
        state = jax.tree.unflatten(state_tree, empty[num:])
        return sent, state, new_aux(spec, aux, changed, ints), weight + 0

    return jax.jit(
        hxla_update,
        donate_argnums=(0, 1, 2) if own.cuts_params else (1, 2),
        compiler_options=update_options(replica.devices[0].platform, spec.contribution.form),
    )


def mean_of(x: jax.Array, weight: jax.Array, zero: jax.Array) -> jax.Array:
    """A gradient from its sum, rounded: what follows must not join the division.

    Args:
        x: The sum.
        weight: Of the examples.
        zero: See `rounded`.
    """
    return rounded(x / weight, zero)


def own_sums(
    spec: UpdateSpec,
    chunks: Sequence[Chunks],
    copy: int,
    totals: Sequence[jax.Array],
    exponents_T: jax.Array,
) -> dict[int, jax.Array]:
    """A copy's own pieces of the sums, flat.

    Args:
        spec: What the update is made from.
        chunks: For each bucket of the sums.
        copy: Number of the copy.
        totals: Those of `Reducer.reduce`.
        exponents_T: Of the sums.
    """
    floats, num = spec.tensors.floats, len(spec.tensors.params)
    found = iter(totals)
    sums: dict[int, jax.Array] = {}
    for bucket, chunk in zip(spec.buckets, chunks, strict=True):
        if chunk.tensors:
            total = jax.lax.bitcast_convert_type(next(found), jnp.float32)
            sums |= dict(zip(chunk.tensors, chunk.pieces(total, copy), strict=True))
        others = [i for i in bucket if i >= num]
        if others:
            total = jax.lax.bitcast_convert_type(next(found), jnp.float32)
            ends = np.cumsum([floats[i].size for i in others])
            sums |= dict(zip(others, jnp.split(total, ends[:-1]), strict=True))
    return {i: spec.contribution.value(x, exponents_T[i]) for i, x in sums.items()}


def _of_shape(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """A whole gradient, if it is not another copy's."""
    return x.reshape(shape) if x.size == math.prod(shape) else x


def gathered_dtype(params: Sequence[Any]) -> Any:
    """Dtype in which parameters travel: their own, or one that holds all of theirs."""
    return functools.reduce(jnp.promote_types, (x.dtype for x in params))


class Gather:
    """Hands the parameters that each copy updated to all copies.

    Args:
        reducer: Knows all copies, and how the sums are shared out.
        params: Shapes of the trained parameters.
        form: Of the sums.
    """

    def __init__(self, reducer: Reducer, params: Sequence[Any], form: Any):
        self._reducer, self._params = reducer, list(params)
        self._buckets = [chunks for chunks in reducer.chunks if chunks.tensors]
        self._options = compiler_options(reducer.devices[0].platform, form)
        self._programs: list[Any] = []
        self._under_way: list[jax.Array] = []

    def lower(self) -> list[Any]:
        """The programs of all buckets before compilation."""
        return [self._build(chunks) for chunks in self._buckets]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        self._programs = list(compiled)

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state while it gathers."""
        stats = [program.memory_analysis() for program in self._programs]
        return max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)

    def _build(self, chunks: Chunks) -> Any:
        own = [self._params[i] for i in chunks.tensors]

        def hxla_gather(chunk: jax.Array, old: list[jax.Array]) -> list[jax.Array]:
            flat = all_gather(chunk, chunks.lengths, DATA_AXIS)
            new = chunks.unflat(flat, [x.shape for x in own])
            return [x.astype(before.dtype) for x, before in zip(new, old, strict=True)]

        mesh = self._reducer.mesh
        mapped = jax.shard_map(
            hxla_gather,
            mesh=mesh,
            in_specs=(P(DATA_AXIS), [P()] * len(own)),
            out_specs=[P()] * len(own),
            check_vma=False,
        )
        sharding = jax.sharding.NamedSharding(mesh, P(DATA_AXIS))
        size = chunks.longest * len(chunks.lengths)
        whole = jax.sharding.NamedSharding(mesh, P())
        return jax.jit(
            mapped, donate_argnums=(1,), keep_unused=True, compiler_options=self._options
        ).lower(
            jax.ShapeDtypeStruct((size,), gathered_dtype(self._params), sharding=sharding),
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in own],
        )

    def run(
        self, sent: Sequence[Sequence[jax.Array]], params: Sequence[Sequence[jax.Array]]
    ) -> list[list[jax.Array]]:
        """The new parameters on each local copy.

        Args:
            sent: For each local copy the chunks of its update.
            params: For each local copy the trained parameters as they were, which are given up.
        """
        reducer = self._reducer
        new = [list(own) for own in params]
        for k, (chunks, program) in enumerate(zip(self._buckets, self._programs, strict=True)):
            chunk = reducer.stacked([own[k] for own in sent])
            old = [reducer.over_all([own[i] for own in params], P()) for i in chunks.tensors]
            found = program(chunk, old)
            for i, x in zip(chunks.tensors, found, strict=True):
                for own_new, part in zip(new, reducer.local_parts(x, P()), strict=True):
                    own_new[i] = part
            self._under_way = found
            if reducer.ring and k + 1 < len(self._programs):
                self.wait()
        return new

    def wait(self) -> None:
        """Until the parameters are there: Gloo mixes up collectives that wait for nothing."""
        jax.block_until_ready(self._under_way)
        self._under_way = []
