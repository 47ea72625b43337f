"""How devices share a model: by annotations, by a mesh, by a number of stages.

A structure has the devices of each replica and the roles of its mesh axes; `complete` makes a plan
of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cluster.cluster import Cluster
from ..core.config import ClusterConfig, Config
from ..core.errors import ConfigError, PlanError
from ..core.format import plural
from ..core.keywords import check_whole_numbers
from ..core.types import (
    DATA_AXIS,
    DEVICE_AXIS,
    OUTER_AXES,
    STAGE_AXIS,
    TENSOR_AXIS,
    TOKEN_AXIS,
)
from ..graph.graph import Graph
from ..plan.axis_assignment import Axes
from ..plan.parts import Role
from ..plan.rules import RuleSet
from ..plan.unlike_stages import STAGE_AXES
from .mesh_axes import BATCH_AXES, axes_of_annotations, roles_of_mesh
from .pipeline_request import PipelineRequest, Stages, asked
from .stage_forms import StageForm, check_settings, forms_annotated

Ranks = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaGroups:
    """How devices share a model.

    Attributes:
        replicas: Ranks of each replica's devices, in the order of the axes.
        axes: Mesh axes inside a replica, with their sizes.
        roles: For each axis but `stage`, the role of each TaskGraph.
        rules: Decide which parameters the axes shard; None: by least communication.
        pipeline: None: no stages.
        shares: The ratio of the shards of a replica's devices; empty: not stated or measured.
        shares_are: `stated`, or `measured` in a trial.
        granules: Of each dimension that the one inner axis cuts; None: see `Axis.granules`.
    """

    replicas: tuple[Ranks, ...]
    axes: Axes = ()
    roles: Mapping[str, tuple[Role, ...]] = dataclasses.field(default_factory=dict)
    rules: RuleSet | None = None
    pipeline: PipelineRequest | None = None
    shares: tuple[int, ...] = ()
    shares_are: str = "stated"
    granules: int | None = None
    reasons: tuple[str, ...] = ()

    @property
    def inner(self) -> Axes:
        """The axes inside a replica, or inside each of its stages."""
        return tuple(axis for axis in self.axes if axis[0] not in OUTER_AXES)


def structure_of(
    graph: Graph,
    cluster: Cluster,
    settings: Config,
    stages: Stages | None,
    axes: Axes | None,
    grid: np.ndarray,
    rules: RuleSet | None,
    shares: tuple[int, ...] = (),
) -> ReplicaGroups:
    """The structure by arguments and annotations together.

    Args:
        cluster: All of its devices are used.
        stages: What the user asks of stages; None: what settings or annotations say.
        axes: Names and sizes of a mesh; None: no mesh.
        grid: Ranks of the mesh's devices.
        rules: Decide which parameters the inner axes shard.
        shares: The ratio that the mesh states for one of its axes; empty: none.

    Raises:
        ConfigError: If they contradict each other.
        PlanError: If the devices do not fit.
    """
    request = asked(stages, settings)
    if axes is not None and (STAGE_AXIS, 1) in axes:  # no pipeline
        place = axes.index((STAGE_AXIS, 1))
        axes, grid = (*axes[:place], *axes[place + 1 :]), grid.squeeze(place)
        if not axes:
            axes, grid = ((DATA_AXIS, 1),), grid.reshape(1)
    granules = settings.numerics.granules if settings.numerics.cut == "any" else None
    if granules is not None and request.has_forms:
        if rules is None:
            raise ConfigError(
                f"numerics.cut of 'any' is about what the axis {TENSOR_AXIS!r} of stages cuts: "
                "pass rules='decoder' or your own, also for stages of one device"
            )
        request = request.in_granules(granules)
    elif granules is not None:
        axes, grid = _with_tensor(graph, request, axes, grid, rules)
    structure = _structure(graph, cluster, settings.cluster, request, axes, grid, rules, shares)
    staged = structure.pipeline is not None and structure.pipeline.has_forms
    if shares and not staged:
        structure = dataclasses.replace(structure, shares=shares)
    if granules is not None:
        structure = _in_granules(graph, structure, rules, granules)
    if staged:
        check_settings(settings)
    return structure


def _with_tensor(
    graph: Graph,
    request: PipelineRequest,
    axes: Axes | None,
    grid: np.ndarray,
    rules: RuleSet | None,
) -> tuple[Axes, np.ndarray]:
    """A mesh with the axis that `numerics.cut` is about; of one device if the user names none.

    Raises:
        ConfigError: If there are other axes, or nothing says what this one cuts.
    """
    axes = ((DATA_AXIS, grid.size),) if axes is None else axes
    if request.is_asked and STAGE_AXIS not in dict(axes):
        raise ConfigError(
            "numerics.cut of 'any' takes stages from a mesh or from tables: pass mesh={'data': 1, "
            "'stage': 2, 'tensor': 1} or stages=[{'devices': 1}, {'tensor': 2}], or set it to "
            "'planned'"
        )
    known = (DATA_AXIS, STAGE_AXIS, TENSOR_AXIS)
    if others := [name for name, _ in axes if name not in known]:
        raise ConfigError(
            f"numerics.cut of 'any' is for replicas with the one axis {TENSOR_AXIS!r}: leave "
            f"{', '.join(map(repr, others))} out, or set it to 'planned'"
        )
    if rules is None and all(task.strategy != "split" for task in graph.task_graphs):
        raise ConfigError(
            f"numerics.cut of 'any' is about what the mesh axis {TENSOR_AXIS!r} cuts, and nothing "
            f"says what that is: pass mesh={{{DATA_AXIS!r}: {grid.size}, {TENSOR_AXIS!r}: 1}} and "
            "rules='decoder' (or your own), also for one device"
        )
    if TENSOR_AXIS in dict(axes):
        return axes, grid
    return (*axes, (TENSOR_AXIS, 1)), grid[..., None]


def _in_granules(
    graph: Graph, structure: ReplicaGroups, rules: RuleSet | None, granules: int
) -> ReplicaGroups:
    """The structure with granules, and with the axis `tensor` where stages left out size one.

    Raises:
        ConfigError: If stages are to keep residuals, which those of several devices do not, or
            annotations make unlike stages.
    """
    inner: Axes = ((TENSOR_AXIS, 1),)
    pipeline = structure.pipeline
    if pipeline is not None and pipeline.has_forms:
        if pipeline.by_annotations:
            raise ConfigError(
                "numerics.cut of 'any' takes unlike stages from tables, not from annotations: pass "
                "stages=[{'devices': 1}, {'tensor': 2}] and rules, or set it to 'planned'"
            )
        pipeline = pipeline.in_granules(granules)
        return dataclasses.replace(structure, granules=granules, pipeline=pipeline)
    if structure.inner:
        return dataclasses.replace(structure, granules=granules)
    assert pipeline is not None
    if pipeline.recompute is False or pipeline.has_weight:
        raise ConfigError(
            "numerics.cut of 'any' needs stages that keep only their inputs: leave "
            "memory.recompute out or set 'boundaries', and use pipeline.schedule='1f1b'"
        )
    return dataclasses.replace(
        structure,
        pipeline=dataclasses.replace(pipeline, recompute=True),
        axes=(*structure.axes, *inner),
        roles=roles_of_mesh(graph, inner, by_rules=rules is not None),
        rules=rules,
        granules=granules,
    )


def _structure(
    graph: Graph,
    cluster: Cluster,
    config: ClusterConfig,
    request: PipelineRequest,
    axes: Axes | None,
    grid: np.ndarray,
    rules: RuleSet | None,
    shares: tuple[int, ...],
) -> ReplicaGroups:
    if axes is not None and set(dict(axes)) != {DATA_AXIS}:
        if request.has_forms:
            raise ConfigError(
                "stages give the axes of each stage, and a mesh those of all: leave the mesh out"
            )
        return from_mesh(graph, axes, grid, rules, request, shares)
    if request.replicas:
        check_unannotated(graph, "stages=[[...], ...]")
        return unlike_replicas(range(len(cluster.devices)), request, rules)
    if request.forms:
        check_unannotated(graph, "stages=[...]")
        return unlike_stages(range(len(cluster.devices)), request, request.forms, rules)
    if rules is not None:
        raise ConfigError(
            f"rules {rules.name!r} need a mesh whose axes they name, such as "
            f"mesh={{'data': {len(cluster.devices)}, 'tensor': 1}}"
        )
    if request.num:
        check_unannotated(graph, f"stages={request.num}")
    if request.is_asked:
        return pipelined(range(len(cluster.devices)), request)
    return from_annotations(graph, cluster, config, request)


def shares_of(mesh: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The ratio that a mesh states for one of its axes, `{"tensor": (2, 1)}`; empty: none.

    Raises:
        ConfigError: If it states several, or one between replicas.
    """
    stated = {str(n): s for n, s in (mesh or {}).items() if isinstance(s, tuple | list)}
    check_whole_numbers(
        1,
        **{
            f"mesh axis {n}, share {i}": s
            for n, shares in stated.items()
            for i, s in enumerate(shares)
        },
    )
    if len(stated) > 1:
        raise ConfigError(f"the mesh states shares for {', '.join(stated)}: one axis may have them")
    for name, shares in stated.items():
        if name in (DATA_AXIS, STAGE_AXIS, "fsdp"):
            raise ConfigError(
                f"the mesh states shares {tuple(shares)} for {name!r}, which cuts no parameters: "
                "counts= are for replicas, stages= for stages"
            )
        if len(shares) == 0:
            raise ConfigError(f"the mesh states no share for {name!r}: give one for each device")
        return tuple(map(int, shares))
    return ()


