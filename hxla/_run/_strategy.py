"""From a traced model and the devices to replicas, and to what each of their axes cuts."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._core._errors import AnnotationError, ConfigError, PlanError
from .._core._format import num_bytes
from .._core._types import DATA_AXIS, STAGE_AXIS, PyTree
from .._graph._factors import PATTERNS, Patterns
from .._graph._graph import Graph
from .._graph._trace import trace_sums
from .._lower._pipeline import PipelineSpec
from .._lower._replica import Replica
from .._plan._rules import RuleSet
from .._plan._sharding import Sharded
from .._plan._virtual_devices import Layout
from .._planner._assign import Role
from .._planner._partition import (
    BATCH_AXES,
    axes_of_annotations,
    resolve_rules,
    roles_of_mesh,
    shard_graph,
    split_over,
)
from ._stages import Stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the devices share the model.

    Attributes:
        replicas: Each holds one copy.
        axes: Mesh axes inside a replica.
        roles: For each axis, the part of each TaskGraph.
        rules: Rule set that decides, or None for annotations.
        patterns: Which dimensions of an equation can be cut together.
        stages: Of a replica that is a pipeline.
        reasons: What to say about it in the plan.
    """

    replicas: tuple[Replica, ...]
    axes: tuple[tuple[str, int], ...] = ()
    roles: Mapping[str, tuple[Role, ...]] = dataclasses.field(default_factory=dict)
    rules: RuleSet | None = None
    patterns: Patterns = PATTERNS
    stages: Stages | None = None
    reasons: tuple[str, ...] = ()

    def shard(
        self,
        run: Callable[..., Any],
        params: PyTree,
        aux: PyTree,
        batch: PyTree,
        logical: Sequence[Sequence[str | None] | None],
    ) -> Sharded:
        """Plan what the inner axes cut, for a microbatch like `batch`: see `trace_sums`."""
        graph = trace_sums(run, params, aux, batch, logical=logical, patterns=self.patterns)
        axes = self._cutting
        resolved = resolve_rules(graph, self.rules, axes) if self.rules is not None else None
        return shard_graph(graph, axes, self.roles, resolved)

    @property
    def _cutting(self) -> tuple[tuple[str, int], ...]:
        """Axes inside a replica, or inside each of its stages."""
        return tuple(axis for axis in self.axes if axis[0] != STAGE_AXIS)

    @property
    def stage(self) -> Callable[..., PipelineSpec] | None:
        """Makes what a pipeline's programs are made from; None where there are no stages."""
        if self.stages is None:
            return None
        axes = self._cutting
        return functools.partial(
            self.stages.spec,
            num_pipelines=len(self.replicas),
            axes=axes,
            shard=self.shard if axes else None,
        )


def from_annotations(
    graph: Graph,
    devices: Sequence[jax.Device],
    *,
    hosts: Sequence[str],
    share: bool,
    prefer_intra_node: bool,
    layout: Layout = "auto",
    stages: Stages,
) -> Strategy:
    """The strategy that `replicate` and `split` ask for.

    Args:
        graph: Of the loss.
        devices: Of the run.
        hosts: Name of each process's host.
        share: Whether TaskGraphs use the same devices.
        prefer_intra_node: Whether a replica is kept on one node.
        layout: Within what copies of the model are placed.
        stages: How a pipeline is to run, where the annotations make one.

    Raises:
        PlanError: If the devices do not fit.
    """
    virtual, axes, roles = axes_of_annotations(
        graph,
        len(devices),
        nodes=_nodes(devices, hosts),
        share=share,
        prefer_intra_node=prefer_intra_node,
        layout=layout,
    )
    if not axes:
        return replicated(devices)
    if axes[0][0] == STAGE_AXIS:
        own = dataclasses.replace(stages, num=axes[0][1], by_tasks=True)
        if axes[1:]:
            whole = [list(virtual.replica(i)) for i in range(virtual.num_replicas)]
            return _pipelines([[devices[d] for d in w] for w in whole], own, axes[1:], roles)
        groups = [
            [devices[d] for d in pipeline]
            for tasks in virtual.devices
            for pipeline in zip(*tasks, strict=True)
        ]
        return _pipelines(groups, own)
    replicas = tuple(
        Replica(i, tuple(devices[d] for d in virtual.replica(i)), axes)
        for i in range(virtual.num_replicas)
    )
    return Strategy(replicas=replicas, axes=axes, roles=roles)


