"""Checks that a plan suits this job, its devices and the installed versions."""

import re
from collections.abc import Iterator

import jax

from ..choose.complete import versions_for
from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..cluster.kinds import are_unlike, in_words, missing_attention, missing_dtypes
from ..core.errors import ConfigError, PlanError
from ..graph.graph import Graph, params_of, rows_touched
from ..graph.parts import graph_at, graph_of
from ..graph.segments import segments_at
from ..graph.trace import largest_head
from ..jax.devices import process_of
from ..jax.settings import unlike_settings
from ..job.agreement import facts_of_plan, facts_of_versions
from ..job.context import JobContext
from ..lower.chain_spec import direct_parts
from ..plan.layout import dtype_name
from ..plan.parts import ChainSegment
from ..plan.plan import Plan
from ..plan.precision import Precision
from .values import SessionOptions

_MOST_LINES = 20  # of one kind of difference
_LINE = re.compile(r":\d+")  # of a source file; it moves when a comment is written


def agree_on_asked(plan: Plan, job: JobContext, options: SessionOptions) -> None:
    """Refuse to open a session if processes disagree about it.

    Raises:
        LaunchError: On every process, with the arguments, settings, versions and decisions that
            differ.
    """
    job.agree(
        "arguments",
        lambda: {**job.facts(), **options.facts(), **facts_of_versions(), **facts_of_plan(plan)},
    )


def check_runnable(plan: Plan, job: JobContext, cluster: Cluster, devices: Devices) -> None:
    """Refuse a plan that does not suit the job or its devices.

    Raises:
        PlanError: With every difference: batch, versions, devices, parameters, stages, sums.
    """
    graph = job.graph(plan.microbatch_size)
    lines = []
    for differences in (
        _job_differences(plan, job.batch_size, cluster),
        _precision_differences(plan, job.precision),
        _device_differences(plan, cluster, devices),
        missing_attention(largest_head(graph), [d.kind for d in plan.devices]),
        _parameter_differences(plan, graph),
        _segment_differences(plan, graph),
        _stage_differences(plan, graph),
        _sum_differences(plan, graph, cluster),
    ):
        every = [f"  {difference}" for difference in differences]
        more = len(every) - _MOST_LINES
        lines += every[:_MOST_LINES] + ([f"  and {more} more of this sort"] if more > 0 else [])
    if lines:
        raise PlanError(
            "the plan is for something else:\n"
            + "\n".join(lines)
            + "\nmake a plan for this, with hxla plan or Job.plan, or edit these fields"
        )


def _job_differences(plan: Plan, batch_size: int, cluster: Cluster) -> Iterator[str]:
    if plan.batch_size != batch_size:
        yield f"batch_size: {plan.batch_size} in the plan, {batch_size} in the job"
    here = versions_for(cluster)
    for name in type(here).model_fields:
        planned, present = getattr(plan.made_with, name), getattr(here, name)
        if planned != present and name != "settings":
            yield f"made_with.{name}: {planned} in the plan, {present} here"
    for name, planned, present in unlike_settings(plan.made_with.settings, here.settings):
        yield f"made_with.settings: {name} is {planned} in the plan, {present} here"


def _precision_differences(plan: Plan, precision: Precision) -> Iterator[str]:
    yield from missing_dtypes(plan.precision.low_dtypes, [d.kind for d in plan.devices])
    for name in type(precision).model_fields:
        planned, here = getattr(plan.precision, name), getattr(precision, name)
        if planned != here:
            yield f"precision.{name}: {planned} in the plan, {here} in the job"


def _device_differences(plan: Plan, cluster: Cluster, devices: Devices) -> Iterator[str]:
    used, num = set(), len(cluster.devices)
    beyond = [device.rank for device in plan.devices if device.rank >= num]
    if beyond:
        yield f"devices: the plan uses {', '.join(map(str, beyond))}, here are 0 to {num - 1}"
    for device in plan.devices:
        if device.rank >= num:
            continue
        label, here = cluster.devices[device.rank].label, devices[device.rank]
        if label != device.kind:
            yield f"devices.{device.rank}: {device.kind} in the plan, {label} here"
        if here is None:
            yield f"devices.{device.rank}: no process was started for it"
        else:
            used.add(process_of(here))
    idle = sorted({process_of(d) for d in devices if d is not None} - used)
    if idle:
        yield (
            f"devices: processes {idle} have no part in the plan; hxla run --plan starts only "
            "those that have"
        )


