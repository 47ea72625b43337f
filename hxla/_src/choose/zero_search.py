"""Replicas that shard their state, beside what a search finds with whole state; their bound.

The search over stages and groups of devices counts the whole state of a stage on each of its
devices. Copies of one device each may fit although that does not: where they share it out, run
forwards again, or leave some of it on their hosts (`with_memory`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from ..cluster.cluster import Cluster
from ..core.errors import PlanError
from ..launch.member import own_member
from ..plan.plan import Plan
from ..profile.profile import LayerSize, Profile, measured_sum
from .chain import UNBOUNDED
from .layer_times import layer_times
from .memory_layout import MemoryLayout, asked_candidates, candidates_on_hosts
from .memory_model import predicted_microbatches, step_memory, travel_of
from .memory_price import ReplicaDevice, StepMemory, price, upper_bound
from .proposals import ChainWork, Proposal, propose
from .workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharingCopies:
    """The fastest.

    Attributes:
        plan: Of them; its step counts what its form takes beyond whole state.
        bound_seconds: No copies that do not fit with whole state are faster, whatever their form.
    """

    plan: Plan
    bound_seconds: float


def sharing_copies(
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
) -> SharingCopies | None:
    """The fastest copies of one device each that fit in some form; None: none is fast enough.

    For each microbatch size the search deals microbatches to devices as if their memory had no end
    and sums and updates took no time, which bounds every form; what each form runs again at least
    raises that. The most promising is given its form first. Sums count as rings over all copies, or
    as they were measured.

    Args:
        work: The chain of a job.
        complete: Makes a plan, with the state whole on every copy.
        in_form: Gives it the cheapest form that fits.
        least_seconds: Of copies in any form that fits, given some with whole state, and a bound
            without limits of memory.
        faster_than: Seconds of the step of the best plan with whole state, if there is one.
        all_devices: Whether every device is to take part.
        seconds: Time budget of each search.
    """
    if own_member() is not None:
        return None  # the next generation might find another form, which has other bits
    roomy = cluster.model_copy(
        update={
            "devices": tuple(
                device.model_copy(update={"memory_bytes": int(UNBOUNDED)})
                for device in cluster.devices
            )
        }
    )
    times = None if profile is None else dataclasses.replace(profile, reductions={})
    found: list[Proposal] = []
    for (size, tensor), layers in sorted(work.sizes.items()):
        if tensor > 1 or (faster_than < math.inf and _fit_whole(work, layers, cluster)):
            continue
        alone = dataclasses.replace(
            work, sizes={(size, 1): layers}, reduce_factor=0.0, counts_updates=False
        )
        with contextlib.suppress(PlanError):  # one device would be left out, for it is so slow
            proposal, _ = propose(
                alone,
                roomy,
                times,
                max_stages=1,
                recompute=False,
                all_devices=all_devices,
                time_budget_seconds=seconds,
            )
            found.append(proposal)
    best: Plan | None = None
    least = faster_than
    found.sort(key=lambda own: own.prediction.step_seconds)
    tried: dict[int, Plan] = {}
    for proposal in found:
        if proposal.prediction.step_seconds >= least:
            break
        own = _timed(complete(proposal))
        # One limb has less to hold: if two are asked for, a bound with one is one too.
        sums = own.sums.model_copy(update={"limbs": 1} if own.sums.kind == "exact" else {})
        least_held = tried[own.microbatch_size] = own.replaced(sums=sums)
        summing = _sum_seconds(least_held, cluster, profile)
        if proposal.prediction.step_seconds + summing >= least:
            continue  # in no form are they faster
        try:
            plan = in_form(own)
        except PlanError:
            continue
        tried[own.microbatch_size] = own.replaced(sums=plan.sums)
        plan = _with_rest(plan, work, proposal, cluster, profile)
        assert plan.prediction is not None
        if plan.prediction.step_seconds < least:
            best, least = plan, plan.prediction.step_seconds
    if best is None:
        return None
    bounds = [least]
    for proposal in found:
        size, bound = proposal.alternative.microbatch_size, proposal.prediction.bound_seconds
        bounds.append(least_seconds(tried[size], bound) if size in tried else bound)
    return SharingCopies(plan=best, bound_seconds=min(bounds))


def _fit_whole(work: ChainWork, layers: Sequence[LayerSize], cluster: Cluster) -> bool:
    """Whether every device holds a copy with whole state, which the search then knows."""
    needed = sum(work.state_factor * own.parameter_bytes + own.stash_bytes for own in layers)
    return all(needed <= (device.memory_bytes or math.inf) for device in cluster.devices)


def _timed(plan: Plan) -> Plan:
    """The plan with what a microbatch takes on each copy, as its devices' times say."""
    assert plan.prediction is not None
    each = predicted_microbatches(plan, plan.prediction)
    known = {"microbatch_seconds": each, "fixed_seconds": (0.0,) * len(each)}
    return plan.replaced(prediction=plan.prediction.model_copy(update=known))


def _sum_seconds(plan: Plan, cluster: Cluster, profile: Profile | None) -> float:
    """Of a ring over all copies, or as it was measured."""
    labels = [cluster.devices[replica.devices[0]].label for replica in plan.replicas]
    measured = measured_sum(profile, labels)
    if measured is not None:
        return measured
    return 2 * plan.sums.travel_factor * travel_of(plan, cluster, 1).all_copies


def _with_rest(
    plan: Plan, work: ChainWork, proposal: Proposal, cluster: Cluster, profile: Profile | None
) -> Plan:
    """The plan whose step counts sums, and what each copy updates: all of the state, or a share."""
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
        own.model_copy(
            update={
                "reduction_seconds": sums,
                "update_seconds": each[own.rank],
                "wait_seconds": own.wait_seconds + longest - each[own.rank],
            }
        )
        for own in known.devices
    )
    rest = {
        "step_seconds": known.step_seconds + sums + longest,
        "closed_form_seconds": 0.0,
        "fixed_seconds": tuple(updates),
        "devices": devices,
    }
    return plan.replaced(prediction=known.model_copy(update=rest))


def least_seconds(work: Workload, plan: Plan, cluster: Cluster, seconds: float) -> float:
    """The least step of replicas of one device each that fit, of any number, counts and layout.

    In a layout all replicas run the same of a microbatch again, so that every step is longer by the
    same factor than without limits of memory. The least factor is that of a layout which fits where
    no replicas have less to hold: one on every device, all with the memory of the largest; one of
    them runs an even share of the microbatches, as some replica must, and each other a single one.
    What a layout moves to hosts takes at least as long as it takes if all their links are busy to
    the end.

    Args:
        plan: Some replicas with this size of a microbatch, and sums of this form.
        seconds: No replicas are faster whose devices have no end of memory.

    Returns:
        Infinity if there is no layout that fits.
    """
    busiest = _even_share(plan, cluster)
    flops = busiest * work.microbatch_flops
    if not flops:
        return seconds  # nothing says how much longer a step is
    rates = sum(device.host_bytes_per_second or math.inf for device in cluster.devices)
    least = math.inf
    for layout in _roomiest(work, plan, cluster):
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
    """Microbatches that some replica has at least."""
    return math.ceil(plan.num_microbatches / len(cluster.devices))


def _roomiest(work: Workload, plan: Plan, cluster: Cluster) -> Iterator[MemoryLayout]:
    """The layouts of replicas that have least to hold, those of one program first."""
    sizes = [device.memory_bytes for device in cluster.devices]
    most = None if None in sizes else max(own for own in sizes if own is not None)
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
