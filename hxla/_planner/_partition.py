"""Which devices and which dimensions: a traced model on a number of devices, without them.

References:
    Whale, USENIX ATC 2022, section 3.2 (virtual devices, sharding patterns, bridges).
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from .._core._errors import PlanError
from .._core._types import DATA_AXIS, STAGE_AXIS, TENSOR_AXIS
from .._graph._graph import Graph
from .._plan._rules import Resolved, RuleSet, load_rules
from .._plan._sharding import Bridge, Sharded
from .._plan._virtual_devices import Layout, Request, VirtualDevices, assign_devices
from ._assign import Assignment, Role, assign

#: Inner axes that carry the batch, not parameters' work.
BATCH_AXES = ("fsdp", "sequence")

Axes = tuple[tuple[str, int], ...]
Roles = Mapping[str, tuple[Role, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """A traced model laid over devices.

    Attributes:
        num_replicas: Copies of the model: the mesh axis `data`.
        axes: Mesh axes inside a copy, with their sizes.
        param_specs: PartitionSpec of every parameter, by its path.
        param_bytes: Bytes of all parameters.
        param_bytes_per_device: Bytes of one device's part of them.
        communication_bytes: Bytes that each device sends inside its copy for one microbatch,
            forward and backward; sums between copies come on top.
        bridges: Arrays that cross between TaskGraphs, those that need no collective included.
        warnings: What rules left open.
    """

    num_replicas: int
    axes: Axes
    param_specs: Mapping[str, P]
    param_bytes: int
    param_bytes_per_device: int
    communication_bytes: float
    bridges: tuple[Bridge, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = " x ".join(f"{n}={size}" for n, size in ((DATA_AXIS, self.num_replicas), *self.axes))
        lines = [
            f"mesh {axes}",
            f"parameters {self.param_bytes:,} bytes, {self.param_bytes_per_device:,} on a device",
            f"sent by a device for a microbatch: {self.communication_bytes:,.0f} bytes",
        ]
        lines += [f"  {name}: {spec}" for name, spec in self.param_specs.items() if any(spec)]
        lines += [f"  {bridge}" for bridge in self.bridges]
        return "\n".join([*lines, *(f"  {w}" for w in self.warnings)])


def partition(
    graph: Graph,
    num_devices: int | None = None,
    *,
    axes: Mapping[str, int] | None = None,
    rules: str | RuleSet | None = None,
    share_devices: bool = False,
) -> Partition:
    """Lay a traced model over devices that need not be here.

    Args:
        graph: From `hxla.trace`, over one microbatch.
        num_devices: Devices; the annotations say how they are used.
        axes: Mesh axes and sizes instead, such as `{"data": 4, "tensor": 2}`.
        rules: Rule set that decides about parameters; needs `axes`.
        share_devices: TaskGraphs with device counts use the same devices.

    Returns:
        The partition; `print` shows it.

    Raises:
        PlanError: If the devices do not fit the annotations or make a pipeline, or nothing
            explains an axis.
        AnnotationError: If a parameter cannot be cut as annotated or as a rule says.

    Example:
        >>> print(hxla.partition(hxla.trace(model, loss, batch), 8))
    """
    if (num_devices is None) == (axes is None):
        raise PlanError("hxla.partition takes either num_devices or axes")
    resolved: Resolved | None = None
    if axes is None:
        assert num_devices is not None
        if rules is not None:
            raise PlanError("rules name mesh axes: pass axes={'data': 4, 'tensor': 2} with them")
        virtual, inner, roles = axes_of_annotations(graph, num_devices, share=share_devices)
        num_replicas = virtual.num_replicas if inner else num_devices
        _no_stages(inner)
    else:
        inner = tuple((n, size) for n, size in axes.items() if n != DATA_AXIS)
        num_replicas = axes.get(DATA_AXIS, 1)
        _no_stages(inner)
        rule_set = load_rules(rules) if isinstance(rules, str) else rules
        roles = roles_of_mesh(graph, inner, by_rules=rule_set is not None)
        if rule_set is not None:
            resolved = resolve_rules(graph, rule_set, inner)
    sharded = shard_graph(graph, inner, roles, resolved)
    specs = sharded.param_specs()
    return Partition(
        num_replicas=num_replicas,
        axes=inner,
        param_specs=dict(zip(graph.param_names, specs, strict=True)),
        param_bytes=sum(graph.values[v].num_bytes for v in graph.param_values),
        param_bytes_per_device=sharded.param_bytes(),
        communication_bytes=sum(a.sent_bytes for a in sharded.axes.values()),
        bridges=sharded.bridges(),
        warnings=sharded.warnings,
    )


def _no_stages(axes: Axes) -> None:
    if any(name == STAGE_AXIS for name, _ in axes):
        raise PlanError(
            "hxla.partition lays out models without stages, these devices make a pipeline: the "
            "plan of hxla.train says how it is cut"
        )


def resolve_rules(graph: Graph, rules: RuleSet, axes: Axes) -> Resolved:
    """What rules say about a graph's parameters on a mesh: see `RuleSet.resolve`."""
    return rules.resolve(
        graph.param_names, graph.param_shapes, dict(axes), logical=graph.param_logical
    )


def axes_of_annotations(
    graph: Graph,
    num_devices: int,
    *,
    nodes: Sequence[int] | None = None,
    share: bool = False,
    prefer_intra_node: bool = True,
    layout: Layout = "auto",
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
    """What each inner axis of a user's own mesh does for each TaskGraph.

    Raises:
        PlanError: If nothing says what an axis is for, or an annotation says otherwise.
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
    """The one axis and its roles with which every TaskGraph is split; none for a single device."""
    split: Role = "split"
    axes: Axes = ((TENSOR_AXIS, num_devices),) if num_devices > 1 else ()
    return axes, {name: (split,) * len(graph.task_graphs) for name, _ in axes}


def shard_graph(
    graph: Graph,
    axes: Sequence[tuple[str, int]],
    roles: Mapping[str, tuple[Role, ...]],
    resolved: Resolved | None,
) -> Sharded:
    """Solve one axis after another, each on what the others left.

    Args:
        graph: Of the loss.
        axes: Names and sizes.
        roles: For each axis, the part of each TaskGraph.
        resolved: Rules, where they decide about parameters.
    """
    cuts: dict[int, dict[int, int]] = {}
    solved: dict[str, Assignment] = {}
    for name, size in reversed(list(axes)):  # the innermost axis has the fastest links
        fixed: dict[int, int | None] = {}
        if resolved is not None:
            fixed = {i: dims.get(name) for i, dims in enumerate(resolved.dims)}
        solved[name] = assign(graph, roles[name], size, cuts=cuts, fixed=fixed)
        for v, dim in solved[name].made.items():
            if dim is not None:
                divisors = cuts.setdefault(v, {})
                divisors[dim] = divisors.get(dim, 1) * size
    warnings = resolved.report() if resolved is not None else ()
    return Sharded(graph, {name: solved[name] for name, _ in axes}, warnings)


def requests_of(graph: Graph) -> tuple[Request, ...]:
    """What the TaskGraphs ask for."""
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
