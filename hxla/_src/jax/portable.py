"""A program taken over by other devices of its kind, without compiling or tracing it again.

jax compiles a program for the devices that it names. What XLA made can be serialized, and loaded
for others that are alike, which takes a thirtieth of the time: jax's persistent cache does so for
GPUs of several processes. `jax.experimental.serialize_executable` insists on the devices of the
compilation, so the device assignment and the shardings are replaced here. What cannot be
serialized, as what a CPU has from jax's persistent cache, is compiled from the same text, which
says nothing of devices.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.compilation_cache import is_persistent_cache_enabled
from jax._src.compiler import get_compile_options
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.named_sharding import UnspecifiedValue
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

#: What of a program jax keeps for the devices that it was made for, if there is any.
_BINDING = ("host_callbacks", "keepalive", "ordered_effects", "mut")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Portable:
    """A compiled program that other devices can take over.

    Attributes:
        serialized: What XLA made of it.
    """

    compiled: Any
    serialized: bytes

    def on(self, devices: Sequence[jax.Device]) -> Any:
        """The same `jax.stages.Compiled` for other devices.

        Args:
            devices: As many as the program's own, of the same kinds in the same order.
        """
        unloaded = self.compiled._executable._unloaded_executable
        others = dict(zip(unloaded.device_list, devices, strict=True))
        assignment = np.array([[device.id for device in devices]])
        device_list = xla_client.DeviceList(tuple(devices))
        client = devices[0].client
        loaded = client.deserialize_executable(
            self.serialized,
            device_list,
            get_compile_options(1, len(devices), assignment, backend=client),
        )
        moved = dataclasses.replace(
            unloaded,
            xla_executable=loaded,
            device_list=device_list,
            input_shardings=_moved(unloaded.input_shardings, others),
            output_shardings=_moved(unloaded.output_shardings, others),
        )
        own = self.compiled._params
        return jax.stages.Compiled(
            moved.load(),
            own.const_args,
            self.compiled.args_info,
            self.compiled.out_tree,
            no_kwargs=own.no_kwargs,
            in_types=own.in_types,
            out_types=own.out_types,
        )


def portable(compiled: Any) -> Portable | None:
    """What other devices need to take over a program; None if it is bound to its own.

    A program is bound if it calls Python, has an order of effects, carries arrays that lie
    somewhere, has shardings of a form that says nothing of devices, or if its backend only
    compiles or cannot serialize it. With jax's persistent cache every program is: what a CPU has
    loaded from there cannot be serialized again, and each device finds its own entry.

    Args:
        compiled: A `jax.stages.Compiled`.
    """
    unloaded = compiled._executable._unloaded_executable
    shardings = (*unloaded.input_shardings, *unloaded.output_shardings)
    is_bound = (
        any(getattr(unloaded, name) for name in _BINDING)
        or compiled._params.const_args
        or not isinstance(unloaded.xla_executable, xla_client.LoadedExecutable)
        or is_persistent_cache_enabled()
        or not all(isinstance(s, NamedSharding | SingleDeviceSharding) for s in shardings)
    )
    if is_bound:
        return None
    try:
        serialized = unloaded.xla_executable.serialize()
    except jax.errors.JaxRuntimeError:
        return None
    return Portable(compiled=compiled, serialized=serialized)


def lowered_for(lowered: Any, devices: Sequence[jax.Device]) -> Any | None:
    """A program before compilation, for other devices; None if it is bound to its own.

    Args:
        lowered: A `jax.stages.Lowered`.
        devices: As many as the program's own, of the same kinds in the same order.
    """
    own = lowered._lowering
    args = own.compile_args
    names = "in_shardings", "out_shardings", "intermediate_shardings"
    shardings = [sharding for name in names for sharding in args[name] or ()]
    known = NamedSharding | SingleDeviceSharding | GSPMDSharding | UnspecifiedValue
    is_bound = (
        any(args[name] for name in _BINDING)
        or own.const_args
        or own._device_list is None
        or not all(isinstance(s, known) for s in shardings)
    )
    if is_bound:
        return None
    others = dict(zip(own._device_list, devices, strict=True))
    moved = copy.copy(own)
    moved._device_list, moved._executable = xla_client.DeviceList(tuple(devices)), None
    moved.compile_args = args | {name: _moved(args[name] or (), others) for name in names}
    return jax.stages.Lowered(
        moved,
        lowered.args_info,
        lowered.out_tree,
        no_kwargs=lowered._no_kwargs,
        in_types=lowered._in_types,
        out_types=lowered._out_types,
    )


def _moved(shardings: Sequence[Any], others: Mapping[jax.Device, jax.Device]) -> tuple[Any, ...]:
    meshes: dict[Mesh, Mesh] = {}
    out: list[Any] = []
    for sharding in shardings:
        if isinstance(sharding, UnspecifiedValue):
            out.append(sharding)
            continue
        if isinstance(sharding, SingleDeviceSharding):
            [own] = sharding.device_set
            out.append(SingleDeviceSharding(others[own], memory_kind=sharding.memory_kind))
            continue
        if isinstance(sharding, GSPMDSharding):
            there = [others[device] for device in sharding._devices]
            kind = sharding.memory_kind
            out.append(GSPMDSharding(there, sharding._hlo_sharding, memory_kind=kind))
            continue
        mesh = sharding.mesh
        if mesh not in meshes:
            devices = np.vectorize(others.__getitem__, otypes=[object])(mesh.devices)
            meshes[mesh] = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        out.append(NamedSharding(meshes[mesh], sharding.spec, memory_kind=sharding.memory_kind))
    return tuple(out)