def grid_of(mesh: Mapping[str, Any], num_devices: int) -> tuple[Axes, np.ndarray]:
    """Axes of a mesh over all devices, and the ranks of its devices.

    Raises:
        PlanError: If it takes another number of devices.
    """
    axes = tuple(
        (str(n), len(s) if isinstance(s, tuple | list) else int(s)) for n, s in mesh.items()
    )
    size = math.prod(s for _, s in axes)
    if size != num_devices:
        raise PlanError(f"mesh {dict(axes)} takes {size} devices, there are {num_devices}")
    return axes, np.arange(num_devices).reshape([s for _, s in axes])


def replicated(ranks: Sequence[int]) -> ReplicaGroups:
    """Every device a replica."""
    return ReplicaGroups(replicas=tuple((rank,) for rank in ranks))


def from_annotations(
    graph: Graph, cluster: Cluster, config: ClusterConfig, request: PipelineRequest
) -> ReplicaGroups:
    """The structure by `replicate` and `split`.

    Args:
        cluster: All of its devices are used.
        request: How a pipeline is to run, if the annotations make one.

    Raises:
        PlanError: If the devices do not fit.
    """
    virtual, axes, roles = axes_of_annotations(
        graph,
        len(cluster.devices),
        nodes=devices_of_nodes(cluster),
        share=config.share_devices,
        prefer_intra_node=config.prefer_intra_node,
        layout=config.layout,
    )
    if not axes:
        return replicated(range(len(cluster.devices)))
    if axes[0][0] == DEVICE_AXIS:
        forms = forms_annotated(virtual, graph)
        ranks = [rank for i in range(virtual.num_replicas) for rank in virtual.replica(i)]
        staged_request = dataclasses.replace(request, num=len(forms), by_annotations=True)
        return unlike_stages(ranks, staged_request, forms, None)
    if axes[0][0] == STAGE_AXIS:
        staged_request = dataclasses.replace(request, num=axes[0][1], by_annotations=True)
        if axes[1:]:
            whole = [virtual.replica(i) for i in range(virtual.num_replicas)]
            return _pipelines(whole, staged_request, axes[1:], roles)
        groups = [pipeline for tasks in virtual.devices for pipeline in zip(*tasks, strict=True)]
        return _pipelines(groups, staged_request)
    replicas = tuple(virtual.replica(i) for i in range(virtual.num_replicas))
    return ReplicaGroups(replicas=replicas, axes=axes, roles=roles)


