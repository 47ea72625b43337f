"""Described clusters: devices, the nodes that hold them, and the links between them."""

import bisect
import math
from typing import Annotated

import pydantic


class _Value(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rate(_Value):
    """How fast a device multiplies matrices of one dtype.

    Attributes:
        dtype: `float32`, `bfloat16`, ...
        flops_per_second: Operations per second, a multiply-add being two.
        measured: False if from a data sheet: what no program exceeds, not what one gets.
        source: Where the figure is from.
    """

    dtype: str
    flops_per_second: pydantic.PositiveFloat
    measured: bool = False
    source: str = ""


class Speed(_Value):
    """How fast a device trained one model, alone.

    Attributes:
        model: Name, as the mesh file has it.
        steps_per_second: Measured.
        batch_size: Examples of a step.
        source: Where the figure is from.
    """

    model: str
    steps_per_second: pydantic.PositiveFloat
    batch_size: Annotated[int, pydantic.Field(ge=1)]
    source: str = ""


class Device(_Value):
    """One device of a described cluster.

    Attributes:
        kind: `cpu`, or the model name of an accelerator as NVML gives it.
        memory_bytes: Memory that training may use; None if not described.
        core_share: Share of one core that a CPU device gets, above 0 and at most 1.
        node: Index of its node.
        memory_bytes_per_second: Bandwidth of its memory; None if not described.
        rates: Of matrix products, one per dtype.
        speeds: Of training, one per model.
        uuid: Of one card; None if not described.
        source: Where the memory's figures are from.
    """

    kind: str
    memory_bytes: Annotated[int, pydantic.Field(ge=1)] | None = None
    core_share: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    node: int = 0
    memory_bytes_per_second: pydantic.PositiveFloat | None = None
    rates: tuple[Rate, ...] = ()
    speeds: tuple[Speed, ...] = ()
    uuid: str | None = None
    source: str = ""

    @property
    def label(self) -> str:
        """Devices of one label are alike: the kind, and what share of a core a CPU device gets."""
        part = self.core_share not in (None, 1.0)
        return f"{self.kind}@{self.core_share:g}" if part else self.kind

    def rate(self, dtype: str) -> Rate | None:
        """Matrix products of a dtype; None if not described."""
        return next((r for r in self.rates if r.dtype == dtype), None)

    def speed(self, model: str) -> Speed | None:
        """Training of a model; None if not described."""
        return next((s for s in self.speeds if s.model == model), None)


class Link(_Value):
    """What one transfer gets between two devices while nothing else uses the link.

    Attributes:
        bytes_per_second: Bandwidth of long messages, in one direction.
        latency_seconds: Of the shortest message (0: not known).
        curve: Measured (message bytes, bytes per second), by message size; empty if not measured.
        source: Where the figures are from.
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
        """Time of one message.

        With a curve its times are interpolated, linearly in the logarithms of size and time. A
        message below the first point takes a time between the latency and that point's, one beyond
        the last point goes at the last point's bandwidth. Without a curve the time is
        `latency + bytes / bandwidth`.

        Args:
            num_bytes: Size of the message.

        Example:
            >>> Link(bytes_per_second=1e9, latency_seconds=1e-5).seconds(1e6)
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


class Node(_Value):
    """A machine.

    Attributes:
        name: As links call it; several like nodes share it.
        link: Between its devices; None if it has one device.
    """

    name: str
    link: Link | None = None


class Cluster(_Value):
    """A described cluster: its devices in the order of ranks.

    Attributes:
        name: Of the mesh file.
        description: One line.
        devices: Node by node.
        nodes: Empty if only devices are described, all of one node.
        links: Between two nodes, by their names in alphabetical order.
        default_link: Between nodes that `links` does not name.
    """

    name: str
    description: str = ""
    devices: tuple[Device, ...]
    nodes: tuple[Node, ...] = ()
    links: tuple[tuple[str, str, Link], ...] = ()
    default_link: Link | None = None

    def link(self, i: int, j: int) -> Link | None:
        """The link between two devices, by rank; None if i is j or no link is described."""
        a, b = self.devices[i].node, self.devices[j].node
        if i == j or not self.nodes:
            return None
        if a == b:
            return self.nodes[a].link
        first, second = sorted((self.nodes[a].name, self.nodes[b].name))
        for one, other, link in self.links:
            if (one, other) == (first, second):
                return link
        return self.default_link
