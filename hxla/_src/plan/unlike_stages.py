"""Unlike stages: how each is sharded, and what a plan of them lacks.

Between steps the state of such a replica is sharded over all of its devices, along the axis
`device`. So the optimizer, checkpoints and evaluations know nothing of its stages.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..core.types import (
    DATA_AXIS,
    DEVICE_AXIS,
    EXPERT_AXIS,
    STAGE_AXIS,
    TENSOR_AXIS,
    TOKEN_AXIS,
)
from ..graph.graph import Graph, params_of
from ..graph.parts import ChainPart
from .axis_assignment import Axes, Roles, shard_graph
from .layout import Layout
from .linked_dims import LinkedDims, Parts, planned_parts
from .parts import PlannedPipeline, PlannedStage, granule_faults, size_faults
from .sharding import Sharded

#: The axes that a stage may have, and those of them that cut no parameter.
STAGE_AXES = (DATA_AXIS, TOKEN_AXIS, EXPERT_AXIS, TENSOR_AXIS)
ACTIVATION_AXES = (DATA_AXIS, TOKEN_AXIS)


def shard_stage(
    graph: Graph,
    ordered: Graph,
    part: ChainPart,
    axes: Axes,
    roles: Roles,
    dims: Sequence[Mapping[str, int]] | None,
    *,
    unlike: bool = False,
    granules: int | None = None,
) -> Sharded:
    """The equations of a stage sharded over its axes; values of other stages arrive whole.

    In granules the whole graph is sharded, so that all stages cut it alike. So it is for a stage
    with a part of a scan over layers, which is sharded as the scan is.

    Args:
        ordered: The graph in the order in which it is cut.
        dims: For each parameter the dimension that each axis cuts; None: the least communication.
        unlike: Whether shards may be uneven.
        granules: See `Axis.granules`.
    """
    if granules is not None or any(op.iterations for op in part.segment.ops):
        whole = shard_graph(graph, axes, roles, dims, unlike=unlike, granules=granules)
        return whole.over(ordered)
    of_entries = None if dims is None else [dims[p] for p in params_of(ordered)]
    solved = shard_graph(stage_graph(ordered, part), axes, roles, of_entries, unlike=unlike)
    return Sharded(ordered, solved.axes)


def stage_graph(graph: Graph, part: ChainPart) -> Graph:
    """The equations of a stage alone, whose inputs come as a batch does."""
    return dataclasses.replace(
        graph, ops=part.segment.ops, batch_values=(*graph.batch_values, *part.inputs)
    )


def stage_cuts(cuts: Sequence[int], num_parts: Iterable[int]) -> tuple[int, ...]:
    """The cuts at which stages begin.

    Args:
        cuts: Those between all parts, in the graph that is cut.
        num_parts: Of each stage.
    """
    ends = list(itertools.accumulate(num_parts))
    return tuple(cuts[end - 1] for end in ends[:-1])


def sharded_stages(
    graph: Graph,
    ordered: Graph,
    parts: Sequence[ChainPart],
    stages: Sequence[PlannedStage],
    parameters: Sequence[Layout],
) -> list[Sharded]:
    """The graph sharded as each stage of a plan says.

    Args:
        ordered: The graph in the order in which it is cut.
        parts: Of the stages, each with all that its stage runs.
        parameters: The layouts of all parameters, in the order of the model.
    """
    whole = {layout.name: _dims(layout) for stage in stages for layout in stage.parameters}
    out = []
    for part, stage in zip(parts, stages, strict=True):
        granules = next((axis.granules for axis in stage.axes), None)
        inside = {layout.name: _dims(layout) for layout in stage.parameters}
        known = inside if granules is None else whole
        dims = [known.get(parameter.name, {}) for parameter in parameters]
        axes = tuple((axis.name, axis.size) for axis in stage.axes)
        roles = {axis.name: axis.roles for axis in stage.axes}
        cut = graph, ordered, part, axes, roles, dims
        out.append(shard_stage(*cut, unlike=bool(stage.shares), granules=granules))
    return out


def stage_parts(
    graph: Graph,
    part: ChainPart,
    stage: PlannedStage,
    sharded: Sharded,
    parameters: Sequence[Layout],
) -> Parts | None:
    """The units of a stage's devices; None: its shards are alike.

    Args:
        parameters: The layouts of all parameters, in the order of the model.

    Raises:
        PlanError: If its layouts cut a unit, or disagree.
    """
    if not stage.shares:
        return None
    [axis] = sharded.axes.values()
    inside = {layout.name: layout for layout in stage.parameters}
    linked = LinkedDims(stage_graph(graph, part), axis)
    return planned_parts(linked, [inside.get(p.name, p) for p in parameters], stage.shares)


def _dims(layout: Layout) -> dict[str, int]:
    """The dimension of a parameter that each axis cuts."""
    return {name: dim for dim, names in enumerate(layout.spec) for name in names}


def most_counts(plan: Any) -> tuple[int, ...]:
    """The most microbatches of each form of replica in a step, for which there is memory.

    With `1f1b` a stage keeps no more than its place asks for, however many there are. With `gpipe`
    it keeps all of a step.
    """
    if not plan.unlike_replicas:
        return (max(plan.counts),)
    if plan.pipeline.schedule == "1f1b":
        return (plan.num_microbatches,) * len(plan.counts)
    return plan.counts


def unlike_stage_faults(plan: Any, pipeline: PlannedPipeline) -> Iterator[str]:
    """Faults of a plan with unlike stages: `key: fault, remedy`."""
    replicas, forms = pipeline.replicas, plan.stage_forms
    total = sum(stage.num_devices for form in forms for stage in form)
    if [(axis.name, axis.size) for axis in plan.axes] != [(DEVICE_AXIS, total)]:
        yield (
            f"axes: unlike stages have {total} devices, and the state is sharded "
            f"over the one axis {DEVICE_AXIS!r} of this size: give it alone"
        )
    known = {p.name: p for p in plan.parameters}
    for r, form in enumerate(forms):
        where = f"pipeline.replicas.{r}.stages" if replicas else "pipeline.stages"
        yield from _part_faults(where, form, pipeline, have_several=bool(replicas))
        for s, stage in enumerate(form):
            yield from _stage_faults(f"{where}.{s}", stage, known)
    if plan.is_cut_free:
        key = "pipeline.replicas" if replicas else "pipeline.stages"
        yield from _cut_free_faults(key, [stage for form in forms for stage in form])
    if replicas:
        yield from _replica_faults(plan, pipeline)
    for key, value, allowed in (
        ("pipeline.num_chunks", pipeline.num_chunks, (1,)),
        ("placement.zero", plan.placement.zero, (0, 1)),
        ("sums.kind", plan.sums.kind, ("exact",)),
    ):
        if value not in allowed:
            yield (
                f"{key}: unlike stages do not run with {value!r} yet: use "
                f"{' or '.join(map(repr, allowed))}, or stages of one form"
            )
    if pipeline.has_weight:
        yield (
            "pipeline.schedule: unlike stages have no separate weight gradients "
            "yet: use '1f1b' or 'gpipe', or stages of one form"
        )


def _cut_free_faults(key: str, stages: Sequence[PlannedStage]) -> Iterator[str]:
    """Where stages differ in more than the size of their axis, although no bit may depend on it."""
    if len({str([axis.deciding for axis in stage.axes]) for stage in stages}) > 1:
        yield (
            f"{key}: bits are free of the cut only if every stage, also of one device, has an axis "
            "of the same name, roles and granules"
        )
    specs: dict[str, set[Any]] = {}
    for layout in (layout for stage in stages for layout in stage.parameters):
        specs.setdefault(layout.name, set()).add(layout.spec)
    for name in (name for name, found in specs.items() if len(found) > 1):
        yield f"{key}: stages cut {name} in unlike dimensions, and bits would depend on that"


def _part_faults(
    key: str, stages: Sequence[PlannedStage], pipeline: PlannedPipeline, *, have_several: bool
) -> Iterator[str]:
    num, total = len(pipeline.cut), sum(stage.num_parts for stage in stages)
    if total != num:
        yield f"{key}: they run {total} parts, the pipeline has {num}"
    elif not have_several and len(stages) != num:
        yield f"{key}: {len(stages)} for {num} parts, each stage of a single form runs one"


def _replica_faults(plan: Any, pipeline: PlannedPipeline) -> Iterator[str]:
    if pipeline.stages:
        yield "pipeline.stages: the replicas have stages of their own, leave it out"
    if len(plan.replicas) != 1:
        yield (
            f"replicas: {len(plan.replicas)}, but unlike replicas share one state: list all "
            "devices in one"
        )
    if sum(plan.counts) != plan.num_microbatches:
        yield (
            f"pipeline.replicas: {'+'.join(map(str, plan.counts))} microbatches, a step has "
            f"{plan.num_microbatches}"
        )
    if pipeline.schedule not in ("gpipe", "1f1b"):
        yield "pipeline.schedule: unlike replicas run '1f1b' or 'gpipe'"


def _stage_faults(key: str, stage: PlannedStage, known: Mapping[str, Layout]) -> Iterator[str]:
    yield from _axis_faults(key, stage)
    yield from granule_faults(f"{key}.axes", stage.axes, stage.parameters, f"{key}.parameters")
    for layout in stage.parameters:
        yield from _layout_faults(key, stage, layout, known)
    names = Counter(layout.name for layout in stage.parameters)
    for name in (name for name, times in names.items() if times > 1):
        yield f"{key}.parameters: {name!r} is listed twice"


def _axis_faults(key: str, stage: PlannedStage) -> Iterator[str]:
    for name, times in Counter(axis.name for axis in stage.axes).items():
        if times > 1:
            yield f"{key}.axes: {name!r} is listed twice"
        if name not in STAGE_AXES:
            yield f"{key}.axes: a stage has no axis {name!r}, use {' or '.join(STAGE_AXES)}"
    for axis in stage.axes:
        if axis.shares and (len(stage.axes) > 1 or axis.name == DATA_AXIS):
            yield (
                f"{key}.axes.{axis.name}.shares: uneven shards need a stage with one axis, which "
                f"is not {DATA_AXIS!r}: leave the shares out"
            )
        elif axis.shares and len(axis.shares) != axis.size:
            yield f"{key}.axes.{axis.name}.shares: {len(axis.shares)} for {axis.size} devices"
    if len({len(axis.roles) for axis in stage.axes}) > 1:
        yield f"{key}.axes: `roles` must have one entry for each TaskGraph"


def _layout_faults(
    key: str, stage: PlannedStage, layout: Layout, known: Mapping[str, Layout]
) -> Iterator[str]:
    key, sizes = f"{key}.parameters.{layout.name}", stage.axis_sizes
    whole = known.get(layout.name)
    if whole is None:
        yield f"{key}: there is no such parameter"
        return
    if (layout.shape, layout.dtype) != (whole.shape, whole.dtype):
        yield (
            f"{key}: {layout.dtype}{list(layout.shape)} here, {whole.dtype}{list(whole.shape)} in "
            "`parameters`"
        )
        return
    unlike = layout.sizes or ((),) * len(layout.shape)
    if len(unlike) != len(layout.shape):
        yield f"{key}.sizes: {len(unlike)} entries for {len(layout.shape)} dimensions"
        return
    if len(layout.spec) != len(layout.shape):
        yield f"{key}.spec: {len(layout.spec)} entries for {len(layout.shape)} dimensions"
        return
    used = Counter(axis for names in layout.spec for axis in names)
    for axis, times in used.items():
        if axis not in sizes or axis in (*ACTIVATION_AXES, STAGE_AXIS):
            yield f"{key}.spec: no axis {axis!r} cuts parameters inside this stage"
        elif times > 1:
            yield f"{key}.spec: {axis!r} cuts it twice"
    for d, (size, names) in enumerate(zip(layout.shape, layout.spec, strict=True)):
        num = math.prod(sizes.get(name, 1) for name in names)
        if unlike[d]:
            yield from size_faults(key, layout, d, stage.axes)
        elif size % num:
            yield f"{key}.spec: dimension {d} of size {size} does not divide into {num}"
