"""Whether a plan is for this job, these devices and these versions."""

import re
from collections.abc import Iterator

import jax

from ..choose.complete import versions_for
from ..cluster.card_dtypes import missing_dtypes
from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..cluster.libraries import are_unlike, in_words
from ..core.errors import ConfigError, PlanError
from ..graph.graph import Graph, rows_touched
from ..graph.parts import graph_of
from ..graph.segments import segments_at
from ..jax.devices import process_of
from ..jax.settings import unlike_settings
from ..job.agreement import facts_of_plan, facts_of_versions
from ..job.context import JobContext
from ..plan.layout import dtype_name
from ..plan.parts import ChainSegment
from ..plan.plan import Plan
from ..plan.precision import Precision
from .values import SessionOptions

_MOST_LINES = 20  # of one sort of difference
_LINE = re.compile(r":\d+")  # of a source file; it moves when a comment is written


def agree_on_asked(plan: Plan, job: JobContext, options: SessionOptions) -> None:
    """Refuse to open a session that other processes open otherwise.

    Raises:
        LaunchError: On every process: arguments, settings, versions and decisions that differ.
    """
    job.agree(
        "arguments",
        lambda: {**job.facts(), **options.facts(), **facts_of_versions(), **facts_of_plan(plan)},
    )


def check_runnable(plan: Plan, job: JobContext, cluster: Cluster, devices: Devices) -> None:
    """Refuse a plan for something else.

    Raises:
        PlanError: With every difference: batch, versions, devices, parameters, stages, sums.
    """
    graph = job.graph(plan.microbatch_size)
    lines = []
    for sort in (
        _of_job(plan, job.batch_size, cluster),
        _of_precision(plan, job.precision),
        _of_devices(plan, cluster, devices),
        _of_parameters(plan, graph),
        _of_segments(plan, graph),
        _of_sums(plan, graph, cluster),
    ):
        found = [f"  {fault}" for fault in sort]
        more = len(found) - _MOST_LINES
        lines += found[:_MOST_LINES] + ([f"  and {more} more of this sort"] if more > 0 else [])
    if lines:
        raise PlanError(
            "the plan is for something else:\n"
            + "\n".join(lines)
            + "\nmake a plan for this, with hxla plan or Job.plan, or edit these fields"
        )


def _of_job(plan: Plan, batch_size: int, cluster: Cluster) -> Iterator[str]:
    if plan.batch_size != batch_size:
        yield f"batch_size: {plan.batch_size} in the plan, {batch_size} in the job"
    here = versions_for(cluster)
    for name in type(here).model_fields:
        planned, own = getattr(plan.made_with, name), getattr(here, name)
        if planned != own and name != "settings":
            yield f"made_with.{name}: {planned} in the plan, {own} here"
    for name, planned, own in unlike_settings(plan.made_with.settings, here.settings):
        yield f"made_with.settings: {name} is {planned} in the plan, {own} here"


def _of_precision(plan: Plan, own: Precision) -> Iterator[str]:
    yield from missing_dtypes(plan.precision.low_dtypes, [d.kind for d in plan.devices])
    for name in type(own).model_fields:
        planned, here = getattr(plan.precision, name), getattr(own, name)
        if planned != here:
            yield f"precision.{name}: {planned} in the plan, {here} in the job"


def _of_devices(plan: Plan, cluster: Cluster, devices: Devices) -> Iterator[str]:
    used, num = set(), len(cluster.devices)
    beyond = [device.rank for device in plan.devices if device.rank >= num]
    if beyond:
        yield f"devices: the plan uses {', '.join(map(str, beyond))}, here are 0 to {num - 1}"
    for device in plan.devices:
        if device.rank >= num:
            continue
        own, here = cluster.devices[device.rank].label, devices[device.rank]
        if own != device.kind:
            yield f"devices.{device.rank}: {device.kind} in the plan, {own} here"
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


def _of_parameters(plan: Plan, graph: Graph) -> Iterator[str]:
    own = {
        name: (graph.values[v].shape, dtype_name(graph.values[v].dtype))
        for name, v in zip(graph.param_names, graph.param_values, strict=True)
    }
    planned = {p.name: (p.shape, p.dtype) for p in plan.parameters}
    for name in dict.fromkeys((*planned, *own)):
        here, there = (_array(known.get(name)) for known in (own, planned))
        if here != there:
            yield f"parameters.{name}: {there} in the plan, {here} in the model"
    if planned == own and list(planned) != list(own):
        yield f"parameters: in another order than the model's, which is {', '.join(own)}"
    num_tasks = {len(axis.roles) for axis in plan.axes if axis.roles} - {len(graph.task_graphs)}
    if num_tasks:
        yield (
            f"axes: {num_tasks.pop()} TaskGraphs have roles in the plan, the model has "
            f"{len(graph.task_graphs)}"
        )


def _array(known: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if known is None else f"{known[1]}{list(known[0])}"


def _of_segments(plan: Plan, graph: Graph) -> Iterator[str]:
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
    for i, (segment, own) in enumerate(zip(planned, chain, strict=True)):
        if not own.ops:
            yield f"{key}.segments.{i}: the loss has no equation {segment.first}"
        elif _LINE.sub("", segment.name) != _LINE.sub("", own.name):
            yield (
                f"{key}.segments.{i}: {segment.name!r} begins at equation {segment.first} in "
                f"the plan, {own.name!r} in the loss"
            )


def _of_sums(plan: Plan, graph: Graph, cluster: Cluster) -> Iterator[str]:
    """Devices that cannot meet or would drift apart, and rows of a gradient that would be lost."""
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
    """Refuse settings of jax's under which no program of a session can run.

    Raises:
        ConfigError: With what to leave out.
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
    found = [name for name in guards if str(getattr(jax.config, name)).startswith("disallow")]
    if found:
        wrong.append(f"{', '.join(found)} disallows transfers, and hxla loads batches by them")
    if wrong:
        raise ConfigError("; ".join(wrong))