def pipelined(ranks: Sequence[int], request: PipelineRequest) -> ReplicaGroups:
    """Pipelines of consecutive devices.

    Raises:
        PlanError: If the devices are no multiple of the stages.
    """
    num = request.num
    if num < 2 or len(ranks) % num:
        fitting = [n for n in range(2, len(ranks) + 1) if len(ranks) % n == 0]
        raise PlanError(
            f"{plural(len(ranks), 'device')} cannot make pipelines of {num} stages: use "
            f"{' or '.join(map(str, fitting)) or 'at least two devices and as many'} stages, or "
            "leave devices out with cluster.visible_devices"
        )
    return _pipelines([tuple(ranks[i : i + num]) for i in range(0, len(ranks), num)], request)


def unlike_stages(
    ranks: Sequence[int],
    request: PipelineRequest,
    forms: tuple[StageForm, ...],
    rules: RuleSet | None,
) -> ReplicaGroups:
    """Pipelines of consecutive devices with unlike stages.

    Args:
        rules: Decide which parameters the axes of stages cut; None: the least communication.

    Raises:
        ConfigError: If no stage has an axis for the rules.
        PlanError: If the devices are no multiple of those of the stages.
    """
    _check_rules(rules, forms)
    sizes = [form.num_devices for form in forms]
    num = sum(sizes)
    if not ranks or len(ranks) % num:
        raise PlanError(
            f"{len(ranks)} devices cannot make pipelines of stages of "
            f"{' + '.join(map(str, sizes))} devices: use {num}, {2 * num}, ... devices, or leave "
            "some out with cluster.visible_devices"
        )
    return ReplicaGroups(
        replicas=tuple(tuple(ranks[i : i + num]) for i in range(0, len(ranks), num)),
        axes=((DEVICE_AXIS, num),),
        rules=rules,
        pipeline=dataclasses.replace(request, forms=forms),
    )


