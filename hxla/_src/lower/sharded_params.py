"""Sharded parameters: gathered for the segment that reads them, and freed after it.

What only operations of low precision read travels in it, in half the bytes: they would round each
element by itself to what it is rounded to here. It becomes float32 again when it is there, so that
the programs that read it are the same for all that hold it otherwise.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, section 5.3 (stage 3, parameters).
    Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023,
    section 3 (units whose parameters are gathered together), section 4.4 (low precision copies).
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS
from ..plan.ownership import Ownership
from ..plan.stage_storage import piece_shape
from .chunks import Chunks, all_gather
from .compile import extra_bytes, firsts_alike, for_each
from .gather import gathered_dtype, unflat
from .offload import is_on_host, on_device
from .replica import ReplicaArrays
from .sum import Reducer


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Parameters that travel together.

    Attributes:
        dtype: To which they are rounded before; None: they are not.
    """

    tensors: tuple[int, ...]
    dtype: str | None = None

    @property
    def sent(self) -> Any:
        """What travels in place of a low dtype, its bits: on CPUs bfloat16 would go as float32."""
        return jnp.uint16 if self.dtype else None


class ShardedParams:
    """Makes parameters whole, a group of them at a time.

    Args:
        params: Shapes of the trained parameters, whole.
        specs: How they lie on the axes inside a copy.
        like: From a trained parameter and a copy to the shape of what it has.
        groups: The parameters of each group, by their numbers; one may be in several.
        low: For each group those that are read in a dtype of 16 bits only, with the dtype.
    """

    def __init__(
        self,
        reducer: Reducer,
        own: Ownership,
        params: Sequence[jax.ShapeDtypeStruct],
        specs: Sequence[P],
        like: Callable[[int, int], jax.ShapeDtypeStruct],
        groups: Sequence[Sequence[int]],
        low: Sequence[Mapping[int, str]],
        options: dict[str, Any],
    ):
        self._reducer, self._own, self._like, self._specs = reducer, own, like, list(specs)
        self._options, shares = options, own.shares
        #: Shapes of a device's parts, whole but for what the axes cut.
        self._params = params = [
            jax.ShapeDtypeStruct(piece_shape(x.shape, spec, dict(own.axes)), x.dtype)
            for x, spec in zip(params, specs, strict=True)
        ]
        units: list[_Unit] = []
        #: For each group its units, and those that bring the same as it is.
        self._of_group: list[tuple[list[int], list[int]]] = []
        for group, dtypes in zip(groups, low, strict=True):
            names = dict.fromkeys(dtypes.get(t) for t in group)
            kinds = [
                _Unit(tuple(t for t in group if dtypes.get(t) == name), name) for name in names
            ]
            as_they_are = [dataclasses.replace(unit, dtype=None) for unit in kinds]
            places = []
            for own_units in (kinds, as_they_are):
                places.append([*range(len(units), len(units) + len(own_units))])
                units += own_units
            self._of_group.append((places[0], places[1]))
        self._units = units
        #: For each unit the first that has the same programs.
        self._same = firsts_alike(
            (
                unit.dtype,
                tuple(
                    (params[t].shape, params[t].dtype, shares.owners[t], specs[t])
                    for t in unit.tensors
                ),
            )
            for unit in units
        )
        # What is gathered as it is for an evaluation only is compiled when there is one.
        used = {self._same[u] for own_units, _ in self._of_group for u in own_units}
        self._distinct = sorted(used)
        self._chunks = [
            Chunks(shares, unit.tensors, tuple(params[t].size for t in unit.tensors))
            for unit in units
        ]
        #: For each group that comes the pieces of each local copy, where they wait on the host.
        self._coming: dict[int, list[dict[int, jax.Array]]] = {}
        self._packs: dict[int, list[Any]] = {}
        self._gathers: dict[int, Any] = {}

    def lower(self) -> list[Any]:
        """The gathers of all groups before compilation; of like ones there is one."""
        return [self._gather_program(u) for u in self._distinct]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        for u, program in zip(self._distinct, compiled, strict=True):
            self._adopt(u, program)

    def _adopt(self, u: int, program: Any) -> None:
        local, key = self._reducer.local, self._own.program_key
        self._gathers[u] = program
        self._packs[u] = for_each(local, functools.partial(self._pack_program, u), key)

    def _sent_dtype(self, u: int) -> Any:
        unit = self._units[u]
        return unit.sent or gathered_dtype([self._params[t] for t in unit.tensors])

    def _pack_program(self, u: int, i: int) -> Any:
        """From what a local copy has of a unit to one array, as long as the longest."""
        chunks, replica, unit = self._chunks[u], self._reducer.local[i], self._units[u]
        sent, copy = self._sent_dtype(u), self._own.member(replica.index)

        def hxla_pack(pieces: list[jax.Array]) -> jax.Array:
            flat = [x.reshape(-1).astype(unit.dtype or sent) for x in pieces]
            if unit.sent:
                flat = [jax.lax.bitcast_convert_type(x, sent) for x in flat]
            return chunks.chunk(flat, copy)

        lie = self._own.parts_spec
        like = [replica.like(self._like(t, copy), lie) for t in unit.tensors]
        run: Any = hxla_pack
        if replica.axes:
            run = jax.shard_map(
                run,
                mesh=replica.mesh,
                in_specs=([lie] * len(like),),
                out_specs=lie,
                check_vma=False,
            )
        # A copy that owns nothing of the unit makes zeros, and makes them where it is.
        where = replica.sharding(lie)
        return jax.jit(run, out_shardings=where, compiler_options=self._options).lower(like)

    def _gather_program(self, u: int) -> Any:
        chunks, unit = self._chunks[u], self._units[u]
        own, sent = [self._params[t] for t in unit.tensors], self._sent_dtype(u)

        def hxla_gather(chunk: jax.Array) -> list[jax.Array]:
            flat = all_gather(chunk, chunks.lengths, DATA_AXIS)
            if unit.dtype:
                flat = jax.lax.bitcast_convert_type(flat, jnp.dtype(unit.dtype))
            return unflat(chunks, flat, own)

        arrays = self._reducer.arrays
        mapped = jax.shard_map(
            hxla_gather,
            mesh=arrays.mesh,
            in_specs=arrays.own_spec,
            out_specs=[self._specs[t] for t in unit.tensors],
            check_vma=False,
        )
        size = chunks.longest * len(chunks.lengths) * arrays.num_inner
        sharding = NamedSharding(arrays.mesh, arrays.own_spec)
        return jax.jit(mapped, donate_argnums=0, compiler_options=self._options).lower(
            jax.ShapeDtypeStruct((size,), sent, sharding=sharding)
        )

    def fetch(self, g: int, pieces: Sequence[Sequence[jax.Array]]) -> None:
        """Begin to bring the pieces of a group from host memory, if they wait there."""
        tensors = {t for u in self._of_group[g][0] for t in self._units[u].tensors}
        if g not in self._coming and any(is_on_host(own[t]) for own in pieces for t in tensors):
            self._coming[g] = [{t: on_device(own[t]) for t in tensors} for own in pieces]

    def gather(
        self, g: int, pieces: Sequence[Sequence[jax.Array]], *, as_they_are: bool = False
    ) -> list[dict[int, jax.Array]]:
        """The parameters of a group, whole on each local copy, by their numbers.

        Args:
            pieces: For each local copy what it has of each trained parameter.
            as_they_are: Whether what is read in a low dtype is not to be rounded to it.
        """
        found: list[dict[int, jax.Array]] = [{} for _ in pieces]
        here = self._coming.pop(g, None) or pieces
        units = self._of_group[g][as_they_are]
        for u in units:
            for own, more in zip(found, self._gather(u, here), strict=True):
                own |= more
            if len(units) > 1 and self._reducer.arrays.is_ring:
                # Gloo mixes up collectives that wait for nothing of each other.
                jax.block_until_ready(found)
        return found

    def _gather(self, u: int, pieces: Sequence[Any]) -> list[dict[int, jax.Array]]:
        unit, same = self._units[u], self._same[u]
        if same not in self._gathers:
            self._adopt(same, self._gather_program(same).compile())
        packs = zip(self._packs[same], pieces, strict=True)
        packed = [pack([on_device(own[t]) for t in unit.tensors]) for pack, own in packs]
        chunk = self._reducer.arrays.join(packed, self._chunks[u].lengths)
        found = self._gathers[same](chunk)
        lie = [self._specs[t] for t in unit.tensors]
        each = list(map(self._reducer.arrays.local_parts, found, lie))
        return [
            {t: parts[i] for t, parts in zip(unit.tensors, each, strict=True)}
            for i in range(len(pieces))
        ]

    @property
    def num_groups(self) -> int:
        """As many as were given."""
        return len(self._of_group)

    def num_bytes(self, g: int) -> int:
        """Bytes of a group's parameters, whole."""
        return sum(self._whole_bytes(u) for u in self._of_group[g][0])

    def _whole_bytes(self, u: int) -> int:
        own = [self._params[t] for t in self._units[u].tensors]
        return sum(x.size * x.dtype.itemsize for x in own)

    def piece_bytes(self, g: int) -> int:
        """Bytes of what a device of the first local copy has of a group."""
        copy, tensors = self._reducer.local[0].index, set[int]()
        for u in self._of_group[g][0]:
            tensors.update(self._units[u].tensors)
        own = [self._like(t, copy) for t in tensors]
        num = self._reducer.arrays.num_inner
        return sum(x.size * jnp.dtype(x.dtype).itemsize for x in own) // num

    def gather_bytes(self, g: int) -> int:
        """Bytes of one device while a group's parameters are made whole, once it is compiled."""
        there = most = 0
        for u in self._of_group[g][0]:
            chunk = jnp.dtype(self._sent_dtype(u)).itemsize * self._chunks[u].longest
            most = max(most, there + chunk + extra_bytes(self._gathers[self._same[u]]))
            there += self._whole_bytes(u)
        return most


