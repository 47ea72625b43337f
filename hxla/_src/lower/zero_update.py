"""The update of the shards that a replica owns, and the all-gather of their parameters.

Each copy updates its own pieces with its own part of the optimizer's state; then all parameters are
gathered. Element by element it is the arithmetic of an update of everything, so which copy owns
what changes no bit.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5 (stage 1, the optimizer's state).
"""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS, PyTree
from ..jax.rounded import divided, rounded
from ..jax.separable_update import MISSING, Part
from ..plan.ownership import Ownership
from .chunks import Chunks, all_gather
from .compile import compiler_options, for_each, update_options
from .replica import Replica
from .sharded_update import ShardedUpdate, local_part
from .sum import Reducer
from .update import UpdateInputs, UpdateSpec, new_aux


class ZeroPart(Part):
    """What a copy has.

    Args:
        first: Of its first granule, perhaps traced.
    """

    def __init__(self, own: Ownership, copy: int, first: Any):
        self._own, self._copy, self._first = own, copy, first
        self._shares, self._granules = own.shares, own.granules[copy]
        self._sizes: dict[int, int] = {}  # of the whole arrays of each domain that is cut
        for v, d in zip(own.update.closed.jaxpr.outvars, own.update.domain_of, strict=False):
            if d is not None:
                self._sizes[d] = own.local_size(d, v.aval.shape)

    def owns(self, domain: int) -> bool:
        """Whether it has a domain, or a slice of it."""
        return self._own.owners[domain] in (None, self._copy)

    def has_whole(self, domain: int) -> bool:
        """Never: arrays that are cut are flat, also where one copy has all granules."""
        return False

    def cuts(self, k: int) -> bool:
        """Whether one of the update's arrays is cut."""
        domain = self._own.update.domain_of[k]
        return domain is not None and self._own.owners[domain] is None

    def of(self, k: int, x: Any) -> Any:
        """What it has of one of the update's arrays, given the whole."""
        return self._shares.piece(x, self._granules, self._first) if self.cuts(k) else x

    def piece(self, domain: int, x: Any) -> Any:
        """Its slice of a whole array."""
        if self._own.axes:
            x = local_part(x, self._own.spec(domain), dict(self._own.axes))
        return self._shares.piece(x, self._granules, self._first)

    def own(self, domain: int, x: Any) -> Any:
        """Its slice with zeros where it is padding."""
        size = self._sizes[domain]
        places = self._first * self._shares.granule(size) + jnp.arange(x.size)
        return jnp.where(places < size, x, jnp.zeros((), x.dtype))


def own_arguments(
    spec: UpdateSpec,
    own: Ownership,
    chunks: Sequence[Chunks],
    copy: int,
    params: Sequence[jax.Array],
    opt_state: PyTree,
    given: UpdateInputs,
) -> tuple[list[Any], ZeroPart]:
    """Those of the traced update that a copy has.

    Args:
        spec: What the update is made from.
        chunks: For each bucket of the sums.
        params: Whole, or its own parts of them.
        given: What else is read.
    """
    sums = own_sums(spec, chunks, copy, given)
    part, leaves = ZeroPart(own, copy, given.where[0]), jax.tree.leaves(opt_state, is_leaf=is_away)
    pieces = params if own.cuts_params else [part.of(i, p) for i, p in enumerate(params)]
    grads = [mean_of(sums[i], given).astype(p.dtype) for i, p in enumerate(params)]
    grads = [g if part.cuts(i) else _of_shape(g, params[i].shape) for i, g in enumerate(grads)]
    return [*pieces, *leaves, *grads, given.value], part


