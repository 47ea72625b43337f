"""Programs loaded for other devices of the same kind, without compiling or tracing them again.

jax compiles a program for particular devices. The executable can be serialized and loaded for
equal devices in a thirtieth of the time: jax's persistent cache does so for GPUs of several
processes. `jax.experimental.serialize_executable` insists on the devices of the compilation, so the
device assignment and the shardings are replaced here. An executable that cannot be serialized, such
as a CPU's from jax's persistent cache, is compiled from the same text, which names no devices.

XLA's compilations are counted through jax's monitoring events.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax._src.compilation_cache import is_persistent_cache_enabled
from jax._src.compiler import get_compile_options
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax._src.named_sharding import UnspecifiedValue
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

# How object files begin, on Linux and on macOS.
_OBJECT_FILES = b"\x7fELF", b"\xcf\xfa\xed\xfe"
#: Fields of a program that bind it to its devices, unless they are empty.
_BINDING = ("host_callbacks", "keepalive", "ordered_effects", "mut")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Portable:
    """A compiled program that can be loaded for other devices."""

    compiled: Any
    serialized: bytes

    def on(self, devices: Sequence[jax.Device]) -> Any:
        """The same `jax.stages.Compiled` for other devices.

        Args:
            devices: Of the same number, kinds and order as the program's devices.
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
            input_shardings=_with_devices(unloaded.input_shardings, others),
            output_shardings=_with_devices(unloaded.output_shardings, others),
        )
        params = self.compiled._params
        return jax.stages.Compiled(
            moved.load(),
            params.const_args,
            self.compiled.args_info,
            self.compiled.out_tree,
            no_kwargs=params.no_kwargs,
            in_types=params.in_types,
            out_types=params.out_types,
        )


def portable(compiled: Any) -> Portable | None:
    """A program in a form that other devices can load; None if it is bound to its devices.

    A CPU's program from jax's persistent cache is serialized without its machine code. It would
    load, and fail when it runs. It may outlive the cache, in jax's caches in memory. Programs that
    need no machine code are taken for such ones; to compile them again costs little.

    A program is bound if it calls Python, has ordered effects, constant arrays on devices or
    shardings without devices. So is one whose backend only compiles or cannot serialize it. With
    jax's persistent cache every program is bound: a CPU cannot serialize an executable from the
    cache again, and each device has an entry there.

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
    on_cpu = unloaded.device_list[0].platform == "cpu"
    if on_cpu and not any(start in serialized for start in _OBJECT_FILES):
        return None
    return Portable(compiled=compiled, serialized=serialized)


def lowered_for(lowered: Any, devices: Sequence[jax.Device]) -> Any | None:
    """A lowered program for other devices; None if it is bound to its devices.

    Args:
        lowered: A `jax.stages.Lowered`.
        devices: Of the same number, kinds and order as the program's devices.
    """
    lowering = lowered._lowering
    args = lowering.compile_args
    names = "in_shardings", "out_shardings", "intermediate_shardings"
    shardings = [sharding for name in names for sharding in args[name] or ()]
    known = NamedSharding | SingleDeviceSharding | GSPMDSharding | UnspecifiedValue
    is_bound = (
        any(args[name] for name in _BINDING)
        or lowering.const_args
        or lowering._device_list is None
        or not all(isinstance(s, known) for s in shardings)
    )
    if is_bound:
        return None
    others = dict(zip(lowering._device_list, devices, strict=True))
    moved = copy.copy(lowering)
    moved._device_list, moved._executable = xla_client.DeviceList(tuple(devices)), None
    moved.compile_args = args | {name: _with_devices(args[name] or (), others) for name in names}
    return jax.stages.Lowered(
        moved,
        lowered.args_info,
        lowered.out_tree,
        no_kwargs=lowered._no_kwargs,
        in_types=lowered._in_types,
        out_types=lowered._out_types,
    )


def _with_devices(
    shardings: Sequence[Any], others: Mapping[jax.Device, jax.Device]
) -> tuple[Any, ...]:
    """Shardings with each device replaced by another."""
    meshes: dict[Mesh, Mesh] = {}
    out: list[Any] = []
    for sharding in shardings:
        if isinstance(sharding, UnspecifiedValue):
            out.append(sharding)
            continue
        if isinstance(sharding, SingleDeviceSharding):
            [old] = sharding.device_set
            out.append(SingleDeviceSharding(others[old], memory_kind=sharding.memory_kind))
            continue
        if isinstance(sharding, GSPMDSharding):
            new = [others[device] for device in sharding._devices]
            kind = sharding.memory_kind
            out.append(GSPMDSharding(new, sharding._hlo_sharding, memory_kind=kind))
            continue
        mesh = sharding.mesh
        if mesh not in meshes:
            devices = np.vectorize(others.__getitem__, otypes=[object])(mesh.devices)
            meshes[mesh] = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        out.append(NamedSharding(meshes[mesh], sharding.spec, memory_kind=sharding.memory_kind))
    return tuple(out)


_EVENT = "/jax/core/compile/backend_compile_duration"
_seconds: list[float] = []


def _listen(event: str, duration_secs: float, **_kwargs: str | int) -> None:
    if event == _EVENT:
        _seconds.append(duration_secs)


# jax has no public way to remove a listener, so it stays for the life of the process.
jax.monitoring.register_event_duration_secs_listener(_listen)


def num_compilations() -> int:
    """Compilations of this process since hxla was imported."""
    return len(_seconds)
