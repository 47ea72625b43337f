"""Plans of a job by arguments, annotations and measurements, without a search."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from ..cluster.cluster import Cluster
from ..core.config import Config
from ..core.errors import ConfigError, PlanError
from ..core.format import num_bytes, plural
from ..core.keywords import as_whole_number, check_whole_numbers
from ..graph.graph import Graph, rows_touched
from ..graph.parts import graph_of
from ..graph.segments import Segment, segments
from ..jax.devices import share_cores
from ..launch.channel import Pinned, pinned
from ..model.functional import Functional, tree_bytes
from ..plan.axis_assignment import Axes, shard_graph
from ..plan.parts import Prediction, SparseRows, SumsForm
from ..plan.plan import Plan
from ..plan.rules import RuleSet
from ..profile.profile import Profile, Setting
from ..profile.segment_times import layer_sizes
from .apportionment import (
    best_counts,
    best_size,
    candidate_sizes,
    default_sizes,
    finish_seconds,
)
from .complete import complete
from .device_times import BACKWARD_FLOPS, Alternative, flops_per_second, layer_times
from .memory import with_sums_and_memory
from .microbatch_counts import Counts, asked_counts, predicted, share_one_process
from .pipeline_request import (
    PipelineRequest,
    Stages,
    best_cut,
    check_even,
    microbatch_size,
)
from .structures import ReplicaGroups, grid_of, pipelined, shares_of, structure_of
from .unlike_replicas import counts_are_free, with_cuts_and_counts
from .workload import Measure, Workload, Workloads


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user asks of a plan.

    Attributes:
        microbatch_size: Examples of a microbatch; None: by `default_sizes`.
        mesh: A mesh of devices, or its axes and their sizes; None: as annotated.
        rules: Decide what the inner axes of the mesh shard.
        stages: The number of pipeline stages, each stage's share of the work, or a table for each.
        counts: `measured`, `even`, or one count for each replica.
        reduction: `exact` or `float`.
        kept: Choices of the checkpoint that training resumes from, for settings left out.
    """

    microbatch_size: int | Literal["measured"] | None = None
    mesh: Mesh | Mapping[str, int | tuple[int, ...]] | None = None
    rules: RuleSet | None = None
    stages: Stages | None = None
    counts: Counts = "measured"
    reduction: str = "exact"
    kept: Pinned = dataclasses.field(default_factory=Pinned)

    def __post_init__(self) -> None:
        for name in ("microbatch_size", "stages"):
            object.__setattr__(self, name, as_whole_number(getattr(self, name)))
        if not isinstance(self.counts, str):
            if not isinstance(self.counts, Iterable):
                raise ConfigError(f"counts={self.counts!r}: give a list with one for each replica")
            counts = tuple(map(as_whole_number, self.counts))
            object.__setattr__(self, "counts", counts)
        if self.mesh is not None and not isinstance(self.mesh, Mesh | Mapping):
            raise ConfigError(
                f"mesh={self.mesh!r} is no mesh: pass its axes and their sizes, such as "
                "{'data': 4}, or a jax.sharding.Mesh"
            )
        if isinstance(self.mesh, Mapping):
            sizes = {f"mesh axis {n}": s for n, s in self.mesh.items() if not _is_ratio(s)}
            check_whole_numbers(1, **sizes)

    @property
    def shares(self) -> tuple[int, ...]:
        """The ratio that the mesh states for one of its axes; empty: none."""
        return shares_of(self.mesh) if isinstance(self.mesh, Mapping) else ()

    @property
    def pinned(self) -> Pinned:
        """The choices of earlier generations, else of the checkpoint."""
        before = pinned()
        return before if before.microbatch_size is not None else self.kept


def _is_ratio(size: object) -> bool:
    return isinstance(size, tuple | list)


