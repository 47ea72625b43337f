"""`hxla devices`: this machine's devices, their measured figures, and a mesh file of them.

Measured are rates of matrix products, copies and links.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from ..core.errors import MeshError
from ..core.timing import median_seconds
from ..jax.devices import multiprocessors
from . import nvml as _nvml
from .cluster import Cluster, Device, Link, Node, Rate
from .kinds import extra_for, installed_cuda, unsupported
from .mesh_file import dump_cluster

_MIN_SECONDS = 0.02  # of one product: far above the noise of clock and dispatch
_LARGEST = 16384  # 1 GiB per float32 operand
_LAUNCHED, _SMALL = 128, 64  # products in a chain, and their size
_MESSAGE_BYTES = (2**12, 2**16, 2**20, 2**24, 2**27)


def matmul_flops_per_second(device: jax.Device, dtype: str) -> float:
    """Rate of square matrix products that take about 20 ms.

    Args:
        dtype: Of operands and result. `tensorfloat32` is float32 in JAX's default precision, which
            NVIDIA cards from Ampere on round to TF32; `float32` is not rounded.
    """
    precision = "default" if dtype == "tensorfloat32" else "highest"
    dtype = dtype.replace("tensor", "")
    product = jax.jit(functools.partial(jnp.matmul, precision=precision))
    size = 256
    while True:
        # Random, since GPUs multiply constants at a higher clock than real data.
        x = jax.device_put(jax.random.normal(jax.random.key(0), (size, size), dtype), device)
        seconds = median_seconds(functools.partial(product, x, x))
        if seconds >= _MIN_SECONDS or size >= _LARGEST:
            return 2 * size**3 / seconds
        # Seconds grow at most cubically: the largest power of two that stays below the minimum.
        more = math.log2(_MIN_SECONDS / seconds) / 3
        size = min(_LARGEST, size * 2 ** max(1, int(more)))


def launch_seconds(device: jax.Device) -> float:
    """Seconds per small kernel in a long sequence, running or launching."""

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_LAUNCHED):
            x = x @ x
        return x

    x = jax.device_put(jnp.eye(_SMALL), device)
    return median_seconds(functools.partial(chain, x)) / _LAUNCHED


def host_bytes_per_second(device: jax.Device, num_bytes: int) -> float | None:
    """Rate of copies to pinned memory of the device's host or back, the slower of the two.

    Returns:
        The rate; None if the backend has no pinned memory.
    """
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        return None
    kinds = ("device", "pinned_host")
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in kinds)
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), here)
    y = jax.device_put(x, there)
    ways = (functools.partial(jax.device_put, x, there), functools.partial(jax.device_put, y, here))
    return x.nbytes / max(map(median_seconds, ways))


def copy_bytes_per_second(device: jax.Device, num_bytes: int) -> float:
    """Rate of a pass over memory, with both its reads and its writes counted."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), device)

    def again() -> jax.Array:
        nonlocal x
        x = increment(x)
        return x

    return 2 * x.nbytes / median_seconds(again)


def link_curve(source: jax.Device, target: jax.Device) -> tuple[tuple[float, float], ...]:
    """(Message bytes, bytes per second) of copies from one device to another, by message size."""
    points = []
    for size in _MESSAGE_BYTES:
        x = jax.device_put(jnp.zeros(size, jnp.uint8), source)
        points.append(
            (float(size), size / median_seconds(functools.partial(jax.device_put, x, target)))
        )
    return tuple(points)