def unlike_replicas(
    ranks: Sequence[int], request: PipelineRequest, rules: RuleSet | None
) -> ReplicaGroups:
    """Replicas of unlike form on consecutive devices, which share one state.

    Args:
        rules: Decide which parameters the axes of stages cut; None: the least communication.

    Raises:
        ConfigError: If no stage has an axis for the rules.
        PlanError: If the devices are not as many as those of the replicas.
    """
    _check_rules(rules, [form for replica in request.replicas for form in replica.forms])
    sizes = [replica.num_devices for replica in request.replicas]
    if len(ranks) != sum(sizes):
        raise PlanError(
            f"{plural(len(ranks), 'device')} cannot make replicas of "
            f"{' + '.join(map(str, sizes))} devices: use {sum(sizes)}, write other stages, or "
            "leave some out with cluster.visible_devices"
        )
    return ReplicaGroups(
        replicas=(tuple(ranks),),
        axes=((DEVICE_AXIS, len(ranks)),),
        rules=rules,
        pipeline=request,
    )


def _check_rules(rules: RuleSet | None, forms: Sequence[StageForm]) -> None:
    if rules is not None and not any(dict(form.axes).keys() - {DATA_AXIS} for form in forms):
        raise ConfigError(
            f"rules {rules.name!r} cut parameters over 'tensor', and no stage has this axis: give "
            "it to one, or leave the rules out"
        )


def from_mesh(
    graph: Graph,
    axes: Axes,
    grid: np.ndarray,
    rules: RuleSet | None,
    request: PipelineRequest,
    shares: tuple[int, ...] = (),
) -> ReplicaGroups:
    """The structure by a user's mesh: `data` between replicas, the other axes inside.

    Stages whose axes are of one program share it; tokens and shards of unlike sizes need stages
    with programs of their own.

    Args:
        axes: Names and sizes, in the order of the grid's dimensions.
        rules: Decide which parameters the inner axes shard; None: the annotations do.
        request: How a pipeline is to run, if the mesh has an axis `stage` or stages are asked for.
        shares: The ratio of the shards of an inner axis; empty: they are alike.

    Raises:
        ConfigError: If the stages asked for are not those of the mesh.
        PlanError: If nothing says what the inner axes are for.
    """
    sizes = dict(axes)
    num_stages = sizes.get(STAGE_AXIS, 0)
    if request.num not in (0, num_stages):
        has = f"an axis of {num_stages}" if num_stages else "none"
        raise ConfigError(
            f"stages={request.num} need a mesh axis {STAGE_AXIS!r} of that size, the mesh has "
            f"{has}: make one, or leave the mesh out"
        )
    names = list(sizes)
    inside = [n for n in names if n not in (DATA_AXIS, STAGE_AXIS)]
    is_one_program = TOKEN_AXIS not in inside and not shares
    if num_stages and not is_one_program:
        inside.sort(key=[*STAGE_AXES, *inside].index)
    inside = [STAGE_AXIS] * bool(num_stages) + inside
    first = [DATA_AXIS] if DATA_AXIS in sizes else []
    grid = grid.transpose([names.index(n) for n in (*first, *inside)])
    rows = [tuple(map(int, row.flat)) for row in (grid if first else grid[None])]
    inner_axes = tuple((n, sizes[n]) for n in inside)
    if num_stages:
        request = dataclasses.replace(request, num=num_stages)
        if is_one_program:
            return _staged(graph, rows, inner_axes, rules, request)
        return _staged_apart(graph, rows, inner_axes[1:], rules, request, shares)
    roles = roles_of_mesh(graph, inner_axes, by_rules=rules is not None)
    return ReplicaGroups(replicas=tuple(rows), axes=inner_axes, roles=roles, rules=rules)


