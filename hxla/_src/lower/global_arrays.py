"""Arrays of all replicas as one array: over their devices, or over their hosts.

Over the hosts each process has one place, the first device of JAX's CPU backend. The replicas of a
process are added there before processes communicate, and each gets the result back from there. So
the devices that train take part in no collective.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ..core.errors import MeshError, PlanError
from ..core.types import DATA_AXIS, SHARD_GROUP_AXIS, PyTree
from ..plan.layout import names_of, to_spec
from .replica import Replica


class GlobalArrays:
    """Joins arrays of the local replicas to global arrays, and splits them again.

    Attributes:
        axes: Names and sizes of the mesh axes inside a replica.
        places: For each place the numbers of the replicas whose arrays are there.
        num_members: Places of a shard group, along `data`.
        names: The mesh axes over the places: `data`, after `shard_group` if there are several.
        mesh: The mesh of all places and axes.

    Args:
        shard_groups: See `Placement`; 1 over the hosts.

    Raises:
        MeshError: If JAX has no CPU backend, over the hosts.
    """

    def __init__(
        self, replicas: Sequence[Replica], over: Literal["device", "host"], shard_groups: int = 1
    ):
        self.replicas = tuple(replicas)
        self.local = tuple(r for r in replicas if r.is_local)
        self.axes = replicas[0].axes
        self.over_hosts = over == "host"
        if self.over_hosts:
            self.places = _by_process(replicas)
            self.devices = _hosts([replicas[numbers[0]].process for numbers in self.places])
        else:
            self.places = tuple((r.index,) for r in replicas)
            self.devices = tuple(d for r in replicas for d in r.devices)
        self.num_members = len(self.places) // shard_groups
        outer = {SHARD_GROUP_AXIS: shard_groups} if shard_groups > 1 else {}
        outer[DATA_AXIS] = self.num_members
        self.names = tuple(outer)
        names = (*self.names, *(name for name, _ in self.axes))
        sizes = (*outer.values(), *(size for _, size in self.axes))
        devices = np.array(self.devices).reshape(sizes)
        self.mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        here = jax.process_index()
        self._host = next(d for d in self.devices if d.process_index == here)
        #: Whether collectives read arrays in the memory in which they are computed.
        self.is_in_place = self.local[0].devices[0].platform == self._host.platform

    @property
    def is_single(self) -> bool:
        """Whether there is one place of one device, whose arrays are used as they are."""
        return len(self.places) == 1 and not self.axes

    @property
    def num_inner(self) -> int:
        """Devices at each place."""
        return math.prod(size for _, size in self.axes)

    @property
    def inner_spec(self) -> P:
        """PartitionSpec of an array with a shard for each device of a place, in order."""
        return to_spec([[name for name, _ in self.axes]])

    @property
    def own_spec(self) -> P:
        """PartitionSpec of an array with a shard for each device of each place of a group."""
        return to_spec([[DATA_AXIS, *(name for name, _ in self.axes)]])

    @property
    def is_ring(self) -> bool:
        """Whether a reduce-scatter is a ring of permutes.

        XLA's over Gloo was seen to add data before it arrived, between processes on a slow link.
        """
        return self.devices[0].platform == "cpu"

    def sharding(self, spec: P) -> Sharding:
        """The sharding of a PartitionSpec over the places and axes."""
        if self.is_single:
            return SingleDeviceSharding(self._host)
        return NamedSharding(self.mesh, spec)

    def stacked(self, spec: P) -> P:
        """PartitionSpec of the arrays of all places, concatenated in the first dimension.

        Args:
            spec: PartitionSpec of each array over the axes.
        """
        return P((*self.names, *names_of(spec[0] if len(spec) else None)), *spec[1:])

    def lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Elements at each place of a group, from the elements of each of its replicas."""
        return tuple(sum(lengths[i] for i in place) for place in self.places[: self.num_members])

    def check_in_order(self) -> None:
        """Refuse places whose replicas are not consecutive, for a place has one chunk of them all.

        Raises:
            PlanError: If there are any.
        """
        if [i for place in self.places for i in place] != [*range(len(self.replicas))]:
            raise PlanError(
                "replicas: with sums.over='host' and placement.zero the replicas of a process must "
                "be consecutive: put the devices of each process together"
            )

    # -- to one array ----------------------------------------------------------------------------

    def stacking(
        self,
        specs: Any,
        per_replica: Sequence[PyTree],
        join: Callable[[Any, Any], Any] = operator.add,
    ) -> Callable[[], PyTree]:
        """A function with the result of `stack`; transfers from an accelerator begin now."""
        if self.is_in_place:
            stacked = self.stack(specs, per_replica, join)
            return lambda: stacked
        for x in jax.tree.leaves(per_replica):
            x.copy_to_host_async()
        return functools.partial(self.stack, specs, per_replica, join)

    def stack(
        self,
        specs: Any,
        per_replica: Sequence[PyTree],
        join: Callable[[Any, Any], Any] = operator.add,
    ) -> PyTree:
        """One tree for all places, whose arrays are concatenated in the first dimension.

        Args:
            specs: PartitionSpec of each leaf over the axes.
            per_replica: For each local replica its tree, arrays at least 1-D.
            join: Combines the arrays of two replicas at one place.
        """
        if self.is_single and not self.over_hosts:
            return per_replica[0]
        leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        flat = [jax.tree.flatten(tree) for tree in per_replica]
        stacked = []
        for i, spec in enumerate(leaves):
            arrays = [tree_leaves[i] for tree_leaves, _ in flat]
            if self.over_hosts:
                arrays = [functools.reduce(join, map(self._on_host, arrays))]
            stacked.append(self._global_array(arrays, self.stacked(spec)))
        return jax.tree.unflatten(flat[0][1], stacked)

    def join(self, pieces: Sequence[jax.Array], lengths: Sequence[int]) -> jax.Array:
        """One array of the local replicas' flat pieces, each place padded to the longest.

        Args:
            pieces: Of each the first `lengths[replica]` elements count.
            lengths: Elements of each replica of a group, the same in all groups; elements of each
                device, where replicas have several.
        """
        longest = max(self.lengths(lengths))
        if self.axes:
            pairs = zip(self.local, pieces, strict=True)
            return self._global_array(
                [self._resized(r, x, longest) for r, x in pairs], self.own_spec
            )
        if not self.over_hosts:
            return self._global_array([widened(x, longest) for x in pieces], P(DATA_AXIS))
        on_host = [self._on_host(x) for x in pieces]
        if len(on_host) > 1:
            sizes = [lengths[r.index] for r in self.local]
            on_host = [
                jnp.concatenate([widened(x, n) for x, n in zip(on_host, sizes, strict=True)])
            ]
        return self._global_array([widened(on_host[0], longest)], P(DATA_AXIS))

    def over_all(self, per_replica: Sequence[jax.Array], spec: P) -> jax.Array:
        """A replicated array as one global array; moves data only to a host."""
        arrays = [self._on_host(per_replica[0])] if self.over_hosts else per_replica
        if self.is_single:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(
            arrays[0].shape,
            NamedSharding(self.mesh, spec),
            [s.data for x in arrays for s in x.addressable_shards],
        )

    def _global_array(self, arrays: Sequence[jax.Array], spec: P) -> jax.Array:
        if self.is_single:
            return arrays[0]
        shape = arrays[0].shape
        num = len(self.places) if self.names[0] in names_of(spec[0]) else self.num_members
        return jax.make_array_from_single_device_arrays(
            (num * shape[0], *shape[1:]),
            NamedSharding(self.mesh, spec),
            [s.data for x in arrays for s in x.addressable_shards],
        )

    def _on_host(self, x: jax.Array) -> jax.Array:
        return jax.device_put(x if self.is_in_place else np.asarray(x), self._host)

    def _resized(self, replica: Replica, x: jax.Array, size: int) -> jax.Array:
        """A flat piece of each device of a replica, cut or padded with zeros to a size."""
        if x.shape == (size * self.num_inner,):
            return x
        return _widened_each(replica, self.inner_spec, size)(x)  # type: ignore[no-any-return]

    # -- and back --------------------------------------------------------------------------------

    def local_parts(
        self, x: jax.Array, spec: P, shape: tuple[int, ...] | None = None
    ) -> list[jax.Array]:
        """A replicated array, or a place's shard of one, on each local replica.

        Moves data only from a host.

        Args:
            spec: PartitionSpec of the array, or of a replica's shard, over the axes in a replica.
            shape: Shape on each replica of several devices; None: that of the whole array.
        """
        if self.over_hosts:
            [shard] = x.addressable_shards
            return [jax.device_put(shard.data, r.devices[0]) for r in self.local]
        if self.is_single:
            return [x]
        shards = {s.device: s.data for s in x.addressable_shards}
        if not self.axes:
            return [shards[r.devices[0]] for r in self.local]
        return [
            jax.make_array_from_single_device_arrays(
                shape or x.shape, r.sharding(spec), [shards[d] for d in r.devices if d in shards]
            )
            for r in self.local
        ]

    def part(self, x: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
        """The inverse of `join`: the piece of each local replica.

        It is padded to the longest, but on a replica of several devices it is not.

        Args:
            lengths: Elements of each replica of a group.
        """
        if self.axes:
            parts = self.local_parts(x, self.inner_spec, (max(lengths) * self.num_inner,))
            sizes = [max(lengths[r.index % len(lengths)], 1) for r in self.local]
            return list(map(self._resized, self.local, parts, sizes))
        if len(self.places) == len(self.replicas):
            return self.local_parts(x, P(DATA_AXIS))
        [shard] = x.addressable_shards
        ends = itertools.accumulate((lengths[r.index] for r in self.local), initial=0)
        return [
            jax.device_put(widened(shard.data[a:b], max(lengths)), r.devices[0])
            for r, (a, b) in zip(self.local, itertools.pairwise(ends), strict=True)
        ]


def widened(x: jax.Array, size: int) -> jax.Array:
    """A flattened array, cut or padded with zeros to a size."""
    return x if x.shape == (size,) else _widened(x, size)


@functools.cache
def _widened_each(replica: Replica, spec: P, size: int) -> Any:
    """`widened` on each device of a replica."""
    return jax.jit(
        jax.shard_map(
            functools.partial(_widened, size=size),
            mesh=replica.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


@functools.partial(jax.jit, static_argnames="size")
def _widened(x: jax.Array, size: int) -> jax.Array:
    flat = x.reshape(-1)[:size]
    return jnp.pad(flat, (0, size - flat.size))


def _by_process(replicas: Sequence[Replica]) -> tuple[tuple[int, ...], ...]:
    numbers: dict[int, tuple[int, ...]] = {}
    for r in replicas:
        numbers[r.process] = (*numbers.get(r.process, ()), r.index)
    return tuple(numbers.values())


def _hosts(processes: Sequence[int]) -> tuple[jax.Device, ...]:
    """The first device of the CPU backend of each process."""
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise MeshError(
            f"sums over the host need JAX's CPU backend: {error}\nlet JAX_PLATFORMS name `cpu`, "
            "too, or set communication.over to 'device'"
        ) from error
    firsts = {d.process_index: d for d in sorted(devices, key=lambda d: -d.id)}
    return tuple(firsts[process] for process in processes)


_MESSAGE_BYTES = 1 << 24


class HostSums:
    """Sums of host arrays over all processes."""

    def __init__(self, devices: Sequence[jax.Device], replicas: Sequence[Replica]):
        self._devices, self._replicas = tuple(devices), tuple(replicas)
        self._mesh = Mesh(np.array(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))
        self._sum = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.psum(x, DATA_AXIS),
                mesh=self._mesh,
                in_specs=P(DATA_AXIS),
                out_specs=P(),
                check_vma=False,
            )
        )

    def exchange(self, rows: np.ndarray) -> np.ndarray:
        """Sum a host array over all processes, bit for bit where the others hold zeros.

        Args:
            rows: Any shape, any 32-bit dtype.

        Returns:
            The sum of the bit patterns, of the same dtype and shape.
        """
        if len(self._devices) == 1:
            return rows
        bits = np.ascontiguousarray(rows).view(np.int32).reshape(-1)
        local_devices = [d for d in self._devices if d.process_index == jax.process_index()]
        shards = [
            jax.device_put(np.zeros_like(bits) if i else bits, d)
            for i, d in enumerate(local_devices)
        ]
        stacked = jax.make_array_from_single_device_arrays(
            (len(self._devices) * bits.size,), NamedSharding(self._mesh, P(DATA_AXIS)), shards
        )
        total = self._sum(stacked).addressable_shards[0].data
        return np.asarray(total).view(rows.dtype).reshape(rows.shape)

    def exchange_bits(self, host: np.ndarray) -> np.ndarray:
        """`exchange` in place for any dtype and size, in messages of bounded size."""
        if jax.process_count() == 1 or not host.size:
            return host
        data = host.reshape(-1).view(np.uint8)
        size = min(_MESSAGE_BYTES, -(-data.size // 4) * 4)
        for start in range(0, data.size, size):
            piece = data[start : start + size]
            message = np.zeros(size, np.uint8)  # one size, so one program
            message[: piece.size] = piece
            piece[:] = self.exchange(message.view(np.int32)).view(np.uint8)[: piece.size]
        return host

    def whole(self, x: Any) -> np.ndarray:
        """An array of the first local replica, whole in host memory; all processes call this.

        Args:
            x: The array on that replica, or over all replicas.
        """
        is_over_all = isinstance(x, jax.Array) and not x.is_fully_addressable
        if not is_over_all and not any(r.spans_processes for r in self._replicas):
            return np.array(x)
        return self.of_first(x)

    def of_first(self, x: Any) -> np.ndarray:
        """An array of the first replica of all, whole in host memory; all processes call this.

        Args:
            x: The array on the first local replica, or over all replicas.
        """
        host = np.zeros(x.shape, x.dtype)
        if self._replicas[0].is_local or x.sharding.device_set == set(self._devices):
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    host[shard.index] = np.asarray(shard.data)
        return self.exchange_bits(host)


def stat_rows(
    per_replica: Sequence[np.ndarray], replicas: Sequence[Replica], num: int
) -> list[jax.Array]:
    """int32[D, N] on each local replica: the bits of its float32 statistics in its row, else 0."""
    rows = []
    for stats, replica in zip(per_replica, replicas, strict=True):
        bits_DN = np.zeros((num, stats.size), np.int32)
        bits_DN[replica.index] = stats.view(np.int32)
        rows.append(replica.put(bits_DN))
    return rows
