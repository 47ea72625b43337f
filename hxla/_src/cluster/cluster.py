"""Described clusters: devices, their nodes, and the links between them.

Simultaneous transfers take longer where devices of a node share its network card.
"""

import bisect
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import pydantic


class _Value(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rate(_Value):
    """A device's rate of matrix products in one dtype.

    Attributes:
        dtype: The name of the dtype: `float32`, `bfloat16`, ...
        flops_per_second: The operations per second, a multiply-add being two.
        measured: Whether it was measured; otherwise it is a data sheet's, an upper bound.
        source: The source of the figure.
    """

    dtype: str
    flops_per_second: pydantic.PositiveFloat
    measured: bool = False
    source: str = ""


class Speed(_Value):
    """A device's measured speed of training one model, alone.

    Attributes:
        model: The name of the model in the mesh file.
        steps_per_second: The measured steps per second.
        batch_size: The examples of a step.
        source: The source of the figure.
    """

    model: str
    steps_per_second: pydantic.PositiveFloat
    batch_size: Annotated[int, pydantic.Field(ge=1)]
    source: str = ""


class Device(_Value):
    """One device of a described cluster.

    Attributes:
        kind: The model name of an accelerator as NVML reports it, or `cpu`.
        memory_bytes: The memory that training may use; None if not described.
        core_share: The share of one core that a CPU device gets, above 0 and at most 1.
        node: The index of its node.
        memory_bytes_per_second: The bandwidth of its memory; None if not described.
        host_memory_bytes: The memory of its host that training may use for it; None if not
            described.
        host_bytes_per_second: The bandwidth of copies between device and host memory, in one
            direction; None if not described.
        disk_bytes_per_second: Its share of the bandwidth of its host's disk, reading or writing;
            None if not described.
        multiprocessors: The streaming multiprocessors of a GPU, each of which computes a tile of a
            matrix product at a time; None if not described.
        launch_seconds: The seconds per small kernel in a long sequence, running or launching; None
            if not described.
        rates: The rates of matrix products, one for each dtype.
        speeds: The speeds of training, one for each model.
        uuid: The identity of one card; None if not described.
        source: The source of the memory figures.
    """

    kind: str
    memory_bytes: Annotated[int, pydantic.Field(ge=1)] | None = None
    core_share: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    node: int = 0
    memory_bytes_per_second: pydantic.PositiveFloat | None = None
    host_memory_bytes: Annotated[int, pydantic.Field(ge=1)] | None = None
    host_bytes_per_second: pydantic.PositiveFloat | None = None
    disk_bytes_per_second: pydantic.PositiveFloat | None = None
    multiprocessors: Annotated[int, pydantic.Field(ge=1)] | None = None
    launch_seconds: pydantic.PositiveFloat | None = None
    rates: tuple[Rate, ...] = ()
    speeds: tuple[Speed, ...] = ()
    uuid: str | None = None
    source: str = ""

    @property
    def label(self) -> str:
        """The kind, and a CPU device's share of a core: devices of one label are alike."""
        part = self.core_share not in (None, 1.0)
        return f"{self.kind}@{self.core_share:g}" if part else self.kind

    def rate(self, dtype: str) -> Rate | None:
        """Find the rate of matrix products of a dtype.

        Args:
            dtype: The name of the dtype, `float32`.

        Returns:
            The rate; None if not described.
        """
        return next((r for r in self.rates if r.dtype == dtype), None)

    def product_rate(self, arithmetic: str = "model") -> Rate | None:
        """Find the rate of matrix products.

        Args:
            arithmetic: The name of a rate; `model` is float32 as jax computes it by default, on
                NVIDIA cards from Ampere on in TF32.

        Returns:
            The rate; where it is not described, the default rate of float32; None without either.
        """
        rate = self.rate(arithmetic) if arithmetic != "model" else None
        return rate or self.rate("tensorfloat32") or self.rate("float32")

    def speed(self, model: str) -> Speed | None:
        """Find the speed of training of a model.

        Args:
            model: The name of the model in the mesh file.

        Returns:
            The speed; None if not described.
        """
        return next((s for s in self.speeds if s.model == model), None)


class Link(_Value):
    """The bandwidth and latency of one transfer between two devices, alone on the link.

    Between nodes, transfers at the same time share each node's `NetworkCard`.

    Attributes:
        bytes_per_second: The bandwidth of long messages, in one direction.
        latency_seconds: The time of the shortest message (0: not known).
        all_reduce_seconds: The time of an all-reduce of a few numbers over both devices, amid a
            program, as `hxla profile` measures it (0: not known).
        curve: Measured pairs of message bytes and bytes per second, by message size; none if not
            measured.
        source: The source of the figures.
    """

    bytes_per_second: pydantic.PositiveFloat
    latency_seconds: pydantic.NonNegativeFloat = 0.0
    all_reduce_seconds: pydantic.NonNegativeFloat = 0.0
    curve: tuple[tuple[pydantic.PositiveFloat, pydantic.PositiveFloat], ...] = ()
    source: str = ""

    @pydantic.field_validator("curve")
    @classmethod
    def _sizes_grow(cls, curve: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        sizes = [size for size, _ in curve]
        if sizes != sorted(set(sizes)):
            raise ValueError("message sizes must grow from point to point")
        return curve

    def seconds(self, num_bytes: float) -> float:
        """Predict the time of one message.

        With a curve, times are interpolated linearly in the logarithms of size and time. Below the
        first point they are interpolated from the latency; beyond the last point the bandwidth is
        that of the last point. Without a curve the time is `latency + bytes / bandwidth`.

        Args:
            num_bytes: The size of the message.

        Returns:
            The seconds.

        Example:
            >>> import hxla
            >>> hxla.Link(bytes_per_second=1e9, latency_seconds=1e-5).seconds(1e6)
            0.00101
        """
        if not self.curve:
            return self.latency_seconds + num_bytes / self.bytes_per_second
        sizes = [size for size, _ in self.curve]
        times = [size / rate for size, rate in self.curve]
        if num_bytes >= sizes[-1]:
            return num_bytes / self.curve[-1][1]
        if num_bytes <= sizes[0]:
            least = min(self.latency_seconds, times[0])
            return least + (times[0] - least) * num_bytes / sizes[0]
        i = bisect.bisect(sizes, num_bytes)
        part = math.log(num_bytes / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
        return float(times[i - 1] * (times[i] / times[i - 1]) ** part)


class NetworkCard(_Value):
    """The bandwidth that all devices of a node share to other nodes, over one card or several.

    Attributes:
        bytes_per_second: The bandwidth that its transfers share, in one direction.
        duplex: Whether it sends and receives at once, each at that bandwidth; otherwise both
            directions share it.
        source: The source of the figure.
    """

    bytes_per_second: pydantic.PositiveFloat
    duplex: bool = True
    source: str = ""


class Node(_Value):
    """A machine of a described cluster.

    Attributes:
        name: The name in `Cluster.links`; several equal nodes share it.
        link: The link between its devices; None if it has one device or none is described.
        network_card: The bandwidth that its devices share to other nodes; None if not described,
            see `Cluster.network_card`.
    """

    name: str
    link: Link | None = None
    network_card: NetworkCard | None = None


@functools.lru_cache(maxsize=64)
def _card_of_link(bytes_per_second: float) -> NetworkCard:
    """A card with a link's bandwidth, cached so that all equal nodes share one object."""
    return NetworkCard(bytes_per_second=bytes_per_second, source="its fastest link")


class Cluster(_Value):
    """A described cluster: its devices in the order of ranks.

    Attributes:
        name: The name of the mesh file.
        description: One line about it.
        devices: The devices, node by node.
        nodes: The nodes; none if only devices are described, all of one node.
        links: The links between two nodes, each with their names in alphabetical order.
        default_link: The link between pairs of nodes that are not in `links`.
        file: The path of the mesh file; empty for a built-in one, or without a file.
    """

    name: str
    description: str = ""
    devices: tuple[Device, ...]
    nodes: tuple[Node, ...] = ()
    links: tuple[tuple[str, str, Link], ...] = ()
    default_link: Link | None = None
    file: str = ""

    def link(self, i: int, j: int) -> Link | None:
        """Find the link between two devices.

        Args:
            i: The rank of the first.
            j: The rank of the second.

        Returns:
            The link; None if both are the same device, or no link is described.
        """
        a, b = self.devices[i].node, self.devices[j].node
        if i == j or not self.nodes:
            return None
        if a == b:
            return self.nodes[a].link
        return self._between(self.nodes[a].name, self.nodes[b].name)

    def network_card(self, node: int) -> NetworkCard | None:
        """Find the network card that the devices of a node share.

        Where none is described, it is a duplex card with the bandwidth of the node's fastest link
        to another node. A bandwidth measured between two nodes is the card's, however many devices
        share it.

        Args:
            node: The index of the node.

        Returns:
            The card; None if no link to another node is described.
        """
        if not self.nodes or self.nodes[node].network_card is not None:
            return self.nodes[node].network_card if self.nodes else None
        name = self.nodes[node].name
        if self.links:
            others = {n.name for i, n in enumerate(self.nodes) if i != node}
            links = [self._between(name, other) for other in others]
        else:  # large clusters have many nodes, and one link between all of them
            links = [self.default_link][: len(self.nodes) - 1]
        fastest = max((link.bytes_per_second for link in links if link is not None), default=None)
        if fastest is None:
            return None
        return _card_of_link(fastest)

    def _between(self, a: str, b: str) -> Link | None:
        first, second = sorted((a, b))
        for one, other, link in self.links:
            if (one, other) == (first, second):
                return link
        return self.default_link


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send:
    """A transfer from one device to another, in one direction."""

    sender: int
    receiver: int
    num_bytes: float


CardWay = tuple[int, bool]  # a node, and whether into it; always False if it is not duplex


def cards_passed(
    card_of: Callable[[int], NetworkCard | None], a: int, b: int
) -> list[tuple[NetworkCard, CardWay]]:
    """The cards that a transfer from node `a` to node `b` passes, with its direction."""
    if a == b:
        return []
    known = [(node, card_of(node), bool(i)) for i, node in enumerate((a, b))]
    return [(card, (node, card.duplex and into)) for node, card, into in known if card]


def ring_transfers(cluster: Cluster, ranks: Iterable[int], num_bytes: float) -> list[Send]:
    """The sends from each device of a ring to the next; none for a single device.

    The ring passes the devices node by node and leaves each node once, as collective libraries
    build rings.
    """
    order = sorted(ranks, key=lambda rank: cluster.devices[rank].node)
    if len(order) < 2:
        return []
    return [
        Send(sender=a, receiver=b, num_bytes=num_bytes)
        for a, b in zip(order, (*order[1:], order[0]), strict=True)
    ]


def transfer_seconds(cluster: Cluster, transfers: Sequence[Send]) -> list[float | None]:
    """Predict the time of each of several transfers that begin together.

    A transfer takes at least its link's time. Transfers over a network card in one direction, or in
    both if it is not duplex, share its bandwidth equally. So a transfer of b bytes ends when the
    card has carried at most b bytes of every other transfer.

    Returns:
        The seconds of each; None where no link is described.
    """
    # Most transfers have equals: the same nodes and bytes.
    kinds = [
        (cluster.devices[x.sender].node, cluster.devices[x.receiver].node, x.num_bytes)
        if x.sender != x.receiver
        else None
        for x in transfers
    ]
    numbers = collections.Counter(filter(None, kinds))
    card_of = functools.cache(cluster.network_card)
    over: dict[CardWay, dict[float, int]] = collections.defaultdict(collections.Counter)
    for (a, b, size), num in numbers.items():
        for _, key in cards_passed(card_of, a, b):
            over[key][size] += num
    carried = {key: _CarriedBytes(sizes) for key, sizes in over.items()}
    seconds: dict[tuple[int, int, float] | None, float | None] = {None: None}
    for kind, x in zip(kinds, transfers, strict=True):
        if kind is None or kind in seconds:
            continue
        a, b, size = kind
        link = cluster.link(x.sender, x.receiver)
        if link is None:
            seconds[kind] = None
            continue
        shared = [
            link.latency_seconds + carried[key].until(size) / card.bytes_per_second
            for card, key in cards_passed(card_of, a, b)
        ]
        seconds[kind] = max([link.seconds(size), *shared])
    return [seconds[kind] for kind in kinds]


class _CarriedBytes:
    """The bytes that a card has carried when a transfer of some size is done.

    Args:
        counts: The number of its transfers of each size in bytes.
    """

    def __init__(self, counts: Mapping[float, int]):
        self._until: dict[float, float] = {}
        num_longer, done = sum(counts.values()), 0.0
        for size in sorted(counts):
            self._until[size] = done + num_longer * size
            done += counts[size] * size
            num_longer -= counts[size]

    def until(self, size: float) -> float:
        """Bytes carried when the card's transfers of this size are done."""
        return self._until[size]