def own_update_program(
    spec: UpdateSpec,
    own: Ownership,
    chunks: Sequence[Chunks],
    replica: Replica,
    on: ShardedUpdate | None = None,
) -> Any:
    """The program of a copy's own update: its state and other variables are donated.

    The arguments are those of `update_program`, `opt_state` the copy's own part. The results are
    chunks of its new parameters, for each bucket, and as there its state, the other variables, and
    a tick. Where it has only its own parts of the parameters, or is the only copy, they are
    donated, and the results are these parts, or all.

    Args:
        spec: What the update is made from.
        chunks: For each bucket of the sums.
        on: Its devices, if there are several; what it is made from has the shapes of their parts.
    """
    tensors, copy = spec.tensors, own.member(replica.index)
    floats, num = tensors.floats, len(tensors.params)
    dtype = gathered_dtype(tensors.params)

    def hxla_update(
        params: Sequence[jax.Array],
        opt_state: PyTree,
        aux: Sequence[jax.Array],
        given: UpdateInputs,
    ) -> tuple[list[jax.Array], PyTree, list[jax.Array], jax.Array]:
        arguments, part = own_arguments(spec, own, chunks, copy, params, opt_state, given)
        run = own.update.run if on is None else on.run
        results = run(arguments, part, given.where[1], given.sums)
        leaves, state_tree = jax.tree.flatten(opt_state)
        empty = [
            jnp.zeros(1, x.dtype) if new is MISSING else new
            for x, new in zip((*params, *leaves), results, strict=True)
        ]
        sent = empty[:num]
        if own.is_alone:
            sent = [
                x.reshape(-1)[: p.size].reshape(p.shape) for x, p in zip(sent, params, strict=True)
            ]
        elif not own.cuts_params:
            sent = [
                chunk.chunk([empty[i].reshape(-1).astype(dtype) for i in chunk.tensors], copy)
                for chunk in chunks
                if chunk.tensors
            ]
        values = own_sums(spec, chunks, copy, given)
        changed = [values[i].reshape(floats[i].shape) for i in range(num, len(floats))]
        state = jax.tree.unflatten(state_tree, empty[num:])
        return sent, state, new_aux(spec, aux, changed, given.words), given.weight + 0

    return jax.jit(
        hxla_update if on is None else on.update(hxla_update),
        # A copy that owns nothing makes zeros, and makes them where it is.
        out_shardings=replica.sharding(P()) if on is None else None,
        donate_argnums=(1, 2) if own.sends_params else (0, 1, 2),
        compiler_options=update_options(replica.devices[0].platform, spec.contribution.form),
    )


def is_away(leaf: Any) -> bool:
    """Whether a leaf stands for what is not on the device, and which no sum reads."""
    return leaf is None


def mean_of(x: jax.Array, given: UpdateInputs) -> jax.Array:
    """A gradient from its sum, rounded: what follows must not join the division."""
    zero = given.where[1]
    return rounded(divided(x, given.weight, zero), zero)


