"""How a step lies in memory: state shared out, a microbatch recomputed, as settings or room ask."""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

from .._cluster._cluster import Cluster
from .._cluster._job_devices import Devices
from .._core._errors import PlanError
from .._core._format import num_bytes
from .._graph._graph import Graph, params_of
from .._graph._interpreter import AS_THEY_ARE
from .._graph._parts import graph_at, graph_of
from .._launch._member import pinned
from .._lower._inputs import sharded_of
from .._lower._segment_costs import segment_costs
from .._lower._segment_part import direct_parts, wanted_values
from .._lower._stage import StagePart
from .._plan._plan import Plan
from .._plan._plan_parts import (
    ChainSegment,
    DevicePrediction,
    PlannedChain,
    Prediction,
    RunnerUp,
)
from .._plan._sharding import Sharded
from .._planner._inner_split import described_speed
from .._planner._memory_forms import MemoryForms, best_of
from .._planner._memory_values import (
    ChainBytes,
    CopyDevice,
    MemoryForm,
    ModelBytes,
    Places,
    Recompute,
)
from .._planner._shard_groups import travel_of
from .._schedule._sequence_replay import SegmentCost
from ._host_places import asked_places, could_be_chain, more_on_hosts
from ._planned_programs import (
    check_cut_copies,
    check_segments,
    compiled_lack,
    of_whole_programs,
    tightest,
)
from ._segments_of_job import gathered_bytes, param_bytes, segments_of_job
from ._shared_state import (
    could_share,
    group_options,
    stages_to_try,
    with_shared_state,
)
from ._state_elsewhere import (
    FLOPS_OF_FORWARD,
    PART_ON_DEVICE,
    device_optimizer_bytes,
    fits_hosts,
    moving_seconds,
    on_hosts,
)
from ._traced_job import TracedJob

_MOST_RUNNERS_UP = 5


def with_memory(
    job: TracedJob,
    plan: Plan,
    cluster: Cluster,
    devices: Devices | None = None,
    *,
    timed_form: str = "",
) -> Plan:
    """The plan with state shared out and a microbatch recomputed as the settings ask.

    What they leave open is the cheapest form that fits into the memory with which the devices are
    described: the plain one where it does. Before compilation that is estimated, and compilers keep
    more of one program than it needs at least, so on devices that are here it is compiled first.

    Args:
        job: That is planned.
        plan: Of it, with the state whole on every copy.
        cluster: Its devices.
        devices: By rank, if they are here; None: bytes are told by owner, however few.
        timed_form: In which the plan's times were measured, if they were while it trained: what it
            runs again and moves is in them.

    Raises:
        PlanError: If it cannot be as the settings ask, or nothing that they leave open fits.
    """
    stages, asked = stages_to_try(job, plan), job.settings.memory.recompute
    places = asked_places(job)
    groups = group_options(job, plan, cluster)
    if 1 not in groups:
        stages = tuple(stage for stage in stages if stage)
        if not stages:
            raise PlanError(
                "memory.shard_groups needs memory.zero of 1 to 3, and copies that can share the "
                "state: set it, or leave them out"
            )
    if plan.pipeline is not None or plan.is_uneven:
        return of_whole_programs(job, plan, cluster, devices, stages[0], groups[0])
    if job.settings.memory.waves is not None:
        stages = tuple(stage for stage in stages if stage > 1)
        if not stages:
            raise PlanError(
                "memory.waves needs memory.zero of 2 or 3, which run segment by segment: set it, "
                "or leave them out"
            )
    if places.parameters != "device":
        stages = tuple(stage for stage in stages if stage > 2)
        if not stages:
            raise PlanError(
                "memory.offload.parameters='host' needs memory.zero of 3, in which each copy of "
                "the model has its share of them: set it, or leave it out"
            )
    if plan.axes:
        check_cut_copies(job, plan)
    _check_chain(job, plan)
    is_described = any(cluster.devices[d.rank].memory_bytes is not None for d in plan.devices)
    if asked == "auto" and not is_described:
        raise PlanError(
            "memory.recompute is 'auto', but no device is described with its memory: give it in "
            "the mesh file, or set 'none' or 'boundaries'"
        )
    to_try = _as_before(_to_try(job, plan, stages, is_described, places))
    model = _model_bytes(job, plan, places)
    forms = _forms(job, plan, cluster, model, places, groups[0])
    if to_try[0][1] is None and not (devices is None and is_described):
        sure = forms.surely(to_try[0][0])
        if sure.fits:
            return _in_form(job, plan, cluster, sure)
    if is_described:
        ways = [forms, *(_forms(job, plan, cluster, model, places, num) for num in groups[1:])]
        best, *others = best_of(ways, to_try)
    else:
        best, *others = forms.best(to_try[:1])
    if is_described and not best.fits:
        on_hosts = _best_on_hosts(job, plan, cluster, stages, groups)
        if on_hosts:
            others = [*on_hosts[1:], best, *others]
            best = on_hosts[0]
    found = _in_form(job, plan, cluster, best)
    if best.recompute is None and devices is not None and best.fits:
        lack = compiled_lack(job, found, cluster, devices)
        others = [form for form in others if form.recompute is not None and form.tier == best.tier]
        if lack > 0 and others:
            said = f"one program lacks {num_bytes(lack)}, as compiled"
            best, *others = others
            found = _in_form(job, plan, cluster, best)
            found = found.replaced(reasons=(*found.reasons, said))
    if not best.fits and asked in (None, "auto"):
        raise PlanError(_lacking(best, forms, plan))
    is_timed = found.memory_form == timed_form
    if found.prediction is not None and _microbatch_seconds(plan) and not is_timed:
        later = _with_more(found.prediction, best, moving_seconds(job, plan, cluster, best))
        found = found.replaced(prediction=later)
    return _told(found, cluster, best, others) if is_described else found


