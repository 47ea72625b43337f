"""Offloaded state and residuals: pinned memory of the host, or a file.

Copies begin when they are asked for and run beside programs. A queue of them would be a queue of
memory: so before one is asked for, that before it in the same direction must be done.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 5 (the optimizer's state on CPU memory or NVMe).
    Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural
    network design", MICRO 2016, section 3 (offload and prefetch beside computation).
"""

import functools
import math
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from ..core.errors import PlanError
from .replica import Replica
from .units import Group, UpdateGroups, streamed, units_of
from .zero_state import ZeroState

DEVICE, HOST = "device", "pinned_host"
#: Of each unit of a group its arrays.
GroupState = list[list[jax.Array]]


def in_memory(sharding: Sharding, kind: str) -> Sharding:
    """The same places in another kind of memory."""
    return sharding.with_memory_kind(kind)


def check_host_memory(device: jax.Device, key: str) -> None:
    """Refuse a device that cannot name its host's memory, in which state waits or passes.

    Args:
        key: The field of a plan that asks for it.

    Raises:
        PlanError: With the kinds of memory that it knows.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise PlanError(
            f"{key}: {device.device_kind} knows the memory {', '.join(kinds)} and no "
            f"{HOST}: use 'device'"
        )


class OffloadBuffer(Protocol):
    """The state of a copy that waits elsewhere, by groups of its update."""

    groups: tuple[Group, ...]
    spec: P

    def put(self, g: int, unit: int, k: int, x: jax.Array) -> None:
        """Keep an array of a unit."""

    def get(self, g: int, unit: int, k: int) -> jax.Array:
        """An array of a unit, on the device."""

    def begin(self) -> None:
        """An update begins with the first group."""

    def coming(self, g: int) -> GroupState:
        """What the program of the group before brings to the device by itself; perhaps nothing."""

    def arrived(self, g: int, brought: GroupState) -> GroupState:
        """A group's state on the device, given what the program before brought."""

    def going(self, g: int, state: GroupState) -> GroupState:
        """Take a group's new state back; what is returned is taken by the next group's program."""

    def gone(self, g: int, state: GroupState) -> None:
        """What that program took."""

    def end(self) -> None:
        """The update is done."""

    def close(self) -> None:
        """Let go of everything."""


class HostBuffer(OffloadBuffer):
    """State in pinned memory of the host: a group's program brings the next, takes the last."""

    def __init__(self, replica: Replica, groups: UpdateGroups):
        self.groups, self.spec = groups.groups, groups.spec
        self._device = in_memory(replica.sharding(groups.spec), DEVICE)
        self._host = in_memory(self._device, HOST)
        self._state: list[list[list[Any]]] = [
            [[None] * len(unit.leaves) for unit in group] for group in self.groups
        ]

    def put(self, g: int, unit: int, k: int, x: jax.Array) -> None:
        """See `OffloadBuffer`."""
        self._state[g][unit][k] = jax.device_put(x, self._host)

    def get(self, g: int, unit: int, k: int) -> jax.Array:
        """See `OffloadBuffer`."""
        return jax.device_put(self._state[g][unit][k], self._device)

    def begin(self) -> None:
        """See `OffloadBuffer`."""

    def coming(self, g: int) -> GroupState:
        """See `OffloadBuffer`."""
        return self._state[g] if g < len(self.groups) else []

    def arrived(self, g: int, brought: GroupState) -> GroupState:
        """See `OffloadBuffer`."""
        return brought if g else jax.device_put(self._state[0], self._device)

    def going(self, g: int, state: GroupState) -> GroupState:
        """See `OffloadBuffer`."""
        if g + 1 < len(self.groups):
            return state
        self._state[g] = jax.device_put(state, self._host)
        return []

    def gone(self, g: int, state: GroupState) -> None:
        """See `OffloadBuffer`."""
        if state:
            # Programs wait in a queue with their arguments: no more than some groups may be there.
            jax.block_until_ready(state)
            self._state[g] = state

    def end(self) -> None:
        """See `OffloadBuffer`."""

    def close(self) -> None:
        """See `OffloadBuffer`."""
        self._state = []


