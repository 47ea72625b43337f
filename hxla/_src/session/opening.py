"""A session's opening: checked plan, compiled programs, first state, speed of every replica.

A plan has to suit the job, its devices and the installed versions. The local replica gets the
fastest number of executors.
"""

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from ..choose.complete import versions_for
from ..choose.microbatch_counts import lack, pooled, shared_numbers, with_executors
from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..cluster.kinds import are_unlike, in_words, missing_attention, missing_dtypes
from ..core.config import Config, IslandsConfig
from ..core.errors import ConfigError, PlanError
from ..core.types import PyTree
from ..graph.graph import Graph, params_of, rows_touched
from ..graph.parts import graph_at, graph_of
from ..graph.segments import segments_at
from ..graph.trace import largest_head
from ..jax.devices import is_here, keep_heap_small, process_of
from ..jax.settings import unlike_settings
from ..job.agreement import facts_of_data, facts_of_plan, facts_of_versions
from ..job.context import JobContext
from ..launch.channel import own_member
from ..lower.chain_spec import direct_parts
from ..lower.lower import Programs
from ..lower.stage_chain import use_counts
from ..lower.store import Store
from ..plan.layout import dtype_name
from ..plan.parts import ChainSegment
from ..plan.plan import Plan
from ..plan.precision import Precision
from ..plan.unlike_stages import stage_cuts
from .ending import Termination
from .island_steps import IslandSteps
from .saved_state import RestoreSource
from .step import Stepper, use_executors
from .values import SessionOptions

if TYPE_CHECKING:
    from .member import SessionMember

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
        _island_differences(plan, job.settings.islands),
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


def _island_differences(plan: Plan, settings: IslandsConfig) -> Iterator[str]:
    """Islands that the settings ask for, and another plan."""
    if settings.every is None:
        return
    if plan.islands is None:
        yield f"islands: none in the plan, the settings ask for islands.every of {settings.every}"
        return
    for name in ("every", "learning_rate", "momentum"):
        planned, here = getattr(plan.islands, name), getattr(settings, name)
        if planned != here:
            yield f"islands.{name}: {planned} in the plan, {here} in the settings"


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
    unlike = [axis for form in plan.stage_forms for stage in form for axis in stage.axes]
    stated = [*unlike, *(axis for axis in plan.axes if axis.roles)]
    num_tasks = {len(axis.roles) for axis in stated} - {len(graph.task_graphs)}
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
    for r, form in enumerate(plan.stage_forms):
        assert plan.pipeline is not None
        ordered, cuts = graph_at(graph, plan.pipeline.cut_by, plan.pipeline.points)
        points = stage_cuts(cuts, [stage.num_parts for stage in form])
        param_of, where = params_of(ordered), f"replicas.{r}." * bool(plan.unlike_replicas)
        for s, (part, stage) in enumerate(zip(direct_parts(ordered, points), form, strict=True)):
            read = {graph.param_names[param_of[entry]] for entry in part.segment.params}
            listed = {layout.name for layout in stage.parameters}
            for name in sorted(read ^ listed):
                says = "reads it" if name in read else "does not read it"
                yield f"pipeline.{where}stages.{s}.parameters: {name!r}: the stage {says}"


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


_REPEATS = 5
_MOST_OF_WORK = 1 / 20  # largest share of the remaining work for trials
_LONG_SECONDS = 0.1  # of a run in which adding the sums of executors is negligible
_SHORT_SUM = 0.1  # seconds, of a reduction that is timed again


def with_fastest_executors(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    min_gain: float,
    num_steps: int,
) -> tuple[Plan, list[float]]:
    """Double the executors of the local replica while microbatches become faster.

    Every process of a job must call this. A plan with several executors stays.

    Args:
        stepper: A warm one, which then uses the fastest number.
        seconds: Of a microbatch on each local replica.
        min_gain: Relative gain in seconds that a doubling must reach.
        num_steps: Remaining steps; trials take at most a twentieth of their work.

    Returns:
        The plan with the fastest number of executors on each replica, and their seconds.
    """
    if any(r.executors > 1 for r in plan.replicas):
        return plan, seconds
    best, most, num = plan, _most_executors(programs), 1
    budget = _MOST_OF_WORK * num_steps * max(plan.counts)
    min_microbatches = math.ceil(_LONG_SECONDS / max(seconds[0], 1e-9))
    while 2 * num <= most:
        num *= 2
        at_once = min(max(2 * num, min_microbatches), max(plan.counts))
        budget -= 2 * _REPEATS * at_once
        if budget < 0:
            break
        more = with_executors(plan, (num,) * len(plan.replicas))
        timed = functools.partial(stepper.seconds_of_microbatches, 0, batch, at_once)
        before = timed(repeats=_REPEATS, apart=True)
        use_executors(programs, more.replicas)
        after = timed(repeats=_REPEATS, apart=True)
        if not np.median(after) < (1 - min_gain) * np.median(before):
            use_executors(programs, best.replicas)
            break
        best, seconds = more, [float(np.median(after))]
    local = programs.reducer.local
    executors = shared_numbers(programs.reducer, [best.replicas[r.index].executors for r in local])
    return with_executors(plan, tuple(map(int, executors))), seconds


def seconds_of_replicas(
    stepper: Stepper,
    programs: Programs,
    plan: Plan,
    batch: PyTree,
    seconds: list[float],
    settings: Config,
    num_steps: int | None,
) -> tuple[Plan, tuple[float, ...]]:
    """The plan with the executors of the settings, and seconds of a microbatch on each replica.

    Args:
        seconds: Of a microbatch on each local replica.
        num_steps: Remaining steps; None: not known.
    """
    if settings.cluster.executors == "auto" and num_steps is not None:
        gain = settings.balance.min_gain
        plan, seconds = with_fastest_executors(
            stepper, programs, plan, batch, seconds, gain, num_steps
        )
    return plan, pooled(shared_numbers(programs.reducer, seconds), plan)


