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
from ..graph.operations import bytes_of
from ..jax.devices import is_here, process_of
from .padding import StatePadding


def device_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of an array that a device has of it, as it is said to lie."""
    assert x.sharding is not None
    return bytes_of(x.sharding.shard_shape(x.shape), x.dtype)


@dataclasses.dataclass(frozen=True)
class Replica:
    """One copy of the model: a single device, or several that a `split` cuts it over.

    Attributes:
        index: Its place in `counts`.
        devices: In the order of `axes`, the last one running fastest.
        axes: Names and sizes of the mesh axes inside it; none for a single device.
    """

    index: int
    devices: tuple[jax.Device, ...]
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.devices) == math.prod(size for _, size in self.axes)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Its own mesh; empty axes for a single device."""
        names = tuple(name for name, _ in self.axes)
        shape = tuple(size for _, size in self.axes)
        devices = np.array(self.devices).reshape(shape)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    @property
    def rows(self) -> tuple[tuple[jax.Device, ...], ...]:
        """Devices at each place of the first axis: those of each stage of a pipeline."""
        num = len(self.devices) // (self.axes[0][1] if self.axes else 1)
        return tuple(self.devices[i : i + num] for i in range(0, len(self.devices), num))

    @property
    def process(self) -> int:
        """Number of the process that has its first device."""
        return process_of(self.devices[0])

    @property
    def is_local(self) -> bool:
        """Whether this process has a device of it."""
        return any(map(is_here, self.devices))

    @property
    def spans_processes(self) -> bool:
        """Whether several processes share it."""
        return len({process_of(d) for d in self.devices}) > 1

    @property
    def is_led_here(self) -> bool:
        """Whether this process has its first device, and so speaks for it."""
        return self.process == jax.process_index()

    @property
    def only_place(self) -> int | None:
        """The place of the one device of it that is here, all others elsewhere; None: no such.

        TPUs are none, for they want one program of all processes.
        """
        places = [k for k, d in enumerate(self.devices) if is_here(d)]
        is_alone = len(places) == 1 and self.spans_processes
        return places[0] if is_alone and self.devices[0].platform != "tpu" else None

    def sharding(self, spec: P) -> Sharding:
        """Of an array with this spec over `axes`."""
        if not self.axes:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec)

    def like(self, x: Any, spec: P | None = None) -> jax.ShapeDtypeStruct:
        """The shape of an array as it lies here; whole on every device without a spec."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(spec or P()))

    def put(self, x: Any, spec: P | None = None) -> jax.Array:
        """A host array on this replica, whole on every device if no spec says otherwise."""
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
    """PartitionSpecs of a state over the devices of a copy of the model.

    Attributes:
        opt_state: Tree like the optimizer's state.
    """

    params: list[P]
    aux: list[P]
    opt_state: PyTree
    padding: StatePadding

    def leaves(self) -> list[P]:
        """In the order of `ReplicaArrays.leaves`."""
        opt_state = jax.tree.leaves(self.opt_state, is_leaf=lambda s: isinstance(s, P))
        return [*self.params, *self.aux, *opt_state]


@dataclasses.dataclass
class ReplicaArrays:
    """The arrays of one local copy of the model; the next step replaces them."""

    params: list[jax.Array]
    aux: list[jax.Array]
    opt_state: PyTree

    def leaves(self) -> list[jax.Array]:
        """All of them."""
        return [*self.params, *self.aux, *jax.tree.leaves(self.opt_state)]