class OffloadedLeaf:
    """A leaf of the optimizer's state that waits elsewhere.

    Args:
        shape: As the copy has it.
        places: Of its parts there, in order: group, unit and number among the unit's arrays.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        shelf: OffloadBuffer,
        replica: Replica,
        places: Sequence[tuple[int, int, int]],
    ):
        self.shape, self.dtype, self.shelf = tuple(shape), jnp.dtype(dtype), shelf
        self._replica, self._places = replica, tuple(places)

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def put(self, x: jax.Array) -> None:
        """Keep other values of it."""
        if len(self._places) == 1:
            self.shelf.put(*self._places[0], x)
            return
        for g, u, k in self._places:
            unit = self.shelf.groups[g][u]
            cut = functools.partial(_slice_of, start=unit.start, stop=unit.stop)
            self.shelf.put(g, u, k, self._each(cut, [x]))

    def get(self) -> jax.Array:
        """It, whole on the device."""
        parts = [self.shelf.get(*place) for place in self._places]
        whole = parts[0] if len(parts) == 1 else self._each(_joined, parts)
        return whole.reshape(self.shape)

    def _each(self, run: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
        """A function of flat arrays, of what each device of the copy has of them."""
        if not self._replica.axes:
            return run(*arrays)
        spec = self.shelf.spec
        mapped = jax.shard_map(
            run,
            mesh=self._replica.mesh,
            in_specs=(spec,) * len(arrays),
            out_specs=spec,
            check_vma=False,
        )
        found: jax.Array = jax.jit(mapped)(*arrays)
        return found


def _slice_of(x: jax.Array, start: int, stop: int | None) -> jax.Array:
    return x.reshape(-1)[start:stop]


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


def away_leaves(
    shelf: OffloadBuffer, replica: Replica, state: Sequence[Any]
) -> dict[int, OffloadedLeaf]:
    """The leaves that a shelf holds, by their places in the optimizer's state.

    Args:
        state: Shapes of the leaves as the copy has them.
    """
    places: dict[int, list[tuple[int, int, int]]] = {}
    for g, group in enumerate(shelf.groups):
        for u, unit in enumerate(group):
            for n, k in enumerate(unit.leaves):
                places.setdefault(k, []).append((g, u, n))
    return {
        k: OffloadedLeaf(state[k].shape, state[k].dtype, shelf, replica, own)
        for k, own in places.items()
    }


def on_device(x: Any) -> jax.Array:
    """An array of a copy, wherever it waits."""
    if isinstance(x, OffloadedLeaf):
        return x.get()
    return jax.device_put(x, in_memory(x.sharding, DEVICE)) if is_on_host(x) else x


def is_on_host(x: Any) -> bool:
    """Whether an array of a copy waits in pinned memory of the host."""
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST


def on_host(x: jax.Array) -> jax.Array:
    """An array of a copy in pinned memory of the host; the copy is under way."""
    return x if is_on_host(x) else jax.device_put(x, in_memory(x.sharding, HOST))


MakeShelf = Callable[[Replica, UpdateGroups], OffloadBuffer]


class OffloadedArrays:
    """What of the local copies' `ReplicaArrays.leaves` waits elsewhere.

    Args:
        own: Where what each copy has a part of is; None: all have everything, and nothing waits.
        num_params: The first leaves, the parameters.
        state: Places of the leaves of the optimizer's state, the last ones.
        make_shelf: Makes what holds the optimizer's state of a copy; None: devices do.
        params_on_host: Whether the own part of parameters that each copy has waits on the host.
    """

    def __init__(
        self,
        own: ZeroState | None,
        local: Sequence[Replica],
        num_params: int,
        state: range,
        make_shelf: MakeShelf | None,
        params_on_host: bool,
    ):
        self._own, self._num_params, self._state = own, num_params, state
        self._params_on_host = params_on_host
        if params_on_host:
            check_host_memory(local[0].devices[0], "placement.parameters")
        self.shelves: list[OffloadBuffer] = []
        #: Of each local copy the leaves of the optimizer's state that are on its shelf.
        self._away: list[dict[int, OffloadedLeaf]] = [{} for _ in local]
        if make_shelf is not None and own is not None:
            for i, replica in enumerate(local):
                leaves = [own.like(k, replica.index) for k in state]
                units = units_of(own.own, own.own.member(replica.index), leaves)
                shelf = make_shelf(replica, streamed(own.own, units))
                self.shelves.append(shelf)
                self._away[i] = away_leaves(shelf, replica, leaves)

    def waits(self, k: int) -> bool:
        """Whether copies have a leaf elsewhere than on the device."""
        if self._own is None or self._own.is_common[k]:
            return False
        is_state = k in self._state and bool(self.shelves)
        return is_state or (k < self._num_params and self._params_on_host)

    def put(self, i: int, k: int, x: jax.Array) -> Any:
        """What a local copy has of a leaf, where it waits.

        Args:
            i: Number of the local copy.
            x: What it has, perhaps where it waits already.
        """
        if k < self._num_params:
            return on_host(x) if self.waits(k) else x
        away = self._away[i].get(k - self._state.start)
        if away is None:
            return x
        away.put(x)
        return away

    def close(self) -> None:
        """Let go of what is not on devices."""
        for shelf in self.shelves:
            shelf.close()


#: Of a value of a microbatch its copy, as long as anybody needs it.
Known = MutableMapping[int, jax.Array]


class Stash:
    """Copies of one device to and from its host.

    Args:
        replica: The copy of the model.

    Raises:
        PlanError: If its device cannot name its host's memory.
    """

    def __init__(self, replica: Replica):
        check_host_memory(replica.devices[0], "placement.stash")
        #: In each direction one of the arrays that were asked for last.
        self._latest: dict[bool, jax.Array] = {}

    def offload(
        self, values: Sequence[int | None], arrays: Sequence[jax.Array], known: Known
    ) -> list[jax.Array]:
        """Copies in host memory.

        Args:
            values: Numbers of the arrays in the graph, None for what has none.
            arrays: Of one microbatch.
            known: Of its values what is in host memory, which is not copied again.
        """
        return self._copied(values, arrays, known, to_host=True)

    def fetch(
        self, values: Sequence[int | None], arrays: Sequence[jax.Array], known: Known
    ) -> list[jax.Array]:
        """Copies on the device; see `offload`."""
        return self._copied(values, arrays, known, to_host=False)

    def _copied(
        self,
        values: Sequence[int | None],
        arrays: Sequence[jax.Array],
        known: Known,
        *,
        to_host: bool,
    ) -> list[jax.Array]:
        found: list[Any] = [None if v is None else known.get(v) for v in values]
        new = [k for k, x in enumerate(found) if x is None]
        jax.block_until_ready(self._latest.pop(to_host, None))
        kind, moved = HOST if to_host else DEVICE, [arrays[k] for k in new]
        made = jax.device_put(moved, [in_memory(x.sharding, kind) for x in moved])
        for k, x in zip(new, made, strict=True):
            found[k] = x
        for v, x in zip(values, found, strict=True):
            if v is not None:
                known[v] = x
        if made:  # copies in one direction end in order, and a small array holds little
            self._latest[to_host] = min(reversed(made), key=lambda x: x.nbytes)
        return found

    def wait(self) -> None:
        """Until nothing is under way."""
        jax.block_until_ready(list(self._latest.values()))
        self._latest = {}


def nothing_known() -> Known:
    """Of a microbatch that begins."""
    return weakref.WeakValueDictionary()
