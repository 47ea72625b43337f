"""Moves arrays between two sets of devices that shard them in unlike ways, bit for bit.

A route is one SPMD program over the devices of both sides. In each of its rounds a device sends to
at most one device and receives from at most one, so a round is a permute. A device that receives
copies the rows that it lacks. Nothing is added, and no array is whole on a device that does not
keep it whole. Only the processes of these devices call the program.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from ..graph.graph import bytes_of
from ..jax.devices import is_here
from .bitcast_packing import BitcastPacking
from .compile import extra_bytes
from .padding import NOT_PADDED, Padding

_AXIS = "route"

#: For each dimension of a device's shard its rows in the whole array; -1 is padding.
Rows = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteEnd:
    """An array at one end of a route, on some devices.

    Attributes:
        shape: The shape of the whole array, with padding.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    padding: Padding = NOT_PADDED

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a device's shard."""
        return self.sharding.shard_shape(self.shape)

    def bytes_on(self, device: jax.Device) -> int:
        """The bytes of a device's shard; 0 where it has none."""
        is_there = device in self.sharding.device_set
        return bytes_of(self.local_shape, self.dtype) if is_there else 0

    @functools.cached_property
    def rows(self) -> dict[jax.Device, Rows]:
        """The rows of each device's shard."""
        parts = self.padding.parts or ((),) * len(self.shape)
        whole = [_true_rows(n, sizes) for n, sizes in zip(self.shape, parts, strict=True)]
        indices = self.sharding.devices_indices_map(self.shape)
        return {
            device: tuple(rows[index] for rows, index in zip(whole, each, strict=True))
            for device, each in indices.items()
            if each is not None
        }


def _true_rows(size: int, parts: Sequence[int]) -> np.ndarray:
    """For each row of a padded dimension the row of the whole array, or -1."""
    if not parts:
        return np.arange(size)
    most = max(parts)
    starts = itertools.accumulate(parts, initial=0)
    rows = np.full((len(parts), most), -1)
    for row, start, num in zip(rows, starts, parts, strict=False):
        row[:num] = start + np.arange(num)
    return rows.reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copy:
    """What each device copies of an array in a round.

    Attributes:
        receives: bool[devices]: whether a device copies anything.
        picks: For each dimension, int[devices, rows]: the row of the sender's shard for each row of
            the receiver's, or -1; in the order of senders if they pick, else of receivers.
        keeps: The same in the order of receivers.
        at_sender: Whether the sender picks, because the receiver's shard is the smaller one.
    """

    receives: np.ndarray
    picks: tuple[np.ndarray, ...]
    keeps: tuple[np.ndarray, ...]
    at_sender: bool


def _needed(source: RouteEnd, target: RouteEnd) -> dict[jax.Device, list[jax.Device]]:
    """For each device that receives the devices that have its rows, itself first."""
    sent: dict[jax.Device, int] = dict.fromkeys(source.rows, 0)
    needed: dict[jax.Device, list[jax.Device]] = {}
    for to, wanted in target.rows.items():
        owners: dict[Any, list[jax.Device]] = {}
        for device, rows in source.rows.items():
            if all(np.isin(w[w >= 0], r).any() for w, r in zip(wanted, rows, strict=True)):
                owners.setdefault(tuple(r.tobytes() for r in rows), []).append(device)
        needed[to] = []
        for devices in owners.values():
            device = to if to in devices else min(devices, key=sent.__getitem__)
            sent[device] += device != to
            needed[to].append(device)
    return needed