def automatic(
    graph: Graph,
    devices: Sequence[jax.Device],
    *,
    hosts: Sequence[str],
    memory_bytes: int | None,
    optimizer_bytes: int,
    parts: int,
    num_microbatches: int,
) -> Strategy:
    """As few devices for a copy of the model as its memory needs, the rest for more copies.

    Between copies only gradients travel, once a step; inside one, activations do, several times a
    layer. So a copy is never larger than it must be. Which dimensions its devices cut is the
    choice of least communication.

    Args:
        graph: Of the loss, for one microbatch; without annotations.
        devices: Of the run.
        hosts: Name of each process's host.
        memory_bytes: Of the smallest device; None: not known, and taken to be enough.
        optimizer_bytes: Of the optimizer's state for the whole model.
        parts: Arrays in which a gradient is summed.
        num_microbatches: Of a global batch; a device holds the inputs of its own.

    Raises:
        ConfigError: If the model is annotated.
        PlanError: If no number of devices is enough, with the bytes missing for each.
    """
    annotated = [t.label for t in graph.task_graphs if t.strategy == "split" or t.device_count]
    if annotated:
        raise ConfigError(
            f"auto.auto_parallel chooses what annotations say already ({', '.join(annotated)}): "
            "remove the annotations, or leave auto.auto_parallel off"
        )
    param_bytes = sum(graph.values[v].num_bytes for v in graph.param_values)
    batch_bytes = sum(graph.values[v].num_bytes for v in graph.batch_values)
    node = min(_nodes(devices, hosts))
    tried: list[str] = []
    for size in (s for s in range(1, len(devices) + 1) if len(devices) % s == 0):
        axes, roles = split_over(graph, size)
        try:
            share = shard_graph(graph, axes, roles, None).param_bytes() / max(1, param_bytes)
        except AnnotationError as error:
            tried.append(f"  {size} devices a copy: {error}")
            continue
        # Parameters, a gradient, its sum in parts, the optimizer's state; what backward keeps.
        need = share * (param_bytes * (2 + parts) + optimizer_bytes)
        need += batch_bytes * math.ceil(num_microbatches * size / len(devices))
        need += sum(t.activation_bytes for t in graph.task_graphs) / size
        where = "" if size <= node else ", across nodes"
        line = f"{size} devices a copy{where}: about {num_bytes(int(need))} on each"
        if memory_bytes is None or need <= memory_bytes:
            known = "memory not known" if memory_bytes is None else f"of {num_bytes(memory_bytes)}"
            reason = f"auto_parallel: {line} ({known})"
            if not axes:
                return dataclasses.replace(replicated(devices), reasons=(reason,))
            groups = [devices[i : i + size] for i in range(0, len(devices), size)]
            replicas = tuple(Replica(i, tuple(g), axes) for i, g in enumerate(groups))
            return Strategy(replicas=replicas, axes=axes, roles=roles, reasons=(reason,))
        tried.append(f"  {line}, {num_bytes(int(need) - memory_bytes)} too many")
    raise PlanError(
        f"the model does not fit into devices of {num_bytes(memory_bytes or 0)}:\n"
        + "\n".join(tried)
        + "\nuse a smaller microbatch_size, or more devices"
    )


def pipelined(devices: Sequence[jax.Device], stages: Stages) -> Strategy:
    """Pipelines of consecutive devices.

    Raises:
        PlanError: If the devices are no multiple of the stages.
    """
    num = stages.num
    if num < 2 or len(devices) % num:
        fitting = [n for n in range(2, len(devices) + 1) if len(devices) % n == 0]
        raise PlanError(
            f"{len(devices)} devices cannot make pipelines of {num} stages: use "
            f"{' or '.join(map(str, fitting)) or 'at least two devices and as many'} stages, or "
            "leave devices out with cluster.visible_devices"
        )
    return _pipelines([devices[i : i + num] for i in range(0, len(devices), num)], stages)


def _pipelines(
    groups: Sequence[Sequence[jax.Device]],
    stages: Stages,
    inner: Sequence[tuple[str, int]] = (),
    roles: Mapping[str, tuple[Role, ...]] | None = None,
    rules: RuleSet | None = None,
) -> Strategy:
    """Of devices in the order of stages, and within a stage in that of the inner axes."""
    axes = ((STAGE_AXIS, stages.num), *inner)
    reasons: tuple[str, ...] = ()
    if inner:
        size = math.prod(n for _, n in inner)
        if not stages.recompute:
            reasons = (f"forwards run again: stages of {size} devices keep no residuals",)
        stages = stages.split_inside(size)
    replicas = tuple(Replica(i, tuple(g), axes) for i, g in enumerate(groups))
    return Strategy(
        replicas=replicas,
        axes=axes,
        roles=roles or {},
        rules=rules,
        stages=stages,
        reasons=reasons,
    )


