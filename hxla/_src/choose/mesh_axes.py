"""Mesh axes inside a replica, from annotations, rules or a mesh, and their roles.

Virtual devices say which devices each TaskGraph gets.

References:
    Whale, USENIX ATC 2022, section 3.2 (virtual devices, sharding patterns, bridges).
    Whale, USENIX ATC 2022, section 3.2.1 (virtual devices from device counts; nested data
    parallelism; replicas within a node).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from ..core.errors import AnnotationError, PlanError
from ..core.files import nearest
from ..core.types import DATA_AXIS, DEVICE_AXIS, STAGE_AXIS, TENSOR_AXIS, TOKEN_AXIS
from ..graph.graph import Graph
from ..graph.parts import stacked_dims
from ..model.annotations import Kind
from ..plan.axis_assignment import Axes, Roles
from ..plan.parts import Role
from ..plan.rules import AXES, Resolved, RuleSet

DeviceLayout = Literal["auto", "all", "host"] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The devices that a TaskGraph asks for.

    Attributes:
        device_count: Devices of one copy of the TaskGraph; None: all devices.
        copies: Of the TaskGraph (`replicate(n)` around a `split`).
    """

    kind: Kind
    device_count: int | None
    copies: int = 1
    label: str = ""

    @property
    def num_devices(self) -> int | None:
        """Devices of all copies of the TaskGraph."""
        return None if self.device_count is None else self.device_count * self.copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualDevices:
    """Devices of every TaskGraph in every replica.

    Attributes:
        devices: For each replica and TaskGraph the numbers of its devices in the cluster.
    """

    devices: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_replicas(self) -> int:
        """Replicas of the whole model: nested data parallelism."""
        return len(self.devices)

    def replica(self, index: int) -> tuple[int, ...]:
        """All devices of one replica, in order."""
        return tuple(dict.fromkeys(d for task in self.devices[index] for d in task))


def assign_devices(
    requests: Sequence[Request],
    num_devices: int,
    *,
    nodes: Sequence[int] | None = None,
    share: bool = False,
    prefer_intra_node: bool = True,
    layout: DeviceLayout = "auto",
) -> VirtualDevices:
    """Give devices to TaskGraphs in order.

    A TaskGraph without a device count uses the devices of the whole replica. If the devices are a
    multiple of the TaskGraphs' counts together, there are that many replicas.

    Args:
        requests: For each TaskGraph, in the order of execution.
        nodes: Devices on each node, in order; None: one node.
        share: Whether TaskGraphs use the same devices instead of one set each.
        prefer_intra_node: Keep a replica on one node where the nodes' sizes allow it; otherwise
            its devices are spread over nodes in turn.
        layout: Where replicas are placed: `auto`, on all devices; `all`, one replica over all of
            them; `host`, inside each node; or inside lists of devices.

    Raises:
        PlanError: If the devices are no multiple of the request, with the counts that fit.
    """
    sizes = list(nodes or [num_devices])
    if sum(sizes) != num_devices:
        raise PlanError(f"nodes {sizes} have {sum(sizes)} devices, not {num_devices}")
    if layout != "auto":
        return _in_groups(requests, _layout_groups(layout, sizes), share, one_copy=layout == "all")
    asked = [r.num_devices for r in requests if r.num_devices is not None]
    if not asked:
        need = num_devices
    elif share:
        need = math.lcm(*asked)
    else:
        need = sum(asked)
    if need > num_devices or num_devices % need:
        listed = _listed(requests)
        fitting = [k * need for k in range(1, 5)]
        how = "together (they share devices)" if share else "one after another"
        hint = ""
        if not share and len(asked) > 1 and num_devices % math.lcm(*asked) == 0:
            hint = "; or let them share devices: config cluster.share_devices = true"
        raise PlanError(
            f"{num_devices} devices do not fit the TaskGraphs ({listed}), which need {need} {how}: "
            f"use {', '.join(map(str, fitting))}, ... devices{hint}"
        )
    replicas = []
    for order in _groups(sizes, need, prefer_intra_node):
        tasks, start = [], 0
        for r in requests:
            count = r.num_devices
            if count is None or share:
                tasks.append(tuple(order))
            else:
                tasks.append(tuple(order[start : start + count]))
                start += count
        replicas.append(tuple(tasks))
    return VirtualDevices(devices=tuple(replicas))


