"""Plans of a job by search: for a described cluster, or for the devices here.

The search over stages and groups of devices counts the whole state of a stage on each of its
devices. Replicas of one device each may fit where that does not: if they shard the state, run
forwards again, or offload some of it to their hosts (`with_memory`).
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..cluster.cluster import Cluster, Device
from ..core.config import Config
from ..core.errors import AnnotationError, ConfigError, PlanError
from ..core.format import span
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..launch.again import can_start_again, start_again_on
from ..launch.channel import own_member
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import RunnerUp, SumsForm
from ..plan.plan import Plan, name_of_devices
from ..plan.sharding import Sharded
from ..profile.profile import LayerSize, Profile, measured_sum, with_measured
from ..profile.segment_times import kept_bytes, layer_sizes
from .apportionment import candidate_sizes
from .chain import UNBOUNDED
from .complete import complete
from .device_times import layer_times
from .memory import with_sums_and_memory
from .memory_layout import MemoryLayout, asked_candidates, candidates_on_hosts
from .memory_model import predicted_microbatches, step_memory, travel_of, with_open_calls
from .memory_price import ReplicaDevice, StepMemory, price, upper_bound
from .mesh_axes import split_over
from .pipeline_request import PipelineRequest
from .proposals import ChainWork, Proposal, propose
from .search import NothingFitsError
from .structures import ReplicaGroups, check_unannotated
from .workload import Measure, PlanResult, SearchOptions, Workload, Workloads


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedReplicas:
    """The fastest plan of replicas that shard their state.

    Attributes:
        plan: Its step counts the extra seconds of its memory layout.
        bound_seconds: A bound on all replicas that do not fit with whole state, in any layout.
    """

    plan: Plan
    bound_seconds: float


def sharded_replicas(
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    complete: Callable[[Proposal], Plan],
    in_form: Callable[[Plan], Plan],
    least_seconds: Callable[[Plan, float], float],
    *,
    faster_than: float,
    all_devices: bool,
    seconds: float,
) -> ShardedReplicas | None:
    """The fastest replicas of one device each that fit in some layout; None: none is fast enough.

    For each microbatch size the search deals microbatches to devices with unlimited memory, sums
    and updates free. That bounds every layout; the least recomputation of a layout raises the
    bound. The most promising size gets its layout first. Reductions count as rings over all
    replicas, or as measured.

    Args:
        complete: Makes a plan, with the state whole on every replica.
        in_form: Gives a plan the cheapest layout that fits.
        least_seconds: A bound for all layouts that fit, from a plan with whole state and a bound
            without limits of memory.
        faster_than: Seconds of the best plan with whole state; infinite if there is none.
        all_devices: Whether every device must take part.
        seconds: Time budget of each search.
    """
    if own_member() is not None:
        return None  # the next generation might choose another layout, with other bits
    roomy = cluster.model_copy(
        update={
            "devices": tuple(
                device.model_copy(update={"memory_bytes": int(UNBOUNDED)})
                for device in cluster.devices
            )
        }
    )
    times = None if profile is None else dataclasses.replace(profile, reductions={})
    proposals: list[Proposal] = []
    for (size, tensor), layers in sorted(work.sizes.items()):
        if tensor > 1 or (faster_than < math.inf and _fit_whole(work, layers, cluster)):
            continue
        alone = dataclasses.replace(
            work, sizes={(size, 1): layers}, reduce_factor=0.0, counts_updates=False
        )
        with contextlib.suppress(PlanError):  # a slow device would be left out
            proposal, _ = propose(
                alone,
                roomy,
                times,
                max_stages=1,
                recompute=(False,),
                all_devices=all_devices,
                time_budget_seconds=seconds,
            )
            proposals.append(proposal)
    best: Plan | None = None
    least = faster_than
    proposals.sort(key=lambda proposal: proposal.prediction.step_seconds)
    plans_by_size: dict[int, Plan] = {}
    for proposal in proposals:
        if proposal.prediction.step_seconds >= least:
            break
        whole_plan = _timed(complete(proposal))
        # One limb needs less memory, so a bound with one limb also bounds two.
        sums = whole_plan.sums.model_copy(
            update={"limbs": 1} if whole_plan.sums.kind == "exact" else {}
        )
        least_held = plans_by_size[whole_plan.microbatch_size] = whole_plan.replaced(sums=sums)
        summing = _sum_seconds(least_held, cluster, profile)
        if proposal.prediction.step_seconds + summing >= least:
            continue  # no layout is faster
        try:
            plan = in_form(whole_plan)
        except PlanError:
            continue
        plans_by_size[whole_plan.microbatch_size] = whole_plan.replaced(sums=plan.sums)
        plan = _with_rest(plan, work, proposal, cluster, profile)
        assert plan.prediction is not None
        if plan.prediction.step_seconds < least:
            best, least = plan, plan.prediction.step_seconds
    if best is None:
        return None
    bounds = [least]
    for proposal in proposals:
        size, bound = proposal.alternative.microbatch_size, proposal.prediction.bound_seconds
        bounds.append(least_seconds(plans_by_size[size], bound) if size in plans_by_size else bound)
    return ShardedReplicas(plan=best, bound_seconds=min(bounds))


def _fit_whole(work: ChainWork, layers: Sequence[LayerSize], cluster: Cluster) -> bool:
    """Whether every device holds a replica with whole state: the search has that plan already."""
    needed = sum(work.state_factor * x.parameter_bytes + x.stash_bytes for x in layers)
    return all(needed <= (device.memory_bytes or math.inf) for device in cluster.devices)


def _timed(plan: Plan) -> Plan:
    """The plan with the seconds of a microbatch on each replica, by its devices' times."""
    assert plan.prediction is not None
    each = predicted_microbatches(plan, plan.prediction)
    known = {"microbatch_seconds": each, "fixed_seconds": (0.0,) * len(each)}
    return plan.replaced(prediction=plan.prediction.model_copy(update=known))


