"""How a step lies in memory: state shared out, a microbatch recomputed, as settings or room ask."""

import functools
from collections.abc import Sequence

from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..core.errors import PlanError
from ..core.format import num_bytes
from ..job.context import JobContext
from ..plan.parts import ChainSegment, DevicePrediction, PlannedChain, Prediction, RunnerUp
from ..plan.plan import Plan
from .memory_candidates import MemoryForm, MemoryForms, best_of
from .memory_model import (
    forms_to_try,
    memory_forms,
    microbatch_seconds,
    model_bytes,
    segments_of_job,
    speeds_of,
)
from .offload import fits_hosts, moving_seconds, on_hosts
from .offload_candidates import asked_places, more_on_hosts
from .zero_for_pipelines import (
    check_cut_copies,
    check_segments,
    compiled_lack,
    of_whole_programs,
    tightest,
)
from .zero_placement import could_share, group_options, stages_to_try, with_shared_state

_MOST_RUNNERS_UP = 5


def with_memory(
    job: JobContext,
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
        plan: Of it, with the state whole on every copy.
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
    to_try = forms_to_try(job, plan, stages, places, is_described=is_described)
    model = model_bytes(job, plan, places.stash)
    forms = memory_forms(job, plan, cluster, model, places, groups[0])
    if to_try[0][1] is None and not (devices is None and is_described):
        sure = forms.surely(to_try[0][0])
        if sure.fits:
            return _in_form(job, plan, cluster, sure)
    if is_described:
        ways = [
            forms,
            *(memory_forms(job, plan, cluster, model, places, num) for num in groups[1:]),
        ]
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
    if found.prediction is not None and microbatch_seconds(plan) and not is_timed:
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


def _check_chain(job: JobContext, plan: Plan) -> None:
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


def _best_on_hosts(
    job: JobContext, plan: Plan, cluster: Cluster, stages: Sequence[int], groups: Sequence[int]
) -> list[MemoryForm]:
    """The forms that fit with more in host memory than was asked for, the fastest first.

    What is moved counts whole, though some of it hides behind programs.
    """
    model_of = functools.cache(functools.partial(model_bytes, job, plan))
    found = []
    for places in more_on_hosts(job, plan, cluster):
        model = model_of(places.stash)
        ways = [memory_forms(job, plan, cluster, model, places, num) for num in groups]
        for form in best_of(ways, forms_to_try(job, plan, stages, places)):
            if form.fits and fits_hosts(job, plan, cluster, form):
                found.append((moving_seconds(job, plan, cluster, form), form))
    is_timed = speeds_of(job, plan, cluster).are_known  # else the others' seconds are operations
    found.sort(key=lambda own: own[0] + own[1].extra_seconds * is_timed)
    return [form for _, form in found]


def _in_form(job: JobContext, plan: Plan, cluster: Cluster, form: MemoryForm) -> Plan:
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
