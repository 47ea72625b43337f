"""Plans of a job by search: for a described cluster, or for the devices here.

Three searches, of which the fastest plan is taken: stages and groups of devices in one form
(`proposals`), replicas of one device each that shard their state (`sharded_search`), and pipelines
of unlike stages (`unlike_search`).
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..cluster.cluster import Cluster, Device
from ..core.config import Config
from ..core.errors import AnnotationError, ConfigError, NothingFitsError, PlanError
from ..core.format import span
from ..graph.graph import is_slow_in_loops
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..launch.again import can_start_again, start_again_on
from ..launch.channel import own_member
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import RunnerUp, SumsForm
from ..plan.plan import Plan, name_of_devices
from ..plan.sharding import Sharded
from ..profile.profile import LayerSize, Profile, with_measured
from ..profile.segment_times import kept_bytes, layer_sizes
from ..schedule.replay import Timeline
from .apportionment import candidate_sizes
from .complete import complete, keeps_order
from .memory import with_sums_and_memory
from .memory_model import travel_of
from .mesh_axes import split_over
from .pipeline_request import PipelineRequest
from .proposals import ChainWork, Proposal, propose
from .sharded_search import sharded_replicas
from .structures import ReplicaGroups, check_unannotated
from .unlike_search import as_runners_up, unlike_plan
from .workload import Measure, PlanResult, SearchOptions, Workloads

_MAX_TENSOR = 8  # a node of NVLinked cards
_MEASURED_SEGMENTS = 8  # each takes a compilation
_MOST_SEGMENTS = 96  # of estimated times; the search is measured up to so many


def search_plan(
    jobs: Workloads,
    cluster: Cluster,
    profile: Profile | None,
    options: SearchOptions,
    *,
    sums: SumsForm,
    size: int | None = None,
    all_devices: bool = False,
    measure: Measure | None = None,
) -> PlanResult:
    """The fastest plan by search for a cluster.

    Args:
        profile: Measured times; missing ones are estimated from the mesh file's rates.
        size: Examples of a microbatch; None: not asked for.
        all_devices: Whether every device must take part.
        measure: None: the devices are not here.

    Raises:
        ConfigError: If the model is annotated, or sizes do not divide the batch.
        PlanError: If a kind of device has neither a profile nor a rate, or nothing fits.
    """
    described = cluster
    cluster, measured = with_measured(described, () if profile is None else profile.links)
    tried = options.microbatch_sizes
    if profile is not None and not tried and size is None:
        tried = tuple({s.microbatch_size for s in profile.times})
    sizes = _sizes(jobs.batch_size, tried, size, len(cluster.devices))
    first = jobs.at(sizes[0]).graph
    check_unannotated(first, "plan='auto'")
    is_open = options.max_stages is None
    if keeps_order(first) and not options.tensors and is_open:
        options = dataclasses.replace(options, tensors=(1,), max_stages=1)
        why = "replicas of one device each: the model has a callback with ordered=True"
        measured = (*measured, why)
    elif is_open and is_slow_in_loops(first, [device.kind for device in cluster.devices]):
        options = dataclasses.replace(options, max_stages=1)
        why = "no pipelines: XLA is slow at convolutions inside their loops on CPUs"
        measured = (*measured, why)
    some = min(max(_MEASURED_SEGMENTS, 2 * len(cluster.devices)), _MOST_SEGMENTS)
    num_segments = options.num_segments or some
    if profile is not None:
        num_segments = profile.most_segments

    timed_form = "" if profile is None else profile.form

    def in_form(plan: Plan) -> Plan:
        if measure is not None:  # every process compiles programs
            measure.agree(plan)
        work = jobs.at(plan.microbatch_size)
        return with_sums_and_memory(work, plan, cluster, measure, timed_form=timed_form)

    def search(sizes: Sequence[int], num_segments: int, notes: Sequence[str] = ()) -> PlanResult:
        tensors = _tensors(options.tensors, cluster)
        work, uncut = chain_work(jobs, sizes, tensors, num_segments, sums)
        if profile is not None:
            profile.check(work.layers)
        whole: PlanResult | None = None
        refused: PlanError | None = None
        lines = (*measured, *notes, *uncut)
        proposed = functools.partial(
            propose,
            work,
            profile=profile,
            max_stages=options.max_stages,
            recompute=_of_stages(options, jobs.settings),
            uncounted=bool(options.tensors),
            all_devices=all_devices,
        )
        try:
            whole = _fitting(
                proposed,
                lambda proposal: in_form(
                    _completed(jobs, described, proposal, num_segments, sums, lines)
                ),
                cluster,
            )
        except PlanError as error:  # nothing fits, or the settings refuse the plan
            refused = error
        shared = sharded_replicas(
            work,
            cluster,
            profile,
            lambda proposal: _completed(
                jobs, described, proposal, num_segments, sums, (*measured, *notes)
            ),
            in_form,
            faster_than=_step_seconds(whole),
            all_devices=all_devices,
        )
        found = whole if shared is None else PlanResult(plan=_with_runner_up(shared, whole))
        unlike, why_not = unlike_plan(
            jobs,
            work,
            cluster,
            profile,
            in_form,
            best=None if found is None else found.plan,
            described=described,
            num_segments=num_segments,
            recompute=_of_stages(options, jobs.settings),
            max_stages=options.max_stages,
            sums=sums,
        )
        found = found if unlike is None else PlanResult(plan=unlike)
        if found is None:
            assert refused is not None
            raise refused
        apart = _note_of_islands(
            found.plan,
            work,
            cluster,
            profile,
            lambda proposal: _completed(jobs, described, proposal, num_segments, sums, ()),
            jobs.at(found.plan.microbatch_size).graph.merges,
            state_bytes=work.state_factor - 2 - sums.num_parts,
        )
        reasons = (*found.plan.reasons, *why_not, *([apart] if apart else []))
        return dataclasses.replace(found, plan=found.plan.replaced(reasons=reasons))

    if tried or size is not None:
        return search(sizes, num_segments)
    try:
        return search(sizes, num_segments)
    except NothingFitsError:
        finer, segments = _finer(jobs.batch_size, sizes), options.num_segments or _MOST_SEGMENTS
        if (finer, segments) == (sizes, num_segments):
            raise
        larger = ", ".join(map(str, sizes))
        why = f"nothing fits of sizes {larger} in {num_segments} segments: finer ones were tried"
        return search(finer, segments, (why,))


_PARTS_OF_MEMORY = (1.0, 0.85, 0.7, 0.55)  # that the search may fill


def _fitting(
    proposed: Callable[[Cluster], tuple[Proposal, Mapping[int, Timeline]]],
    planned: Callable[[Proposal], Plan],
    cluster: Cluster,
) -> PlanResult:
    """The fastest plan that fits in fact.

    The search knows less of memory than a complete plan: where that does not fit, it gets less.

    Args:
        proposed: The fastest plan for a cluster, and its timelines.
        planned: Completes it.

    Raises:
        NothingFitsError: If none fits.
    """
    fault: NothingFitsError | None = None
    for part in _PARTS_OF_MEMORY:
        devices = [
            d
            if d.memory_bytes is None
            else d.model_copy(update={"memory_bytes": int(part * d.memory_bytes)})
            for d in cluster.devices
        ]
        try:
            some = cluster.model_copy(update={"devices": tuple(devices)})
            proposal, timelines = proposed(some)
            known = proposal.prediction
            whole = tuple(
                d.model_copy(update={"capacity_bytes": cluster.devices[d.rank].memory_bytes or 0.0})
                for d in known.devices
            )
            known = known.model_copy(update={"devices": whole})
            plan = planned(dataclasses.replace(proposal, prediction=known))
            return PlanResult(plan=plan, timelines=timelines)
        except NothingFitsError as error:
            fault = fault or error
    assert fault is not None
    raise fault


def auto_plan(
    jobs: Workloads,
    cluster: Cluster,
    measure: Measure,
    *,
    sums: SumsForm,
    size: int | None,
    all_devices: bool,
) -> Plan:
    """The fastest plan for the devices here, by a short profile of them.

    Every process of the job takes part and gets the same plan. Where the launcher can, the job
    starts again without devices that would make a step longer.

    Args:
        size: Examples of a microbatch; None: not asked for.
        all_devices: Whether every device must take part.
    """
    options = SearchOptions()
    sizes = _sizes(jobs.batch_size, (), size, len(cluster.devices))
    profile = measure.profile(cluster, sizes, _MEASURED_SEGMENTS, sums)
    search = functools.partial(search_plan, jobs, cluster, profile, options, sums=sums, size=size)
    if all_devices and can_start_again() and not jobs.settings.auto.all_devices:
        _leave_out(cluster, search)
    plan = search(all_devices=all_devices, measure=measure).plan
    return plan.replaced(reasons=("chosen by search", *plan.reasons))


_LEAST_GAIN = 0.05  # of a step, relative: a restart takes seconds
_MOST_OF_MEMORY = 0.9  # that an estimate may fill: it is a few per cent off


def _has_room(plan: Plan) -> bool:
    """Whether every device holds the plan even if its memory is underestimated."""
    assert plan.prediction is not None
    return all(
        not d.capacity_bytes or d.memory_bytes <= _MOST_OF_MEMORY * d.capacity_bytes
        for d in plan.prediction.devices
    )


def _leave_out(cluster: Cluster, search: Callable[..., PlanResult]) -> None:
    """Start the job again without devices that would make a step longer, if there are any."""
    fewer = search()
    used, ranks = {d.rank for d in fewer.plan.devices}, range(len(cluster.devices))
    if len(used) == len(ranks) or not _has_room(fewer.plan):
        return
    seconds, without = _step_seconds(search(all_devices=True)), _step_seconds(fewer)
    if without > (1 - _LEAST_GAIN) * seconds:
        return
    others = [rank for rank in ranks if rank not in used]
    names = name_of_devices(others, {i: d.label for i, d in enumerate(cluster.devices)})
    start_again_on(
        sorted(used),
        f"a step takes {without:.3g} s without {names} and {seconds:.3g} s with every device: the "
        f"job starts again without {'it' if len(others) == 1 else 'them'} (auto.all_devices keeps "
        "every device)",
    )


def _of_stages(options: SearchOptions, settings: Config) -> tuple[bool, ...]:
    """Whether pipelines run forwards again: what to try."""
    word = settings.memory.recompute
    if word == "boundaries":
        return (True,)
    return (False,) if word == "none" or not options.recompute else (False, True)


def _sizes(
    batch_size: int, asked: Sequence[int], size: int | None, num_devices: int
) -> tuple[int, ...]:
    sizes = tuple(asked) or ((size,) if size else candidate_sizes(batch_size, num_devices))
    wrong = [b for b in sizes if batch_size % b]
    if wrong:
        raise ConfigError(
            f"microbatch sizes {wrong} do not divide the job's batch_size={batch_size}"
        )
    return tuple(sorted(sizes))


def _finer(batch_size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The least of the tried sizes, two below it, and single examples."""
    least = min(sizes)
    below = [size for size in range(1, least) if batch_size % size == 0]
    return tuple(sorted({1, *below[-2:], least}))


