"""The devices of a run, by rank, and their cluster."""

import collections
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from ..core.errors import MeshError
from ..jax.devices import is_here, is_local, own_devices, process_of
from . import nvml as _nvml
from .cluster import Cluster, Device, Node

Devices = tuple[jax.Device | None, ...]  # by rank in the cluster; None: not started


def resolve(
    mesh: Mesh | None,
    cluster: Cluster | None,
    visible: Sequence[int] | None = None,
    started: Sequence[int] | None = None,
    *,
    runs: bool = True,
) -> Devices:
    """All devices of a run, those of other processes included, process by process.

    Args:
        mesh: The user's mesh; None: every device.
        cluster: The described cluster on which the job was started, or None.
        visible: Numbers of the devices to use; None: all.
        started: Ranks of the described devices for which a process was started; None: all.
        runs: Whether these processes train. A plan alone may have unlike accelerators in a process.

    Raises:
        MeshError: If there is no device, one process has unlike accelerators, or the cluster
            describes another number of devices, or accelerators where JAX has the CPU.
    """
    if mesh is not None:
        devices: list[Any] = list(mesh.devices.flat)
    else:
        try:
            devices = jax.devices() if not is_local() else _one_of_each_process()
        except (RuntimeError, AssertionError) as error:  # jax asserts that some platform is left
            raise MeshError(
                f"JAX found no devices: {error}\nfor NVIDIA GPUs install what hxla devices says, "
                "or set JAX_PLATFORMS=cpu to train on the CPU"
            ) from error
    if not devices:
        raise MeshError("the mesh has no devices: pass mesh=None to use every device there is")
    devices.sort(key=lambda d: (process_of(d), d.id))
    if visible is not None:
        beyond = [i for i in visible if i >= len(devices)]
        if beyond or len(set(visible)) < len(visible) or mesh is not None:
            why = (
                "cannot be combined with a mesh"
                if mesh is not None
                else (
                    f"names {beyond or 'a device twice'}, there are devices 0 to {len(devices) - 1}"
                )
            )
            raise MeshError(f"cluster.visible_devices={list(visible)} {why}")
        devices = [devices[i] for i in sorted(visible)]
    missing = set(range(jax.process_count())) - set(map(process_of, devices))
    if missing:
        raise MeshError(
            f"processes {sorted(missing)} have no device in the mesh: every process of the job "
            "needs one"
        )
    if runs:
        check_one_kind_per_process(
            [(process_of(d), d.id, device_kind(d)) for d in devices if d.platform != "cpu"]
        )
    ranks = range(len(devices)) if started is None else started
    if cluster is not None:
        _check_described(cluster, devices, ranks)
        placed: list[jax.Device | None] = [None] * len(cluster.devices)
        for rank, device in zip(ranks, devices, strict=True):
            placed[rank] = device
        return tuple(placed)
    return tuple(devices)


def _one_of_each_process() -> list[Any]:
    """One device for each process, where JAX clients only see local accelerators.

    CPU devices stand for those of other processes; only their process index is read.
    """
    local = own_devices()
    if len(local) != 1:
        raise MeshError(
            f"process {jax.process_index()} has {len(local)} devices ({local[0].device_kind}), and "
            "in a job of unlike devices each process trains on one: start one process per device, "
            "with hxla run --mesh, or let each see one (CUDA_VISIBLE_DEVICES; for CPUs, no "
            "--xla_force_host_platform_device_count in XLA_FLAGS)"
        )
    firsts = {d.process_index: d for d in reversed(jax.devices("cpu"))}
    return [*(firsts | {jax.process_index(): local[0]}).values()]


def _check_described(cluster: Cluster, devices: Sequence[jax.Device], ranks: Sequence[int]) -> None:
    if (
        len(ranks) != len(devices)
        or max(ranks) >= len(cluster.devices)
        or (isinstance(ranks, range) and len(devices) != len(cluster.devices))
    ):
        raise MeshError(
            f"mesh file {cluster.name!r} describes {len(cluster.devices)} devices, the job has "
            f"{len(devices)}: start it with hxla run --mesh, one process per described device"
        )
    for i, device in zip(ranks, devices, strict=True):
        described = cluster.devices[i]
        if is_local() and not is_here(device):
            continue  # a CPU device stands for it
        # Without a driver JAX falls back on the CPU.
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
        MeshError: With the process, the cards and the remedy.
    """
    by_process = collections.defaultdict(list)
    for process, device, kind in kinds:
        by_process[process].append((device, kind))
    for process, cards in by_process.items():
        if len({kind for _, kind in cards}) > 1:
            names = ", ".join(f"device {device}: {kind}" for device, kind in cards)
            raise MeshError(
                f"process {process} has unlike accelerators ({names}): JAX compiles a program "
                "for one kind only. Start one process per accelerator: hxla run script.py"
            )


def device_kind(device: jax.Device) -> str:
    """The model name of a device, from NVML where possible: jax may repeat the first card's."""
    if device.platform not in ("gpu", "cuda"):
        return device.device_kind
    with _nvml.driver() as nvml:
        index = None if nvml is None else _nvml.index_of(device.local_hardware_id)
        # None on ROCm, and for a card named by UUID.
        return device.device_kind if index is None else _nvml.name_of(nvml, index)


def job_cluster(
    devices: Devices,
    described: Cluster | None,
    gather: Callable[[str, str], tuple[str, ...]],
    used_bytes: Callable[[jax.Device], int],
) -> Cluster:
    """The devices of a run as a cluster: described by the mesh file, or else detected.

    Args:
        devices: By rank.
        described: The mesh file's cluster, or None.
        gather: Name and text to the texts of all processes.
        used_bytes: Of an accelerator's memory, by the user's arrays.

    Returns:
        The same on every process. Memory that the mesh file does not describe is detected, and the
        user's arrays are subtracted.
    """
    local = {
        rank: [
            device_kind(device),
            (device.memory_stats() or {}).get("bytes_limit"),
            platform.node(),
            used_bytes(device) if device.platform != "cpu" else 0,
        ]
        for rank, device in enumerate(devices)
        if device is not None and is_here(device)
    }
    by_rank: dict[str, list[Any]] = {}
    for text in gather("devices", json.dumps(local)):
        by_rank |= json.loads(text)
    facts = [by_rank.get(str(rank), ["", None, "", 0]) for rank in range(len(devices))]
    if described is not None:
        filled = [
            device.model_copy(
                update={"memory_bytes": _free_bytes(device.memory_bytes or memory, used)}
            )
            for device, (_, memory, _, used) in zip(described.devices, facts, strict=True)
        ]
        return described.model_copy(update={"devices": tuple(filled)})
    hosts = list(dict.fromkeys(host for _, _, host, _ in facts))
    return Cluster(
        name="",
        devices=tuple(
            Device(kind=kind, memory_bytes=_free_bytes(memory, used), node=hosts.index(host))
            for kind, memory, host, used in facts
        ),
        nodes=tuple(Node(name=host) for host in hosts),
    )


def _free_bytes(memory: int | None, used: int) -> int | None:
    """The memory without the used bytes, at least 1; None if it is not known."""
    return None if memory is None else max(memory - used, 1)