_MAX_COPY_BYTES = 2**28  # beyond any cache
_MEASURED = ("memory_bytes_per_second", "host_bytes_per_second", "launch_seconds")
_SHOWN_LINKS = 28  # of eight devices
_SOURCE = f"hxla devices --measure, jax {jax.__version__}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """The devices of this machine.

    Attributes:
        devices: As a mesh file describes them.
        free_bytes: Of each device's memory, now; None if not known.
        wires: Between devices by their index, as far as the driver reports them.
        handles: JAX's devices in the same order; empty if JAX does not see them.
        curves: By pair of devices, (message bytes, bytes per second); empty if not measured.
    """

    devices: tuple[Device, ...]
    free_bytes: tuple[int | None, ...]
    wires: tuple[_nvml.Wire, ...] = ()
    handles: tuple[jax.Device, ...] = ()
    notes: tuple[str, ...] = ()
    curves: Mapping[tuple[int, int], tuple[tuple[float, float], ...]] = dataclasses.field(
        default_factory=dict
    )


def command(*, measured: bool, write: str | None) -> None:
    """Print the devices; measure them and write a mesh file if asked to.

    Raises:
        MeshError: If the file exists or cannot be written, or JAX has no device to measure.
    """
    path = None if write is None else pathlib.Path(write).expanduser()
    if path is not None and path.exists():
        raise MeshError(f"{path} exists: remove it, or write to another file")
    with _run_process_settings(alone=measured) as num_cores:
        here = detect(num_cores)
        here = measure(here) if measured else here
    _show(here)
    for note in here.notes:
        print(f"hxla: {note}", file=sys.stderr)
    if path is not None:
        try:
            path.write_text(dump_cluster(describe(here, path.stem)))
        except OSError as error:
            raise MeshError(f"{path} cannot be written: {error.strerror}") from None
        print(f"wrote {path}")


@contextlib.contextmanager
def _run_process_settings(*, alone: bool) -> Iterator[int]:
    """The settings of a process of `hxla run`, with one core per CPU device; yields the cores.

    To measure a core, the process is pinned to one.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cores = os.sched_getaffinity(0)
    flags = os.environ.get("XLA_FLAGS", "")
    forced = "xla_force_host_platform_device_count" in flags
    if not forced and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", len(cores))
    if alone:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
        with _nvml.driver() as nvml:
            if nvml is None:
                os.sched_setaffinity(0, {min(cores)})
    try:
        yield len(cores)
    finally:
        os.sched_setaffinity(0, cores)


def detect(num_cores: int) -> Here:
    """JAX's accelerators with NVML's facts; without any, the cards of NVML; without any, cores."""
    cards, wires = _nvml.read()
    notes = []
    try:
        local = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that some platform is left
        local = []
        platforms = os.environ.get("JAX_PLATFORMS", "")
        notes.append(f"JAX found no devices: {str(error) or f'JAX_PLATFORMS={platforms}'}")
    handles = tuple(d for d in local if d.platform != "cpu")
    notes += unsupported(cards, _nvml.driver_version(), installed_cuda())
    if not handles and not cards:
        return _cores(tuple(local), num_cores, notes)
    if handles:
        by_index = {card.index: card for card in cards}
        numbers = [
            _nvml.index_of(d.local_hardware_id) if d.platform in ("gpu", "cuda") else None
            for d in handles
        ]
        chosen = [None if n is None else by_index.get(n) for n in numbers]
        hidden = len(cards) - sum(card is not None for card in chosen)
        if hidden:
            notes.append(f"JAX does not use {hidden} of {len(cards)} NVIDIA GPUs")
        pairs = [
            (_described_handle(d, card), card) for d, card in zip(handles, chosen, strict=True)
        ]
    else:
        notes.append(f"JAX does not see the GPUs: {_how_to_see(cards)}")
        pairs = [(_described_card(card), card) for card in cards]
    position = {card.index: i for i, (_, card) in enumerate(pairs) if card is not None}
    return Here(
        devices=tuple(device for device, _ in pairs),
        free_bytes=tuple(None if card is None else card.free_bytes for _, card in pairs),
        wires=tuple(
            dataclasses.replace(wire, cards=(min(ends), max(ends)))
            for wire in wires
            if len(ends := [position[card] for card in wire.cards if card in position]) == 2
        ),
        handles=handles,
        notes=tuple(notes),
    )


