"""Sharded parameters: gathered for the segment that reads them, and freed after it.

A parameter that only low-precision operations read travels in that precision, in half the bytes:
each of them would round it in the same way. It is cast back to float32 after the gather, so its
readers are the same programs as without sharding.

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
from jax.sharding import PartitionSpec as P

from ..core.types import DATA_AXIS
from ..plan.layout import piece_shape
from ..plan.ownership import Ownership
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
        dtype: The dtype to which they are rounded before; None: they are not rounded.
    """

    tensors: tuple[int, ...]
    dtype: str | None = None

    @property
    def sent(self) -> Any:
        """The dtype sent for a low one, with its bits: CPUs would send bfloat16 as float32."""
        return jnp.uint16 if self.dtype else None


class ShardedParams:
    """Makes parameters whole, a group of them at a time.

    Args:
        params: Shapes of the trained parameters, whole.
        specs: PartitionSpecs over the axes inside a replica.
        like: From a trained parameter and a replica to the shape of the replica's piece.
        groups: The parameters of each group, by their numbers; one may be in several.
        low: For each group the parameters read in a dtype of 16 bits only, with the dtype.
    """

    def __init__(
        self,
        reducer: Reducer,
        ownership: Ownership,
        params: Sequence[jax.ShapeDtypeStruct],
        specs: Sequence[P],
        like: Callable[[int, int], jax.ShapeDtypeStruct],
        groups: Sequence[Sequence[int]],
        low: Sequence[Mapping[int, str]],
        options: dict[str, Any],
    ):
        self._reducer, self._ownership = reducer, ownership
        self._like, self._specs = like, list(specs)
        self._options, shares = options, ownership.shares
        #: Shapes of a device's pieces, which only the axes inside a replica cut.
        self._params = params = [
            jax.ShapeDtypeStruct(piece_shape(x.shape, spec, dict(ownership.axes)), x.dtype)
            for x, spec in zip(params, specs, strict=True)
        ]
        units: list[_Unit] = []
        #: For each group its units, and the units that gather the same without rounding.
        self._of_group: list[tuple[list[int], list[int]]] = []
        for group, dtypes in zip(groups, low, strict=True):
            names = dict.fromkeys(dtypes.get(t) for t in group)
            kinds = [
                _Unit(tuple(t for t in group if dtypes.get(t) == name), name) for name in names
            ]
            as_they_are = [dataclasses.replace(unit, dtype=None) for unit in kinds]
            places = []
            for more in (kinds, as_they_are):
                places.append([*range(len(units), len(units) + len(more))])
                units += more
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
        # Gathers without rounding serve evaluations only, and are compiled by the first one.
        used = {self._same[u] for rounded, _ in self._of_group for u in rounded}
        self._distinct = sorted(used)
        self._chunks = [
            Chunks(shares, unit.tensors, tuple(params[t].size for t in unit.tensors))
            for unit in units
        ]
        #: For each group being fetched from the host the pieces of each local replica.
        self._coming: dict[int, list[dict[int, jax.Array]]] = {}
        self._packs: dict[int, list[Any]] = {}
        self._gathers: dict[int, Any] = {}
        #: Over the hosts, for each local replica what cuts the gathered array into parameters.
        self._unflats: dict[int, list[Any]] = {}

    def lower(self) -> list[Any]:
        """The distinct gathers of all groups, before compilation."""
        return [self._gather_program(u) for u in self._distinct]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        for u, program in zip(self._distinct, compiled, strict=True):
            self._adopt(u, program)

    def _adopt(self, u: int, program: Any) -> None:
        local, key = self._reducer.local, self._ownership.program_key
        self._gathers[u] = program
        self._packs[u] = for_each(local, functools.partial(self._pack_program, u), key)
        if self._reducer.arrays.over_hosts:
            self._unflats[u] = for_each(local, functools.partial(self._unflat_program, u))

    def _sent_dtype(self, u: int) -> Any:
        unit = self._units[u]
        return unit.sent or gathered_dtype([self._params[t] for t in unit.tensors])

    def _pack_program(self, u: int, i: int) -> Any:
        """Packs a local replica's pieces of a unit into one array of the longest chunk's length."""
        chunks, replica, unit = self._chunks[u], self._reducer.local[i], self._units[u]
        sent, member = self._sent_dtype(u), self._ownership.member(replica.index)

        def hxla_pack(pieces: list[jax.Array]) -> jax.Array:
            flat = [x.reshape(-1).astype(unit.dtype or sent) for x in pieces]
            if unit.sent:
                flat = [jax.lax.bitcast_convert_type(x, sent) for x in flat]
            return chunks.chunk(flat, member)

        parts_spec = self._ownership.parts_spec
        like = [replica.like(self._like(t, member), parts_spec) for t in unit.tensors]
        run: Any = hxla_pack
        if replica.axes:
            run = jax.shard_map(
                run,
                mesh=replica.mesh,
                in_specs=([parts_spec] * len(like),),
                out_specs=parts_spec,
                check_vma=False,
            )
        # A replica that owns nothing of the unit makes zeros on its devices.
        where = replica.sharding(parts_spec)
        return jax.jit(run, out_shardings=where, compiler_options=self._options).lower(like)

    def _gather_program(self, u: int) -> Any:
        unit, arrays = self._units[u], self._reducer.arrays
        lengths = arrays.lengths(self._chunks[u].lengths)

        def hxla_gather(chunk: jax.Array) -> Any:
            flat = all_gather(chunk, lengths, DATA_AXIS) if len(lengths) > 1 else chunk
            return flat if arrays.over_hosts else self._unflat(u, flat)

        run: Any = hxla_gather
        if not arrays.is_single:
            specs: Any = P() if arrays.over_hosts else [self._specs[t] for t in unit.tensors]
            run = jax.shard_map(
                run,
                mesh=arrays.mesh,
                in_specs=arrays.own_spec,
                out_specs=specs,
                check_vma=False,
            )
        size = max(lengths) * len(lengths) * arrays.num_inner
        sent = jax.ShapeDtypeStruct(
            (size,), self._sent_dtype(u), sharding=arrays.sharding(arrays.own_spec)
        )
        return jax.jit(run, donate_argnums=0, compiler_options=self._options).lower(sent)

    def _unflat(self, u: int, flat: jax.Array) -> list[jax.Array]:
        """The parameters of a unit, from their gathered chunks."""
        unit = self._units[u]
        if unit.dtype:
            flat = jax.lax.bitcast_convert_type(flat, jnp.dtype(unit.dtype))
        return unflat(self._chunks[u], flat, [self._params[t] for t in unit.tensors])

    def _unflat_program(self, u: int, i: int) -> Any:
        """The program that cuts the hosts' gathered array into parameters on a local replica."""
        size, replica = sum(self._chunks[u].lengths), self._reducer.local[i]

        def hxla_unflat(flat: jax.Array) -> list[jax.Array]:
            return self._unflat(u, flat)

        flat = replica.like(jax.ShapeDtypeStruct((size,), self._sent_dtype(u)))
        return jax.jit(hxla_unflat, compiler_options=self._options).lower(flat)

    def fetch(self, g: int, pieces: Sequence[Sequence[jax.Array]]) -> None:
        """Begin to fetch the pieces of a group, if they are in host memory."""
        tensors = {t for u in self._of_group[g][0] for t in self._units[u].tensors}
        if g not in self._coming and any(
            is_on_host(arrays[t]) for arrays in pieces for t in tensors
        ):
            self._coming[g] = [{t: on_device(arrays[t]) for t in tensors} for arrays in pieces]

    def gather(
        self, g: int, pieces: Sequence[Sequence[jax.Array]], *, as_they_are: bool = False
    ) -> list[dict[int, jax.Array]]:
        """The parameters of a group, whole on each local replica, by their numbers.

        Args:
            pieces: For each local replica its piece of each trained parameter.
            as_they_are: Whether to gather in full precision what is read in a low dtype.
        """
        whole: list[dict[int, jax.Array]] = [{} for _ in pieces]
        here = self._coming.pop(g, None) or pieces
        units = self._of_group[g][as_they_are]
        for u in units:
            for params, more in zip(whole, self._gather(u, here), strict=True):
                params |= more
            if len(units) > 1 and self._reducer.arrays.is_ring:
                # Gloo mixes up independent collectives.
                jax.block_until_ready(whole)
        return whole

    def _gather(self, u: int, pieces: Sequence[Any]) -> list[dict[int, jax.Array]]:
        unit, same = self._units[u], self._same[u]
        if same not in self._gathers:
            self._adopt(same, self._gather_program(same).compile())
        packs = zip(self._packs[same], pieces, strict=True)
        packed = [pack([on_device(arrays[t]) for t in unit.tensors]) for pack, arrays in packs]
        chunk = self._reducer.arrays.join(packed, self._chunks[u].lengths)
        whole = self._gathers[same](chunk)
        if self._reducer.arrays.over_hosts:
            flats = self._reducer.arrays.local_parts(whole, P())
            cut = zip(self._unflats[same], flats, strict=True)
            return [dict(zip(unit.tensors, unflat(flat), strict=True)) for unflat, flat in cut]
        specs = [self._specs[t] for t in unit.tensors]
        each = list(map(self._reducer.arrays.local_parts, whole, specs))
        return [
            {t: parts[i] for t, parts in zip(unit.tensors, each, strict=True)}
            for i in range(len(pieces))
        ]

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self._of_group)

    def num_bytes(self, g: int) -> int:
        """Bytes of a group's parameters, whole."""
        return sum(self._whole_bytes(u) for u in self._of_group[g][0])

    def _whole_bytes(self, u: int) -> int:
        params = [self._params[t] for t in self._units[u].tensors]
        return sum(x.size * x.dtype.itemsize for x in params)

    def piece_bytes(self, g: int) -> int:
        """Bytes of the pieces of a group on a device of the first local replica."""
        replica, tensors = self._reducer.local[0].index, set[int]()
        for u in self._of_group[g][0]:
            tensors.update(self._units[u].tensors)
        pieces = [self._like(t, replica) for t in tensors]
        num = self._reducer.arrays.num_inner
        return sum(x.size * jnp.dtype(x.dtype).itemsize for x in pieces) // num

    def gather_bytes(self, g: int) -> int:
        """Bytes of one device while a group's parameters are gathered, once it is compiled."""
        whole = most = 0
        for u in self._of_group[g][0]:
            same, chunks = self._same[u], self._chunks[u]
            program, length = self._gathers[same], chunks.longest
            if self._reducer.arrays.over_hosts:  # each device gets the gathered array
                program, length = self._unflats[same][0], sum(chunks.lengths)
            num_sent = jnp.dtype(self._sent_dtype(u)).itemsize * length
            most = max(most, whole + num_sent + extra_bytes(program))
            whole += self._whole_bytes(u)
        return most