def _with_more(known: Prediction, form: MemoryForm, moving: float) -> Prediction:
    """What a form adds to the seconds of a plan: what runs again, and what moves meanwhile."""
    if not known.step_seconds:
        return known
    more = max(form.extra_seconds + moving, 0.0)
    again = min(more, max(form.extra_seconds, 0.0))
    devices = tuple(
        device.model_copy(
            update={
                "compute_seconds": device.compute_seconds + again,
                "wait_seconds": device.wait_seconds + more - again,
            }
        )
        for device in known.devices
    )
    return known.model_copy(update={"step_seconds": known.step_seconds + more, "devices": devices})


def _check_chain(job: TracedJob, plan: Plan) -> None:
    """Refuse a stash on the host of what cannot be a chain of segments."""
    if asked_places(job).stash == "device":
        return
    clips = job.settings.communication.microbatch_clip_norm is not None
    if clips or plan.sums.sparse:
        why = (
            "each microbatch's own gradient is clipped (communication.clip)"
            if clips
            else "rows of a gradient travel alone (communication.sparse_embeddings)"
        )
        raise PlanError(
            f"memory.offload.stash='host': {why}, so that a microbatch is one program, in which "
            "nothing can be moved: leave either out"
        )


def _to_try(
    job: TracedJob, plan: Plan, stages: Sequence[int], is_described: bool, places: Places
) -> list[tuple[int, Recompute | None]]:
    """Stages of ZeRO with what is recomputed, as far as the settings leave it open.

    Where the time is the same, the first that fits is taken: that which changes least.
    """
    asked = job.settings.memory.recompute
    if asked is not None:
        return [(stage, asked) for stage in stages]
    found: list[tuple[int, Recompute | None]] = [(s, None) for s in stages if s < 2]
    if places.stash != "device":  # of one program nothing can be moved
        found = [] if is_described else [(s, "boundaries") for s in stages if s < 2]
    is_chain = could_be_chain(job, plan)
    if is_chain and is_described:
        found += [(s, "auto") for s in stages if s < 2]
    words: tuple[Recompute, ...] = ("none", "boundaries") if is_described else ("boundaries",)
    if is_chain or not found:
        found += [(s, word) for word in words for s in stages if s > 1]
    return found