def size_asked(jobs: Workloads, request: PlanRequest) -> int | None:
    """The microbatch size by the arguments, `pipeline.num_micro_batch` or an earlier run.

    Raises:
        ConfigError: For sizes below one, that do not divide the batch, or that disagree.
    """
    batch_size, num = jobs.batch_size, jobs.settings.pipeline.num_micro_batch
    size = request.microbatch_size
    if isinstance(size, str):
        if size != "measured":
            raise ConfigError(f"microbatch_size={size!r}: use a number, 'measured' or None")
        if num is not None:
            raise ConfigError(
                f"microbatch_size='measured' and pipeline.num_micro_batch={num} disagree: give one"
            )
        size = None
    check_whole_numbers(1, microbatch_size=size)
    if num is not None:
        if batch_size % num:
            raise ConfigError(
                f"batch_size={batch_size} is not divisible into pipeline.num_micro_batch={num} "
                "microbatches: use a divisor"
            )
        if size is not None and size != batch_size // num:
            raise ConfigError(
                f"microbatch_size={size} and pipeline.num_micro_batch={num} disagree: "
                f"{batch_size} examples in {num} microbatches are {batch_size // num} each; give "
                "one"
            )
        size = batch_size // num
    size = request.pinned.microbatch_size if size is None else size
    if size is not None and batch_size % size:
        divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
        near = min(divisors, key=lambda b: abs(b - size))
        raise ConfigError(
            f"batch_size={batch_size} is not divisible by microbatch_size={size}: the nearest "
            f"size that fits is {near}"
        )
    return size


def check_enough(batch_size: int, size: int, num_replicas: int, *, is_kept: bool = False) -> None:
    """Refuse more replicas than microbatches.

    Args:
        is_kept: Whether the size is that of a resumed run.

    Raises:
        PlanError: With both numbers.
    """
    num = batch_size // size
    if num < num_replicas:
        remedy = f"use fewer devices or microbatch_size <= {max(batch_size // num_replicas, 1)}"
        if is_kept:
            remedy = (
                f"the size is the checkpoint's, and the run keeps it: resume with {num} "
                f"device{'s' * (num > 1)} or fewer, let several devices share a replica "
                "(mesh, stages), or begin anew in another checkpoint_dir"
            )
        raise PlanError(
            f"{num_replicas} devices but only {plural(num, 'microbatch')} "
            f"(batch_size {batch_size} / microbatch_size {size}): {remedy}"
        )