def replicated(devices: Sequence[jax.Device]) -> Strategy:
    """Every device a replica."""
    return Strategy(replicas=tuple(Replica(i, (d,)) for i, d in enumerate(devices)))


def from_mesh(
    graph: Graph, mesh: Mesh, rules: RuleSet | None, stages: Stages | None = None
) -> Strategy:
    """The strategy of a user's own mesh: `data` between replicas, the other axes inside.

    Args:
        graph: Of the loss.
        mesh: The user's, with an axis besides `data`.
        rules: Decide which parameters the inner axes cut; None: the annotations do.
        stages: How a pipeline is to run, where the mesh has an axis `stage` or `num` is asked for.

    Raises:
        ConfigError: If the stages asked for are not those of the mesh.
        PlanError: If nothing says what the inner axes are for.
    """
    names = [n for n in mesh.axis_names if n != DATA_AXIS]
    num_stages = mesh.shape.get(STAGE_AXIS, 0)
    if stages is not None and stages.num not in (0, num_stages):
        has = f"an axis of {num_stages}" if num_stages else "none"
        raise ConfigError(
            f"stages={stages.num} need a mesh axis {STAGE_AXIS!r} of that size, the mesh has "
            f"{has}: make one, or leave the mesh out"
        )
    names.sort(key=lambda n: n != STAGE_AXIS)
    order = [mesh.axis_names.index(n) for n in names]
    grid = mesh.devices
    if DATA_AXIS in mesh.axis_names:
        grid = grid.transpose([mesh.axis_names.index(DATA_AXIS), *order])
    else:
        grid = grid.transpose(order)[None]
    axes = tuple((str(n), int(mesh.shape[n])) for n in names)
    if num_stages:
        assert stages is not None
        return _staged_mesh(graph, grid, axes, rules, dataclasses.replace(stages, num=num_stages))
    roles = roles_of_mesh(graph, axes, by_rules=rules is not None)
    replicas = tuple(Replica(i, tuple(row.flat), axes) for i, row in enumerate(grid))
    return Strategy(replicas=replicas, axes=axes, roles=roles, rules=rules)


def _staged_mesh(
    graph: Graph,
    grid: np.ndarray,
    axes: tuple[tuple[str, int], ...],
    rules: RuleSet | None,
    stages: Stages,
) -> Strategy:
    if stages.num < 2:
        raise PlanError(
            f"the mesh axis {STAGE_AXIS!r} has size {stages.num}: a pipeline has at least two "
            "stages, leave the axis out"
        )
    inner = tuple(axis for axis in axes[1:] if axis[1] > 1)
    batch_axes = [name for name, _ in inner if name in BATCH_AXES]
    if batch_axes:
        raise PlanError(
            f"the mesh axes {', '.join(batch_axes)} would cut the batch inside a stage, which "
            f"hxla does not lower: use {DATA_AXIS!r} for copies of the pipeline, and axes that cut "
            "parameters, such as 'tensor', inside stages"
        )
    counted = [t.label for t in graph.task_graphs if t.device_count]
    if counted:
        raise ConfigError(
            f"the mesh's axis {STAGE_AXIS!r} cuts a model that annotations cut already "
            f"({', '.join(counted)}): leave the mesh out, or the counts of the annotations"
        )
    roles = roles_of_mesh(graph, inner, by_rules=rules is not None)
    return _pipelines([list(row.flat) for row in grid], stages, inner, roles, rules)


def share_cores(replicas: Sequence[Replica]) -> bool:
    """Whether several replicas of several CPU devices each live in one process."""
    local = [r for r in replicas if r.is_local and r.axes]
    return len(local) > 1 and local[0].devices[0].platform == "cpu"


def stages_share_cores(replicas: Sequence[Replica]) -> bool:
    """Whether a process has several CPU devices: what one takes then says nothing of another."""
    local = [d for r in replicas for d in r.devices if d.process_index == jax.process_index()]
    return len(local) > 1 and local[0].platform == "cpu"


def _nodes(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[int]:
    """Consecutive devices on one host."""
    names = [hosts[d.process_index] for d in devices]
    return [len(list(same)) for _, same in itertools.groupby(names)]
