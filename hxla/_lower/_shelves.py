"""Where state waits that is not on a device: pinned memory of the host, or a file.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 5 (the optimizer's state on CPU memory or NVMe).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from .._core._errors import PlanError
from ._replica import Replica
from ._update_groups import Group, UpdateGroups

DEVICE, HOST = "device", "pinned_host"
#: Of each unit of a group its arrays.
GroupState = list[list[jax.Array]]


def in_memory(sharding: Sharding, kind: str) -> Sharding:
    """The same places in another kind of memory."""
    return sharding.with_memory_kind(kind)


def check_host_memory(device: jax.Device, key: str) -> None:
    """Refuse a device that cannot name its host's memory, in which state waits or passes.

    Args:
        device: Of a copy.
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


class Shelf(Protocol):
    """The state of a copy that waits elsewhere, by groups of its update."""

    groups: tuple[Group, ...]
    lie: P

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


class HostShelf(Shelf):
    """State in pinned memory of the host: each group's program brings the next and takes the last.

    Args:
        replica: The copy.
        groups: Of its update.
    """

    def __init__(self, replica: Replica, groups: UpdateGroups):
        self.groups, self.lie = groups.groups, groups.lie
        self._device = in_memory(replica.sharding(groups.lie), DEVICE)
        self._host = in_memory(self._device, HOST)
        self._state: list[list[list[Any]]] = [
            [[None] * len(unit.leaves) for unit in group] for group in self.groups
        ]

    def put(self, g: int, unit: int, k: int, x: jax.Array) -> None:
        """See `Shelf`."""
        self._state[g][unit][k] = jax.device_put(x, self._host)

    def get(self, g: int, unit: int, k: int) -> jax.Array:
        """See `Shelf`."""
        return jax.device_put(self._state[g][unit][k], self._device)

    def begin(self) -> None:
        """See `Shelf`."""

    def coming(self, g: int) -> GroupState:
        """See `Shelf`."""
        return self._state[g] if g < len(self.groups) else []

    def arrived(self, g: int, brought: GroupState) -> GroupState:
        """See `Shelf`."""
        return brought if g else jax.device_put(self._state[0], self._device)

    def going(self, g: int, state: GroupState) -> GroupState:
        """See `Shelf`."""
        if g + 1 < len(self.groups):
            return state
        self._state[g] = jax.device_put(state, self._host)
        return []

    def gone(self, g: int, state: GroupState) -> None:
        """See `Shelf`."""
        if state:
            # Programs wait in a queue with their arguments: no more than some groups may be there.
            jax.block_until_ready(state)
            self._state[g] = state

    def end(self) -> None:
        """See `Shelf`."""

    def close(self) -> None:
        """See `Shelf`."""
        self._state = []


class Away:
    """A leaf of the optimizer's state that waits elsewhere.

    Args:
        shape: As the copy has it.
        dtype: Of its elements.
        shelf: Where it is.
        replica: The copy.
        places: Of its parts there, in order: group, unit and number among the unit's arrays.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        shelf: Shelf,
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
        lie = self.shelf.lie
        mapped = jax.shard_map(
            run,
            mesh=self._replica.mesh,
            in_specs=(lie,) * len(arrays),
            out_specs=lie,
            check_vma=False,
        )
        found: jax.Array = jax.jit(mapped)(*arrays)
        return found


def _slice_of(x: jax.Array, start: int, stop: int | None) -> jax.Array:
    return x.reshape(-1)[start:stop]


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


def away_leaves(shelf: Shelf, replica: Replica, state: Sequence[Any]) -> dict[int, Away]:
    """The leaves that a shelf holds, by their places in the optimizer's state.

    Args:
        shelf: Of a copy.
        replica: The copy.
        state: Shapes of the leaves as the copy has them.
    """
    places: dict[int, list[tuple[int, int, int]]] = {}
    for g, group in enumerate(shelf.groups):
        for u, unit in enumerate(group):
            for n, k in enumerate(unit.leaves):
                places.setdefault(k, []).append((g, u, n))
    return {
        k: Away(state[k].shape, state[k].dtype, shelf, replica, own) for k, own in places.items()
    }


def on_device(x: Any) -> jax.Array:
    """An array of a copy, wherever it waits."""
    if isinstance(x, Away):
        return x.get()
    return jax.device_put(x, in_memory(x.sharding, DEVICE)) if is_on_host(x) else x


def is_on_host(x: Any) -> bool:
    """Whether an array of a copy waits in pinned memory of the host."""
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST


def on_host(x: jax.Array) -> jax.Array:
    """An array of a copy in pinned memory of the host; the copy is under way."""
    return x if is_on_host(x) else jax.device_put(x, in_memory(x.sharding, HOST))
