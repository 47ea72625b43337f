"""Copies of the model that share their state, beside what a search finds with whole state.

The search over stages and groups of devices counts the whole state of a stage on each of its
devices. Copies of one device each may fit although that does not: where they share it out, run
forwards again, or leave some of it on their hosts (`with_memory`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from .._cluster._cluster import Cluster
from .._core._errors import PlanError
from .._launch._member import own_member
from .._plan._plan import Plan
from .._planner._chain import UNBOUNDED
from .._planner._estimate import layer_times
from .._planner._propose import ChainWork, Proposal, propose
from .._planner._shard_groups import travel_of
from .._profile._profile import LayerSize, Profile, measured_sum
from ._forms_of_job import predicted_microbatches


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
        cluster: Described.
        profile: Measured times.
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