def plan_for(
    jobs: Workloads,
    request: PlanRequest,
    cluster: Cluster,
    sums: SumsForm,
    measure: Measure | None,
    profile: Profile | None = None,
) -> Plan:
    """The plan that the user asks for.

    Args:
        measure: None: the devices are not here.
        profile: Measured times; None: none.

    Raises:
        ConfigError: If the request contradicts itself or cannot be met.
        PlanError: If the devices do not fit.
        AnnotationError: If a parameter cannot be sharded by its annotation or rule.
    """
    batch_size, size = jobs.batch_size, size_asked(jobs, request)
    is_measured = size is None and request.microbatch_size == "measured"
    is_kept = size != request.microbatch_size and size == request.pinned.microbatch_size
    graph = jobs.at(size or default_sizes(batch_size, 1)[0]).graph
    structure = _structure(jobs, request, cluster, graph, measure)
    num, pipeline = len(structure.replicas), structure.pipeline
    known: Prediction | None = None
    counts, reasons = _possible_counts(structure, request.counts, measure)
    if pipeline is not None:
        several = len(pipeline.replicas) or num
        size, notes = _pipeline_size(jobs, pipeline, size, several, is_measured=is_measured)
        reasons += notes
        check_enough(batch_size, size, several, is_kept=is_kept)
        if (pipeline.needs_even_counts and counts == "measured") or pipeline.replicas:
            counts = "even"  # unlike replicas have counts of their own, and share a state
        check_even(pipeline, batch_size // size, num, counts)
        timed_stages = _unlike_replicas if pipeline.replicas else _timed_stages
        if request.mesh is None:
            structure, known = timed_stages(
                jobs.at(size), structure, sums, request, cluster, measure, profile
            )
    else:
        reasons += _unused_profile(structure, profile)
    timed = profile if counts == "measured" and not structure.axes else None
    if size is not None:
        check_enough(batch_size, size, num, is_kept=is_kept)

    def make(size: int, reasons: Sequence[str], structure: ReplicaGroups = structure) -> Plan:
        work = jobs.at(size)
        form, notes = _with_sparse(work, structure, sums)
        plan = complete(
            work.graph,
            structure,
            cluster=cluster,
            batch_size=batch_size,
            microbatch_size=size,
            sums=form,
            optimizer_bytes=work.optimizer_bytes,
            counts=asked_counts(counts, batch_size // size, num),
            prediction=known,
            reasons=(*reasons, *_trained_reasons(work.model), *notes),
            profile=profile,
        )
        plan = with_sums_and_memory(work, plan, cluster, measure)
        if timed is not None:
            return _with_profiled_counts(plan, work.graph, timed, cluster)
        is_free = measure is None and counts == "measured"
        return _with_known_speeds(plan, work.graph, profile, cluster, is_free=is_free)

    def with_measured_split(plan: Plan) -> Plan:
        """The plan with the sizes of a split by a trial on the devices here."""
        is_free = request.counts != "even" and profile is None and plan.is_uneven
        is_free = is_free and plan.pipeline is None
        if measure is None or structure.shares or not is_free:
            return plan
        trial = measure.split_sizes(plan)
        if trial is None:
            return plan
        if not trial.shares:
            return plan.replaced(reasons=(*plan.reasons, trial.reason))
        better = dataclasses.replace(structure, shares=trial.shares, shares_are="measured")
        return make(plan.microbatch_size, (*reasons, trial.reason), better)

    if size is not None:
        if is_kept:
            reasons.append(f"microbatch_size={size}, as it was before")
        return with_measured_split(make(size, reasons))
    if not is_measured and timed is None:
        return with_measured_split(_default_plan(batch_size, num, make, reasons))
    sizes = candidate_sizes(batch_size, num)
    if timed is not None:
        sizes = tuple(sorted({setting.microbatch_size for setting in timed.times}))
    plan, notes = _fastest_size(batch_size, sizes, lambda size: make(size, ()), timed, measure)
    plan = with_measured_split(plan)
    return plan.replaced(reasons=(*plan.reasons, *reasons, *notes))


def _structure(
    jobs: Workloads,
    request: PlanRequest,
    cluster: Cluster,
    graph: Graph,
    measure: Measure | None,
) -> ReplicaGroups:
    """The replicas by the mesh, the stages, the rules and the annotations."""
    settings = jobs.settings
    stages = request.stages if request.stages is not None else settings.auto.num_stages
    axes, grid = _mesh(request.mesh, cluster, None if measure is None else measure.devices)
    structure = structure_of(
        graph, cluster, settings, stages, axes, grid, request.rules, request.shares
    )
    shares = structure.shares or _pinned_shares(structure, request.pinned)
    return dataclasses.replace(structure, shares=shares) if shares else structure


def _unused_profile(structure: ReplicaGroups, profile: Profile | None) -> list[str]:
    if profile is None or not structure.axes or len(structure.inner) == 1:
        return []
    return ["the profile is of a model on one device: not used"]


def _possible_counts(
    structure: ReplicaGroups, counts: Counts, measure: Measure | None
) -> tuple[Counts, list[str]]:
    """The counts asked for, but even where replicas share the cores of one process."""
    if counts != "measured" or not structure.axes or measure is None:
        return counts, []
    if share_one_process(len(structure.replicas[0]), measure.devices):
        return "even", ["even counts: the replicas share the cores of one process"]
    return counts, []


def _pipeline_size(
    jobs: Workloads, request: PipelineRequest, size: int | None, num: int, *, is_measured: bool
) -> tuple[int, list[str]]:
    """The microbatch size of pipelines, and the reason if it was not asked for.

    Raises:
        ConfigError: If it is to be measured, or gradients are to be clipped before the reduction.
    """
    _check_clip(jobs.settings)
    if is_measured:
        raise ConfigError(
            "microbatch_size='measured': that of a pipeline follows from its stages; give a "
            "number, or leave it out"
        )
    if size is not None:
        return size, []
    size, reason = microbatch_size(request, jobs.batch_size, num)
    return size, [reason]


def _fastest_size(
    batch_size: int,
    sizes: Sequence[int],
    make: Callable[[int], Plan],
    timed: Profile | None,
    measure: Measure | None,
) -> tuple[Plan, list[str]]:
    """The plan of the microbatch size with the shortest step, and why.

    Args:
        timed: The profile that predicts plans; None: they are measured.

    Raises:
        ConfigError: If there are neither a profile nor devices.
        PlanError: If no size gives a plan.
    """
    if measure is None and timed is None:
        raise ConfigError(
            "microbatch_size='measured' needs devices that are here, or a profile of those that "
            "are described: pass one, give a number, or leave it out"
        )
    seconds: dict[int, tuple[float, ...]] = {}
    plans, reasons = {}, []
    fault: PlanError | None = None
    for size in sizes:
        try:
            plans[size] = make(size)
        except PlanError as error:
            fault = error
            reasons.append(f"microbatch_size={size} left out: {error}")
            continue
        prediction = plans[size].prediction
        if timed is not None and prediction is not None:
            seconds[size] = prediction.microbatch_seconds
        elif measure is not None:
            seconds[size] = measure.microbatch_seconds(plans[size])
    if fault is not None and not plans:
        raise fault
    winner, steps = best_size(batch_size, seconds)
    reasons += [
        f"microbatch_size={winner} chosen: predicted step "
        + ", ".join(f"{s:.3f} s with {b}" for b, s in steps.items()),
        "pass it as microbatch_size to get the same bits where other sizes would win",
    ]
    return plans[winner], reasons


def _default_plan(
    batch_size: int,
    num_replicas: int,
    make: Callable[[int, Sequence[str]], Plan],
    reasons: Sequence[str],
) -> Plan:
    """The plan of the first default size that allows one.

    Raises:
        PlanError: If no size allows one: the error of the first size.
    """
    check_enough(batch_size, 1, num_replicas)
    usual, sizes = default_sizes(batch_size, 1)[0], default_sizes(batch_size, num_replicas)
    why = "whatever the devices"
    if sizes[0] != usual:
        why = f"as {usual} would make too few microbatches for {num_replicas}"
    notes, fault = list(reasons), None
    for size in sizes:
        try:
            return make(size, (*notes, f"microbatch_size={size} by default, {why}"))
        except PlanError as error:
            fault = fault or error
            notes.append(f"microbatch_size={size} left out: {error}")
    assert fault is not None  # there is one size at least
    raise fault


def _mesh(
    mesh: Mesh | Mapping[str, int | tuple[int, ...]] | None,
    cluster: Cluster,
    devices: tuple[jax.Device, ...] | None,
) -> tuple[Axes | None, np.ndarray]:
    """Axes of a mesh with their sizes, and ranks of its devices."""
    if mesh is None:
        return None, np.arange(len(cluster.devices))
    if not isinstance(mesh, Mesh):
        return grid_of(mesh, len(cluster.devices))
    if devices is None:
        raise ConfigError("a jax mesh is of devices that are here: pass its axes, {'data': 4}")
    ranks = {device: rank for rank, device in enumerate(devices)}
    grid = np.vectorize(ranks.__getitem__, otypes=[int])(mesh.devices)
    return tuple((str(n), int(s)) for n, s in mesh.shape.items()), grid


def _pinned_shares(structure: ReplicaGroups, before: Pinned) -> tuple[int, ...]:
    shares = before.shares
    return shares if [size for _, size in structure.inner] == [len(shares)] else ()


def _timed_stages(
    work: Workload,
    structure: ReplicaGroups,
    sums: SumsForm,
    request: PlanRequest,
    cluster: Cluster,
    measure: Measure | None,
    profile: Profile | None,
) -> tuple[ReplicaGroups, Prediction | None]:
    """Pipelines cut by the times of their devices, if these are known, else by their speeds.

    Returns:
        The structure, and the stages' fractions of the work if measured.
    """
    pipeline, graph, size = structure.pipeline, work.graph, work.microbatch_size
    if (
        pipeline is None
        or not pipeline.is_asked
        or request.counts == "even"
        or pipeline.shares is not None
        or pipeline.num_chunks > 1
        or (profile is None and measure is not None and share_cores(measure.devices))
    ):
        return structure, None
    kept, chain = request.pinned.cut, segments(graph_of(graph), pipeline.most_segments)
    if (len(kept), sum(kept)) == (pipeline.num_parts, len(chain)):
        pipeline = dataclasses.replace(pipeline, cut=kept)
        return pipelined(range(len(cluster.devices)), pipeline), None
    times: Mapping[int, np.ndarray] = {}
    if profile is not None:
        pipeline = dataclasses.replace(pipeline, num_segments=profile.most_segments)
        times = _profiled(profile, graph, size, cluster)
    elif measure is not None:
        times = measure.segment_seconds(cluster, size, pipeline.most_segments, sums)
    else:
        times = _estimated(chain, graph_of(graph), size, cluster)
        if not times:
            return structure, None
    cut = best_cut(
        graph,
        pipeline,
        times,
        memory_bytes={i: d.memory_bytes for i, d in enumerate(cluster.devices)},
        num_microbatches=work.batch_size // size,
        optimizer_bytes=work.optimizer_bytes,
        num_parts=sums.num_parts,
        trained=work.model.trained_places,
    )
    structure = pipelined(cut.order, dataclasses.replace(pipeline, cut=cut.layers))
    shown = ", ".join(f"{seconds * 1e3:.3g}" for seconds in cut.stage_seconds)
    is_measured = profile is not None or measure is not None
    origin = "measured times" if is_measured else _ESTIMATES
    reason = f"cut by {origin}: {shown} ms a microbatch on the stages"
    structure = dataclasses.replace(structure, reasons=(reason,))
    return structure, Prediction(stage_fractions=cut.fractions) if is_measured else None


def _unlike_replicas(
    work: Workload,
    structure: ReplicaGroups,
    sums: SumsForm,
    request: PlanRequest,
    cluster: Cluster,
    measure: Measure | None,
    profile: Profile | None,
) -> tuple[ReplicaGroups, Prediction | None]:
    """Replicas of unlike form, cut and given microbatches by the times of their devices."""
    pipeline, graph, size = structure.pipeline, work.graph, work.microbatch_size
    assert pipeline is not None
    num, kept = work.batch_size // size, request.pinned.cut
    # What another run would not measure again may not decide bits, unless a checkpoint keeps it.
    is_timed = request.counts == "measured" and counts_are_free(pipeline, structure.granules)
    times: Mapping[int, np.ndarray]
    if profile is not None and is_timed:
        pipeline = dataclasses.replace(pipeline, num_segments=profile.most_segments)
        times = _profiled(profile, graph, size, cluster)
    elif measure is not None and is_timed and not share_cores(measure.devices):
        times = measure.segment_seconds(cluster, size, pipeline.most_segments, sums)
    else:
        chain = segments(graph_of(graph), pipeline.most_segments)
        times = _estimated(chain, graph_of(graph), size, cluster)
    asked, slowest, fixed = with_cuts_and_counts(graph, pipeline, num, request.counts, times, kept)
    shown = ", ".join(f"{x * 1e3:.3g}" for x in slowest)
    is_measured = is_timed and (profile is not None or measure is not None)
    origin = "measured times" if is_measured else _ESTIMATES
    reason = f"by {origin}: {shown} ms a microbatch on the slowest stage of each replica"
    reasons = (*structure.reasons, *([reason] if times else []))
    structure = dataclasses.replace(structure, pipeline=asked, reasons=reasons)
    if not times:
        return structure, None
    counts = [replica.num_microbatches for replica in asked.replicas]
    return structure, Prediction(
        step_seconds=max(finish_seconds(counts, slowest, fixed)),
        microbatch_seconds=slowest,
        fixed_seconds=fixed,
    )


_ESTIMATES = "times estimated from FLOPs and the described speeds"


def _estimated(
    chain: Sequence[Segment], graph: Graph, size: int, cluster: Cluster
) -> dict[int, np.ndarray]:
    """[3, L] Seconds of the segments on each device, by its described speed.

    Empty: the devices are alike, or a speed is not known.
    """
    speeds = [flops_per_second(device, graph.arithmetic) for device in cluster.devices]
    if len(set(speeds)) == 1 or not all(speeds):
        return {}
    sizes = layer_sizes(graph, chain, shard_graph(graph, (), {}))
    flops = np.array([[1.0], [BACKWARD_FLOPS], [0.0]]) * [segment.flops for segment in chain]
    return {
        rank: layer_times(device, Alternative(size), sizes, None)[0]
        if device.product_rate(graph.arithmetic) is not None
        else flops / speed
        for rank, (device, speed) in enumerate(zip(cluster.devices, speeds, strict=True))
    }


def _profiled(profile: Profile, graph: Graph, size: int, cluster: Cluster) -> dict[int, np.ndarray]:
    """[3, L] Seconds of the segments on each device, by a profile."""
    graph = graph_of(graph)
    chain = segments(graph, profile.most_segments)
    profile.check([segment.name for segment in chain])
    sizes = layer_sizes(graph, chain, shard_graph(graph, (), {}))
    return {
        rank: layer_times(device, Alternative(size), sizes, profile)[0]
        for rank, device in enumerate(cluster.devices)
    }


def _with_known_speeds(
    plan: Plan, graph: Graph, profile: Profile | None, cluster: Cluster, *, is_free: bool
) -> Plan:
    """A plan with the step of a split by a profile, else with counts by described speeds.

    Args:
        is_free: Whether the counts may be chosen, for devices that are not here.
    """
    if profile is not None:
        return _with_profiled_split(plan, profile, cluster)
    if is_free and plan.pipeline is None and not plan.is_uneven:
        return _with_estimated_counts(plan, graph, cluster)
    return plan


def _with_profiled_counts(plan: Plan, graph: Graph, profile: Profile, cluster: Cluster) -> Plan:
    """A plan of replicas of one device each, with counts by a profile's times."""
    times = _profiled(profile, graph, plan.microbatch_size, cluster)
    by_replica = [times[rank] for replica in plan.replicas for rank in replica.devices]
    seconds = [float(rows[:2].sum()) for rows in by_replica]
    fixed = [float(rows[2].sum()) for rows in by_replica]
    plan = plan.with_counts(best_counts(plan.num_microbatches, seconds, fixed))
    known = predicted(plan, seconds, fixed, memory_bytes={}, cluster=cluster)
    return plan.replaced(prediction=known)


def _with_estimated_counts(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """A plan for devices that are not here, with counts by their described speeds.

    Devices of a replica have equal shares of its work, so that the slowest of them decides.
    """
    graph = graph_of(graph)
    times = _estimated(segments(graph, 1), graph, plan.microbatch_size, cluster)
    if not times:
        return plan
    seconds = [max(float(times[r][:2].sum()) for r in replica.devices) for replica in plan.replicas]
    found = plan.with_counts(best_counts(plan.num_microbatches, seconds, [0.0] * len(seconds)))
    return found.replaced(reasons=(*found.reasons, f"counts by {_ESTIMATES}"))


def _with_profiled_split(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """A plan whose replicas one axis shards, with its step by a profile's times.

    Every device updates arrays of the shape of the largest shard.
    """
    seconds = plan.prediction.microbatch_seconds if plan.prediction is not None else ()
    if not seconds:
        return plan
    part = plan.device_parameter_bytes / plan.parameter_bytes

    def update(rank: int) -> float:
        setting = Setting(cluster.devices[rank].label, plan.microbatch_size)
        return part * sum(t.update for t in profile.times[setting])

    fixed = [max(map(update, replica.devices)) for replica in plan.replicas]
    known = predicted(plan, seconds, fixed, memory_bytes={}, cluster=cluster)
    return plan.replaced(prediction=known)


def _check_clip(settings: Config) -> None:
    if settings.communication.microbatch_clip_norm is not None:
        raise ConfigError(
            "communication.clip='before' needs the whole gradient of a microbatch, which no "
            "stage of a pipeline has: use clip='after'"
        )


def _trained_reasons(model: Functional) -> tuple[str, ...]:
    if not model.frozen:
        return ()
    num, every = (sum(x.size for x in jax.tree.leaves(t)) for t in (model.trained, model.params))
    trained, whole = (num_bytes(tree_bytes(tree)) for tree in (model.trained, model.params))
    return (
        f"trained: {num:,} of {every:,} parameters, {trained} of {whole}; the others are frozen",
    )


def _with_sparse(
    work: Workload, structure: ReplicaGroups, sums: SumsForm
) -> tuple[SumsForm, tuple[str, ...]]:
    """The form of the sums with the embeddings that are reduced row by row, and why."""
    if not work.settings.communication.sparse_embeddings:
        return sums, ()
    if structure.axes:
        return sums, ("sparse_embeddings: whole, for the devices of a replica share them",)
    num, sparse_rows, notes = len(structure.replicas), [], []
    graph, is_trained = work.graph, work.model.is_trained
    for p, most in rows_touched(graph, work.batch_size // work.microbatch_size).items():
        if not is_trained[p]:
            continue
        name, height = graph.param_names[p], graph.param_shapes[p][0]
        # An all-gather of rows, against a reduce-scatter of shards and an all-gather of floats.
        if num * most * sums.num_parts < height * (sums.num_parts + 1):
            sparse_rows.append(SparseRows(name=name, most_rows=most))
            notes.append(f"sparse_embeddings: at most {most} of {height} rows of {name}")
        else:
            notes.append(
                f"sparse_embeddings: {name} whole, {most} rows from each of {num} would be more "
                f"than its {height}"
            )
    none = "sparse_embeddings: no parameter is only looked up by rows"
    return sums.model_copy(update={"sparse": tuple(sparse_rows)}), tuple(notes) or (none,)
