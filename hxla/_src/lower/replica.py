"""A replica: its devices, the arrays on them between steps, and how those are sharded."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..graph.graph import bytes_of
from ..jax.devices import is_here, process_of
from .padding import StatePadding


def device_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of a device's shard of an array, by its sharding."""
    assert x.sharding is not None
    return bytes_of(x.sharding.shard_shape(x.shape), x.dtype)


@dataclasses.dataclass(frozen=True)
class Replica:
    """The devices of one replica: a single one, or several over which the model is sharded.

    Attributes:
        index: The replica's place in `counts`.
        devices: Devices in the order of `axes`, the last axis fastest.
        axes: Names and sizes of the mesh axes inside the replica; empty for a single device.
    """

    index: int
    devices: tuple[jax.Device, ...]
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.devices) == math.prod(size for _, size in self.axes)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The mesh of the replica; without axes for a single device."""
        names = tuple(name for name, _ in self.axes)
        shape = tuple(size for _, size in self.axes)
        devices = np.array(self.devices).reshape(shape)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def rows(self) -> tuple[tuple[jax.Device, ...], ...]:
        """Devices at each place of the first axis, such as those of each stage of a pipeline."""
        num = len(self.devices) // (self.axes[0][1] if self.axes else 1)
        return tuple(self.devices[i : i + num] for i in range(0, len(self.devices), num))

    @property
    def process(self) -> int:
        """Number of the process of the first device."""
        return process_of(self.devices[0])

    @property
    def is_local(self) -> bool:
        """Whether this process has a device of the replica."""
        return any(map(is_here, self.devices))

    @property
    def spans_processes(self) -> bool:
        """Whether the devices are in several processes."""
        return len({process_of(d) for d in self.devices}) > 1

    @property
    def is_led_here(self) -> bool:
        """Whether this process has the first device, and so reports for the replica."""
        return self.process == jax.process_index()

    @property
    def only_place(self) -> int | None:
        """The place of the only device in this process, if others are in other processes; or None.

        None for TPUs, too, which need one program in all processes.
        """
        places = [k for k, d in enumerate(self.devices) if is_here(d)]
        is_alone = len(places) == 1 and self.spans_processes
        return places[0] if is_alone and self.devices[0].platform != "tpu" else None

    def sharding(self, spec: P) -> Sharding:
        """The sharding of a PartitionSpec over `axes`."""
        if not self.axes:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def like(self, x: Any, spec: P | None = None) -> jax.ShapeDtypeStruct:
        """The shape of an array with its sharding on the replica; replicated without a spec."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(spec or P()))

    def put(self, x: Any, spec: P | None = None) -> jax.Array:
        """A host array on the replica's devices; replicated without a spec."""
        if not self.axes:
            return jax.device_put(x, self.devices[0])
        sharding = NamedSharding(self.mesh, spec or P())
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def put_tree(self, tree: PyTree, specs: list[P] | None = None) -> PyTree:
        """`put` for every leaf; `specs` in the order of the leaves."""
        if not self.axes:
            return jax.device_put(tree, self.devices[0])
        leaves, treedef = jax.tree.flatten(tree)
        each = specs or [P()] * len(leaves)
        placed = [self.put(x, s) for x, s in zip(leaves, each, strict=True)]
        return jax.tree.unflatten(treedef, placed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpecs:
    """PartitionSpecs of a state over the devices of a replica.

    Attributes:
        opt_state: Tree like the optimizer's state.
    """

    params: list[P]
    aux: list[P]
    opt_state: PyTree
    padding: StatePadding

    def leaves(self) -> list[P]:
        """PartitionSpecs in the order of `ReplicaArrays.leaves`."""
        opt_state = jax.tree.leaves(self.opt_state, is_leaf=lambda s: isinstance(s, P))
        return [*self.params, *self.aux, *opt_state]


@dataclasses.dataclass
class ReplicaArrays:
    """The arrays of one local replica; the next step replaces them."""

    params: list[jax.Array]
    aux: list[jax.Array]
    opt_state: PyTree

    def leaves(self) -> list[jax.Array]:
        """All arrays: parameters, other variables, optimizer state."""
        return [*self.params, *self.aux, *jax.tree.leaves(self.opt_state)]
