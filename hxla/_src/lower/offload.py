"""Offloaded state and residuals: pinned memory of the host, or a file.

Transfers are asynchronous and run beside programs. Each one that is queued holds memory. So a
transfer starts only when the previous one in the same direction is done.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 5 (the optimizer's state on CPU memory or NVMe).
    Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural
    network design", MICRO 2016, section 3 (offload and prefetch beside computation).
"""

import functools
import math
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from ..core.errors import PlanError
from .replica import Replica
from .state_layout import StateLayout
from .units import Group, UpdateGroups, streamed, units_of

DEVICE, HOST = "device", "pinned_host"
#: The arrays of each unit of a group.
GroupState = list[list[jax.Array]]


def in_memory(sharding: Sharding, kind: str) -> Sharding:
    """The same sharding in another kind of memory."""
    return sharding.with_memory_kind(kind)


def check_host_memory(device: jax.Device, key: str) -> None:
    """Refuse a device without pinned host memory, to which state is offloaded.

    Args:
        key: The field of the plan, for the message.

    Raises:
        PlanError: If the device has no such memory.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise PlanError(
            f"{key}: {device.device_kind} has the memory kinds {', '.join(kinds)} and no "
            f"{HOST}: use 'device'"
        )


class OffloadBuffer(Protocol):
    """A replica's offloaded state, by groups of its update."""

    groups: tuple[Group, ...]
    spec: P

    def put(self, g: int, unit: int, k: int, x: jax.Array) -> None:
        """Store an array of a unit."""

    def get(self, g: int, unit: int, k: int) -> jax.Array:
        """Fetch an array of a unit to the device."""

    def begin(self) -> None:
        """Begin an update with the first group."""

    def coming(self, g: int) -> GroupState:
        """A group's state that the previous group's program is to fetch; perhaps nothing."""

    def arrived(self, g: int, brought: GroupState) -> GroupState:
        """A group's state on the device, perhaps as the previous program fetched it."""

    def going(self, g: int, state: GroupState) -> GroupState:
        """Write back a group's new state; return what the next group's program is to write back."""

    def gone(self, g: int, state: GroupState) -> None:
        """Store the state that a program wrote back."""

    def end(self) -> None:
        """End the update."""

    def close(self) -> None:
        """Free all resources."""


class HostBuffer(OffloadBuffer):
    """Pinned host memory: a group's program fetches the next state and writes back the last."""

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
            # Queued programs hold their arguments: block, so that few groups are in the queue.
            jax.block_until_ready(state)
            self._state[g] = state

    def end(self) -> None:
        """See `OffloadBuffer`."""

    def close(self) -> None:
        """See `OffloadBuffer`."""
        self._state = []


