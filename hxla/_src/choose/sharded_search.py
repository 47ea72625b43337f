"""Replicas of one device each that shard their state, where whole state fits no device.

The search over stages and groups of devices counts the whole state of a stage on each of its
devices. Replicas of one device each may fit where that does not: if they shard the state, run
forwards again, or offload some of it to their hosts (`with_memory`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from ..cluster.cluster import Cluster
from ..core.errors import PlanError
from ..launch.channel import own_member
from ..plan.plan import Plan
from ..profile.profile import LayerSize, Profile, measured_sum
from .chain import UNBOUNDED
from .device_times import layer_times
from .memory_model import predicted_microbatches, travel_of
from .proposals import ChainWork, Proposal, propose


def sharded_replicas(
    work: ChainWork,
    cluster: Cluster,
    profile: Profile | None,
    complete: Callable[[Proposal], Plan],
    in_form: Callable[[Plan], Plan],
    *,
    faster_than: float,
    all_devices: bool,
) -> Plan | None:
    """The fastest replicas of one device each that fit in some layout; None: none is fast enough.

    For each microbatch size the search deals microbatches to devices with unlimited memory, sums
    and updates free; no layout is faster. The most promising size gets its layout first. The
    plan's step counts the extra seconds of its layout. Reductions count as rings over all replicas,
    or as measured.

    Args:
        complete: Makes a plan, with the state whole on every replica.
        in_form: Gives a plan the cheapest layout that fits.
        faster_than: Seconds of the best plan with whole state; infinite if there is none.
        all_devices: Whether every device must take part.
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
                alone, roomy, times, max_stages=1, recompute=(False,), all_devices=all_devices
            )
            proposals.append(proposal)
    best: Plan | None = None
    least = faster_than
    proposals.sort(key=lambda proposal: proposal.prediction.step_seconds)
    for proposal in proposals:
        if proposal.prediction.step_seconds >= least:
            break
        whole_plan = _timed(complete(proposal))
        # One limb needs less memory, so a bound with one limb also bounds two.
        sums = whole_plan.sums.model_copy(
            update={"limbs": 1} if whole_plan.sums.kind == "exact" else {}
        )
        summing = _sum_seconds(whole_plan.replaced(sums=sums), cluster, profile)
        if proposal.prediction.step_seconds + summing >= least:
            continue  # no layout is faster
        try:
            plan = in_form(whole_plan)
        except PlanError:
            continue
        plan = _with_rest(plan, work, proposal, cluster, profile)
        assert plan.prediction is not None
        if plan.prediction.step_seconds < least:
            best, least = plan, plan.prediction.step_seconds
    return best


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
        "fixed_seconds": tuple(updates),
        "devices": devices,
    }
    return plan.replaced(prediction=known.model_copy(update=rest))
