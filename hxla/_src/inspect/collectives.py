"""Every collective of a module, the devices that run it together, and their mesh axes."""

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from ..choose.collective_costs import LinkSeconds, all_gather_seconds, ring_all_reduce_seconds
from ..cluster.cluster import Cluster, Send, ring_transfers, transfer_seconds
from . import hlo_text
from .annotated_module import AnnotatedModule, CallContext
from .hlo_text import MOST_DEVICES, Computation, Instruction, Module
from .program import Collective, Origin

Mesh = tuple[tuple[str, int], ...]
Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"mesh\[([^\]]*)\](?:\s*,\s*device_ids=[^{]*)?\s*\{([^}]*)\}")


@functools.lru_cache(maxsize=1024)
def parse_groups(text: str | None, num_devices: int) -> Groups:
    """Read groups in any of XLA's three forms; `{}` and None are all devices together.

    Args:
        text: `{{0,1},{2,3}}`, `[2,2]<=[4]T(1,0)` or `mesh['d'=4] {'d'}`.

    Raises:
        ValueError: For a form that is not known.
    """
    if text is None or text.replace(" ", "") in ("{}", "{{}}"):
        return (tuple(range(num_devices)),)
    if iota := _IOTA.match(text):
        shape, dims = _ints(iota[1]), _ints(iota[2])
        ids = np.arange(_num_devices(dims)).reshape(dims)
        if iota[3]:
            ids = ids.transpose(_ints(iota[3]))
        return tuple(map(tuple, ids.reshape(shape[0], -1).tolist()))
    if named := _NAMED.match(text):
        mesh = mesh_of(named[1])
        return groups_of(mesh, [a for a in re.findall(r"'([^']+)'", named[2])])
    groups = re.findall(r"\{([\d,\s]+)\}", text)
    if not groups:
        raise ValueError(f"replica groups of a form not known: {text[:60]}")
    return tuple(tuple(_ints(group)) for group in groups)


@functools.lru_cache(maxsize=1024)
def parse_pairs(text: str | None) -> Groups:
    """Sources and targets of a collective-permute."""
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text or ""))


def mesh_of(text: str) -> Mesh:
    """`'d'=2,'t'=4` or `"d"=2, "t"=4` as axes."""
    return tuple((name, int(n)) for name, n in re.findall(r"['\"]?(\w+)['\"]?=(\d+)", text))


def groups_of(mesh: Mesh, axes: Sequence[str]) -> Groups:
    """Groups of devices that differ along these axes only."""
    names = [name for name, _ in mesh]
    ids = np.arange(_num_devices([n for _, n in mesh])).reshape([n for _, n in mesh])
    rest = [i for i, name in enumerate(names) if name not in axes]
    along = [names.index(a) for a in axes]
    size = int(np.prod([mesh[i][1] for i in along], dtype=int))
    return tuple(map(tuple, ids.transpose([*rest, *along]).reshape(-1, size).tolist()))


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes that groups run over; None if no axes have these groups."""
    wanted = {frozenset(g) for g in groups}
    real = [name for name, size in mesh if size > 1]
    size = len(groups[0]) if groups else 0
    sizes = dict(mesh)
    for num in range(len(real) + 1):
        for axes in itertools.combinations(real, num):
            if np.prod([sizes[a] for a in axes], dtype=int) != size:
                continue
            if {frozenset(g) for g in groups_of(mesh, axes)} == wanted:
                return axes
    return None


def axes_of_pairs(permuted: Groups, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes along which some source and its target differ."""
    shape = [n for _, n in mesh]
    if any(i >= math.prod(shape) for pair in permuted for i in pair):
        return None
    places = np.unravel_index(np.array(permuted, int).reshape(-1, 2), shape)
    return tuple(
        name for (name, _), at in zip(mesh, places, strict=True) if (at[:, 0] != at[:, 1]).any()
    )


def _num_devices(shape: Sequence[int]) -> int:
    """The devices of a mesh.

    Raises:
        ValueError: Above `MOST_DEVICES`, because their list would fill the memory.
    """
    num = math.prod(shape)
    if num > MOST_DEVICES:
        raise ValueError(f"a mesh of {num:.3g} devices, {MOST_DEVICES} are the most")
    return num


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
OPCODES = {kind: (kind, False) for kind in KINDS} | {f"{k}-start": (k, True) for k in KINDS}
# Their start returns its operands beside its results.
_START_KEEPS_OPERANDS = frozenset({"all-gather", "reduce-scatter", "collective-permute"})
_BY_PARTITION = frozenset({"all-to-all", "ragged-all-to-all", "collective-broadcast"})
_MAX_GROUPS = 4096  # kept in full


def collectives(
    read: AnnotatedModule, mesh: Mesh, cluster: Cluster | None
) -> tuple[Collective, ...]:
    """List the collectives of a module.

    Args:
        mesh: Axes; empty if not known.
        cluster: Devices in the order of the mesh; None: no predictions.
    """
    places = read.module.find(OPCODES.keys())
    return tuple(_collective(read, i, computation, mesh, cluster) for i, computation in places)


