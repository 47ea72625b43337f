"""Described clusters: devices, the nodes that hold them, and the links between them."""

import bisect
import functools
import math
from typing import Annotated

import pydantic


class _Value(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rate(_Value):
    """How fast a device multiplies matrices of one dtype.

    Attributes:
        dtype: The name of the dtype: `float32`, `bfloat16`, ...
        flops_per_second: The operations per second, a multiply-add being two.
        measured: Whether it was measured; else it is from a data sheet, which no program exceeds.
        source: The source of the figure.
    """

    dtype: str
    flops_per_second: pydantic.PositiveFloat
    measured: bool = False
    source: str = ""


class Speed(_Value):
    """How fast a device trained one model, alone.

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
        kind: The model name of an accelerator as NVML gives it, or `cpu`.
        memory_bytes: The memory that training may use; None if not described.
        core_share: The share of one core that a CPU device gets, above 0 and at most 1.
        node: The index of its node.
        memory_bytes_per_second: The bandwidth of its memory; None if not described.
        host_memory_bytes: The memory of its host that training may use for it; None if not
            described.
        host_bytes_per_second: The bandwidth of copies between the two, in one direction; None if
            not described.
        disk_bytes_per_second: What it gets of its host's disk, reading or writing; None if not
            described.
        multiprocessors: The streaming multiprocessors of a GPU, each of which computes a tile of a
            matrix product at a time; None if not described.
        launch_seconds: What one of many small kernels takes, or the host to launch the next; None
            if not described.
        rates: The rates of matrix products, one for each dtype.
        speeds: The speeds of training, one for each model.
        uuid: The identity of one card; None if not described.
        source: The source of the memory's figures.
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
        """The kind, and what share of a core a CPU device gets: devices of one label are alike."""
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
            The rate; that of float32 by default where it is not described; None if neither is.
        """
        own = self.rate(arithmetic) if arithmetic != "model" else None
        return own or self.rate("tensorfloat32") or self.rate("float32")

    def speed(self, model: str) -> Speed | None:
        """Find the speed of training of a model.

        Args:
            model: The name of the model in the mesh file.

        Returns:
            The speed; None if not described.
        """
        return next((s for s in self.speeds if s.model == model), None)


class Link(_Value):
    """What one transfer gets between two devices while nothing else uses the link.

    Between nodes, transfers at the same time share each node's `NetworkCard`.

    Attributes:
        bytes_per_second: The bandwidth of long messages, in one direction.
        latency_seconds: The time of the shortest message (0: not known).
        curve: Measured pairs of message bytes and bytes per second, by message size; none if not
            measured.
        source: The source of the figures.
    """

    bytes_per_second: pydantic.PositiveFloat
    latency_seconds: pydantic.NonNegativeFloat = 0.0
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

        With a curve its times are interpolated, linearly in the logarithms of size and time. A
        message below the first point takes a time between the latency and that point's, one beyond
        the last point goes at the last point's bandwidth. Without a curve the time is
        `latency + bytes / bandwidth`.

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
    """What all devices of a node together get to other nodes, over one card or several.

    Attributes:
        bytes_per_second: The bandwidth that its transfers share, in one direction.
        duplex: Whether it sends and receives at once, each at that bandwidth; else the two share
            it.
        source: The source of the figure.
    """

    bytes_per_second: pydantic.PositiveFloat
    duplex: bool = True
    source: str = ""


class Node(_Value):
    """A machine of a described cluster.

    Attributes:
        name: The name that links call it by; several like nodes share it.
        link: The link between its devices; None if it has one device or none is described.
        network_card: What its devices together get to other nodes; None if not described: see
            `Cluster.network_card`.
    """

    name: str
    link: Link | None = None
    network_card: NetworkCard | None = None


@functools.lru_cache(maxsize=64)
def _card_of_link(bytes_per_second: float) -> NetworkCard:
    """A card that carries what a link does: one object for all nodes and all questions."""
    return NetworkCard(bytes_per_second=bytes_per_second, source="its fastest link")


class Cluster(_Value):
    """A described cluster: its devices in the order of ranks.

    Attributes:
        name: The name of the mesh file.
        description: One line about it.
        devices: The devices, node by node.
        nodes: The nodes; none if only devices are described, all of one node.
        links: The links between two nodes, each with their names in alphabetical order.
        default_link: The link between nodes that `links` does not name.
        file: The path of the mesh file; empty where it is built in, or there is none.
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
            i: The rank of the one.
            j: The rank of the other.

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
        """Find what the devices of a node share on the way to other nodes.

        Where none is described, it is a card, in both directions at once, of the bandwidth of the
        node's fastest link to another node: what is measured between two nodes is what the card
        gets, however many devices are behind it.

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
            found = [self._between(name, other) for other in others]
        else:  # large clusters have many nodes, and one link between all of them
            found = [self.default_link][: len(self.nodes) - 1]
        fastest = max((link.bytes_per_second for link in found if link is not None), default=None)
        if fastest is None:
            return None
        return _card_of_link(fastest)

    def _between(self, a: str, b: str) -> Link | None:
        first, second = sorted((a, b))
        for one, other, link in self.links:
            if (one, other) == (first, second):
                return link
        return self.default_link