def _sum_seconds(plan: Plan, cluster: Cluster, profile: Profile | None) -> float:
    """Seconds of a ring all-reduce over all replicas, or as measured."""
    labels = [cluster.devices[replica.devices[0]].label for replica in plan.replicas]
    measured = measured_sum(profile, labels)
    if measured is not None:
        return measured
    return 2 * plan.sums.travel_factor * travel_of(plan, cluster, 1).all_copies


def _with_rest(
    plan: Plan, work: ChainWork, proposal: Proposal, cluster: Cluster, profile: Profile | None
) -> Plan:
    """The plan with reductions and updates in its step, of whole state or of shards."""
    known, alternative = plan.prediction, proposal.alternative
    assert known is not None
    layers = work.sizes[alternative.microbatch_size, 1]
    leaders = [replica.devices[0] for replica in plan.replicas]
    labels = [cluster.devices[rank].label for rank in leaders]
    whole: dict[str, float] = {}
    for rank, label in zip(leaders, labels, strict=True):
        if label not in whole:
            device, factor = cluster.devices[rank], work.state_factor
            times, _ = layer_times(device, alternative, layers, profile, state_factor=factor)
            whole[label] = float(times[2].sum())
    parts = plan.owned_parts if plan.placement.zero else (1.0,) * len(labels)
    updates = [whole[label] * part for label, part in zip(labels, parts, strict=True)]
    sums = _sum_seconds(plan, cluster, profile)
    each, longest = dict(zip(leaders, updates, strict=True)), max(updates)
    devices = tuple(
        spent.model_copy(
            update={
                "reduction_seconds": sums,
                "update_seconds": each[spent.rank],
                "wait_seconds": spent.wait_seconds + longest - each[spent.rank],
            }
        )
        for spent in known.devices
    )
    rest = {
        "step_seconds": known.step_seconds + sums + longest,
        "closed_form_seconds": 0.0,
        "fixed_seconds": tuple(updates),
        "devices": devices,
    }
    return plan.replaced(prediction=known.model_copy(update=rest))


def least_seconds(work: Workload, plan: Plan, cluster: Cluster, seconds: float) -> float:
    """A bound on replicas of one device each that fit, of any number, counts and layout.

    In a layout all replicas recompute the same, so every step is longer by one factor than without
    limits of memory. The least factor is that of a layout that fits the roomiest replicas: one on
    every device, each with the largest memory; one of them runs an even share of the microbatches,
    as some replica must, and each other a single one. Transfers to hosts take at least the time in
    which all links together move their bytes.

    Args:
        plan: Any replicas with this microbatch size and form of sums.
        seconds: A bound for devices of unlimited memory.

    Returns:
        Infinity if no layout fits.
    """
    plan = with_open_calls(work, plan)
    busiest = _even_share(plan, cluster)
    flops = busiest * work.microbatch_flops
    if not flops:
        return seconds  # the factor is not known
    rates = sum(device.host_bytes_per_second or math.inf for device in cluster.devices)
    least = math.inf
    for layout in _roomiest_layouts(work, plan, cluster):
        if not layout.fits:
            continue
        factor = 1 + max(layout.extra_seconds, 0.0) / flops
        moved = layout.moved.get("stash", (0,))[0] * plan.num_microbatches / busiest
        moved += sum(sum(layout.moved.get(name, ())) for name in ("parameters", "optimizer"))
        least = min(least, seconds * factor + moved / rates)
        if least <= seconds:
            break
    return least


def _even_share(plan: Plan, cluster: Cluster) -> int:
    """The fewest microbatches of the busiest replica."""
    return math.ceil(plan.num_microbatches / len(cluster.devices))