class GroupCollectives:
    """Gathers parameters and sums gradients of one group after another.

    Args:
        reducer: The sums over all copies, with its groups.
        sharded: Gathers the parameters of each group; None: all copies have them.
        trained: Places of the parameters that are trained.

    Attributes:
        under_way: What is there when the last collective is done.
    """

    def __init__(self, reducer: Reducer, sharded: ShardedParams | None, trained: Sequence[int]):
        self.reducer, self.sharded, self._trained = reducer, sharded, tuple(trained)
        self.under_way: Any = None

    def wait(self) -> None:
        """Until the last collective is done: Gloo mixes up those that wait for nothing."""
        if self.reducer.arrays.is_ring:
            jax.block_until_ready(self.under_way)

    def pieces(self, held: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """For each local copy what it has of each trained parameter."""
        return [[own.params[p] for p in self._trained] for own in held]

    def gather(
        self, g: int, pieces: Sequence[Sequence[jax.Array]], *, as_they_are: bool = False
    ) -> list[dict[int, jax.Array]]:
        """See `ShardedParams.gather`; by the places of the parameters."""
        assert self.sharded is not None
        self.wait()
        gathered = self.sharded.gather(g, pieces, as_they_are=as_they_are)
        self.under_way = [smallest(own.values()) for own in gathered]
        return [{self._trained[t]: x for t, x in own.items()} for own in gathered]

    def add_group(self, k: int, values: Sequence[Sequence[Any]], before: Any) -> Any:
        """See `Reducer.add_group`; what it gives to the next wave."""
        self.wait()
        found, self.under_way = self.reducer.add_group(k, values, before)
        return found

    def sum_group(
        self,
        k: int,
        values: Sequence[Sequence[Any]],
        totals: Sequence[list[jax.Array]],
        before: Any = None,
    ) -> None:
        """See `Reducer.sum_group`; each local copy's totals are put behind those it has."""
        self.wait()
        self.under_way = self.reducer.sum_group(k, values, before)
        for own, new in zip(totals, self.under_way, strict=True):
            own += new

    def whole(self, held: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """All parameters whole on each local copy; every process calls this."""
        found = [list(own.params) for own in held]
        if self.sharded is None:
            return found
        pieces = self.pieces(held)
        for g in range(self.sharded.num_groups):
            for params, own in zip(found, self.gather(g, pieces, as_they_are=True), strict=True):
                for p, x in own.items():
                    params[p] = x
        return found


def smallest(arrays: Iterable[jax.Array]) -> jax.Array | None:
    """One of what a program makes, all of which is there at once; whoever holds it holds little."""
    return min(arrays, key=lambda x: x.size, default=None)
