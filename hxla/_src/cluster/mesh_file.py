"""Mesh files: a described cluster as TOML that people read, review and contribute."""

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any

import pydantic

from ..core import files as _files
from ..core.errors import MeshError
from ..core.files import fault, listed, named, nearest, read_toml
from .cluster import Cluster, Device, Link, NetworkCard, Node, Rate, Speed


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


# No cluster exceeds these limits, which keep products of figures finite.
_MOST_DEVICES, _MOST_TABLES = 65536, 1024
_Figure = Annotated[float, pydantic.Field(ge=1e-12, le=1e12)]


class _Rate(_Table):
    teraflops_per_second: _Figure
    measured: bool = False
    source: str = ""


class _Rates(_Table):
    float64: _Rate | None = None
    float32: _Rate | None = None
    tensorfloat32: _Rate | None = None
    bfloat16: _Rate | None = None
    float16: _Rate | None = None
    float8: _Rate | None = None


class _Speed(_Table):
    steps_per_second: _Figure
    batch_size: int = pydantic.Field(ge=1, le=2**40)
    source: str = ""


class _Device(_Table):
    kind: str = pydantic.Field(min_length=1)
    count: int = pydantic.Field(1, ge=1, le=65536)
    core_share: float | None = pydantic.Field(None, ge=0.001, le=1)  # the least quota of Linux
    memory_gib: float | None = pydantic.Field(None, ge=2**-30, le=2**30)
    memory_gigabytes_per_second: _Figure | None = None
    host_memory_gib: float | None = pydantic.Field(None, ge=2**-30, le=2**30)
    host_gigabytes_per_second: _Figure | None = None
    disk_gigabytes_per_second: _Figure | None = None
    multiprocessors: int | None = pydantic.Field(None, ge=1, le=65536)
    launch_microseconds: _Figure | None = None
    rates: _Rates = _Rates()
    speeds: dict[str, _Speed] = {}
    uuids: list[str] = []
    source: str = ""

    @pydantic.field_validator("core_share")
    @classmethod
    def _share_is_for_cpus(cls, share: float | None, info: pydantic.ValidationInfo) -> float | None:
        kind = info.data.get("kind", "cpu")
        if share is not None and kind != "cpu":
            raise ValueError(f"core_share is for kind 'cpu', not {kind!r}")
        return share


class _Point(_Table):
    message_bytes: Annotated[float, pydantic.Field(gt=0, le=2**60)]
    gigabytes_per_second: _Figure


class _Link(_Table):
    gigabytes_per_second: _Figure
    latency_microseconds: float = pydantic.Field(0.0, ge=0, le=1e12)
    curve: list[_Point] = []
    source: str = ""

    @pydantic.field_validator("curve")
    @classmethod
    def _sizes_grow(cls, curve: list[_Point]) -> list[_Point]:
        sizes = [point.message_bytes for point in curve]
        if sizes != sorted(set(sizes)):
            raise ValueError("message_bytes must grow from point to point")
        return curve


class _Between(_Link):
    between: Annotated[list[str], pydantic.Field(min_length=2, max_length=2)] | None = None


class _NetworkCard(_Table):
    gigabytes_per_second: _Figure
    duplex: bool = True
    source: str = ""


class _Node(_Table):
    name: str = pydantic.Field(min_length=1)
    count: int = pydantic.Field(1, ge=1, le=65536)
    link: _Link | None = None
    network_card: _NetworkCard | None = None
    device: list[_Device] = pydantic.Field(min_length=1)


class _MeshFileTable(_Table):
    name: str = pydantic.Field(min_length=1)
    description: str = ""
    device: list[_Device] = pydantic.Field([], max_length=_MOST_TABLES)
    node: list[_Node] = pydantic.Field([], max_length=_MOST_TABLES)
    link: list[_Between] = pydantic.Field([], max_length=_MOST_DEVICES)