def _roomiest_layouts(work: Workload, plan: Plan, cluster: Cluster) -> Iterator[MemoryLayout]:
    """The layouts of the roomiest replicas, one program first."""
    sizes = [device.memory_bytes for device in cluster.devices]
    most = None if None in sizes else max(size for size in sizes if size is not None)
    counts = (_even_share(plan, cluster), *(1 for _ in cluster.devices[1:]))
    known = step_memory(work, plan, cluster)
    step = StepMemory(
        model=dataclasses.replace(known.model, keeps_sums=False),
        devices=tuple(
            ReplicaDevice(name="", num_microbatches=num, memory_bytes=most) for num in counts
        ),
        waves=None,
    )
    asked = asked_candidates(work, plan, cluster)
    if asked[0].recompute is None:
        yield upper_bound(asked[0], step)  # without a look at its chain
    groups = min(candidate.shard_groups for candidate in asked)
    for candidate in (*asked, *candidates_on_hosts(work, plan, cluster)):
        if candidate.shard_groups == groups:
            yield price(candidate, step)


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
    check_unannotated(jobs.at(sizes[0]).graph, "plan='auto'")
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

    def least(plan: Plan, seconds: float) -> float:
        # Times measured in a layout include its recomputation.
        if timed_form:
            return seconds
        return least_seconds(jobs.at(plan.microbatch_size), plan, cluster, seconds)

    def search(sizes: Sequence[int], num_segments: int, notes: Sequence[str] = ()) -> PlanResult:
        tensors = _tensors(options.tensors, cluster)
        work, uncut = chain_work(jobs, sizes, tensors, num_segments, sums)
        if profile is not None:
            profile.check(work.layers)
        whole: PlanResult | None = None
        refused: PlanError | None = None
        try:
            proposal, timelines = propose(
                work,
                cluster,
                profile,
                max_stages=options.max_stages,
                recompute=_of_stages(options, jobs.settings),
                uncounted=bool(options.tensors),
                all_devices=all_devices,
                time_budget_seconds=options.seconds,
                most_seconds=options.most_seconds,
            )
            lines = (*measured, *notes, *uncut)
            plan = _completed(jobs, described, proposal, num_segments, sums, lines)
            whole = PlanResult(plan=in_form(plan), timelines=timelines)
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
            least,
            faster_than=_step_seconds(whole),
            all_devices=all_devices,
            seconds=options.seconds,
        )
        if shared is not None:
            found = PlanResult(plan=_with_runner_up(shared, whole))
        elif whole is not None:
            found = whole
        else:
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
            seconds=options.seconds,
        )
        reasons = (*found.plan.reasons, *([apart] if apart else []))
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
            sent[size, tensor] = tuple(bytes_sent * s.flops / total for s in chain)
    first = jobs.at(sizes[0])
    param_bytes = tree_bytes(first.model.params)
    work = ChainWork(
        layers=names,
        sizes=chains,
        sent_bytes=sent,
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


def _with_runner_up(shared: ShardedReplicas, whole: PlanResult | None) -> Plan:
    """Replicas that shard their state, with the best plan of whole state as a runner-up."""
    plan, known = shared.plan, shared.plan.prediction
    assert known is not None
    bound = shared.bound_seconds
    others: tuple[RunnerUp, ...] = ()
    if whole is None:
        note = "no plan without sharded state fits"
    else:
        before = whole.plan.prediction
        assert before is not None
        bound = min(bound, before.bound_seconds)
        words = f"microbatches of {whole.plan.microbatch_size}, {whole.plan.mesh_in_words}"
        best = RunnerUp(description=words, step_seconds=before.step_seconds)
        others = (best, *whole.plan.runners_up)
        note = f"without sharded state the best plan takes {before.step_seconds:.4g} s"
    return plan.replaced(
        prediction=known.model_copy(update={"bound_seconds": bound}),
        runners_up=(*others, *plan.runners_up),
        reasons=(f"replicas of one device each: {note}", *plan.reasons),
    )


_MOST_IN_MEETINGS = 0.05  # that meetings take
_MOST_STEPS_APART = 500  # between two meetings, as in DiLoCo
_LEAST_GAIN_OF_ISLANDS = 1.25  # of a step over the plan's
_LEAST_SUMS = 0.2  # of a step, if all devices are in the plan
_MOST_SECONDS_OF_NOTE = 2.0  # for the search of the note
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
    seconds: float,
) -> str:
    """A line about islands where the network makes a searched plan slow; else empty.

    Args:
        complete: Makes a plan of replicas of one device each.
        merges: See `Graph.merges`.
        state_bytes: Bytes of the optimizer's state for each byte of parameters.
        seconds: Time budget of a search.
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
            apart,
            cluster,
            times,
            max_stages=1,
            recompute=(False,),
            all_devices=True,
            time_budget_seconds=min(seconds, _MOST_SECONDS_OF_NOTE),
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