def seconds_of_sums(stepper: Stepper, programs: Programs, batch: PyTree) -> float:
    """Seconds of the reduction over replicas, the least of some; every process calls this."""

    def once() -> float:
        for i, runner in enumerate(programs.runners):
            stepper.seconds_of_microbatches(i, batch, runner.unit, repeats=1)
        here = [stepper.seconds_of_sums()] * len(programs.reducer.local)
        # The last process that comes waits for no other.
        return min(shared_numbers(programs.reducer, here))

    seconds = once()
    return min(seconds, *(once() for _ in range(2))) if seconds < _SHORT_SUM else seconds


def _most_executors(programs: Programs) -> int:
    """The largest useful number of executors: the cores of a single CPU device.

    A GPU runs the programs of a process one after another.
    """
    plan, local = programs.plan, programs.reducer.local
    has_others = plan.axes or plan.chain is not None or plan.placement.zero > 1
    if len(local) != 1 or has_others or plan.sums.kind != "exact":
        return 1
    if local[0].devices[0].platform != "cpu":
        return 1
    return min(len(os.sched_getaffinity(0)), max(plan.counts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """What a session steps with.

    Attributes:
        plan: The plan with the measured executors, if counts follow the devices.
        source: The checkpoints, and the state with which the session begins.
        member: The elastic part of the session; None: it is not elastic.
        first_batch: The examples whose shapes the programs are compiled for.
        inputs: `first_batch` as programs take it.
        seconds: Of a microbatch on each replica; None: not measured.
        sum_seconds: Of the reduction over replicas; 0: not measured, or the microbatches' own.
        memory_bytes: Of one device, for its state, its sums and the largest of its programs.
        waits_for_saves: Whether training waits for a checkpoint, because memory is scarce.
    """

    plan: Plan
    cluster: Cluster
    programs: Programs
    store: Store
    stepper: Stepper
    islands: IslandSteps
    source: RestoreSource
    member: "SessionMember | None"
    first_batch: PyTree
    inputs: PyTree
    seconds: tuple[float, ...] | None
    sum_seconds: float
    memory_bytes: int
    waits_for_saves: bool


def opened_session(
    job: JobContext,
    plan: Plan,
    devices: Devices,
    options: SessionOptions,
    termination: Termination,
    stack: contextlib.ExitStack,
    tell: Callable[[str], None],
) -> Opened:
    """Compile a plan's programs, put the state in its places and run everything once.

    Every process must call this. An elastic session compiles before its generation is formed.
    """
    cluster = job.cluster(devices)
    agree_on_asked(plan, job, options)
    check_runnable(plan, job, cluster, devices)
    on_cpu = any(d is not None and is_here(d) and d.platform == "cpu" for d in devices)
    is_tight = on_cpu and plan.placement.sums == "released"
    if is_tight:
        keep_heap_small()
    own = own_member() if not options.is_trial and options.steps is not None else None
    make_source = functools.partial(RestoreSource, job, plan, options, stack, is_tight=is_tight)
    source = make_source() if own is None else None
    start = options.first_step if source is None else source.first_step
    resumed = None if source is None else source.step
    inputs = job.as_inputs(batch := job.first_batch(start, plan.microbatch_size))
    job.agree("data", lambda: facts_of_data(batch, f"data of step {start + 1}: "))
    weights = job.opened_weights(plan.microbatch_size) if resumed is None else None
    stack.enter_context(job.functional(plan.microbatch_size).in_host_memory())
    programs = job.programs(plan, devices, tell, keep=options.is_trial)
    store = programs.store()
    stack.callback(store.close)
    tell("putting the state in its places")
    if source is None or not source.load(store):
        store.initialise(job.gather, weights)
    tell("running every program once")
    stepper = Stepper(programs, store)
    stack.callback(stepper.close)
    use_executors(programs, plan.replicas)
    use_counts(programs.runners, plan)
    islands = IslandSteps(programs, store, stepper, start)
    repeats = 3 if options.balance else 0
    times = stepper.warm_up(inputs, repeats=repeats, has_scales=resumed is not None)
    seconds, sum_seconds, member = None, 0.0, None
    if options.balance:
        if len(plan.replicas) > 1 and programs.layered is None:
            sum_seconds = seconds_of_sums(stepper, programs, inputs)
        num_left = None if options.steps is None else options.steps - start
        parts = stepper, programs, plan, inputs, times
        plan, seconds = seconds_of_replicas(*parts, job.settings, num_left)
    if own is not None:
        from .member import SessionMember, rehearse

        rehearse(own, store, job)
        tell("waiting for the generation to be formed")
        source = make_source(folders=own.wait_for_the_others())
        if source.load(store):
            stepper.scales.restored()
        member = SessionMember(own, store, termination, job, source)
    assert source is not None  # made in one of the two branches
    state_bytes = store.num_bytes()
    memory_bytes = programs.memory_bytes(state_bytes)
    return Opened(
        plan=plan,
        cluster=cluster,
        programs=programs,
        store=store,
        stepper=stepper,
        islands=islands,
        source=source,
        member=member,
        first_batch=batch,
        inputs=inputs,
        seconds=seconds,
        sum_seconds=sum_seconds,
        memory_bytes=memory_bytes,
        waits_for_saves=on_cpu and lack(devices, cluster, state_bytes + memory_bytes),
    )