def _rounds(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs in rounds, in each of which a device sends once and receives once at most."""
    rounds: list[list[tuple[int, int]]] = []
    for source, to in pairs:
        free = (r for r in rounds if all(source != a and to != b for a, b in r))
        its_round = next(free, None)
        if its_round is None:
            rounds.append(its_round := [])
        its_round.append((source, to))
    return rounds


class Route:
    """The program of a route, for some arrays together.

    Args:
        devices: Those of both sides, in one order on every process.
        sources: The arrays where they are.
        targets: The same arrays where they go.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        sources: Sequence[RouteEnd],
        targets: Sequence[RouteEnd],
    ):
        self._devices = tuple(devices)
        self._sources, self._targets = tuple(sources), tuple(targets)
        self._local = [d for d in self._devices if is_here(d)]
        self._mesh = Mesh(np.array(self._devices), (_AXIS,), axis_types=(AxisType.Auto,))
        self._rounds = self._copies()
        self.compiled: Any = None

    @property
    def is_local(self) -> bool:
        """Whether this process has a device of the route."""
        return bool(self._local)

    def lower(self) -> Any:
        """The program before compilation."""
        sharding = NamedSharding(self._mesh, P(_AXIS))
        arguments = [
            jax.ShapeDtypeStruct(self._stacked(x.local_shape), x.dtype, sharding=sharding)
            for x in self._sources
        ]
        mapped = jax.shard_map(
            self._run, mesh=self._mesh, in_specs=(P(_AXIS),), out_specs=P(_AXIS), check_vma=False
        )
        return jax.jit(mapped, out_shardings=sharding).lower(arguments)

    def run(self, arrays: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """The arrays where they go; None where no device of this process has one.

        Args:
            arrays: None likewise.
        """
        stacked = [self._stack(place, x) for place, x in zip(self._sources, arrays, strict=True)]
        made = self.compiled(stacked)
        return list(map(self._placed, self._targets, made))

    def source_bytes(self, device: jax.Device) -> int:
        """The bytes of a device's shards before they move."""
        return sum(x.bytes_on(device) for x in self._sources)

    def target_bytes(self, device: jax.Device) -> int:
        """The bytes of a device's shards after they moved."""
        return sum(x.bytes_on(device) for x in self._targets)

    def extra_bytes(self, device: jax.Device) -> int:
        """The bytes that a device of the route needs beside `source_bytes` while arrays move."""
        each = (bytes_of(x.local_shape, x.dtype) for x in self._sources)
        return sum(each) - self.source_bytes(device) + extra_bytes(self.compiled)

    def _stacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        first, *rest = shape or (1,)
        return (len(self._devices) * first, *rest)

    def _stack(self, place: RouteEnd, x: jax.Array | None) -> jax.Array:
        """One array with the shard of every device, zeros where it has none."""
        shards = {} if x is None else {s.device: s.data for s in x.addressable_shards}
        shape = place.local_shape or (1,)
        parts = [
            _shaped(shards[d], shape) if d in shards else _zeros(shape, place.dtype, d)
            for d in self._local
        ]
        sharding = NamedSharding(self._mesh, P(_AXIS))
        whole = self._stacked(place.local_shape)
        return jax.make_array_from_single_device_arrays(whole, sharding, parts)

    def _placed(self, place: RouteEnd, x: jax.Array) -> jax.Array | None:
        shards = {s.device: s.data for s in x.addressable_shards}
        order = place.sharding.addressable_devices_indices_map(place.shape)
        places = [d for d in order if d in shards]
        here = [_shaped(shards[d], place.local_shape) for d in places]
        if not here:
            return None
        return jax.make_array_from_single_device_arrays(place.shape, place.sharding, here)

    # -- the program -----------------------------------------------------------------------------

    def _copies(self) -> list[tuple[list[tuple[int, int]], dict[int, _Copy]]]:
        """For each round its pairs, and what is copied of each of its arrays.

        The first round is of what devices have themselves.
        """
        place_of = {device: i for i, device in enumerate(self._devices)}
        each = [
            [(place_of[a], place_of[b]) for b, owners in _needed(s, t).items() for a in owners]
            for s, t in zip(self._sources, self._targets, strict=True)
        ]
        every = dict.fromkeys(itertools.chain(*each))
        local = [pair for pair in every if pair[0] == pair[1]]
        rounds = [local, *_rounds([pair for pair in every if pair[0] != pair[1]])]
        wanted = list(map(set, each))
        return [
            (
                pairs,
                {
                    k: self._copy(k, [pair for pair in pairs if pair in some])
                    for k, some in enumerate(wanted)
                    if not some.isdisjoint(pairs)
                },
            )
            for pairs in rounds
            if pairs
        ]

    def _copy(self, k: int, pairs: Sequence[tuple[int, int]]) -> _Copy:
        source, target, num = self._sources[k], self._targets[k], len(self._devices)
        at_sender = math.prod(target.local_shape) < math.prod(source.local_shape)
        keeps = tuple(np.full((num, n), -1, np.int32) for n in target.local_shape)
        picks = tuple(np.full((num, n), -1, np.int32) for n in target.local_shape)
        receives = np.zeros(num, bool)
        for a, b in pairs:
            receives[b] = True
            rows_a, rows_b = source.rows[self._devices[a]], target.rows[self._devices[b]]
            for dim, (have, want) in enumerate(zip(rows_a, rows_b, strict=True)):
                where = np.full(1 + max(have.max(), want.max()), -1)
                where[have[have >= 0]] = np.flatnonzero(have >= 0)
                taken = np.where(want >= 0, where[want], -1)
                keeps[dim][b] = taken
                picks[dim][a if at_sender else b] = taken
        return _Copy(receives=receives, picks=picks, keeps=keeps, at_sender=at_sender)

    def _run(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        me = jax.lax.axis_index(_AXIS)
        here = [x.reshape(p.local_shape) for x, p in zip(arrays, self._sources, strict=True)]
        out = [jnp.zeros(p.local_shape, p.dtype) for p in self._targets]
        for pairs, copies in self._rounds:
            is_local_copy = pairs[0][0] == pairs[0][1]
            if is_local_copy:
                received = [here[k] for k in copies]
            else:
                message = [
                    _pick(here[k], copy.picks, me) if copy.at_sender else here[k]
                    for k, copy in copies.items()
                ]
                words = BitcastPacking.like(message)
                moved = jax.lax.ppermute(words.pack(message), _AXIS, pairs)
                received = words.unpack(moved)
            for (k, copy), x in zip(copies.items(), received, strict=True):
                if is_local_copy or not copy.at_sender:
                    x = _pick(x, copy.picks, me)
                out[k] = jnp.where(_kept(copy, me), x, out[k])
        return [x.reshape(p.local_shape or (1,)) for x, p in zip(out, self._targets, strict=True)]


def _zeros(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # random keys, whose zeros ignore `device`
        return jax.device_put(jnp.zeros(shape, dtype), device)
    return jnp.zeros(shape, dtype, device=device)


def _shaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array; a scalar has a dimension on its way, along which shards are stacked."""
    return x if x.shape == shape else x.reshape(shape)


def _pick(x: jax.Array, picks: Sequence[np.ndarray], me: jax.Array) -> jax.Array:
    """The picked rows of each dimension; any row where a pick is -1."""
    for dim, table in enumerate(picks):
        same = np.arange(x.shape[dim])
        used = [row for row in table if row.max(initial=-1) >= 0]
        if table.shape[1] == len(same) and all((row == same).all() for row in used):
            continue
        rows = jnp.asarray(np.maximum(table, 0))[me]
        x = jnp.take(x, rows, axis=dim, mode="clip")
    return x


def _kept(copy: _Copy, me: jax.Array) -> jax.Array:
    """Whether an element of the receiver's shard is among the rows of this round."""
    kept = jnp.asarray(copy.receives)[me]
    for dim, table in enumerate(copy.keeps):
        is_kept = jnp.asarray(table >= 0)[me]
        kept = kept & is_kept.reshape(-1, *(1,) * (len(copy.keeps) - dim - 1))
    return kept