def load_cluster(name_or_path: str) -> Cluster:
    """Read a mesh file.

    Args:
        name_or_path: A built-in name (`cpu-1.0-0.33`) or a path.

    Returns:
        The described cluster, with each node and each device repeated `count` times.

    Raises:
        MeshError: If there is no such file, or it has faults: all at once, each with its key, the
            nearest known key and the value.

    Example:
        >>> import hxla
        >>> cluster = hxla.load_cluster("whale-8v100-8p100")
        >>> len(cluster.devices), cluster.link(0, 8).bytes_per_second
        (16, 6250000000.0)
    """
    path = _files.find("meshes", name_or_path)
    table = read_toml(path, named("mesh file", path, MeshError))
    faults = list(_faults_between_tables(table))
    try:
        parsed = _MeshFileTable.model_validate(table)
    except pydantic.ValidationError as error:
        faults = [_fault(failure) for failure in error.errors()] + faults
    if faults:
        raise MeshError(f"{path} has faults:" + listed(faults))
    file = "" if _files.is_built_in("meshes", path) else str(path)
    return _cluster(parsed).model_copy(update={"file": file})


def _cluster(file: _MeshFileTable) -> Cluster:
    nodes = [node for node in file.node for _ in range(node.count)]
    devices = [
        device
        for index, tables in enumerate([node.device for node in nodes] or [file.device])
        for table in tables
        for device in _devices(table, index)
    ]
    named = [(sorted(link.between), link) for link in file.link if link.between]
    defaults = [_link(link) for link in file.link if not link.between]
    return Cluster(
        name=file.name,
        description=file.description,
        devices=tuple(devices),
        nodes=tuple(map(_node, nodes)),
        links=tuple((a, b, _link(link)) for (a, b), link in named),
        default_link=defaults[0] if defaults else None,
    )


def _node(table: _Node) -> Node:
    return Node(
        name=table.name,
        link=_link(table.link) if table.link else None,
        network_card=_network_card(table.network_card) if table.network_card else None,
    )


def _network_card(table: _NetworkCard) -> NetworkCard:
    return NetworkCard(
        bytes_per_second=_times_ten_to(9, table.gigabytes_per_second),
        duplex=table.duplex,
        source=table.source,
    )


def _devices(table: _Device, node: int) -> Iterator[Device]:
    rates = [(dtype, getattr(table.rates, dtype)) for dtype in _Rates.model_fields]
    device = Device(
        kind=table.kind,
        memory_bytes=_gib(table.memory_gib),
        core_share=table.core_share if table.kind != "cpu" else table.core_share or 1.0,
        node=node,
        memory_bytes_per_second=_maybe(9, table.memory_gigabytes_per_second),
        host_memory_bytes=_gib(table.host_memory_gib),
        host_bytes_per_second=_maybe(9, table.host_gigabytes_per_second),
        disk_bytes_per_second=_maybe(9, table.disk_gigabytes_per_second),
        multiprocessors=table.multiprocessors,
        launch_seconds=_maybe(-6, table.launch_microseconds),
        rates=tuple(
            Rate(
                dtype=dtype,
                flops_per_second=_times_ten_to(12, rate.teraflops_per_second),
                measured=rate.measured,
                source=rate.source or table.source,
            )
            for dtype, rate in rates
            if rate is not None
        ),
        speeds=tuple(
            Speed(model=model, **speed.model_dump()) for model, speed in table.speeds.items()
        ),
        source=table.source,
    )
    for _, uuid in itertools.zip_longest(range(table.count), table.uuids):
        yield device.model_copy(update={"uuid": uuid})


def _link(table: _Link) -> Link:
    return Link(
        bytes_per_second=_times_ten_to(9, table.gigabytes_per_second),
        latency_seconds=_times_ten_to(-6, table.latency_microseconds),
        curve=tuple(
            (point.message_bytes, _times_ten_to(9, point.gigabytes_per_second))
            for point in table.curve
        ),
        source=table.source,
    )


def _gib(value: float | None) -> int | None:
    return None if value is None else int(value * 2**30)


def _maybe(power: int, value: float | None) -> float | None:
    return None if value is None else _times_ten_to(power, value)


def _times_ten_to(power: int, value: float) -> float:
    """Exact in decimal, so that a written file is read back as the same numbers."""
    return float(Decimal(repr(value)).scaleb(power))


