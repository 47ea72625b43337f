"""A model for the planner: a chain of layers with their sizes and times.

A profile is kept as a versioned JSON file. The links that plans count are described in a mesh file,
or measured by a profile.
"""

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from ..cluster.cluster import Cluster, Link, Node
from ..core.errors import PlanError
from ..core.files import fault, listed, local_path, named, read_json, shown
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


_VERSION = 1

# No measurement exceeds these limits, which keep sums and products finite.
_Seconds = Annotated[float, pydantic.Field(ge=0, le=1e9)]
_Bytes = Annotated[float, pydantic.Field(ge=0, le=2**60)]
_Count = Annotated[int, pydantic.Field(ge=1, le=2**40)]
_Arithmetic = Literal[
    "model", "float64", "float32", "tensorfloat32", "bfloat16", "float16", "float8"
]


class _FileTable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _ProductTable(_FileTable):
    count: _Count
    copies: _Count
    rows: _Count
    columns: _Count
    depth: _Count
    arithmetic: _Arithmetic = "model"


class _SizeTable(_FileTable):
    parameter_bytes: _Bytes
    output_bytes: _Bytes
    stash_bytes: _Bytes
    flops: Annotated[float, pydantic.Field(ge=0, le=1e30)] = 0.0
    arithmetic: _Arithmetic = "model"
    products: list[_ProductTable] = []
    moved_bytes: _Bytes = 0.0


class _TimeTable(_FileTable):
    forward: _Seconds
    backward: _Seconds
    update: _Seconds = 0.0
    measured: bool = True


class _Sizes(_FileTable):
    microbatch_size: _Count
    tensor: _Count
    layers: list[_SizeTable]

    @property
    def setting(self) -> tuple[Any, ...]:
        return self.microbatch_size, self.tensor


class _KindTable(_FileTable):
    kind: str
    microbatch_size: _Count
    tensor: _Count

    @property
    def setting(self) -> tuple[Any, ...]:
        return self.kind, self.microbatch_size, self.tensor


class _Times(_KindTable):
    layers: list[_TimeTable]


class _Peak(_KindTable):
    bytes: Annotated[int, pydantic.Field(ge=0, le=2**60)]


class _Split(_FileTable):
    kinds: list[str] = pydantic.Field(min_length=2)
    microbatch_size: _Count
    sent_bytes: _Bytes
    parts: list[Annotated[float, pydantic.Field(gt=0, lt=1)]]
    seconds: _Seconds


class _MeasuredLink(_FileTable):
    kinds: list[str] = pydantic.Field(min_length=2, max_length=2)
    in_node: bool
    mesh: str = ""
    link: Link

    @property
    def setting(self) -> tuple[Any, ...]:
        return (*sorted(self.kinds), self.in_node)


class _ProfileTable(_FileTable):
    version: int
    model: str
    layers: list[str] = pydantic.Field(min_length=1)
    num_segments: int = pydantic.Field(0, ge=0, le=2**20)
    form: str = ""
    sizes: list[_Sizes]
    times: list[_Times]
    reductions: dict[str, _Seconds] = {}
    peaks: list[_Peak] = []
    splits: list[_Split] = []
    links: list[_MeasuredLink] = []


def dump_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, atomically; its folder is made."""
    table = {"version": _VERSION, **profile.to_table()}
    file = local_path(path, "path", PlanError)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(table, indent=1) + "\n")
    part.replace(file)


def load_profile(path: str | os.PathLike[str], *, model: str | None = None) -> Profile:
    """Read a profile that `hxla profile` wrote.

    Args:
        path: The path of the file.
        model: The name of the model that it must describe; None: any.

    Returns:
        The profile.

    Raises:
        PlanError: If the file cannot be read, is of another version or model, or has invalid
            values: every fault with its key.

    Example:
        >>> import hxla
        >>> hxla.load_profile("missing.json")
        PlanError: profile missing.json cannot be read: No such file or directory
    """
    refuse = named("profile", path, PlanError)
    table = read_json(path, refuse)
    version = table.get("version") if isinstance(table, dict) else None
    if type(version) is not int or version != _VERSION:
        raise refuse(
            f"has version {shown(version)}, this hxla reads {_VERSION}: measure again with hxla "
            "profile"
        )
    faults = list(_faults(table))
    if faults:
        raise refuse("has faults:" + listed(faults))
    profile = Profile.from_table(table)
    if model is not None and profile.model != model:
        raise refuse(
            f"is of another model: {profile.model[:80]}, not {model}; measure this one with hxla "
            "profile, into another file"
        )
    return profile


def merge_profiles(profiles: Iterable[Profile]) -> Profile:
    """The union of several profiles of one model; later ones win.

    Raises:
        PlanError: If their models or numbers of layers differ.
    """
    first, *others = profiles
    for other in others:
        if (other.model, len(other.layers)) != (first.model, len(first.layers)):
            raise PlanError(
                f"profiles of {first.model} in {len(first.layers)} layers and of {other.model} in "
                f"{len(other.layers)} do not match: measure one model, in the same layers"
            )
        first = dataclasses.replace(
            first,
            sizes={**first.sizes, **other.sizes},
            times={**first.times, **other.times},
            reductions={**first.reductions, **other.reductions},
            peaks={**first.peaks, **other.peaks},
            form=other.form or first.form,
            splits=tuple({s.split: s for s in (*first.splits, *other.splits)}.values()),
            links=tuple({x.place: x for x in (*first.links, *other.links)}.values()),
        )
    return first


def _faults(table: Mapping[str, Any]) -> Iterator[str]:
    """The faults inside a file's tables; without any, the contradictions between them."""
    try:
        file = _ProfileTable.model_validate(table)
    except pydantic.ValidationError as error:
        yield from (fault(failure, _ProfileTable) for failure in error.errors())
        return
    for name, rows in (
        *(("sizes", file.sizes), ("times", file.times)),
        *(("peaks", file.peaks), ("links", file.links)),
    ):
        settings = Counter(row.setting for row in rows)
        for setting, times in settings.items():
            if times > 1:
                yield f"{name}: {shown(setting)} is listed {times} times"
    layered = [(f"sizes.{i}", len(row.layers)) for i, row in enumerate(file.sizes)]
    layered += [(f"times.{i}", len(row.layers)) for i, row in enumerate(file.times)]
    for i, split in enumerate(file.splits):
        if len(split.parts) != len(split.kinds):
            yield f"splits.{i}.parts: {len(split.parts)} of {len(split.kinds)} places"
    for where, num in layered:
        if num != len(file.layers):
            yield f"{where}.layers: {num} of {len(file.layers)} layers"