def own_sums(
    spec: UpdateSpec,
    chunks: Sequence[Chunks],
    copy: int,
    given: UpdateInputs,
    wanted: Collection[int] | None = None,
) -> dict[int, jax.Array]:
    """A copy's own pieces of the sums, flat.

    Args:
        spec: What the update is made from.
        chunks: For each bucket of the sums.
        wanted: Numbers of the tensors whose sums are; None: of all.
    """
    floats, num = spec.tensors.floats, len(spec.tensors.params)
    found = iter(given.totals)
    sums: dict[int, jax.Array] = {}
    for bucket, chunk in zip(spec.of_totals, chunks, strict=True):
        if chunk.tensors:
            total = jax.lax.bitcast_convert_type(next(found), jnp.float32)
            sums |= dict(zip(chunk.tensors, chunk.pieces(total, copy), strict=True))
        others = [i for i in bucket if i >= num]
        if others:
            total = jax.lax.bitcast_convert_type(next(found), jnp.float32)
            ends = np.cumsum([floats[i].size for i in others])
            sums |= dict(zip(others, jnp.split(total, ends[:-1]), strict=True))
    return {
        i: spec.contribution.value(x, given.exponents_T[i])
        for i, x in sums.items()
        if wanted is None or i in wanted
    }


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
        specs: How they lie on the axes inside a copy.
    """

    def __init__(self, reducer: Reducer, params: Sequence[Any], specs: Sequence[P], form: Any):
        self._arrays, self._params, self._form = reducer.arrays, list(params), form
        self._specs = list(specs)
        self._buckets = [chunks for chunks in reducer.chunks if chunks.tensors]
        self._programs: list[Any] = []
        self._unflat: list[list[Any]] = []
        self._under_way: list[jax.Array] = []

    def lower(self) -> list[Any]:
        """The programs of all buckets before compilation."""
        return [self._build(chunks) for chunks in self._buckets]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        self._programs = list(compiled)
        if self._arrays.over_hosts:
            self._unflat = [
                for_each(self._arrays.local, functools.partial(self._build_unflat, chunks))
                for chunks in self._buckets
            ]

    def memory_bytes(self) -> int:
        """Bytes that one device needs beside the state while it gathers."""
        programs = [own[0] for own in self._unflat] or self._programs
        stats = [program.memory_analysis() for program in programs]
        return max((int(s.temp_size_in_bytes) for s in stats if s is not None), default=0)

    def _build(self, chunks: Chunks) -> Any:
        arrays, lengths = self._arrays, self._arrays.lengths(chunks.lengths)
        specs = [self._specs[i] for i in chunks.tensors]

        def hxla_gather(chunk: jax.Array, *old: list[jax.Array]) -> Any:
            flat = all_gather(chunk, lengths, DATA_AXIS) if len(lengths) > 1 else chunk
            return flat if arrays.over_hosts else unflat(chunks, flat, *old)

        old = [] if arrays.over_hosts else [self._old(chunks, list(map(arrays.sharding, specs)))]
        run: Any = hxla_gather
        if not arrays.is_single:
            run = jax.shard_map(
                hxla_gather,
                mesh=arrays.mesh,
                in_specs=(arrays.own_spec, *[specs for _ in old]),
                out_specs=specs if old else P(),
                check_vma=False,
            )
        sent = jax.ShapeDtypeStruct(
            (max(lengths) * len(lengths) * arrays.num_inner,),
            gathered_dtype(self._params),
            sharding=arrays.sharding(arrays.own_spec),
        )
        options = compiler_options(arrays.devices[0].platform, self._form)
        donated = () if arrays.over_hosts else (1,)
        return jax.jit(
            run, donate_argnums=donated, keep_unused=True, compiler_options=options
        ).lower(sent, *old)

    def _build_unflat(self, chunks: Chunks, i: int) -> Any:
        """From what the hosts gathered to the parameters on a local copy."""
        replica = self._arrays.local[i]

        def hxla_unflat(flat: jax.Array, old: list[jax.Array]) -> list[jax.Array]:
            return unflat(chunks, flat, old)

        flat = jax.ShapeDtypeStruct((sum(chunks.lengths),), gathered_dtype(self._params))
        return jax.jit(
            hxla_unflat,
            donate_argnums=(1,),
            keep_unused=True,
            compiler_options=compiler_options(replica.devices[0].platform, self._form),
        ).lower(
            replica.like(flat),
            self._old(chunks, [replica.sharding(P())] * len(chunks.tensors)),
        )

    def _old(self, chunks: Chunks, where: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        own = [self._params[i] for i in chunks.tensors]
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(own, where, strict=True)
        ]

    def run(
        self, sent: Sequence[Sequence[jax.Array]], params: Sequence[Sequence[jax.Array]]
    ) -> list[list[jax.Array]]:
        """The new parameters on each local copy.

        Args:
            sent: For each local copy the chunks of its update.
            params: For each local copy the trained parameters as they were, which are given up.
        """
        arrays = self._arrays
        new = [list(own) for own in params]
        for k, (chunks, program) in enumerate(zip(self._buckets, self._programs, strict=True)):
            chunk = arrays.join([own[k] for own in sent], chunks.lengths)
            old = [[own[i] for i in chunks.tensors] for own in params]
            if arrays.over_hosts:
                self._under_way = [program(chunk)]
                flats = arrays.local_parts(self._under_way[0], P())
                found = [
                    unflat(flat, own)
                    for unflat, flat, own in zip(self._unflat[k], flats, old, strict=True)
                ]
            else:
                specs = [self._specs[i] for i in chunks.tensors]
                over_all = list(map(arrays.over_all, zip(*old, strict=True), specs))
                self._under_way = program(chunk, over_all)
                each = map(arrays.local_parts, self._under_way, specs)
                found = [list(parts) for parts in zip(*each, strict=True)]
            for own_new, parts in zip(new, found, strict=True):
                for i, part in zip(chunks.tensors, parts, strict=True):
                    own_new[i] = part
            if arrays.is_ring and k + 1 < len(self._programs):
                self.wait()
        return new

    def wait(self) -> None:
        """Until the parameters are there: Gloo mixes up collectives that wait for nothing."""
        jax.block_until_ready(self._under_way)
        self._under_way = []


def unflat(chunks: Chunks, flat: jax.Array, like: Sequence[Any]) -> list[jax.Array]:
    """The parameters of a bucket, whole.

    Args:
        flat: All of them one after another.
    """
    new = chunks.unflat(flat, [x.shape for x in like])
    return [x.astype(own.dtype) for x, own in zip(new, like, strict=True)]
