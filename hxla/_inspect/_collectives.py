"""Every collective of a module."""

import math
from collections.abc import Sequence

from .._cluster._cluster import Cluster
from .._planner._cost import LinkSeconds, all_gather_seconds, ring_all_reduce_seconds
from . import _replica_groups as _groups
from . import _shapes
from ._call_graph import CallContext, total_runs
from ._dataflow import Flow
from ._hlo_text import Computation, Instruction, Module
from ._origin import Origins
from ._program import Collective, Origin
from ._replica_groups import Groups, Mesh

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
OPCODES = {kind: (kind, False) for kind in KINDS} | {f"{k}-start": (k, True) for k in KINDS}
# Their start returns what it was given beside what it makes.
_START_KEEPS_OPERANDS = frozenset({"all-gather", "reduce-scatter", "collective-permute"})
_BY_PARTITION = frozenset({"all-to-all", "ragged-all-to-all", "collective-broadcast"})
_MAX_GROUPS = 4096  # kept in full


def collectives(
    module: Module,
    contexts: dict[str, list[CallContext]],
    origins: Origins,
    *,
    mesh: Mesh,
    cluster: Cluster | None,
    flow: Flow,
    paths: dict[str, str],
) -> tuple[Collective, ...]:
    """List them.

    Args:
        module: Read.
        contexts: Of its computations.
        origins: Of its instructions.
        mesh: Axes, or nothing.
        cluster: For predictions, its devices in the order of the mesh.
        flow: Of the module.
        paths: Of the entry's parameters, by name.
    """
    out = []
    for computation in module.computations.values():
        if not computation.opcodes & OPCODES.keys():
            continue
        for instruction in computation.instructions.values():
            found = OPCODES.get(instruction.opcode)
            if found is None:
                continue
            kind, is_start = found
            ways = contexts.get(computation.name, [])
            out.append(
                _collective(
                    module,
                    computation,
                    instruction,
                    kind,
                    is_start,
                    ways,
                    origins,
                    mesh,
                    cluster,
                    flow,
                    paths,
                )
            )
    return tuple(out)


def _collective(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    is_start: bool,
    ways: list[CallContext],
    origins: Origins,
    mesh: Mesh,
    cluster: Cluster | None,
    flow: Flow,
    paths: dict[str, str],
) -> Collective:
    groups, missing = _devices(module, instruction, kind)
    is_permute = kind == "collective-permute"
    size = 2 if is_permute else max((len(g) for g in groups), default=1)
    axes = None
    if not missing:
        axes, missing = _axes(groups, mesh, module, is_permute)
    shape = instruction.shape
    if is_start and kind in _START_KEEPS_OPERANDS:
        elements = _shapes.tuple_elements(shape)
        shape = elements[1] if len(elements) > 1 else shape
    arrays = _shapes.arrays(shape)
    num_bytes = _shapes.shape_bytes(shape)
    if kind == "reduce-scatter":
        dim = int((instruction.attribute("dimensions") or "{0}").strip("{} "))
        arrays = tuple(
            (t, tuple(n * size if i == dim else n for i, n in enumerate(d))) for t, d in arrays
        )
        num_bytes *= size
    names = tuple(_shapes.array_text(*array) for array in arrays)
    if kind == "all-to-all" and len(names) == size and len(set(names)) == 1:
        names = (f"{size} x {names[0]}",)  # one array, as its pieces
    first = ways[0] if ways else CallContext()
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
        runs=total_runs(ways) if ways else 0,
        is_conditional=any(c.is_conditional for c in ways),
        operands=_arguments(instruction, computation, flow, paths),
        origin=_origin(instruction, computation, origins, flow),
        seconds=None if cluster is None else _seconds(kind, num_bytes, groups, cluster),
    )


def _origin(
    instruction: Instruction, computation: Computation, origins: Origins, flow: Flow
) -> Origin:
    """Its own, else that of what it is made for."""
    own = origins.of(instruction, computation)
    if own.missing:
        readers = (origins.of(r, computation) for r in flow.readers(computation, instruction))
        return next((origin for origin in readers if not origin.missing), own)
    return own


def _devices(module: Module, instruction: Instruction, kind: str) -> tuple[Groups, str]:
    num = module.num_partitions * module.num_replicas
    if kind == "collective-permute":
        return _groups.pairs(instruction.attribute("source_target_pairs")), ""
    text = instruction.attribute("replica_groups")
    has_channel = ", channel_id=" in instruction.rest
    is_global = "use_global_device_ids=true" in instruction.rest
    try:
        if module.num_partitions > 1 and not is_global and kind not in _BY_PARTITION:
            # Groups of replicas, and with a channel all partitions of them together.
            groups = _groups.parse(text, module.num_replicas)
            n = module.num_partitions
            if has_channel:
                return tuple(tuple(r * n + p for r in g for p in range(n)) for g in groups), ""
            return tuple(tuple(r * n + p for r in g) for g in groups for p in range(n)), ""
        return _groups.parse(text, num), ""
    except ValueError as error:
        return (), str(error)


def _axes(
    groups: Groups, mesh: Mesh, module: Module, is_permute: bool
) -> tuple[tuple[str, ...] | None, str]:
    if not mesh:
        return None, "the mesh is not known: name its axes"
    total = math.prod(n for _, n in mesh)
    num = module.num_partitions * module.num_replicas
    if total != num:
        return None, f"the mesh has {total} devices and the program {num}"
    axes = _groups.axes_of_pairs(groups, mesh) if is_permute else _groups.axes_of(groups, mesh)
    return axes, "" if axes is not None else "its groups are not those of whole axes"


def _arguments(
    instruction: Instruction, computation: Computation, flow: Flow, paths: dict[str, str]
) -> tuple[str, ...]:
    found = [flow.argument(computation, *operand) for operand in instruction.operands]
    return tuple(paths[a.name] for a in found if a is not None and a.name in paths)


def _seconds(kind: str, num_bytes: int, groups: Groups, cluster: Cluster) -> float | None:
    """Time of the slowest group: of a ring, its slowest link."""
    slowest = 0.0
    for group in groups:
        link = _slowest(group, cluster)
        if link is None:
            if len(set(group)) > 1:
                return None
            continue
        slowest = max(slowest, _ring(kind, num_bytes, len(group), link))
    return slowest


def _slowest(group: Sequence[int], cluster: Cluster) -> LinkSeconds | None:
    links = []
    for a, b in zip(group, (*group[1:], group[0]), strict=True):
        if a != b:
            link = cluster.link(a, b) if max(a, b) < len(cluster.devices) else None
            if link is None:
                return None
            links.append(link)
    return max(links, key=lambda link: link.seconds(1 << 20)).seconds if links else None


def _ring(kind: str, num_bytes: int, num_devices: int, link: LinkSeconds) -> float:
    if kind == "all-reduce":
        return ring_all_reduce_seconds(num_bytes, num_devices, link)
    if kind in ("collective-permute", "collective-broadcast"):
        return link(num_bytes)
    return all_gather_seconds(num_bytes, num_devices, link)
