"""A model for the planner: a chain of layers with their sizes and times."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..cluster.cluster import Link
from ..core.errors import PlanError
from .products import MatrixProduct


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Sizes of one layer on one device of a tensor-parallel group.

    Attributes:
        parameter_bytes: The bytes of the device's shard of the parameters.
        output_bytes: The bytes of one microbatch's output, which the next layer receives.
        stash_bytes: The bytes of one microbatch's residuals.
        flops: The forward operations of one microbatch (0: not known).
        arithmetic: The dtype of its matrix products, by the names of rates in mesh files; `model`:
            the model's dtypes.
        products: The matrix products of one microbatch's forward; none: not known.
        moved_bytes: The bytes that one microbatch's forward moves through memory between its
            products; 0: not known, estimated by `stash_bytes`.
    """

    parameter_bytes: float
    output_bytes: float
    stash_bytes: float
    flops: float = 0.0
    arithmetic: str = "model"
    products: tuple[MatrixProduct, ...] = ()
    moved_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer on one device, for one microbatch.

    Attributes:
        forward: The seconds of the forward, with tensor parallelism's collectives.
        backward: The seconds of the backward, likewise.
        update: The seconds of the update of the device's parameters, once a step.
        measured: Whether it was measured; otherwise it is estimated from operations and bytes
            (roofline).
    """

    forward: float
    backward: float
    update: float = 0.0
    measured: bool = True


@dataclasses.dataclass(frozen=True, order=True)
class Setting:
    """The devices and microbatch size for which times were measured.

    Attributes:
        kind: The kind of the device, as `Device.label` says.
        microbatch_size: The examples of a microbatch.
        tensor: The devices of one tensor-parallel group, all of this kind and in one node.
    """

    kind: str
    microbatch_size: int
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitTime:
    """Seconds of one microbatch on devices over which an axis cuts the model, all at work together.

    Attributes:
        kinds: For each place along the axis the kinds of its devices, those of several replicas
            sorted and joined by ` + `.
        microbatch_size: The examples of the microbatch.
        sent_bytes: The bytes that one device sends over the axis, which distinguish one sharding
            from another.
        parts: The fraction of the cut dimensions at each place.
        seconds: The seconds of the microbatch, forward and backward, with its collectives.
    """

    kinds: tuple[str, ...]
    microbatch_size: int
    sent_bytes: float
    parts: tuple[float, ...]
    seconds: float

    @property
    def split(self) -> tuple[tuple[str, ...], int, float]:
        """The key of a split, without its parts."""
        return self.kinds, self.microbatch_size, self.sent_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """The measured link between two kinds of devices.

    Attributes:
        kinds: The kinds of both devices, sorted.
        in_node: Whether they are in one node.
        mesh: The name of the mesh in which it was measured; empty without one.
        link: Its times are half of an exchange. In an exchange each device sends one message, as
            neighbouring stages of a pipeline do in a tick.
    """

    kinds: tuple[str, str]
    in_node: bool
    mesh: str
    link: Link

    @property
    def place(self) -> tuple[tuple[str, str], bool]:
        """The key of a link, without its figures."""
        return self.kinds, self.in_node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A model as a chain of layers, with known sizes and times.

    Attributes:
        model: The name, or a fingerprint of the parameters.
        layers: The names of the layers, in the order of the chain.
        sizes: (microbatch size, tensor) to one size for each layer.
        times: Setting to one time for each layer.
        reductions: The kinds of devices that train together, sorted and joined by ` + `, to the
            seconds of a step outside microbatches and updates: the all-reduce of gradients and the
            training loop.
        peaks: Setting to the bytes of a whole replica on the device without the inputs of its
            microbatches: state, sums, and the compiled programs' temporaries.
        num_segments: The largest number of layers that was asked for; a chain may have fewer (0:
            as many as there are).
        form: The memory layout in which the times were measured during training, as
            `Plan.memory_form` names it. Its recomputation and transfers are in the times. Empty:
            each layer ran alone.
        splits: Times of splits of the model, each with its parts.
        links: The measured links, at most one for each pair of kinds in a node or between nodes.
    """

    model: str
    layers: tuple[str, ...]
    sizes: Mapping[tuple[int, int], tuple[LayerSize, ...]]
    times: Mapping[Setting, tuple[LayerTime, ...]]
    reductions: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peaks: Mapping[Setting, int] = dataclasses.field(default_factory=dict)
    num_segments: int = 0
    form: str = ""
    splits: tuple[SplitTime, ...] = ()
    links: tuple[MeasuredLink, ...] = ()

    @property
    def most_segments(self) -> int:
        """The number to ask for to get the same layers again."""
        return self.num_segments or len(self.layers)

    def check(self, layers: Sequence[str]) -> None:
        """Refuse another chain of layers.

        Args:
            layers: The names of the chain's layers.

        Raises:
            PlanError: If the names differ.
        """
        if self.layers != tuple(layers):
            raise PlanError(
                f"the profile has the segments {', '.join(self.layers)}, the loss has "
                f"{', '.join(layers)}: measure it again with hxla profile"
            )

    def to_table(self) -> dict[str, Any]:
        """Write the profile as lists and dictionaries, for JSON."""
        return {
            "model": self.model,
            "layers": list(self.layers),
            "num_segments": self.num_segments,
            "form": self.form,
            "sizes": [
                {"microbatch_size": b, "tensor": t, "layers": list(map(dataclasses.asdict, sizes))}
                for (b, t), sizes in sorted(self.sizes.items())
            ],
            "times": [
                {**dataclasses.asdict(setting), "layers": [dataclasses.asdict(t) for t in times]}
                for setting, times in sorted(self.times.items())
            ],
            "reductions": dict(sorted(self.reductions.items())),
            "peaks": [
                {**dataclasses.asdict(setting), "bytes": peak}
                for setting, peak in sorted(self.peaks.items())
            ],
            "splits": [dataclasses.asdict(split) for split in self.splits],
            "links": [
                {
                    "kinds": list(x.kinds),
                    "in_node": x.in_node,
                    "mesh": x.mesh,
                    "link": x.link.model_dump(mode="json"),
                }
                for x in self.links
            ],
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Profile":
        """Read a profile from the result of `to_table`.

        Args:
            table: The lists and dictionaries.

        Returns:
            The profile.

        Raises:
            KeyError: If a key is missing.
            TypeError: If a value is of another type.
            ValueError: If a value is no number.
        """
        return cls(
            model=str(table["model"]),
            layers=tuple(map(str, table["layers"])),
            sizes={
                (int(row["microbatch_size"]), int(row["tensor"])): tuple(
                    _size(layer) for layer in row["layers"]
                )
                for row in table["sizes"]
            },
            times={
                _setting(row): tuple(LayerTime(**layer) for layer in row["layers"])
                for row in table["times"]
            },
            reductions={str(k): float(v) for k, v in table.get("reductions", {}).items()},
            peaks={_setting(row): int(row["bytes"]) for row in table.get("peaks", ())},
            num_segments=int(table.get("num_segments", 0)),
            form=str(table.get("form", "")),
            splits=tuple(map(_split, table.get("splits", ()))),
            links=tuple(map(_link, table.get("links", ()))),
        )


def _size(layer: Mapping[str, Any]) -> LayerSize:
    products = tuple(MatrixProduct(**product) for product in layer.get("products", ()))
    return LayerSize(**{**layer, "products": products})


def _split(row: Mapping[str, Any]) -> SplitTime:
    rows = {name: tuple(row[name]) for name in ("kinds", "parts")}
    return SplitTime(**{**row, **rows})


def _link(row: Mapping[str, Any]) -> MeasuredLink:
    first, second = map(str, row["kinds"])
    return MeasuredLink(
        kinds=(first, second),
        in_node=bool(row["in_node"]),
        mesh=str(row["mesh"]),
        link=Link.model_validate(row["link"]),
    )


def _setting(row: Mapping[str, Any]) -> Setting:
    return Setting(str(row["kind"]), int(row["microbatch_size"]), int(row["tensor"]))


def together_key(labels: Iterable[str]) -> str:
    """The key of devices that train together: their sorted kinds."""
    return " + ".join(sorted(labels))


def measured_sum(profile: Profile | None, labels: Iterable[str]) -> float | None:
    """Measured seconds of the all-reduce over these devices and of the loop, or None."""
    return None if profile is None else profile.reductions.get(together_key(labels))
