"""How gradients are summed, and the memory layout of a step: the cheapest that settings allow.

One call of a program runs several microbatches. A call and each array from the host cost 50 to 350
microseconds, so several microbatches run in a loop inside one program. Its rounding need not be
that of a program for one, and every device runs the same program. So the number follows from the
batch alone, and no bit depends on the devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..cluster.cluster import Cluster
from ..cluster.kinds import are_unlike, in_words
from ..core.errors import NothingFitsError, PlanError
from ..core.format import num_bytes
from ..graph.graph import is_slow_in_loops
from ..graph.parts import graph_at, parts_of
from ..lower.chain_spec import direct_parts
from ..lower.contribution import num_terms
from ..lower.exact import Limbs
from ..model.functional import leaf_names
from ..plan.ownership import SUMMED_STATE, Ownership
from ..plan.parts import (
    ChainSegment,
    DevicePrediction,
    HeldBytes,
    Placement,
    PlannedChain,
    Prediction,
    RunnerUp,
)
from ..plan.plan import Plan
from .complete import placement_for
from .memory_layout import (
    Candidate,
    MemoryLayout,
    Recompute,
    asked_candidates,
    candidates_on_hosts,
    is_described,
)
from .memory_model import microbatch_seconds, segments_of, step_memory, tightest, with_open_calls
from .memory_price import (
    PART_ON_DEVICE,
    ModelBytes,
    ReplicaDevice,
    StepMemory,
    price,
    tier_of,
    upper_bound,
)
from .microbatch_counts import with_asked_calls
from .recompute import boundary_texts, keep_texts
from .workload import Measure, Workload

#: The most inputs of a call. A device with fewer microbatches than a call takes gets padding, which
#: crosses a PCIe link of 25 GB/s in less than a millisecond.
_MOST_BYTES = 16 << 20
_MOST_OF_MEMORY = 1 / 64  # the part of a device's memory that the inputs of a call may take
_MOST = 4096


def with_calls(work: Workload, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the microbatches of a call, where the settings leave them open."""
    if work.settings.cluster.microbatches_per_call != "auto" or plan.num_microbatches == 1:
        return plan
    if plan.axes or plan.num_segments > 1:  # a microbatch is several programs or has collectives
        return plan
    if work.graph.program.effects:
        return _with_reason(plan, "a call for each microbatch: the loss calls Python")
    if is_slow_in_loops(work.graph, [device.kind for device in plan.devices]):
        why = "XLA is slow at convolutions inside loops on CPUs"
        return _with_reason(plan, f"a call for each microbatch: {why}")
    each = max(work.input_bytes, 1)
    num = min(plan.num_microbatches, _MOST_BYTES // each, _MOST)
    if num < 2:
        why = f"two would have inputs of {num_bytes(2 * each)}, of {num_bytes(_MOST_BYTES)} at most"
        return _with_reason(plan, f"a call for each microbatch: {why}")
    known = [b for d in plan.devices if (b := cluster.devices[d.rank].memory_bytes)]
    room = int(min(known, default=1 << 62) * _MOST_OF_MEMORY)
    if num * each > room:
        why = f"{num} have inputs of {num_bytes(num * each)}, and a device has room for "
        return _with_reason(plan, f"a call for each microbatch: {why}{num_bytes(room)} of inputs")
    plan = plan.replaced(microbatches_per_call=num)
    if num == plan.num_microbatches:
        return plan
    return _with_reason(plan, f"one call runs up to {num} microbatches: {num_bytes(num * each)}")


def _with_reason(plan: Plan, reason: str) -> Plan:
    return plan.replaced(reasons=(*plan.reasons, reason))


_MOST_RUNNERS_UP = 5


def with_memory(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    measure: Measure | None = None,
    *,
    timed_form: str = "",
) -> Plan:
    """The plan in the cheapest memory layout that fits and that the settings allow.

    The plain layout is the cheapest wherever it fits. Bytes are estimates before compilation, and a
    compiled program may need more, so on present devices one program is compiled to see.

    Args:
        plan: With the state whole on every replica.
        measure: None: the devices are not here.
        timed_form: The layout of the measured times, which include its recomputation and transfers.

    Raises:
        PlanError: If the settings cannot be met, or (`NothingFitsError`) no layout that they
            allow fits.
    """
    plan = with_open_calls(work, plan)  # each layout gets its number
    asked, described = asked_candidates(work, plan, cluster), is_described(plan, cluster)
    is_searched = plan.prediction is not None and bool(plan.prediction.devices)
    if plan.pipeline is not None and measure is None and not is_searched:
        # Nothing is compiled here to see what the planned stages need.
        own: Recompute = "boundaries" if plan.pipeline.recompute else "none"
        asked = [dataclasses.replace(x, recompute=x.recompute or own) for x in asked]
    step = step_memory(work, plan, cluster)
    compiled_lack = None
    if measure is not None and described:
        compiled_lack = functools.partial(measure.compiled_lack, cluster=cluster)
    ranked = _ranked(work, plan, cluster, step, asked, are_here=measure is not None)

    def in_layout(layout: MemoryLayout) -> Plan:
        return with_calls(work, _in_layout(work, plan, cluster, step, layout), cluster)

    layout, chosen = _first_as_compiled(ranked, in_layout, compiled_lack)
    if not layout.fits and work.settings.memory.recompute in (None, "auto"):
        raise NothingFitsError(_no_fit(layout, step.devices, plan))
    if microbatch_seconds(plan) and chosen.memory_form != timed_form:
        chosen = chosen.replaced(prediction=_with_extra_seconds(chosen.prediction, layout))
    if not described or not layout.held:
        return chosen
    known = _with_bytes(chosen, cluster, layout, ranked[ranked.index(layout) + 1 :])
    return known if step.model.unlike is None else _with_stage_bytes(known, step.model, layout)


def _ranked(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    step: StepMemory,
    asked: Sequence[Candidate],
    *,
    are_here: bool,
) -> list[MemoryLayout]:
    """The layouts of a step, those that fit first, the cheapest first.

    Args:
        are_here: Whether the devices are here, so that a compilation corrects the bound.
    """

    def priced(candidates: Sequence[Candidate]) -> list[MemoryLayout]:
        return sorted((price(x, step) for x in candidates), key=lambda layout: layout.cost)

    described = is_described(plan, cluster)
    if step.is_estimated and asked[0].recompute is None and (are_here or not described):
        bound = upper_bound(asked[0], step)
        if bound.fits:
            return [bound]
    ranked = priced(asked if described else asked[:1])
    if not ranked[0].fits:
        others = priced(candidates_on_hosts(work, plan, cluster))
        fit = [x for x in others if x.fits and not _host_faults(x, step.devices)]
        ranked = [*fit, *ranked]
    return ranked


def _first_as_compiled(
    ranked: Sequence[MemoryLayout],
    in_layout: Callable[[MemoryLayout], Plan],
    compiled_lack: Callable[[Plan], float] | None,
) -> tuple[MemoryLayout, Plan]:
    """The first layout whose compiled programs fit; estimates of a chain are taken as they are.

    Raises:
        PlanError: If none fits.
    """
    first, *others = ranked
    # The alternatives to one program are chains with the state in the same place.
    tier = first.candidate.optimizer
    if first.held:
        others = [x for x in others if x.candidate.recompute and x.candidate.optimizer == tier]
    lacks: dict[str, float] = {}
    for layout in (first, *others):
        candidate_plan = in_layout(layout)
        is_sure = layout.sequence or not layout.fits or not others
        lack = 0.0 if compiled_lack is None or is_sure else compiled_lack(candidate_plan)
        if lack <= 0:
            note = [f"{layout}: {_lacks_in_words(lacks)}"] if lacks else []
            return layout, candidate_plan.replaced(reasons=(*candidate_plan.reasons, *note))
        lacks[str(layout)] = lack
    raise PlanError(
        f"memory.zero: {_lacks_in_words(lacks)}: use more stages or devices, a smaller "
        "microbatch_size, or memory.recompute"
    )


def _lacks_in_words(lacks: Mapping[str, float]) -> str:
    each = [f"{num_bytes(int(lack))} with {layout}" for layout, lack in lacks.items()]
    return f"a device lacks {', '.join(each)}, as compiled"


def _with_extra_seconds(known: Prediction | None, layout: MemoryLayout) -> Prediction | None:
    """The prediction with a layout's recomputation and transfers."""
    if known is None or not known.step_seconds:
        return known
    more = max(layout.extra_seconds + layout.moving_seconds, 0.0)
    again = min(more, max(layout.extra_seconds, 0.0))
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


def _in_layout(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    step: StepMemory,
    layout: MemoryLayout,
) -> Plan:
    """The plan in a layout.

    Raises:
        PlanError: If the settings contradict the layout, or hosts have no room.
    """
    candidate, memory = layout.candidate, work.settings.memory
    if not candidate.zero and memory.shares not in ("auto", "even"):
        raise PlanError("memory.shares needs memory.zero of 1 to 3: set it, or leave them out")
    is_asked = candidate.optimizer != "device" or memory.offload.optimizer is not None
    if plan.stage_forms and candidate.zero and len(plan.replicas) == 1:
        what = f"memory.offload.optimizer={candidate.optimizer!r}"
        raise PlanError(
            f"{what if is_asked else f'memory.zero={candidate.zero}'}: all devices share one state "
            "here, and nobody is left to share it with: leave this out"
        )
    if candidate.zero and len(plan.replicas) == 1 and not is_asked:
        raise PlanError(
            f"memory.zero={candidate.zero}: one replica has nobody to share with, leave it out"
        )
    placement, notes = (
        _sharded(work, plan, cluster, layout) if candidate.zero else (plan.placement, [])
    )
    if candidate.recompute is None and memory.segments is not None:
        raise PlanError(
            "memory.segments needs memory.recompute: set it to 'none', 'boundaries' or 'auto'"
        )
    if faults := _host_faults(layout, step.devices):
        raise PlanError(faults[0])
    notes += _moves_in_words(work, plan, cluster, step.devices, layout)
    replicas, chain, pipeline = plan.replicas, None, plan.pipeline
    if candidate.recompute is not None and pipeline is not None:
        pipeline = pipeline.keeping("residuals" if candidate.recompute == "none" else "inputs")
    elif candidate.recompute is not None:
        points, segments = segments_of(work)
        chain = PlannedChain(
            segments=tuple(
                ChainSegment(name=segment.name, first=first)
                for segment, first in zip(segments, (0, *points), strict=True)
            ),
            sequence=layout.sequence or _fixed_texts(candidate, len(segments)),
        )
    if pipeline is not None and candidate.zero > 1:
        if any(replica.start_seconds for replica in replicas):
            why = "replicas fill their slots together: none begins later, and cards are shared"
            notes.append(f"memory.zero={candidate.zero}: {why}")
        replicas = tuple(x.model_copy(update={"start_seconds": 0.0}) for x in replicas)
    return plan.replaced(
        chain=chain,
        pipeline=pipeline,
        placement=placement.model_copy(
            update={
                "zero": candidate.zero,
                "waves": layout.waves,
                "stash": candidate.stash,
                "parameters": candidate.parameters,
            }
        ),
        replicas=replicas,
        reasons=(*plan.reasons, *notes),
    )


def _fixed_texts(candidate: Candidate, num: int) -> tuple[str, ...]:
    """The sequence of a chain whose bytes are not estimated."""
    return keep_texts(num) if candidate.recompute == "none" else boundary_texts(num)


def _sharded(
    work: Workload, plan: Plan, cluster: Cluster, layout: MemoryLayout
) -> tuple[Placement, list[str]]:
    """The placement of sharded state, with the reasons to report.

    Raises:
        PlanError: If the optimizer's state cannot be where the layout puts it.
    """
    candidate, members = layout.candidate, len(plan.replicas) // layout.candidate.shard_groups
    granules = layout.shares or (1,) * members
    owned = work.ownership(granules)
    if candidate.optimizer != "device" and owned.summed_state:
        raise PlanError(
            f"memory.offload.optimizer={candidate.optimizer!r}: {SUMMED_STATE}: use 'device'"
        )
    names, owners = leaf_names(work.model.trained), owned.shares.owners
    whole = tuple(n for n, owner in zip(names, owners, strict=True) if owner is not None)
    on_device = work.optimizer_bytes * (1 if candidate.optimizer == "device" else PART_ON_DEVICE)
    placement = placement_for(
        plan.parameters,
        plan.axis_sizes,
        plan.sums,
        on_device * (max(granules) / sum(granules)),
        [cluster.devices[d.rank] for d in plan.devices],
    ).model_copy(
        update={
            "shares": layout.shares,
            "shard_groups": candidate.shard_groups,
            "whole": whole,
            "optimizer": candidate.optimizer,
        }
    )
    notes = _shares_in_words(owned, whole, names, layout)
    if candidate.shard_groups > 1:
        notes.append(
            f"the replicas are {candidate.shard_groups} groups of {members}: each group shards the "
            "whole state"
        )
    if work.settings.optimizer.num_apply_groups > 1 and whole:
        notes.append("optimizer.num_apply_groups: not used, some parameters have one owner each")
    return placement, notes


def _shares_in_words(
    owned: Ownership, whole: Sequence[str], names: Sequence[str], layout: MemoryLayout
) -> list[str]:
    stage = layout.candidate.zero
    ratio = ":".join(map(str, layout.shares)) if layout.shares else "even shares"
    what = ("", ", the sums of gradients", ", the sums of gradients and the parameters")[stage - 1]
    notes = [
        f"ZeRO stage {stage}: each replica has its share of the optimizer's state{what}, {ratio}"
    ]
    domains = owned.update.domain_of[: owned.num_params]
    if len(names) > 1 and len(set(domains)) == 1 and whole:
        notes.append(
            "the optimizer ties all parameters together, as one that branches over all of them "
            "does, so one replica owns all of its state"
        )
    elif whole:
        shown = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
        notes.append(f"the optimizer treats these as a whole, each has one owner: {shown}")
    return notes


#: Per key of `MemoryLayout.moved`: its name, what hides its transfers, the remedy.
_WORDS = {
    "optimizer": (
        "the optimizer's state",
        "less where both ways go at once, hidden behind nothing but the update itself",
        "share it out with memory.zero, or set memory.offload.optimizer to 'disk'",
    ),
    "parameters": (
        "the parameters",
        "beside the programs",
        "share them out more, or leave memory.offload.parameters out",
    ),
    "stash": (
        "the residuals",
        "beside the programs",
        "use memory.recompute='boundaries', more memory.waves, or leave memory.offload.stash out",
    ),
}


def _host_faults(layout: MemoryLayout, devices: Sequence[ReplicaDevice]) -> list[str]:
    """Why a layout does not fit host memory; empty: it fits."""
    faults = []
    if not any(layout.on_host.get("stash", [1])):
        num = sum(text.startswith("B") for text in layout.sequence)
        faults.append(
            f"memory.offload.stash='host': a chain of {num} segments keeps nothing for longer than "
            "one of them runs: set memory.segments to more, or leave it out"
        )
    for i, device in enumerate(devices):
        kept = {name: by_device[i] for name, by_device in layout.on_host.items()}
        room = device.host_memory_bytes
        if room is not None and sum(kept.values()) > room:
            each = " and ".join(f"{n:,} bytes of {_WORDS[name][0]}" for name, n in kept.items())
            faults.append(
                f"memory.offload: {device.name} would keep {each} in the {room:,} of its host's "
                f"memory: {_WORDS[max(kept, key=kept.__getitem__)][2]}"
            )
    return faults


def _moves_in_words(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    devices: Sequence[ReplicaDevice],
    layout: MemoryLayout,
) -> Iterator[str]:
    """Transfers to hosts or disks in a step, of the slowest replica."""
    for name, moved in layout.moved.items():
        tier = tier_of(layout.candidate, name)
        place = "in host memory" if tier == "host" else "on the disk"
        what, hidden, _ = _WORDS[name]
        most = max(layout.on_host.get(name) or (n // 2 for n in moved))
        line = (
            f"offload: at most {num_bytes(most)} of {what} of a replica are {place}; a step moves"
        )
        rates = [device.bytes_per_second(tier) for device in devices]
        times = [
            (n / rate, n, rate, i)
            for i, (n, rate) in enumerate(zip(moved, rates, strict=True))
            if rate is not None
        ]
        if not times:
            yield (
                f"{line} {num_bytes(max(moved))} there and back; the time is not known, as the "
                "mesh file does not give the rate"
            )
            continue
        seconds, n, rate, i = max(times)
        left = _rate_left(work, plan, cluster, i, seconds) if name == "optimizer" else ""
        yield (
            f"{line} {num_bytes(n)} there and back at {rate / 1e9:.3g} GB/s, {seconds:.3g} s, "
            f"{hidden}{left}"
        )


def _rate_left(work: Workload, plan: Plan, cluster: Cluster, i: int, seconds: float) -> str:
    """The share of a device's rate that remains beside so many seconds of transfers.

    References:
        Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 4: compute / (compute + copies).
    """
    products = cluster.devices[plan.replicas[i].devices[0]].product_rate(work.arithmetic)
    if products is None or not seconds:
        return ""
    flops = work.microbatch_flops * plan.counts[i]
    part = flops / (flops + seconds * products.flops_per_second)
    return f"; {part:.1%} of the device's rate are left (ZeRO-Infinity's formula)"


def _with_bytes(
    plan: Plan, cluster: Cluster, best: MemoryLayout, others: Sequence[MemoryLayout]
) -> Plan:
    """The plan with the bytes of its layout, and of the runners-up."""
    ranks = [tightest(cluster, replica.devices) for replica in plan.replicas]
    sizes = [cluster.devices[rank].memory_bytes for rank in ranks]
    notes: list[str] = []
    known = [
        (needed.activations, size - needed.total + needed.activations)
        for needed, size in zip(best.held, sizes, strict=True)
        if size is not None
    ]
    is_layered = best.candidate.zero > 1
    if best.candidate.recompute == "auto" or (is_layered and known):
        kept, left = max(known, key=lambda pair: pair[0] - pair[1])
        whose = "its microbatches keep" if is_layered else "a microbatch keeps"
        notes.append(
            f"recomputation: {whose} {kept / 2**20:,.1f} MiB of the {left / 2**20:,.1f} MiB that "
            "are left (estimated before compilation)"
        )
    prediction = plan.prediction or Prediction()
    spent = {device.rank: device for device in prediction.devices}
    devices = tuple(
        spent.get(rank, DevicePrediction(rank=rank)).model_copy(
            update={
                "memory_bytes": needed.total,
                "capacity_bytes": float(cluster.devices[rank].memory_bytes or 0),
                "held": needed,
            }
        )
        for replica, needed in zip(plan.replicas, best.held, strict=True)
        for rank in replica.devices
    )
    runners_up = [
        RunnerUp(
            description=str(layout),
            held=max(layout.held, key=lambda needed: needed.total),
            lack_bytes=max(layout.lack_bytes, 0.0),
        )
        for layout in others[:_MOST_RUNNERS_UP]
    ]
    return plan.replaced(
        prediction=prediction.model_copy(update={"devices": devices}),
        runners_up=(*plan.runners_up, *runners_up),
        reasons=(*plan.reasons, *notes),
    )


def _with_stage_bytes(plan: Plan, model: ModelBytes, layout: MemoryLayout) -> Plan:
    """The plan with the bytes of each device of unlike stages."""
    known = plan.prediction
    assert known is not None
    assert model.unlike is not None
    held = {
        rank: HeldBytes(
            parameters=model.parameters + one.held.slots,
            sums=one.held.summed * model.num_sums,
            optimizer=layout.held[one.place].optimizer,
            activations=one.held.activations,
        )
        for one in model.unlike(layout.candidate.recompute != "none")
        for rank in one.ranks
    }
    devices = tuple(
        device.model_copy(
            update={"held": held[device.rank], "memory_bytes": held[device.rank].total}
        )
        for device in known.devices
    )
    return plan.replaced(prediction=known.model_copy(update={"devices": devices}))


def _no_fit(layout: MemoryLayout, devices: Sequence[ReplicaDevice], plan: Plan) -> str:
    """The message that no layout fits, with the one that lacks least."""
    device, needed = max(
        zip(devices, layout.held, strict=True), key=lambda pair: pair[1].total - pair[0].room
    )
    owners = ", ".join(f"{name} {num_bytes(n)}" for name, n in needed.by_owner.items() if n)
    if len(plan.replicas) > 1:
        remedy = "a smaller microbatch_size, or more or larger devices"
    else:
        remedy = "a smaller microbatch_size, a larger device, or several that share the state"
    if layout.candidate.optimizer == "device" and needed.optimizer and not plan.axes:
        remedy += ", or memory.offload.optimizer = 'host'"
    is_stash = needed.activations > needed.optimizer
    if layout.candidate.stash == "device" and is_stash and not plan.axes:
        remedy += ", or memory.offload.stash = 'host'"
    if plan.pipeline is not None and layout.candidate.recompute == "none":
        remedy += ", or memory.recompute = 'auto'"
    kept = "inputs" if layout.candidate.recompute == "boundaries" else "residuals"
    best = f"that whose stages keep their {kept}" if plan.stage_forms else layout
    return (
        f"a microbatch does not fit beside the state: of all layouts, {best} lacks "
        f"least, and {device.name} has {num_bytes(device.memory_bytes or 0)} and needs "
        f"{num_bytes(needed.total)}: {owners} (estimated before compilation). Use {remedy}"
    )


def with_sums_over(work: Workload, plan: Plan) -> Plan:
    """The plan with its reductions over devices or hosts, by the settings or its devices.

    Args:
        plan: With the reductions over devices.

    Raises:
        PlanError: If the settings ask for collectives that its devices do not share.
    """
    asked, kinds = work.settings.communication.over, [device.kind for device in plan.devices]
    unlike = are_unlike(kinds)
    if unlike and asked == "device":
        raise PlanError(
            f"communication.over='device': {in_words(kinds)} share no library for collectives: "
            "leave it out or set it to 'host', or use devices of one sort"
        )
    if not unlike and asked != "host":
        return plan
    if plan.axes:
        axes = ", ".join(axis.name for axis in plan.axes)
        why = f"{in_words(kinds)} meet over the host" if unlike else "communication.over='host'"
        raise PlanError(
            f"{why}, where replicas of one device meet, and the axes {axes} need collectives "
            "inside a replica: leave out mesh, rules, stages and splits, or "
            + ("use devices of one sort" if unlike else "set communication.over to 'device'")
        )
    notes = ("sums over the host: devices take part in no collective",)
    if unlike:
        notes = (
            f"sums over the host, for {in_words(kinds)} share no library for collectives. Each "
            "kind rounds its microbatches in its own way, so bits depend on who runs which, and "
            "the numerics with them; what is updated is updated on one device and handed to all, "
            "so the state of all replicas is equal to the bit",
        )
    sums = plan.sums.model_copy(update={"over": "host"})
    return plan.replaced(sums=sums, reasons=(*plan.reasons, *notes))


#: The largest error of an element of the mean gradient with `communication.limbs = "auto"`, over
#: the largest magnitude of its tensor: met by 64 microbatches or fewer.
_MOST_ERROR = 2.0**-16


def with_sums_and_memory(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    measure: Measure | None = None,
    *,
    timed_form: str = "",
) -> Plan:
    """The plan with reductions, limbs and memory layout by the settings.

    Args:
        plan: With the state whole on every replica and the reductions over devices; with one limb
            only if asked for.
        measure: See `with_memory`.
        timed_form: See `with_memory`.

    Raises:
        PlanError: If the settings cannot be met, or nothing fits.
    """

    def in_memory(plan: Plan) -> Plan:
        return with_memory(work, plan, cluster, measure, timed_form=timed_form)

    plan = with_asked_calls(work.settings.cluster, with_sums_over(work, plan))
    asked = work.settings.communication.limbs
    if plan.sums.kind != "exact" or asked == 2:
        return in_memory(plan)
    terms = _terms(work, plan)
    if asked == 1 or _mean_error(terms) <= _MOST_ERROR:
        sums = plan.sums.model_copy(update={"limbs": 1})
        one = in_memory(plan.replaced(sums=sums))
        terms = _terms(work, one)  # more, if its segments share a parameter
    if asked == "auto" and (mean := _mean_error(terms)) > _MOST_ERROR:
        reason = (
            f"two limbs: one would let the mean of {terms} terms err by 2**{_power(mean)} of "
            f"its tensor's largest, more than 2**{_power(_MOST_ERROR)}"
        )
        return in_memory(plan.replaced(reasons=(*plan.reasons, reason)))
    bound = Limbs(1, terms).error_bound
    reason = (
        f"one limb: an element's sum of {terms} terms errs by at most 2**{_power(bound)} of the "
        f"largest magnitude in its tensor, their mean by 2**{_power(bound / terms)}"
    )
    return one.replaced(reasons=(*one.reasons, reason))


def _mean_error(terms: int) -> float:
    """The error of the mean of so many terms with one limb, over the largest magnitude."""
    return Limbs(1, terms).error_bound / terms


def _power(bound: float) -> str:
    return f"{math.log2(bound):.3g}"


def _terms(work: Workload, plan: Plan) -> int:
    """The most terms of an element's sum: each part that shares a parameter adds one."""
    graph, num = work.graph, plan.num_microbatches
    if plan.pipeline is not None:
        ordered, points = graph_at(graph, plan.pipeline.cut_by, plan.pipeline.points)
        parts = direct_parts if plan.stage_forms else parts_of
        return num_terms(ordered, parts(ordered, points), num)
    if plan.chain is not None:
        ordered, points = graph_at(graph, "work", plan.chain.points)
        return num_terms(ordered, direct_parts(ordered, points), num)
    return num