def _tensors(asked: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Sizes of tensor-parallel groups: powers of two of like devices of a node."""
    if asked:
        return tuple(sorted({1, *asked}))

    def key(device: Device) -> tuple[str, int | None, int]:
        return device.label, device.memory_bytes, device.node

    largest = max(collections.Counter(map(key, cluster.devices)).values())
    return tuple(2**k for k in range(min(largest, _MAX_TENSOR).bit_length()))


def chain_work(
    jobs: Workloads,
    sizes: Sequence[int],
    tensors: Sequence[int],
    num_segments: int,
    sums: SumsForm,
) -> tuple[ChainWork, tuple[str, ...]]:
    """The job's chain at every size, and why some tensor parallelism is not tried."""
    chains: dict[tuple[int, int], tuple[LayerSize, ...]] = {}
    sent: dict[tuple[int, int], tuple[float, ...]] = {}
    met: dict[tuple[int, int], tuple[float, ...]] = {}
    names: tuple[str, ...] = ()
    notes: dict[str, None] = {}
    solved: dict[int, Sharded] = {}
    for size in sorted(sizes, reverse=True):  # the largest sends most, so its sharding comes first
        workload = jobs.at(size)
        graph, opened = workload.graph, graph_of(workload.graph)
        chain = segments(opened, num_segments)
        names = names or tuple(s.name for s in chain)
        kept = kept_bytes(opened, chain, workload.model.trained_places)
        for tensor in tensors:
            try:
                cut = shard_graph(graph, *split_over(graph, tensor), like=solved.get(tensor))
            except (AnnotationError, PlanError) as error:
                notes[f"tensor {tensor}: not tried: {str(error).splitlines()[0]}"] = None
                continue
            solved.setdefault(tensor, cut)
            chains[size, tensor] = layer_sizes(opened, chain, cut.over(opened), kept=kept)
            total = sum(s.flops for s in chain) or 1.0
            bytes_sent = sum(axis.sent_bytes for axis in cut.axes.values())
            num = sum(axis.num_collectives for axis in cut.axes.values())
            sent[size, tensor] = tuple(bytes_sent * s.flops / total for s in chain)
            met[size, tensor] = tuple(num * s.flops / total for s in chain)
    first = jobs.at(sizes[0])
    param_bytes = tree_bytes(first.model.params)
    work = ChainWork(
        layers=names,
        sizes=chains,
        sent_bytes=sent,
        num_collectives=met,
        input_bytes={size: jobs.at(size).input_bytes for size in sizes},
        batch_size=jobs.batch_size,
        # Parameter, gradient, sums of gradients, optimizer state.
        state_factor=2 + sums.num_parts + first.optimizer_bytes / max(1, param_bytes),
        reduce_factor=sums.travel_factor,
    )
    return work, tuple(notes)


def _completed(
    jobs: Workloads,
    cluster: Cluster,
    proposal: Proposal,
    num_segments: int,
    sums: SumsForm,
    notes: Sequence[str],
) -> Plan:
    alternative, num_stages = proposal.alternative, len(proposal.cuts)
    work = jobs.at(alternative.microbatch_size)
    graph = work.graph
    inner, roles = split_over(graph, alternative.tensor)
    structure = ReplicaGroups(replicas=proposal.replicas, axes=inner, roles=roles)
    if num_stages > 1:
        ends = (*proposal.cuts[1:], len(segments(graph_of(graph), num_segments)))
        request = PipelineRequest(
            num=num_stages,
            recompute=alternative.recompute,
            num_segments=num_segments,
            cut=tuple(b - a for a, b in zip(proposal.cuts, ends, strict=True)),
        )
        structure = dataclasses.replace(
            structure, axes=(("stage", num_stages), *inner), pipeline=request
        )
    return complete(
        graph,
        structure,
        cluster=cluster,
        batch_size=work.batch_size,
        microbatch_size=work.microbatch_size,
        sums=sums,
        optimizer_bytes=work.optimizer_bytes,
        counts=proposal.counts,
        starts=proposal.starts,
        prediction=proposal.prediction,
        runners_up=proposal.runners_up,
        reasons=(*proposal.reasons, *notes),
    )


def _step_seconds(result: PlanResult | None) -> float:
    known = result.plan.prediction if result is not None else None
    return math.inf if known is None else known.step_seconds


def _with_runner_up(plan: Plan, whole: PlanResult | None) -> Plan:
    """Replicas that shard their state, with the best plan of whole state as a runner-up."""
    others: tuple[RunnerUp, ...] = ()
    if whole is None:
        note = "no plan without sharded state fits"
    else:
        before = whole.plan.prediction
        assert before is not None
        others = as_runners_up(whole.plan)
        note = f"without sharded state the best plan takes {before.step_seconds:.4g} s"
    return plan.replaced(
        runners_up=(*others, *plan.runners_up),
        reasons=(f"replicas of one device each: {note}", *plan.reasons),
    )


_MOST_IN_MEETINGS = 0.05  # that meetings take
_MOST_STEPS_APART = 500  # between two meetings, as in DiLoCo
_LEAST_GAIN_OF_ISLANDS = 1.25  # of a step over the plan's
_LEAST_SUMS = 0.2  # of a step, if all devices are in the plan
_KEPT_BY_ISLANDS = 1  # float32 for each parameter: that of the last meeting


def _note_of_islands(
    plan: Plan,
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    complete: Callable[[Proposal], Plan],
    merges: Iterable[str],
    *,
    state_bytes: float,
) -> str:
    """A line about islands where the network makes a searched plan slow; else empty.

    Args:
        complete: Makes a plan of replicas of one device each.
        merges: See `Graph.merges`.
        state_bytes: Bytes of the optimizer's state for each byte of parameters.
    """
    known, num = plan.prediction, len(cluster.devices)
    num_nodes = len({device.node for device in cluster.devices})
    if known is None or not known.step_seconds or num_nodes < 2:
        return ""
    if set(merges) - {"same"} or plan.precision.loss_scale or own_member() is not None:
        return ""  # islands do not go with these
    sums = max((device.reduction_seconds for device in known.devices), default=0.0)
    if len(plan.devices) == num and sums < _LEAST_SUMS * known.step_seconds:
        return ""
    apart = dataclasses.replace(
        work,
        sizes={key: layers for key, layers in work.sizes.items() if key[1] == 1},
        state_factor=work.state_factor + _KEPT_BY_ISLANDS,
        reduce_factor=0.0,
    )
    times = None if profile is None else dataclasses.replace(profile, reductions={})
    try:
        proposal, _ = propose(
            apart, cluster, times, max_stages=1, recompute=(False,), all_devices=True
        )
    except PlanError:  # they do not fit
        return ""
    step = proposal.prediction.step_seconds
    ring = travel_of(complete(proposal), cluster, 1).all_copies / (1 - 1 / num)
    meeting = 2 * (1 + state_bytes) * ring * (1 - 1 / num_nodes)
    every = min(
        10 * max(1, math.ceil(meeting / (_MOST_IN_MEETINGS * step) / 10)), _MOST_STEPS_APART
    )
    each = step + meeting / every
    if not meeting or _LEAST_GAIN_OF_ISLANDS * each > known.step_seconds:
        return ""
    return (
        f"islands.every = {every} with mesh={{'data': {num}}}: nodes that train apart for {every} "
        f"steps would take about {span(each)} a step on all {num} devices, the meeting of "
        f"{span(meeting)} included; other bits, and often a little more loss"
    )
