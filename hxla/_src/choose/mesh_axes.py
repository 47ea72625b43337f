"""Mesh axes inside a replica, from annotations, rules or a mesh, and their roles.

References:
    Whale, USENIX ATC 2022, section 3.2 (virtual devices, sharding patterns, bridges).
"""

import itertools
import math
from collections.abc import Sequence

from ..core.errors import AnnotationError, PlanError
from ..core.files import nearest
from ..core.types import DATA_AXIS, STAGE_AXIS, TENSOR_AXIS
from ..graph.graph import Graph
from ..graph.parts import stacked_dims
from ..plan.axis_assignment import Axes, Roles
from ..plan.parts import Role
from ..plan.rules import AXES, Resolved, RuleSet
from ..plan.virtual_devices import DeviceLayout, Request, VirtualDevices, assign_devices

#: Inner axes that shard the batch, not parameters.
BATCH_AXES = ("fsdp", "sequence")


def resolve_rules(graph: Graph, rules: RuleSet, axes: Axes, *, unlike: bool = False) -> Resolved:
    """The sharding of a graph's parameters on a mesh by rules: see `RuleSet.resolve`.

    Raises:
        AnnotationError: As `RuleSet.resolve`, or if an axis is neither usual nor in a rule, so that
            all devices along it would do the same.
    """
    known = [*AXES, *(axis for rule in rules.rules for dim in rule.axes for axis in dim)]
    for name, _ in axes:
        if name not in known:
            raise AnnotationError(
                f"no rule of {rules.name!r} shards over the mesh axis {name!r}: did you mean "
                f"{nearest(name, known)!r}?"
            )
    return rules.resolve(
        graph.param_names,
        graph.param_shapes,
        dict(axes),
        logical=graph.param_logical,
        unlike=unlike,
        stacked=stacked_dims(graph),
    )


def axes_of_annotations(
    graph: Graph,
    num_devices: int,
    *,
    nodes: Sequence[int] | None = None,
    share: bool = False,
    prefer_intra_node: bool = True,
    layout: DeviceLayout = "auto",
) -> tuple[VirtualDevices, Axes, Roles]:
    """Virtual devices, and the mesh axes inside a replica; none if every device is a replica.

    Raises:
        PlanError: If the devices do not fit, or stages are unlike in strategy or count.
    """
    requests = requests_of(graph)
    virtual = assign_devices(
        requests,
        num_devices,
        nodes=nodes,
        share=share,
        prefer_intra_node=prefer_intra_node,
        layout=layout,
    )
    if len(set(virtual.devices[0])) > 1:
        counts = {len(devices) for devices in virtual.devices[0]}
        kinds = {r.kind for r in requests}
        if len(counts) > 1 or len(kinds) > 1 or any(r.copies > 1 for r in requests):
            raise PlanError(_no_pipeline(requests, virtual))
        inner, roles = split_over(graph, counts.pop()) if kinds == {"split"} else ((), {})
        return virtual, ((STAGE_AXIS, len(requests)), *inner), roles
    if all(r.kind == "replicate" for r in requests):
        return virtual, (), {}
    axes, roles = _axes(requests, _levels(requests, len(virtual.replica(0))))
    return virtual, axes, roles


def roles_of_mesh(graph: Graph, axes: Axes, *, by_rules: bool) -> Roles:
    """The role of each inner axis of a user's mesh for each TaskGraph.

    Raises:
        PlanError: If nothing gives an axis a role, or an annotation disagrees.
    """
    kinds = [t.strategy for t in graph.task_graphs]
    size = math.prod(n for name, n in axes if name not in BATCH_AXES)
    for task in graph.task_graphs:
        asked = task.device_count
        if task.strategy == "split" and not by_rules and asked not in (None, size):
            raise PlanError(
                f"hxla.{task.label} at {task.source} asks for {asked} devices, the mesh splits "
                f"over {size} ({' x '.join(f'{name}={n}' for name, n in axes)}): use "
                "hxla.split() without a count, or a mesh that agrees"
            )
    roles: dict[str, tuple[Role, ...]] = {}
    for name, _ in axes:
        if name in BATCH_AXES:
            roles[name] = tuple("replicate" for _ in kinds)
        elif by_rules:
            roles[name] = tuple("rules" for _ in kinds)
        elif "split" in kinds:
            roles[name] = tuple(kinds)
        else:
            raise PlanError(
                f"the mesh has an axis {name!r}, but neither rules nor a hxla.split in the model "
                "say what it cuts: pass rules='decoder' (or your own), annotate the model, or use "
                f"a mesh with the one axis {DATA_AXIS!r}"
            )
    return roles


def split_over(graph: Graph, num_devices: int) -> tuple[Axes, Roles]:
    """One axis that splits every TaskGraph, with its roles; none for a single device."""
    split: Role = "split"
    axes: Axes = ((TENSOR_AXIS, num_devices),) if num_devices > 1 else ()
    return axes, {name: (split,) * len(graph.task_graphs) for name, _ in axes}


def requests_of(graph: Graph) -> tuple[Request, ...]:
    """The devices that the TaskGraphs request."""
    return tuple(
        Request(kind=t.strategy, device_count=t.device_count, copies=copies, label=t.label)
        for t, copies in zip(graph.task_graphs, graph.nested, strict=True)
    )


def _levels(requests: Sequence[Request], size: int) -> list[int]:
    counts = {r.device_count for r in requests if r.kind == "split" and r.device_count is not None}
    levels = sorted(counts | {size})
    for small, large in itertools.pairwise(levels):
        if large % small:
            raise PlanError(
                f"splits over {small} and {large} devices share {size} devices, but {large} is no "
                f"multiple of {small}: use counts that divide one another"
            )
    return levels


def _axes(
    requests: Sequence[Request], levels: Sequence[int]
) -> tuple[tuple[tuple[str, int], ...], dict[str, tuple[Role, ...]]]:
    """One mesh axis for each level, innermost last; a split takes those up to its count."""
    axes: list[tuple[str, int]] = []
    roles: dict[str, tuple[Role, ...]] = {}
    below = 1
    for i, level in enumerate(levels):
        if level == below:
            continue
        name = TENSOR_AXIS if i == 0 else f"{TENSOR_AXIS}{i + 1}"
        axes.insert(0, (name, level // below))
        roles[name] = tuple(
            "split"
            if r.kind == "split" and (r.device_count or levels[-1]) >= level
            else "replicate"
            for r in requests
        )
        below = level
    return tuple(axes), roles


def _no_pipeline(requests: Sequence[Request], virtual: VirtualDevices) -> str:
    lines = [
        f"  {i}: {r.label} on devices {list(devices)}"
        for i, (r, devices) in enumerate(zip(requests, virtual.devices[0], strict=True))
    ]
    return (
        "TaskGraphs on different devices are stages of a pipeline, which hxla runs where all are "
        "hxla.replicate, or all hxla.split, of the same count:\n"
        + "\n".join(lines)
        + "\nlet them share devices with config={'cluster': {'share_devices': True}}, or give "
        "them no counts"
    )