def _parameter_differences(plan: Plan, graph: Graph) -> Iterator[str]:
    traced = {
        name: (graph.values[v].shape, dtype_name(graph.values[v].dtype))
        for name, v in zip(graph.param_names, graph.param_values, strict=True)
    }
    planned = {p.name: (p.shape, p.dtype) for p in plan.parameters}
    for name in dict.fromkeys((*planned, *traced)):
        in_model, in_plan = (_array(known.get(name)) for known in (traced, planned))
        if in_model != in_plan:
            yield f"parameters.{name}: {in_plan} in the plan, {in_model} in the model"
    if planned == traced and list(planned) != list(traced):
        yield f"parameters: in another order than the model's, which is {', '.join(traced)}"
    axes = (*plan.axes, *(axis for stage in plan.unlike_stages for axis in stage.axes))
    num_tasks = {len(axis.roles) for axis in axes if axis.roles} - {len(graph.task_graphs)}
    if num_tasks:
        yield (
            f"axes: {num_tasks.pop()} TaskGraphs have roles in the plan, the model has "
            f"{len(graph.task_graphs)}"
        )


def _array(known: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if known is None else f"{known[1]}{list(known[0])}"


def _segment_differences(plan: Plan, graph: Graph) -> Iterator[str]:
    planned: tuple[ChainSegment, ...]
    if plan.pipeline is not None:
        key, cut_by, planned = "pipeline", plan.pipeline.cut_by, plan.pipeline.segments
    elif plan.chain is not None:
        key, cut_by, planned = "chain", "work", plan.chain.segments
    else:
        return
    try:
        chain = segments_at(graph_of(graph, cut_by), [s.first for s in planned[1:]])
    except PlanError as error:
        yield f"{key}.cut_by: {error}"
        return
    for i, (segment, traced) in enumerate(zip(planned, chain, strict=True)):
        if not traced.ops:
            yield f"{key}.segments.{i}: the loss has no equation {segment.first}"
        elif _LINE.sub("", segment.name) != _LINE.sub("", traced.name):
            yield (
                f"{key}.segments.{i}: {segment.name!r} begins at equation {segment.first} in "
                f"the plan, {traced.name!r} in the loss"
            )


def _stage_differences(plan: Plan, graph: Graph) -> Iterator[str]:
    """Stages of unlike devices whose layouts are of other parameters than they read."""
    if not plan.unlike_stages:
        return
    assert plan.pipeline is not None
    ordered, points = graph_at(graph, plan.pipeline.cut_by, plan.pipeline.points)
    param_of = params_of(ordered)
    for s, (part, stage) in enumerate(
        zip(direct_parts(ordered, points), plan.unlike_stages, strict=True)
    ):
        read = {graph.param_names[param_of[entry]] for entry in part.segment.params}
        listed = {layout.name for layout in stage.parameters}
        for name in sorted(read ^ listed):
            says = "reads it" if name in read else "does not read it"
            yield f"pipeline.stages.{s}.parameters: {name!r}: the stage {says}"


def _sum_differences(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[str]:
    """Unlike devices with wrong collectives or updates, and sparse sums that would lose rows."""
    used = {device.rank for device in plan.devices}
    kinds = [device.label for rank, device in enumerate(cluster.devices) if rank in used]
    if are_unlike(kinds) and plan.sums.over == "device":
        yield f"sums.over: {in_words(kinds)} share no library for collectives: use 'host'"
    if are_unlike(kinds) and not plan.placement.zero:
        yield f"placement.zero: {in_words(kinds)} would drift apart if each updated all: use 1"
    touched = rows_touched(graph, plan.num_microbatches)
    rows = {graph.param_names[p]: most for p, most in touched.items()}
    for sparse in plan.sums.sparse:
        most = rows.get(sparse.name)
        if most is None:
            yield f"sums.sparse: {sparse.name} is not only looked up by rows: leave it out"
        elif sparse.most_rows < most:
            yield (
                f"sums.sparse: {most} rows of {sparse.name} may be touched, not {sparse.most_rows}"
            )


def check_settings() -> None:
    """Refuse settings of jax under which no program of a session can run.

    Raises:
        ConfigError: With the settings to change.
    """
    wrong = []
    if not jax.sharding.get_abstract_mesh().empty:
        wrong.append(
            "jax.set_mesh(...) is in force, and hxla gives every array its own place: call it "
            "outside of that, and pass mesh=... if the mesh is meant"
        )
    if getattr(jax.config, "jax_disable_jit"):  # noqa: B009
        wrong.append("jit is disabled (jax.disable_jit, JAX_DISABLE_JIT), and hxla compiles ahead")
    kinds = ("", "_host_to_device", "_device_to_device", "_device_to_host")
    guards = [f"jax_transfer_guard{kind}" for kind in kinds]
    disallowed = [name for name in guards if str(getattr(jax.config, name)).startswith("disallow")]
    if disallowed:
        wrong.append(f"{', '.join(disallowed)} disallows transfers, and hxla loads batches by them")
    if wrong:
        raise ConfigError("; ".join(wrong))