def _staged(
    graph: Graph,
    rows: Sequence[Ranks],
    axes: Axes,
    rules: RuleSet | None,
    request: PipelineRequest,
) -> ReplicaGroups:
    inner = tuple(axis for axis in axes[1:] if axis[1] > 1)
    _check_inside(graph, inner)
    roles = roles_of_mesh(graph, inner, by_rules=rules is not None)
    return _pipelines(rows, request, inner, roles, rules)


def _staged_apart(
    graph: Graph,
    rows: Sequence[Ranks],
    axes: Axes,
    rules: RuleSet | None,
    request: PipelineRequest,
    shares: tuple[int, ...],
) -> ReplicaGroups:
    """Pipelines whose stages, all of one form, have programs of their own."""
    inner = tuple(axis for axis in axes if axis[1] > 1)
    _check_inside(graph, inner)
    if others := [name for name, _ in inner if name not in STAGE_AXES]:
        raise PlanError(
            f"stages with programs of their own have the axes {', '.join(STAGE_AXES)}, and the "
            f"mesh has {', '.join(others)}: rename it, or leave it out"
        )
    if shares and len(inner) > 1:
        raise PlanError(
            f"shares {':'.join(map(str, shares))}: uneven shards need stages with one axis, leave "
            f"{' or '.join(name for name, _ in inner)} out"
        )
    form = StageForm(axes=inner, work=1.0, shares=shares if len(set(shares)) > 1 else ())
    ranks = [rank for row in rows for rank in row]
    forms = (form,) * request.num
    request = dataclasses.replace(request, shares=tuple(form.work for form in forms))
    return unlike_stages(ranks, request, forms, rules)


def _check_inside(graph: Graph, inner: Axes) -> None:
    """Refuse what a mesh with stages cannot have inside them.

    Raises:
        ConfigError: If annotations cut the model, too.
        PlanError: If an axis would shard parameters that are gathered inside a stage.
    """
    batch_axes = [name for name, _ in inner if name in BATCH_AXES and name != TOKEN_AXIS]
    if batch_axes:
        raise PlanError(
            f"the mesh axes {', '.join(batch_axes)} would cut the batch inside a stage, which "
            f"hxla does not lower: use {DATA_AXIS!r} for replicas of the pipeline, and axes that "
            "cut parameters or tokens, such as 'tensor' and 'sequence', inside stages"
        )
    counted = [t.label for t in graph.task_graphs if t.device_count]
    if counted:
        raise ConfigError(
            f"the mesh's axis {STAGE_AXIS!r} cuts a model that annotations cut already "
            f"({', '.join(counted)}): leave the mesh out, or the counts of the annotations"
        )


def _pipelines(
    groups: Sequence[Ranks],
    request: PipelineRequest,
    inner: Axes = (),
    roles: Mapping[str, tuple[Role, ...]] | None = None,
    rules: RuleSet | None = None,
) -> ReplicaGroups:
    """Pipelines of devices in the order of stages, within a stage in that of the inner axes."""
    size = math.prod(n for _, n in inner)
    request.check_inside(size)
    reasons: tuple[str, ...] = ()
    if size > 1 and request.recompute is None:
        reasons = (f"forwards are recomputed: stages of {size} devices keep no residuals",)
        request = dataclasses.replace(request, recompute=True)
    return ReplicaGroups(
        replicas=tuple(groups),
        axes=((STAGE_AXIS, request.num), *inner),
        roles=roles or {},
        rules=rules,
        pipeline=request,
        reasons=reasons,
    )


def check_unannotated(graph: Graph, what: str) -> None:
    """Refuse to cut a model that annotations cut already.

    Args:
        what: The argument that cuts it.

    Raises:
        ConfigError: If the model is annotated.
    """
    annotated = [task.label for task in graph.task_graphs if task.asks_for_devices]
    if annotated:
        raise ConfigError(
            f"{what} cuts a model that annotations cut already ({', '.join(annotated)}): remove "
            f"the annotations, or leave {what.split('=')[0]} out"
        )


def devices_of_nodes(cluster: Cluster) -> list[int]:
    """How many consecutive devices each node has."""
    return [len(list(same)) for _, same in itertools.groupby(d.node for d in cluster.devices)]