def _listed(requests: Sequence[Request]) -> str:
    return ", ".join(f"{r.label or r.kind}: {r.num_devices or 'all'}" for r in requests)


def _layout_groups(layout: DeviceLayout, sizes: Sequence[int]) -> list[list[int]]:
    num_devices = sum(sizes)
    if layout == "all":
        return [list(range(num_devices))]
    if layout == "host":
        if len(set(sizes)) > 1:
            raise PlanError(
                f"cluster.layout='host' needs hosts of one size, these have {list(sizes)} devices: "
                "give lists of devices, or leave some out with cluster.visible_devices"
            )
        ends = itertools.accumulate(sizes)
        return [list(range(end - n, end)) for end, n in zip(ends, sizes, strict=True)]
    assert not isinstance(layout, str)
    groups = [list(g) for g in layout]
    named = sorted(d for g in groups for d in g)
    if named != list(range(num_devices)) or len({len(g) for g in groups}) != 1:
        raise PlanError(
            f"cluster.layout={groups} must name each of the {num_devices} devices once, in lists "
            "of one length; leave devices out with cluster.visible_devices"
        )
    return groups


def _in_groups(
    requests: Sequence[Request], groups: Sequence[Sequence[int]], share: bool, *, one_copy: bool
) -> VirtualDevices:
    """The same placement within each group."""
    inside = assign_devices(requests, len(groups[0]), share=share)
    if one_copy and inside.num_replicas > 1:
        asked = _listed(requests)
        raise PlanError(
            f"cluster.layout='all' is one replica over {len(groups[0])} devices, but its "
            f"TaskGraphs ({asked}) make {inside.num_replicas}: give no counts, or use layout='auto'"
        )
    return VirtualDevices(
        devices=tuple(
            tuple(tuple(group[d] for d in task) for task in replica)
            for group in groups
            for replica in inside.devices
        )
    )


def _groups(sizes: Sequence[int], need: int, prefer_intra_node: bool) -> list[list[int]]:
    """Devices of each replica."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    on_node = [list(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)]
    if not prefer_intra_node:
        longest = max(sizes)
        order = [node[i] for i in range(longest) for node in on_node if i < len(node)]
        return [order[i : i + need] for i in range(0, len(order), need)]
    groups, rest = [], []
    for node in on_node:
        whole = len(node) // need * need
        groups += [node[i : i + need] for i in range(0, whole, need)]
        rest += node[whole:]
    groups += [rest[i : i + need] for i in range(0, len(rest), need)]
    return sorted(groups)


#: Inner axes that shard the examples of the batch, or their tokens, not parameters.
BATCH_AXES = ("fsdp", TOKEN_AXIS)


def resolve_rules(graph: Graph, rules: RuleSet, axes: Axes, *, unlike: bool = False) -> Resolved:
    """The sharding of a graph's parameters on a mesh by rules: see `RuleSet.resolve`.

    Raises:
        AnnotationError: As `RuleSet.resolve`, if an axis is neither usual nor in a rule, so that
            all devices along it would do the same, or if a rule cuts parameters over tokens.
    """
    if dict(axes).get(TOKEN_AXIS, 1) > 1:
        for rule in rules.rules:
            if any(TOKEN_AXIS in dim for dim in rule.axes):
                raise AnnotationError(
                    f"rule set {rules.name!r}, {rule}: {TOKEN_AXIS!r} cuts tokens, and no "
                    "parameters: name another axis, such as 'fsdp' or 'tensor'"
                )
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

    The only axis is `device` if TaskGraphs of unlike strategies or counts are stages.

    Raises:
        PlanError: If the devices do not fit, or some belong to several stages.
    """
    if any(t.strategy == "tokens" for t in graph.task_graphs):
        return _token_axes(graph, num_devices, nodes, layout)
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
            if len(virtual.replica(0)) < sum(map(len, virtual.devices[0])):
                raise PlanError(_no_pipeline(requests, virtual))
            return virtual, ((DEVICE_AXIS, len(virtual.replica(0))),), {}
        inner, roles = split_over(graph, counts.pop()) if kinds == {"split"} else ((), {})
        return virtual, ((STAGE_AXIS, len(requests)), *inner), roles
    if all(r.kind == "replicate" for r in requests):
        return virtual, (), {}
    axes, roles = _axes(requests, _levels(requests, len(virtual.replica(0))))
    return virtual, axes, roles