class GroupCollectives:
    """Gathers parameters and sums gradients of one group after another.

    Args:
        reducer: The sums over all replicas, with its groups.
        sharded: Gathers the parameters of each group; None: all replicas have them.

    Attributes:
        under_way: Arrays that are ready when the last collective is done.
    """

    def __init__(self, reducer: Reducer, sharded: ShardedParams | None, trained: Sequence[int]):
        self.reducer, self.sharded, self._trained = reducer, sharded, tuple(trained)
        self.under_way: Any = None

    def wait(self) -> None:
        """Wait for the last collective: Gloo mixes up independent ones."""
        if self.reducer.arrays.is_ring:
            jax.block_until_ready(self.under_way)

    def pieces(self, replicas: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """For each local replica its piece of each trained parameter."""
        return [[arrays.params[p] for p in self._trained] for arrays in replicas]

    def gather(
        self, g: int, pieces: Sequence[Sequence[jax.Array]], *, as_they_are: bool = False
    ) -> list[dict[int, jax.Array]]:
        """`ShardedParams.gather`, by the places of the parameters."""
        assert self.sharded is not None
        self.wait()
        gathered = self.sharded.gather(g, pieces, as_they_are=as_they_are)
        self.under_way = [smallest(params.values()) for params in gathered]
        return [{self._trained[t]: x for t, x in params.items()} for params in gathered]

    def add_group(self, k: int, values: Sequence[Sequence[Any]], before: Any) -> Any:
        """`Reducer.add_group`, for the next wave's `before`."""
        self.wait()
        added, self.under_way = self.reducer.add_group(k, values, before)
        return added

    def sum_group(
        self,
        k: int,
        values: Sequence[Sequence[Any]],
        totals: Sequence[list[jax.Array]],
        before: Any = None,
    ) -> None:
        """`Reducer.sum_group`, whose totals are appended to those of each local replica."""
        self.wait()
        self.under_way = self.reducer.sum_group(k, values, before)
        for sums, new in zip(totals, self.under_way, strict=True):
            sums += new

    def whole(self, replicas: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """All parameters whole on each local replica; every process calls this."""
        whole = [list(arrays.params) for arrays in replicas]
        if self.sharded is None:
            return whole
        pieces = self.pieces(replicas)
        for g in range(self.sharded.num_groups):
            for params, new in zip(whole, self.gather(g, pieces, as_they_are=True), strict=True):
                for p, x in new.items():
                    params[p] = x
        return whole


def smallest(arrays: Iterable[jax.Array]) -> jax.Array | None:
    """The smallest result of a program, to wait on: all are ready at once."""
    return min(arrays, key=lambda x: x.size, default=None)