def _as_before(
    forms: list[tuple[int, Recompute | None]],
) -> list[tuple[int, Recompute | None]]:
    """Those whose bits are the ones of an elastic job's first generation, if there was one."""
    is_chain = pinned().is_chain
    same = [form for form in forms if is_chain in (None, form[1] is not None)]
    return same or forms[:1]  # what the settings ask for is the same in all


def _best_on_hosts(
    job: TracedJob, plan: Plan, cluster: Cluster, stages: Sequence[int], groups: Sequence[int]
) -> list[MemoryForm]:
    """The forms that fit with more in host memory than was asked for, the fastest first.

    What is moved counts whole, though some of it hides behind programs.
    """
    models: dict[str, ModelBytes] = {}
    found = []
    for places in more_on_hosts(job, plan, cluster):
        if places.stash not in models:
            models[places.stash] = _model_bytes(job, plan, places)
        model = models[places.stash]
        ways = [_forms(job, plan, cluster, model, places, num) for num in groups]
        own = [max(s, int(places.optimizer != "device")) for s in stages]
        if places.parameters != "device":
            own = [s for s in own if s > 2]
        to_try = _to_try(job, plan, tuple(dict.fromkeys(own)), True, places) if own else []
        for form in best_of(ways, _as_before(to_try)):
            if form.fits and fits_hosts(job, plan, cluster, form):
                found.append((moving_seconds(job, plan, cluster, form), form))
    is_timed = _speeds(job, plan, cluster).are_known  # else the others' seconds are operations
    found.sort(key=lambda own: own[0] + own[1].extra_seconds * is_timed)
    return [form for _, form in found]


def _model_bytes(job: TracedJob, plan: Plan, places: Places) -> ModelBytes:
    """What a copy takes, with the optimizer's state on the device."""
    size = plan.microbatch_size
    model, graph = job.functional(size), job.graph(size)
    sharded = sharded_of(graph, plan) or Sharded(graph, {})
    opened = graph_of(graph)
    cut = sharded.over(opened)

    @functools.cache
    def chain() -> ChainBytes:
        points, _ = segments_of_job(job, size)
        away = places.stash != "device"
        costs, fused = costs_of(graph, points, model.trained_places, offloads=away, sharded=sharded)
        is_exact = plan.sums.kind == "exact"
        return ChainBytes(
            costs=costs,
            fused=fused,
            parameter_bytes=tuple(param_bytes(job, plan)),
            gathered_bytes=tuple(gathered_bytes(job, plan, keeps_roundings=is_exact)),
        )

    shapes = plan.device_shapes
    own = sum(math.prod(shapes[p]) for p in model.trained_places)
    return ModelBytes(
        parameters=plan.device_parameter_bytes,
        trained=4 * own,
        num_sums=plan.sums.num_parts,
        optimizer=device_optimizer_bytes(job, plan),
        bucket=plan.sums.bucket_mib << 20,
        keeps_sums=plan.placement.sums == "kept",
        inputs=sum(map(cut.device_bytes, opened.batch_values)),
        values=sum(map(cut.device_bytes, range(len(opened.values)))),
        chain=chain,
    )