class OffloadedLeaf:
    """An offloaded leaf of the optimizer's state.

    Args:
        shape: Shape of the replica's shard.
        places: Of each slice, in order, its group, unit and number among the unit's arrays.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        buffer: OffloadBuffer,
        replica: Replica,
        places: Sequence[tuple[int, int, int]],
    ):
        self.shape, self.dtype, self.buffer = tuple(shape), jnp.dtype(dtype), buffer
        self._replica, self._places = replica, tuple(places)

    @property
    def nbytes(self) -> int:
        """Bytes of the leaf."""
        return math.prod(self.shape) * self.dtype.itemsize

    def put(self, x: jax.Array) -> None:
        """Store new values."""
        if len(self._places) == 1:
            self.buffer.put(*self._places[0], x)
            return
        for g, u, k in self._places:
            unit = self.buffer.groups[g][u]
            slice_of = functools.partial(_slice_of, start=unit.start, stop=unit.stop)
            self.buffer.put(g, u, k, self._each(slice_of, [x]))

    def get(self) -> jax.Array:
        """The leaf, whole on the device."""
        parts = [self.buffer.get(*place) for place in self._places]
        whole = parts[0] if len(parts) == 1 else self._each(_joined, parts)
        return whole.reshape(self.shape)

    def _each(self, run: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
        """Apply a function of flat arrays on each device of the replica."""
        if not self._replica.axes:
            return run(*arrays)
        spec = self.buffer.spec
        mapped = jax.shard_map(
            run,
            mesh=self._replica.mesh,
            in_specs=(spec,) * len(arrays),
            out_specs=spec,
            check_vma=False,
        )
        result: jax.Array = jax.jit(mapped)(*arrays)
        return result


def _slice_of(x: jax.Array, start: int, stop: int | None) -> jax.Array:
    return x.reshape(-1)[start:stop]


def _joined(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


def offloaded_leaves(
    buffer: OffloadBuffer, replica: Replica, state: Sequence[Any]
) -> dict[int, OffloadedLeaf]:
    """The leaves in a buffer, by their places in the optimizer's state.

    Args:
        state: Shapes of the replica's shards of the leaves.
    """
    places: dict[int, list[tuple[int, int, int]]] = {}
    for g, group in enumerate(buffer.groups):
        for u, unit in enumerate(group):
            for n, k in enumerate(unit.leaves):
                places.setdefault(k, []).append((g, u, n))
    return {
        k: OffloadedLeaf(state[k].shape, state[k].dtype, buffer, replica, slices)
        for k, slices in places.items()
    }


def on_device(x: Any) -> jax.Array:
    """An array on the device, fetched if it is offloaded."""
    if isinstance(x, OffloadedLeaf):
        return x.get()
    return jax.device_put(x, in_memory(x.sharding, DEVICE)) if is_on_host(x) else x


def is_on_host(x: Any) -> bool:
    """Whether an array is in pinned host memory."""
    return isinstance(x, jax.Array) and x.sharding.memory_kind == HOST


def on_host(x: jax.Array) -> jax.Array:
    """An array in pinned host memory; does not wait for the transfer."""
    return x if is_on_host(x) else jax.device_put(x, in_memory(x.sharding, HOST))


MakeBuffer = Callable[[Replica, UpdateGroups], OffloadBuffer]


class OffloadedArrays:
    """The offloaded arrays among the local replicas' `ReplicaArrays.leaves`.

    Args:
        make_buffer: Makes a replica's buffer of optimizer state; None: devices keep it.
        params_on_host: Whether each replica's shard of the parameters is offloaded to the host.
    """

    def __init__(
        self,
        layout: StateLayout,
        make_buffer: MakeBuffer | None,
        params_on_host: bool,
    ):
        self._layout, self._params_on_host = layout, params_on_host
        zero, local = layout.zero, layout.reducer.local
        if params_on_host:
            check_host_memory(local[0].devices[0], "placement.parameters")
        self.buffers: list[OffloadBuffer] = []
        #: The offloaded leaves of the optimizer's state of each local replica.
        self._offloaded: list[dict[int, OffloadedLeaf]] = [{} for _ in local]
        if make_buffer is not None and zero is not None:
            state = range(layout.first_state, len(layout.shapes))
            for i, replica in enumerate(local):
                leaves = [zero.like(k, replica.index) for k in state]
                units = units_of(zero.ownership, zero.ownership.member(replica.index), leaves)
                buffer = make_buffer(replica, streamed(zero.ownership, units))
                self.buffers.append(buffer)
                self._offloaded[i] = offloaded_leaves(buffer, replica, leaves)

    def is_offloaded(self, k: int) -> bool:
        """Whether a leaf is offloaded."""
        if not self._layout.is_sharded(k):
            return False
        is_state = k >= self._layout.first_state and bool(self.buffers)
        return is_state or (k < self._layout.num_params and self._params_on_host)

    def put(self, i: int, k: int, x: jax.Array) -> Any:
        """A local replica's shard of a leaf, offloaded if planned.

        Args:
            i: Number of the local replica.
            x: The shard, on the device or on the host already.
        """
        if k < self._layout.num_params:
            return on_host(x) if self.is_offloaded(k) else x
        leaf = self._offloaded[i].get(k - self._layout.first_state)
        if leaf is None:
            return x
        leaf.put(x)
        return leaf

    def close(self) -> None:
        """Free all buffers."""
        for buffer in self.buffers:
            buffer.close()


#: The transferred array of a value of a microbatch, as long as it is referenced.
Known = MutableMapping[int, jax.Array]


class Stash:
    """Transfers of residuals between a device and its host.

    Raises:
        PlanError: If the device has no pinned host memory.
    """

    def __init__(self, replica: Replica):
        check_host_memory(replica.devices[0], "placement.stash")
        #: An array of the latest transfer of each executor's thread in each direction.
        self._latest: dict[tuple[int, bool], jax.Array] = {}

    def offload(
        self, values: Sequence[int | None], arrays: Sequence[jax.Array], known: Known
    ) -> list[jax.Array]:
        """The arrays in host memory.

        Args:
            values: Numbers of the arrays in the graph; None: not a value of the graph.
            known: Arrays of values that are in host memory already.
        """
        return self._copied(values, arrays, known, to_host=True)

    def fetch(
        self, values: Sequence[int | None], arrays: Sequence[jax.Array], known: Known
    ) -> list[jax.Array]:
        """The arrays on the device; see `offload`."""
        return self._copied(values, arrays, known, to_host=False)

    def _copied(
        self,
        values: Sequence[int | None],
        arrays: Sequence[jax.Array],
        known: Known,
        *,
        to_host: bool,
    ) -> list[jax.Array]:
        result: list[Any] = [None if v is None else known.get(v) for v in values]
        new = [k for k, x in enumerate(result) if x is None]
        way = threading.get_ident(), to_host
        jax.block_until_ready(self._latest.pop(way, None))
        kind, moved = HOST if to_host else DEVICE, [arrays[k] for k in new]
        transferred = jax.device_put(moved, [in_memory(x.sharding, kind) for x in moved])
        for k, x in zip(new, transferred, strict=True):
            result[k] = x
        for v, x in zip(values, result, strict=True):
            if v is not None:
                known[v] = x
        if transferred:
            # Transfers in one direction end in order; a small array holds little memory.
            self._latest[way] = min(reversed(transferred), key=lambda x: x.nbytes)
        return result

    def wait(self) -> None:
        """Block until all transfers are done."""
        latest, self._latest = self._latest, {}
        jax.block_until_ready(list(latest.values()))


def nothing_known() -> Known:
    """No transferred values, for a new microbatch."""
    return weakref.WeakValueDictionary()