_MESSAGE_BYTES = 1 << 18  # by which links are compared


def with_measured(
    cluster: Cluster, links: Sequence[MeasuredLink]
) -> tuple[Cluster, tuple[str, ...]]:
    """A cluster with measured links, and a line for each of them.

    A described link stays unless it was measured in its own mesh: elsewhere the same kinds of
    devices may be linked in another way.
    """
    if not links or len(cluster.devices) < 2:
        return cluster, ()
    nodes = cluster.nodes or (Node(name="here"),)
    ranks = ranks_of_nodes(cluster)
    lines: dict[str, None] = {}

    def chosen(a: Sequence[int], b: Sequence[int], described: Link | None) -> Link | None:
        """The link between two devices of one node, or one of each of two nodes."""
        labels = ({cluster.devices[rank].label for rank in group} for group in (a, b))
        wanted = {tuple(sorted(pair)) for pair in itertools.product(*labels)}
        met = [x for x in links if x.kinds in wanted and x.in_node == (a is b)]
        slowest = max(met, key=lambda x: x.link.seconds(_MESSAGE_BYTES), default=None)
        if slowest is None or (described is not None and slowest.mesh != cluster.name):
            return described
        line = f"link {'in a node' if a is b else 'between nodes'}: {link_in_words(slowest.link)}"
        if described is not None and described != slowest.link:
            line += f" measured, {link_in_words(described)} described: the measured one counts"
        else:
            line += " measured"
        lines[line] = None
        return slowest.link

    between: dict[tuple[str, str], Link] = {(a, b): link for a, b, link in cluster.links}
    seen = set()
    for i, j in itertools.combinations(range(len(nodes)), 2):
        first, second = sorted((nodes[i].name, nodes[j].name))
        if (first, second) in seen or not (ranks[i] and ranks[j]):
            continue
        seen.add((first, second))
        link = chosen(ranks[i], ranks[j], cluster.link(ranks[i][0], ranks[j][0]))
        if link is not None:
            between[first, second] = link
    linked = {
        "nodes": tuple(
            node.model_copy(update={"link": chosen(group, group, node.link)})
            for node, group in zip(nodes, ranks, strict=True)
        ),
        "links": tuple((*names, link) for names, link in between.items()),
    }
    return cluster.model_copy(update=linked), tuple(lines)


def are_all_known(cluster: Cluster) -> bool:
    """Whether the link between any two devices is known."""
    groups = [group for group in ranks_of_nodes(cluster) if group]
    inside = (cluster.link(*group[:2]) for group in groups if len(group) > 1)
    pairs = itertools.combinations(range(len(groups)), 2)
    if cluster.default_link is None:
        between = (cluster.link(groups[i][0], groups[j][0]) for i, j in pairs)
        return all(link is not None for link in itertools.chain(inside, between))
    return all(link is not None for link in inside)


def ranks_of_nodes(cluster: Cluster) -> list[list[int]]:
    """The devices of each node."""
    ranks: list[list[int]] = [[] for _ in cluster.nodes or range(1)]
    for rank, device in enumerate(cluster.devices):
        ranks[device.node].append(rank)
    return ranks


def link_in_words(link: Link) -> str:
    """The bandwidth and the latency of a link."""
    rate, latency = link.bytes_per_second / 1e9, link.latency_seconds * 1e6
    words = f"{rate:.3g} GB/s, {latency:.3g} us"
    if link.all_reduce_seconds:
        words += f", {link.all_reduce_seconds * 1e6:.3g} us for an all-reduce"
    return words
