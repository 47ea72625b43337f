"""Cards and wires of this machine as the NVIDIA driver reports them, if there is one."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

# Of one PCIe lane in one direction, by generation: transfers per second times the line code
# (PCI-SIG: 2.5 and 5 GT/s with 8b/10b, 8 to 32 GT/s with 128b/130b, 64 GT/s with 242B/256B flits).
_LANE_BYTES_PER_SECOND = {
    1: 0.25e9,
    2: 0.5e9,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
# The names of `nvidia-smi topo -m`.
_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU.

    Attributes:
        index: In NVML, which counts all cards.
        pcie: Generation and lanes of its slot; None if not known.
        capability: CUDA's compute capability, such as (7, 0) of a V100; None if not known.
    """

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    pcie: tuple[int, int] | None
    capability: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire:
    """The connection of two cards.

    Attributes:
        cards: Their indices, the smaller one first.
        name: `NV4` for four NVLinks, else the PCIe path: `PIX`, `PXB`, `PHB`, `NODE` or `SYS`.
        bytes_per_second: In one direction; None if not known.
    """

    cards: tuple[int, int]
    name: str
    bytes_per_second: float | None


@contextlib.contextmanager
def driver() -> Iterator[Any]:
    """The `pynvml` module while the driver is open; None without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def index_of(hardware_id: int | None) -> int | None:
    """NVML's index of one of CUDA's visible cards; None if not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hardware_id is None or not visible:
        return hardware_id
    entries = visible.split(",")
    if hardware_id >= len(entries) or not entries[hardware_id].strip().isdigit():
        return None  # named by UUID
    return int(entries[hardware_id])


def name_of(nvml: Any, index: int) -> str:
    """Model name of a card."""
    return _text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)))


def driver_version() -> int | None:
    """The first number of the driver's version, 580; None without a driver."""
    with driver() as nvml:
        text = None if nvml is None else _ask(nvml, nvml.nvmlSystemGetDriverVersion)
    first = "" if text is None else _text(text).partition(".")[0]
    return int(first) if first.isdigit() else None


def read() -> tuple[tuple[Card, ...], tuple[Wire, ...]]:
    """All cards and the wire between each two; nothing without a driver."""
    with driver() as nvml:
        if nvml is None:
            return (), ()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        cards = tuple(_card(nvml, i, handle) for i, handle in enumerate(handles))
        links = [_nvlinks(nvml, handle) for handle in handles]
        buses = [_bus(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
        wires = []
        for a, b in itertools.combinations(range(len(handles)), 2):
            # Through a switch every card reaches every other card with all its links.
            num = links[a].count(buses[b]) or min(
                links[a].count("switch"), links[b].count("switch")
            )
            if num:
                speed = _nvlink_bytes_per_second(nvml, handles[a])
                rate = None if speed is None else num * speed
                wires.append(Wire(cards=(a, b), name=f"NV{num}", bytes_per_second=rate))
                continue
            path = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
            rates = [_pcie_bytes_per_second(cards[c]) for c in (a, b)]
            rate = None if None in rates else min(filter(None, rates))
            wires.append(Wire(cards=(a, b), name=_PATHS.get(path, "?"), bytes_per_second=rate))
        return cards, tuple(wires)


def _card(nvml: Any, index: int, handle: Any) -> Card:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    # The current generation drops while a card idles.
    generation = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Card(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        pcie=(generation, lanes) if generation and lanes else None,
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
    )


def _pcie_bytes_per_second(card: Card) -> float | None:
    if card.pcie is None or card.pcie[0] not in _LANE_BYTES_PER_SECOND:
        return None
    return _LANE_BYTES_PER_SECOND[card.pcie[0]] * card.pcie[1]


def _nvlinks(nvml: Any, handle: Any) -> list[str]:
    """The remote end of each active NVLink of a card: another card's bus, or `switch`."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            ends.append("switch")
            continue
        remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if remote is not None:
            ends.append(_bus(remote))
    return ends


def _nvlink_bytes_per_second(nvml: Any, handle: Any) -> float | None:
    field = nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    values = _ask(nvml, nvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return float(values[0].value.uiVal) * 1e6 or None


def _ask(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """The answer to a query that some cards and drivers refuse; None then."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _bus(info: Any) -> str:
    return _text(info.busId).lower()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