def _how_to_see(cards: Sequence[_nvml.Card]) -> str:
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return f"unset JAX_PLATFORMS={platforms}"
    extra = extra_for(cards, _nvml.driver_version())
    if installed_cuda() is None and extra is not None:
        return f"pip install 'jax[{extra}]', hxla's extra {extra}"
    return "python -c 'import jax; jax.devices(\"cuda\")' says why"


def _described_card(card: _nvml.Card) -> Device:
    return Device(kind=card.name, memory_bytes=card.total_bytes, uuid=card.uuid, source="NVML")


def _described_handle(handle: jax.Device, card: _nvml.Card | None) -> Device:
    # JAX may allocate this much, by default three quarters of a card.
    limit = (handle.memory_stats() or {}).get("bytes_limit")
    device = (
        Device(kind=handle.device_kind, source="JAX") if card is None else _described_card(card)
    )
    known: dict[str, Any] = {"multiprocessors": multiprocessors(handle)}
    if limit:
        known |= {"memory_bytes": limit, "source": "JAX"}
    return device.model_copy(update=known)


def _cores(handles: tuple[jax.Device, ...], num_cores: int, notes: list[str]) -> Here:
    num = len(handles) or num_cores
    if num > num_cores:
        notes.append(f"{num} devices share {num_cores} cores: hxla run needs lower core_shares")
    total, free = _memory_of_machine()
    device = Device(
        kind="cpu",
        core_share=1.0,
        memory_bytes=total // num,
        source=f"the operating system: an equal part of {total / 2**30:.1f} GiB",
    )
    return Here(
        devices=(device,) * num,
        free_bytes=(free // num,) * num,
        handles=handles,
        notes=tuple(notes),
    )


def _memory_of_machine() -> tuple[int, int]:
    """Total and available bytes, within the limit of a container."""
    rows = (line.split() for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    memory = {row[0]: int(row[1]) * 1024 for row in rows}
    limits = [memory["MemTotal:"]]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # other cgroup version, or `max`
            limits.append(int((pathlib.Path("/sys/fs/cgroup") / file).read_text()))
    return min(limits), min(*limits, memory["MemAvailable:"])


def measure(here: Here) -> Here:
    """Add measured rates of products, copies and links to JAX's devices.

    Raises:
        MeshError: If JAX sees none.
    """
    if not here.handles:
        raise MeshError("nothing to measure: " + "; ".join(here.notes))
    dtypes = ["float32", "bfloat16"]
    if here.handles[0].platform != "cpu":
        dtypes += ["tensorfloat32", "float16"]
    devices = []
    with Console(stderr=True).status("") as status:
        for i, (handle, free) in enumerate(zip(here.handles, here.free_bytes, strict=True)):
            status.update(f"measuring device {i + 1} of {len(here.handles)}")
            rates = [(t, matmul_flops_per_second(handle, t)) for t in dtypes]
            # On a card a smaller copy takes less time than its launch.
            most = _MAX_COPY_BYTES * (1 if handle.platform == "cpu" else 8)
            size = min(most, (free or 8 * most) // 8)
            known = {
                "rates": tuple(
                    Rate(dtype=dtype, flops_per_second=rate, measured=True, source=_SOURCE)
                    for dtype, rate in rates
                ),
                "memory_bytes_per_second": copy_bytes_per_second(handle, size),
                "source": f"{here.devices[i].source}; bandwidth: {_SOURCE}",
            }
            if handle.platform != "cpu":  # a CPU's memory is its host's
                known["launch_seconds"] = launch_seconds(handle)
                known["host_bytes_per_second"] = host_bytes_per_second(handle, size)
            devices.append(here.devices[i].model_copy(update=known))
        curves = {}
        for i, j in itertools.combinations(range(len(here.handles)), 2):
            status.update(f"measuring the link between devices {i} and {j}")
            curves[i, j] = link_curve(here.handles[i], here.handles[j])
    return dataclasses.replace(here, devices=tuple(devices), curves=curves)


def describe(here: Here, name: str) -> Cluster:
    """The cluster that a mesh file of this machine describes.

    Devices of one kind get the median of their measured figures, so that a plan may treat them
    alike. The node's link is the slowest between any two of its devices.
    """
    devices = []
    for device in here.devices:
        like = [other for other in here.devices if other.kind == device.kind]
        rates = [
            rate.model_copy(
                update={"flops_per_second": _median(d.rates[i].flops_per_second for d in like)}
            )
            for i, rate in enumerate(device.rates)
        ]
        known: dict[str, Any] = {"rates": tuple(rates)}
        for figure in _MEASURED:
            values = [getattr(d, figure) for d in like]
            known[figure] = _median(values) if None not in values else None
        devices.append(device.model_copy(update=known))
    link = _slowest_link(here) if len(devices) > 1 else None
    return Cluster(
        name=name,
        devices=tuple(devices),
        nodes=(Node(name="node", link=link),) if link or len(devices) == 1 else (),
    )


def _slowest_link(here: Here) -> Link | None:
    if here.curves:
        curve = min(here.curves.values(), key=lambda curve: curve[-1][1])
        points = tuple((size, _round(rate)) for size, rate in curve)
        return Link(
            bytes_per_second=points[-1][1],
            latency_seconds=_round(curve[0][0] / curve[0][1]),
            curve=points,
            source=f"{_SOURCE}: copies between two devices of one process",
        )
    wires = [wire for wire in here.wires if wire.bytes_per_second]
    if len(wires) < len(here.devices) * (len(here.devices) - 1) // 2:
        return None
    wire = min(wires, key=lambda wire: wire.bytes_per_second or 0)
    return Link(bytes_per_second=_round(wire.bytes_per_second or 0), source=f"NVML: {wire.name}")


def _median(values: Iterable[float]) -> float:
    return _round(statistics.median(values))


def _round(value: float) -> float:
    """To four digits, the precision of a measurement."""
    return float(f"{value:.4g}")


def _show(here: Here) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120
    rates = here.devices[0].rates
    table = Table(box=None, pad_edge=False)
    for heading in ("", "device", "memory", "free", *(f"{r.dtype} TFLOP/s" for r in rates)):
        table.add_column(heading, justify="left" if heading == "device" else "right")
    if rates:
        table.add_column("memory GB/s", justify="right")
    for i, (device, free) in enumerate(zip(here.devices, here.free_bytes, strict=True)):
        cells = [str(i), device.kind, _gib(device.memory_bytes), _gib(free)]
        cells += [f"{rate.flops_per_second / 1e12:.4g}" for rate in device.rates]
        if device.memory_bytes_per_second is not None:
            cells.append(f"{device.memory_bytes_per_second / 1e9:.4g}")
        table.add_row(*cells)
    console.print(table)
    links = [line for _, line in sorted(_link_lines(here))]
    for line in links[:_SHOWN_LINKS]:
        console.print(line, highlight=False)
    if len(links) > _SHOWN_LINKS:
        console.print(f"and {len(links) - _SHOWN_LINKS} faster links")


def _link_lines(here: Here) -> Iterator[tuple[float, str]]:
    """Bandwidth and description of each link."""
    wires = {wire.cards: wire for wire in here.wires}
    for i, j in itertools.combinations(range(len(here.devices)), 2):
        wire = wires.get((i, j))
        rate = (wire.bytes_per_second if wire else None) or 0.0
        parts = [f"{i} - {j}"] + ([wire.name] if wire else [])
        parts += [f"{rate / 1e9:.4g} GB/s by its wires"] if rate else []
        if here.curves:
            curve = here.curves[i, j]
            rate = curve[-1][1]
            latency = curve[0][0] / curve[0][1]
            parts.append(f"{rate / 1e9:.4g} GB/s and {latency * 1e6:.3g} us measured")
        if len(parts) > 1:
            yield rate, "  ".join(parts)


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