def _forms(
    job: TracedJob, plan: Plan, cluster: Cluster, model: ModelBytes, places: Places, groups: int
) -> MemoryForms:
    shares = job.settings.memory.shares
    on_device = 1 if places.optimizer == "device" else PART_ON_DEVICE
    speeds = _speeds(job, plan, cluster)
    ranks = [tightest(cluster, replica) for replica in plan.replicas]
    devices = [cluster.devices[rank] for rank in ranks]
    return MemoryForms(
        dataclasses.replace(model, optimizer=model.optimizer * on_device),
        [
            CopyDevice(
                name=f"device {rank} ({device.label})",
                num_microbatches=replica.num_microbatches,
                memory_bytes=device.memory_bytes,
                speed=speed,
            )
            for replica, rank, device, speed in zip(
                plan.replicas, ranks, devices, speeds.of_copies, strict=True
            )
        ],
        shares=shares if isinstance(shares, str) else tuple(shares),
        travel=travel_of(plan, cluster, groups) if speeds.are_known else None,
        shard_groups=groups,
        tier=places.optimizer,
        stash=places.stash,
        parameters=places.parameters,
        waves=job.settings.memory.waves,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Speeds:
    """Operations of each copy of a plan per second.

    Attributes:
        of_copies: In a unit that all share.
        are_known: Whether that is one operation.
    """

    of_copies: tuple[float, ...]
    are_known: bool


def _speeds(job: TracedJob, plan: Plan, cluster: Cluster) -> _Speeds:
    """By what a microbatch was found to take, else by the rates that describe the devices."""
    arithmetic = job.precision.arithmetic
    if known := _microbatch_seconds(plan):
        work = FLOPS_OF_FORWARD * job.graph(plan.microbatch_size).flops
        return _Speeds(of_copies=tuple(work / own for own in known), are_known=True)
    copies = [[cluster.devices[rank] for rank in replica.devices] for replica in plan.replicas]
    # Those of a copy work at the pace of the slowest.
    speeds = [len(own) * min(described_speed(d, arithmetic) for d in own) for own in copies]
    return _Speeds(
        of_copies=tuple(speeds) if all(speeds) else (1.0,) * len(copies),
        are_known=all(cluster.devices[d.rank].product_rate(arithmetic) for d in plan.devices),
    )


def _microbatch_seconds(plan: Plan) -> tuple[float, ...]:
    """Of each copy of the model, measured or predicted; empty where it is not known."""
    if plan.prediction is None:
        return ()
    known = plan.prediction.microbatch_seconds or predicted_microbatches(plan, plan.prediction)
    return known if all(known) else ()


def predicted_microbatches(plan: Plan, known: Prediction) -> tuple[float, ...]:
    """Seconds of a microbatch on each copy of the model, as its devices' times say.

    Args:
        plan: Of the copies.
        known: Of the plan; what it does not say of a device is 0.
    """
    spent = {device.rank: device.compute_seconds for device in known.devices}
    return tuple(
        max(spent.get(rank, 0.0) for rank in own.devices) / max(own.num_microbatches, 1)
        for own in plan.replicas
    )


def _in_form(job: TracedJob, plan: Plan, cluster: Cluster, form: MemoryForm) -> Plan:
    """The plan as a form has it."""
    shares = form.shares if plan.axes or could_share(plan) else ()
    plan = with_shared_state(job, plan, cluster, form.zero, shares, form.tier, form.shard_groups)
    if form.recompute is None:
        check_segments(job)
        return plan
    points, segments = segments_of_job(job, plan.microbatch_size)
    chain = PlannedChain(
        segments=tuple(
            ChainSegment(name=segment.name, first=first)
            for segment, first in zip(segments, (0, *points), strict=True)
        ),
        sequence=form.sequence,
    )
    if form.on_host:
        plan = on_hosts(job, plan, cluster, form)
    update = {"stash": form.stash, "parameters": form.parameters}
    placement = plan.placement.model_copy(update=update)
    if form.zero > 1:
        placement = placement.model_copy(update={"zero": form.zero, "waves": form.waves})
    return plan.replaced(chain=chain, placement=placement)


def _told(plan: Plan, cluster: Cluster, best: MemoryForm, others: Sequence[MemoryForm]) -> Plan:
    """The plan with what it holds, and what the other forms would."""
    ranks = [tightest(cluster, replica) for replica in plan.replicas]
    sizes = [cluster.devices[rank].memory_bytes for rank in ranks]
    said: list[str] = []
    known = [
        (own.activations, size - own.total + own.activations)
        for own, size in zip(best.held, sizes, strict=True)
        if size is not None
    ]
    if best.recompute == "auto" or (best.zero > 1 and known):
        kept, left = max(known, key=lambda pair: pair[0] - pair[1])
        whose = "its microbatches keep" if best.zero > 1 else "a microbatch keeps"
        said.append(
            f"recomputation: {whose} {kept / 2**20:,.1f} MiB of the {left / 2**20:,.1f} MiB that "
            "are left (estimated before compilation)"
        )
    prediction = plan.prediction or Prediction()
    spent = {device.rank: device for device in prediction.devices}
    devices = tuple(
        spent.get(rank, DevicePrediction(rank=rank)).model_copy(
            update={
                "memory_bytes": own.total,
                "capacity_bytes": float(cluster.devices[rank].memory_bytes or 0),
                "held": own,
            }
        )
        for replica, own in zip(plan.replicas, best.held, strict=True)
        for rank in replica.devices
    )
    runners_up = [
        RunnerUp(
            description=str(form),
            held=max(form.held, key=lambda held: held.total),
            lack_bytes=max(form.lack_bytes, 0.0),
        )
        for form in others[:_MOST_RUNNERS_UP]
    ]
    return plan.replaced(
        prediction=prediction.model_copy(update={"devices": devices}),
        runners_up=(*plan.runners_up, *runners_up),
        reasons=(*plan.reasons, *said),
    )


def _lacking(form: MemoryForm, forms: MemoryForms, plan: Plan) -> str:
    """That even the form which lacks least does not fit."""
    device, held = forms.fullest(form)
    owners = ", ".join(f"{name} {num_bytes(n)}" for name, n in held.by_owner.items() if n)
    if len(plan.replicas) > 1:
        remedy = "a smaller microbatch_size, or more or larger devices"
    else:
        remedy = "a smaller microbatch_size, a larger device, or several that share the state"
    if form.tier == "device" and held.optimizer and not plan.axes:
        remedy += ", or memory.offload.optimizer = 'host'"
    if form.stash == "device" and held.activations > held.optimizer and not plan.axes:
        remedy += ", or memory.offload.stash = 'host'"
    return (
        f"a microbatch does not fit beside the state: of all that may be done, {form} lacks "
        f"least, and {device.name} has {num_bytes(device.memory_bytes or 0)} and needs "
        f"{num_bytes(held.total)}: {owners} (estimated before compilation). Use {remedy}"
    )


def costs_of(
    graph: Graph,
    points: tuple[int, ...],
    trained: Collection[int],
    *,
    offloads: bool = False,
    sharded: Sharded | None = None,
) -> tuple[tuple[SegmentCost, ...], tuple[SegmentCost, ...]]:
    """What each segment takes before it is compiled, as programs of its own and as a part of one.

    Args:
        graph: Traced.
        points: Where it is cut.
        trained: Places of the parameters that are trained.
        offloads: Whether what waits may go to host memory.
        sharded: How the devices of a copy cut it; None: it has one device.
    """
    ordered, own = graph_at(graph, "work", points)
    wanted = wanted_values(ordered, trained)
    entries = [i for i, p in enumerate(params_of(ordered)) if p in trained]
    stages = [
        StagePart(ordered, part, AS_THEY_ARE, trained=entries, on_cpu=False, wanted=wanted)
        for part in direct_parts(ordered, own)
    ]
    cut = (sharded or Sharded(graph, {})).over(ordered)
    alone, fused = (
        segment_costs(cut, stages, fused=one, offloads=offloads) for one in (False, True)
    )
    return tuple(alone), tuple(fused)