def _fault(failure: Any) -> str:
    if failure["type"] == "list_type" and failure["loc"][-1] in ("device", "node", "link"):
        path = ".".join(map(str, failure["loc"]))
        return f"{path}: this is a list of tables, write [[{path}]]"
    return fault(failure, _MeshFileTable)


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(table: Mapping[str, Any]) -> int:
    count = table.get("count", 1)
    return count if type(count) is int and 1 <= count <= _MOST_DEVICES else 1


def _faults_between_tables(file: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions between tables; faults inside a table do not hide them."""
    nodes, links = _tables(file.get("node")), _tables(file.get("link"))
    if not file.get("device") and not file.get("node"):
        yield "device: missing, add [[device]], or [[node]] with [[node.device]]"
    if file.get("device") and nodes:
        yield "device: belongs to no node, write it as [[node.device]] below its [[node]]"
    num = sum(map(_count, _tables(file.get("device")))) + sum(
        _count(node) * sum(map(_count, _tables(node.get("device")))) for node in nodes
    )
    if num > _MOST_DEVICES:
        yield f"count: {num} devices in all, describe {_MOST_DEVICES} at most"
    if max(len(nodes), len(_tables(file.get("device")))) > _MOST_TABLES:
        return  # the tables' own validation reports it
    names = [str(node.get("name")) for node in nodes]
    for i, (name, node) in enumerate(zip(names, nodes, strict=True)):
        if name in names[:i]:
            yield f"node.{i}.name: {name!r} names an earlier node; like nodes are one with a count"
        inside = sum(map(_count, _tables(node.get("device"))))
        if inside > 1 and "link" not in node:
            yield f"node.{i}.link: missing for {name!r} of {inside} devices; add [node.link]"
    yield from _uuid_faults({f"node.{i}.": node for i, node in enumerate(nodes)} or {"": file})
    if nodes:
        counts = dict(zip(names, map(_count, nodes), strict=True))
        yield from _link_faults(links, counts)
    elif links:
        yield "link: there are no nodes to link; write [[node]], with [node.link] inside one"


def _uuid_faults(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for prefix, node in nodes.items():
        for j, device in enumerate(_tables(node.get("device"))):
            uuids = device.get("uuids", [])
            path = f"{prefix}device.{j}.uuids"
            if not uuids or not isinstance(uuids, list):
                continue
            num = _count(device) * _count(node)
            if len(uuids) != num or _count(node) > 1:
                yield f"{path}: names {len(uuids)} cards, the table describes {num} devices"
            for uuid in map(str, uuids):
                if uuid in seen:
                    yield f"{path}: {uuid!r} is in {seen[uuid]} too; list each card once"
                seen.setdefault(uuid, path)


def _link_faults(links: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> Iterator[str]:
    pairs: set[tuple[str, ...] | None] = set()
    for i, link in enumerate(links):
        between = link.get("between")
        names = [str(n) for n in between] if isinstance(between, list) else []
        for name in names:
            if name not in counts:
                near = nearest(name, counts)
                yield f"link.{i}.between: no node {name[:80]!r}, did you mean {near!r}?"
        if len(names) == 2 and names[0] == names[1] and counts.get(names[0]) == 1:
            yield f"link.{i}.between: there is one node {names[0]!r}; inside it is [node.link]"
        pair = tuple(sorted(names)) if names else None
        if pair in pairs:
            what = "the link between {} and {}".format(*map(repr, pair)) if pair else "the default"
            yield f"link.{i}: repeats {what}, keep one"
        pairs.add(pair)
    if None in pairs:
        return
    for pair in itertools.combinations_with_replacement(sorted(counts), 2):
        if pair not in pairs and (pair[0] != pair[1] or counts[pair[0]] > 1):
            yield (
                f"link: missing between nodes {pair[0]!r} and {pair[1]!r}, add [[link]] with "
                f"between = {json.dumps(pair)}, or one without `between` for all other pairs"
            )


@functools.lru_cache(maxsize=64)  # each plan of a search has it
def dump_cluster(cluster: Cluster) -> str:
    """The mesh file of a cluster, which `load_cluster` reads back as an equal one.

    Args:
        cluster: Nodes of one name must have equal devices. Figures have at most 15 significant
            digits.
    """
    lines = [f"name = {_text(cluster.name)}"]
    if cluster.description:
        lines.append(f"description = {_text(cluster.description)}")
    if not cluster.nodes:
        lines += _device_lines(cluster.devices, "device")
    first = 0
    for name, like in itertools.groupby(cluster.nodes, key=lambda node: node.name):
        nodes = list(like)
        lines += ["", "[[node]]", f"name = {_text(name)}"]
        if len(nodes) > 1:
            lines.append(f"count = {len(nodes)}")
        if nodes[0].link:
            lines += ["", "[node.link]", *_link_lines(nodes[0].link)]
        if nodes[0].network_card:
            lines += ["", "[node.network_card]", *_network_card_lines(nodes[0].network_card)]
        lines += _device_lines([d for d in cluster.devices if d.node == first], "node.device")
        first += len(nodes)
    for a, b, link in cluster.links:
        lines += ["", "[[link]]", f"between = [{_text(a)}, {_text(b)}]", *_link_lines(link)]
    if cluster.default_link:
        lines += ["", "[[link]]", *_link_lines(cluster.default_link)]
    return "\n".join(lines) + "\n"


def _device_lines(devices: Iterable[Device], table: str) -> Iterator[str]:
    alike = itertools.groupby(devices, key=lambda d: d.model_copy(update={"uuid": None}))
    for device, same in alike:
        uuids = [d.uuid for d in same]
        yield from ("", f"[[{table}]]", f"kind = {_text(device.kind)}")
        if len(uuids) > 1:
            yield f"count = {len(uuids)}"
        if all(uuids):
            yield f"uuids = {json.dumps(uuids)}"
        if device.core_share is not None:
            yield f"core_share = {device.core_share!r}"
        if device.memory_bytes is not None:
            yield f"memory_gib = {device.memory_bytes / 2**30!r}"
        if device.host_memory_bytes is not None:
            yield f"host_memory_gib = {device.host_memory_bytes / 2**30!r}"
        for place in ("memory", "host", "disk"):
            rate = getattr(device, f"{place}_bytes_per_second")
            if rate is not None:
                yield f"{place}_gigabytes_per_second = {_number(-9, rate)}"
        if device.multiprocessors is not None:
            yield f"multiprocessors = {device.multiprocessors}"
        if device.launch_seconds is not None:
            yield f"launch_microseconds = {_number(6, device.launch_seconds)}"
        yield from _source_lines(device.source)
        if device.rates:
            yield f"[{table}.rates]"
        for products in device.rates:
            figures = {"teraflops_per_second": _number(-12, products.flops_per_second)}
            figures |= {"measured": "true"} if products.measured else {}
            source = products.source if products.source != device.source else ""
            yield f"{products.dtype} = {_inline(figures, source)}"
        if device.speeds:
            yield f"[{table}.speeds]"
        for speed in device.speeds:
            figures = {
                "steps_per_second": repr(speed.steps_per_second),
                "batch_size": str(speed.batch_size),
            }
            yield f"{_text(speed.model)} = {_inline(figures, speed.source)}"


def _link_lines(link: Link) -> Iterator[str]:
    yield f"gigabytes_per_second = {_number(-9, link.bytes_per_second)}"
    if link.latency_seconds:
        yield f"latency_microseconds = {_number(6, link.latency_seconds)}"
    if link.curve:
        yield "curve = ["
        for size, rate in link.curve:
            figures = {"message_bytes": _number(0, size), "gigabytes_per_second": _number(-9, rate)}
            yield f"    {_inline(figures, '')},"
        yield "]"
    yield from _source_lines(link.source)


def _network_card_lines(card: NetworkCard) -> Iterator[str]:
    yield f"gigabytes_per_second = {_number(-9, card.bytes_per_second)}"
    if not card.duplex:
        yield "duplex = false"
    yield from _source_lines(card.source)


def _source_lines(source: str) -> Iterator[str]:
    if source:
        yield f"source = {_text(source)}"


def _inline(figures: dict[str, str], source: str) -> str:
    items = figures | ({"source": _text(source)} if source else {})
    return "{ " + ", ".join(f"{key} = {value}" for key, value in items.items()) + " }"


def _number(power: int, value: float) -> str:
    return f"{Decimal(repr(value)).scaleb(power).normalize():f}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