def _collective(
    read: AnnotatedModule,
    instruction: Instruction,
    computation: Computation,
    mesh: Mesh,
    cluster: Cluster | None,
) -> Collective:
    kind, is_start = OPCODES[instruction.opcode]
    groups, missing = _devices(read.module, instruction, kind)
    is_permute = kind == "collective-permute"
    size = 2 if is_permute else max((len(g) for g in groups), default=1)
    axes = None
    if not missing:
        axes, missing = _axes(groups, mesh, read.module, is_permute)
    shape = instruction.shape
    if is_start and kind in _START_KEEPS_OPERANDS:
        elements = hlo_text.tuple_elements(shape)
        shape = elements[1] if len(elements) > 1 else shape
    arrays = hlo_text.arrays(shape)
    num_bytes = hlo_text.shape_bytes(shape)
    if kind == "reduce-scatter":
        dim = int((instruction.attribute("dimensions") or "{0}").strip("{} "))
        arrays = tuple(
            (t, tuple(n * size if i == dim else n for i, n in enumerate(d))) for t, d in arrays
        )
        num_bytes *= size
    names = tuple(hlo_text.array_text(*array) for array in arrays)
    if kind == "all-to-all" and len(names) == size and len(set(names)) == 1:
        names = (f"{size} x {names[0]}",)  # one array, as its pieces
    ways = read.contexts.get(computation.name, [])
    first = ways[0] if ways else CallContext()
    operands = [read.argument(computation, *operand) for operand in instruction.operands]
    return Collective(
        kind=kind,
        name=instruction.name,
        arrays=names,
        num_bytes=num_bytes,
        group_size=size,
        groups=groups[:_MAX_GROUPS],
        axes=axes,
        axes_missing=missing,
        is_async=is_start or first.is_async,
        loops=first.loops,
        runs=read.runs(computation),
        is_conditional=any(c.is_conditional for c in ways),
        operands=tuple(a.path for a in operands if a is not None),
        origin=_origin(read, instruction, computation),
        seconds=None if cluster is None else _seconds(kind, num_bytes, groups, cluster),
    )


def _origin(read: AnnotatedModule, instruction: Instruction, computation: Computation) -> Origin:
    """The instruction's origin; if it is not known, that of an instruction that reads it."""
    origin = read.origins.of(instruction, computation)
    if origin.missing:
        readers = read.flow.readers(computation, instruction)
        of_readers = (read.origins.of(reader, computation) for reader in readers)
        return next((o for o in of_readers if not o.missing), origin)
    return origin


def _devices(module: Module, instruction: Instruction, kind: str) -> tuple[Groups, str]:
    if kind == "collective-permute":
        return parse_pairs(instruction.attribute("source_target_pairs")), ""
    text = instruction.attribute("replica_groups")
    is_global = "use_global_device_ids=true" in instruction.rest
    n = module.num_partitions
    try:
        if n == 1 or is_global or kind in _BY_PARTITION:
            return parse_groups(text, module.num_devices), ""
        # Groups of replicas, and with a channel all partitions of them together.
        groups = parse_groups(text, module.num_replicas)
    except ValueError as error:
        return (), str(error)
    if ", channel_id=" in instruction.rest:
        return tuple(tuple(r * n + p for r in g for p in range(n)) for g in groups), ""
    return tuple(tuple(r * n + p for r in g) for g in groups for p in range(n)), ""


def _axes(
    groups: Groups, mesh: Mesh, module: Module, is_permute: bool
) -> tuple[tuple[str, ...] | None, str]:
    if not mesh:
        return None, "the mesh is not known: name its axes"
    total = math.prod(n for _, n in mesh)
    if total != module.num_devices:
        return None, f"the mesh has {total} devices and the program {module.num_devices}"
    axes = axes_of_pairs(groups, mesh) if is_permute else axes_of(groups, mesh)
    return axes, "" if axes is not None else "its groups are not those of whole axes"


def _seconds(kind: str, num_bytes: int, groups: Groups, cluster: Cluster) -> float | None:
    """Seconds of the slowest group while all run at once; None if a link is not described.

    Groups are rings, as slow as their slowest link, and share the network cards of their nodes.
    """
    if max((rank for group in groups for rank in group), default=0) >= len(cluster.devices):
        return None
    transfers: list[Send] = []
    sizes: list[int] = []
    for group in groups:
        if kind == "collective-permute":
            pairs = itertools.pairwise(group)
            sends = [Send(sender=a, receiver=b, num_bytes=num_bytes) for a, b in pairs if a != b]
        else:
            in_ring = kind != "collective-broadcast"
            sends = ring_transfers(cluster, group, num_bytes / len(group) if in_ring else num_bytes)
        transfers += sends
        sizes += [len(group)] * len(sends)
    slowest = 0.0
    for seconds, size in zip(transfer_seconds(cluster, transfers), sizes, strict=True):
        if seconds is None:
            return None
        slowest = max(slowest, _ring(kind, num_bytes, size, functools.partial(_same, seconds)))
    return slowest


def _same(seconds: float, _num_bytes: float) -> float:  # the message's size is the transfer's
    return seconds


def _ring(kind: str, num_bytes: int, num_devices: int, link: LinkSeconds) -> float:
    if kind == "all-reduce":
        return ring_all_reduce_seconds(num_bytes, num_devices, link)
    if kind in ("collective-permute", "collective-broadcast"):
        return link(num_bytes)
    return all_gather_seconds(num_bytes, num_devices, link)