def _token_axes(
    graph: Graph, num_devices: int, nodes: Sequence[int] | None, layout: DeviceLayout
) -> tuple[VirtualDevices, Axes, Roles]:
    """Replicas whose devices share the tokens of the whole loss."""
    tasks = graph.task_graphs
    asked = {t.device_count for t in tasks if t.strategy == "tokens"}
    others = (t.asks_for_devices for t in tasks if t.strategy != "tokens")
    if len(asked) > 1 or any(others):
        labels = ", ".join(dict.fromkeys(t.label for t in tasks))
        raise PlanError(
            "hxla.split(dim='sequence') splits the tokens of the whole loss, with one count and "
            f"beside no other annotation that asks for devices; the model has {labels}"
        )
    [count] = asked
    request = Request(kind="tokens", device_count=count)
    virtual = assign_devices([request], num_devices, nodes=nodes, layout=layout)
    size = len(virtual.replica(0))
    role: Role = "tokens"
    axes: Axes = ((TOKEN_AXIS, size),) if size > 1 else ()
    return virtual, axes, {name: (role,) * len(tasks) for name, _ in axes}


def roles_of_mesh(graph: Graph, axes: Axes, *, by_rules: bool) -> Roles:
    """The role of each inner axis of a user's mesh for each TaskGraph.

    Raises:
        PlanError: If nothing gives an axis a role, or an annotation disagrees.
    """
    _check_tokens(graph, axes)
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
        if name == TOKEN_AXIS:
            roles[name] = tuple("tokens" for _ in kinds)
        elif name in BATCH_AXES:
            roles[name] = tuple("replicate" for _ in kinds)
        elif by_rules:
            roles[name] = tuple("rules" for _ in kinds)
        elif "split" in kinds:
            roles[name] = tuple("replicate" if kind == "tokens" else kind for kind in kinds)
        else:
            raise PlanError(
                f"the mesh has an axis {name!r}, but neither rules nor a hxla.split in the model "
                "say what it cuts: pass rules='decoder' (or your own), annotate the model, or use "
                f"a mesh with the one axis {DATA_AXIS!r}"
            )
    return roles


def _check_tokens(graph: Graph, axes: Axes) -> None:
    """Refuse annotations that disagree with an axis of tokens."""
    sizes = {name: size for name, size in axes if size > 1}
    num = dict(axes).get(TOKEN_AXIS, 0)
    for task in graph.task_graphs:
        if TOKEN_AXIS in sizes and task.strategy == "split" and not set(sizes) - set(BATCH_AXES):
            raise PlanError(
                f"hxla.{task.label} at {task.source} splits parameters, and the mesh axis "
                f"{TOKEN_AXIS!r} cuts tokens: add an axis {TENSOR_AXIS!r}, or leave one of the two "
                "out"
            )
        if task.strategy == "tokens" and task.device_count not in ((None, num) if num else ()):
            raise PlanError(
                f"hxla.{task.label} at {task.source} splits tokens, and the mesh has "
                f"{f'{num} devices along' if num else 'no axis'} {TOKEN_AXIS!r}: use a mesh that "
                "agrees, or leave the annotation out"
            )


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
        "TaskGraphs on different devices are stages of a pipeline, and a device belongs to one "
        "stage:\n"
        + "\n".join(lines)
        + "\ngive each TaskGraph a count, or none of them; or let them share devices with "
        "config={'cluster': {'share_devices': True}}"
    )
