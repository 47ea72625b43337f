"""Parameters of which each copy has a share: gathered for what reads them, and then let go.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5.3 (stage 3, parameters).
    Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023,
    section 3 (units whose parameters are gathered together).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._core._types import DATA_AXIS
from .._plan._ownership import Ownership
from ._chunks import Chunks, all_gather
from ._options import extra_bytes
from ._own_update import gathered_dtype, unflat
from ._per_kind import firsts_alike, for_each
from ._sum import Reducer


class ShardedParams:
    """Makes parameters whole, a group of them at a time.

    Args:
        reducer: Knows all copies.
        own: Who has what.
        params: Shapes of the trained parameters, whole.
        like: From a trained parameter and a copy to the shape of what it has.
        groups: The parameters of each group, by their numbers; one may be in several.
        options: For the compiler.
    """

    def __init__(
        self,
        reducer: Reducer,
        own: Ownership,
        params: Sequence[jax.ShapeDtypeStruct],
        like: Callable[[int, int], jax.ShapeDtypeStruct],
        groups: Sequence[Sequence[int]],
        options: dict[str, Any],
    ):
        self._reducer, self._own, self._params, self._like = reducer, own, list(params), like
        self._options, shares = options, own.shares
        self._groups = [tuple(group) for group in groups]
        #: For each group the first that has the same programs.
        self._same = firsts_alike(
            tuple((params[t].shape, params[t].dtype, shares.owners[t]) for t in group)
            for group in self._groups
        )
        self._distinct = [i for i in sorted(set(self._same)) if self._groups[i]]
        self._chunks = [
            Chunks(shares, group, tuple(params[t].size for t in group)) for group in self._groups
        ]
        self._packs: dict[int, list[Any]] = {}
        self._gathers: dict[int, Any] = {}

    def lower(self) -> list[Any]:
        """The gathers of all groups before compilation; of like groups there is one."""
        return [self._gather_program(g) for g in self._distinct]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        self._gathers = dict(zip(self._distinct, compiled, strict=True))
        local, key = self._reducer.local, self._own.program_key
        for g in self._distinct:
            self._packs[g] = for_each(local, functools.partial(self._pack_program, g), key)

    def _pack_program(self, g: int, i: int) -> Any:
        """From what a local copy has of a group to one array, as long as the longest."""
        chunks, replica = self._chunks[g], self._reducer.local[i]
        group, copy = self._groups[g], replica.index
        dtype = gathered_dtype([self._params[t] for t in group])

        def hxla_pack(pieces: list[jax.Array]) -> jax.Array:
            return chunks.chunk([x.reshape(-1).astype(dtype) for x in pieces], copy)

        like = [replica.like(self._like(t, copy)) for t in group]
        # A copy that owns nothing of the group makes zeros, and makes them where it is.
        where = replica.sharding(P())
        return jax.jit(hxla_pack, out_shardings=where, compiler_options=self._options).lower(like)

    def _gather_program(self, g: int) -> Any:
        chunks, own = self._chunks[g], [self._params[t] for t in self._groups[g]]

        def hxla_gather(chunk: jax.Array) -> list[jax.Array]:
            return unflat(chunks, all_gather(chunk, chunks.lengths, DATA_AXIS), own)

        mesh = self._reducer.arrays.mesh
        mapped = jax.shard_map(
            hxla_gather,
            mesh=mesh,
            in_specs=P(DATA_AXIS),
            out_specs=[P()] * len(own),
            check_vma=False,
        )
        size = chunks.longest * len(chunks.lengths)
        sharding = NamedSharding(mesh, P(DATA_AXIS))
        return jax.jit(mapped, donate_argnums=0, compiler_options=self._options).lower(
            jax.ShapeDtypeStruct((size,), gathered_dtype(own), sharding=sharding)
        )

    def gather(self, g: int, pieces: Sequence[Sequence[jax.Array]]) -> list[dict[int, jax.Array]]:
        """The parameters of a group, whole on each local copy, by their numbers.

        Args:
            g: Number of the group.
            pieces: For each local copy what it has of each trained parameter.
        """
        group, same = self._groups[g], self._same[g]
        if not group:
            return [{} for _ in pieces]
        packs = zip(self._packs[same], pieces, strict=True)
        packed = [pack([own[t] for t in group]) for pack, own in packs]
        chunk = self._reducer.arrays.join(packed, self._chunks[g].lengths)
        found = self._gathers[same](chunk)
        each = [self._reducer.arrays.local_parts(x, P()) for x in found]
        return [
            {t: parts[i] for t, parts in zip(group, each, strict=True)} for i in range(len(pieces))
        ]

    @property
    def num_groups(self) -> int:
        """As many as were given."""
        return len(self._groups)

    def num_bytes(self, g: int) -> int:
        """Bytes of a group's parameters, whole."""
        return sum(self._params[t].size * self._params[t].dtype.itemsize for t in self._groups[g])

    def gather_bytes(self, g: int) -> int:
        """Bytes of one device while a group's parameters are made whole, once it is compiled."""
        if not self._groups[g]:
            return 0
        own = [self._params[t] for t in self._groups[g]]
        chunk = gathered_dtype(own).itemsize * self._chunks[g].longest
        return chunk + extra_bytes(self._gathers[self._same[g]])
