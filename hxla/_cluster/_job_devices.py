"""The devices of a run, in the order of `counts`."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .._core._errors import MeshError
from .._lower._replica import Replica
from . import _nvml
from ._cluster import Cluster, Device


def resolve(
    mesh: Mesh | None, cluster: Cluster | None, visible: Sequence[int] | None = None
) -> tuple[jax.Device, ...]:
    """All devices of a run, those of other processes included, process by process.

    Args:
        mesh: The user's own mesh, or None for every device.
        cluster: The described cluster that the job was started on, or None.
        visible: Numbers of the devices to use, or None for all of them.

    Raises:
        MeshError: If there is no device, one process holds unlike accelerators, or the cluster
            describes another number of devices, or accelerators where JAX has the processor.
    """
    if mesh is not None:
        devices: list[Any] = list(mesh.devices.flat)
    else:
        try:
            devices = jax.devices()
        except (RuntimeError, AssertionError) as error:  # jax asserts that some platform is left
            raise MeshError(
                f"JAX found no devices: {error}\ninstall jax[cuda13] for NVIDIA GPUs, or set "
                "JAX_PLATFORMS=cpu to train on the processor"
            ) from error
    if not devices:
        raise MeshError("the mesh has no devices: pass mesh=None to use every device there is")
    devices.sort(key=lambda d: (d.process_index, d.id))
    if visible is not None:
        beyond = [i for i in visible if i >= len(devices)]
        if beyond or len(set(visible)) < len(visible) or mesh is not None:
            why = (
                "does not go with a mesh of your own"
                if mesh is not None
                else (
                    f"names {beyond or 'a device twice'}, there are devices 0 to {len(devices) - 1}"
                )
            )
            raise MeshError(f"cluster.visible_devices={list(visible)} {why}")
        devices = [devices[i] for i in sorted(visible)]
    missing = set(range(jax.process_count())) - {d.process_index for d in devices}
    if missing:
        raise MeshError(
            f"processes {sorted(missing)} have no device in the mesh: every process of the job "
            "needs one"
        )
    check_one_kind_per_process(
        [(d.process_index, d.id, device_kind(d)) for d in devices if d.platform != "cpu"]
    )
    if cluster is not None:
        _check_described(cluster, devices)
    return tuple(devices)


def _check_described(cluster: Cluster, devices: Sequence[jax.Device]) -> None:
    if len(cluster.devices) != len(devices):
        raise MeshError(
            f"mesh file {cluster.name!r} describes {len(cluster.devices)} devices, the job has "
            f"{len(devices)}: start it with hxla run --mesh, one process per described device"
        )
    for i, (described, device) in enumerate(zip(cluster.devices, devices, strict=True)):
        # Without a driver JAX falls back on the processor.
        if (described.kind == "cpu") != (device.platform == "cpu"):
            raise MeshError(
                f"mesh file {cluster.name!r} describes device {i} as {described.kind}, JAX has "
                f"{device.device_kind} here: see `hxla devices`"
            )


def check_one_kind_per_process(kinds: list[tuple[int, int, str]]) -> None:
    """Refuse unlike accelerators in one process: XLA compiles for the first one only.

    Args:
        kinds: Process, device id and model name of each accelerator.

    Raises:
        MeshError: Naming the process, the cards and the way out.
    """
    by_process = collections.defaultdict(list)
    for process, device, kind in kinds:
        by_process[process].append((device, kind))
    for process, cards in by_process.items():
        if len({kind for _, kind in cards}) > 1:
            names = ", ".join(f"device {device}: {kind}" for device, kind in cards)
            raise MeshError(
                f"process {process} holds unlike accelerators ({names}): JAX compiles a program "
                "for one kind only. Start one process per accelerator: hxla run script.py"
            )


def device_kind(device: jax.Device) -> str:
    """The model name of a device; NVML's where there is one, for jax may repeat the first's."""
    if device.platform not in ("gpu", "cuda"):
        return device.device_kind
    with _nvml.driver() as nvml:
        index = None if nvml is None else _nvml.index_of(device.local_hardware_id)
        # ROCm has no such driver, and a card given by UUID no number.
        return device.device_kind if index is None else _nvml.name_of(nvml, index)


def described(devices: Sequence[jax.Device], cluster: Cluster | None) -> dict[jax.Device, Device]:
    """What the mesh file says of each device; nothing if there is none."""
    return dict(zip(devices, cluster.devices, strict=True)) if cluster is not None else {}


def device_label(device: jax.Device, known: Mapping[jax.Device, Device]) -> str:
    """What kind of device it is, as profiles and plans call it."""
    if device in known:
        return known[device].label
    return "cpu" if device.platform == "cpu" else device_kind(device)


def replica_names(
    replicas: Sequence[Replica],
    devices: Sequence[jax.Device],
    known: Mapping[jax.Device, Device],
) -> tuple[str, ...]:
    """Short unique names: the kind and the positions, with the described share of a core."""
    names = []
    position = {device: i for i, device in enumerate(devices)}
    for replica in replicas:
        first = replica.devices[0]
        own = [position[d] for d in replica.devices]
        share = known[first].core_share if first in known else None
        suffix = f"@{share:g}" if share is not None else ""
        consecutive = own == list(range(own[0], own[-1] + 1)) and len(own) > 1
        numbers = f"{own[0]}-{own[-1]}" if consecutive else "+".join(map(str, own))
        names.append(f"{first.platform}{numbers}{suffix}")
    return tuple(names)
