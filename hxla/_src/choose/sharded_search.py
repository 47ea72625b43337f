"""Replicas of one device each that shard their state, where whole state fits no device.

The search over stages and groups of devices counts the whole state of a stage on each of its
devices. Replicas of one device each may fit where that does not: if they shard the state, run
forwards again, or offload some of it to their hosts (`with_memory`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from ..cluster.cluster import Cluster
from ..core.errors import PlanError
from ..launch.channel import own_member
from ..plan.plan import Plan
from ..profile.profile import LayerSize, Profile, measured_sum
from .chain import UNBOUNDED
from .device_times import layer_times
from .memory_layout import MemoryLayout, asked_candidates, candidates_on_hosts
from .memory_model import predicted_microbatches, step_memory, travel_of, with_open_calls
from .memory_price import ReplicaDevice, StepMemory, price, upper_bound
from .proposals import ChainWork, Proposal, propose
from .workload import Workload


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
