"""Policies that share devices among jobs: EasyScale's, fixed gangs, and one that weighs moves."""

import dataclasses
from collections.abc import Iterator, Sequence

from .device_proposals import DeviceProposal, proposals
from .elastic_jobs import ActiveJob, Holdings, Situation, fits, free_devices, minus, plus
from .waste import Nums


def returned(jobs: Sequence[ActiveJob], capacity: Nums, holdings: Holdings) -> dict[str, Nums]:
    """Holdings after devices went away: of each kind no more are held than there are.

    A device that is asked back is returned by one of its own kind: whoever lent a V100 gets a
    V100. Each goes from the job that it costs least, the growth of its step's time being the
    cost, as long as one stays above its fewest devices. If none does the job that came last
    returns all that it holds, and waits.

    Args:
        jobs: The jobs that hold them, in the order of their arrival.
        capacity: The devices of each kind that are left.
    """
    held = {active.name: holdings.get(active.name, (0,) * len(capacity)) for active in jobs}
    for kind in range(len(capacity)):
        while free_devices(capacity, held)[kind] < 0:
            owners = [active for active in jobs if held[active.name][kind]]
            shrunk = {a.name: _less(held[a.name], kind) for a in owners}
            able = [a for a in owners if a.job.allows(shrunk[a.name])]
            if able:
                least = min(able, key=lambda a: _slowdown(a, held[a.name], shrunk[a.name]))
                held[least.name] = shrunk[least.name]
            else:
                held[owners[-1].name] = (0,) * len(capacity)
    return held


def _less(nums: Nums, kind: int) -> Nums:
    return minus(nums, tuple(int(k == kind) for k in range(len(nums))))


def _slowdown(active: ActiveJob, nums: Nums, shrunk: Nums) -> float:
    return active.job.step_seconds(shrunk) / active.job.step_seconds(nums)


def easyscale(situation: Situation) -> dict[str, Nums]:
    """Jobs keep what they hold, new ones get the fewest devices, then the best proposals win.

    Proposals are taken in the order of their speed-up per device, those of more devices first on
    ties, one for each job at a time.

    Returns:
        The devices of each kind for each job.

    References:
        Li et al., "EasyScale", SC 2023, Algorithm 1; what a job starts with, and that one grows by
        one kind at a time and doubles at most, is of its artifact.
    """
    held = returned(situation.jobs, situation.capacity, situation.held)
    for active in situation.jobs:
        if not any(held[active.name]):
            free = free_devices(situation.capacity, held)
            held[active.name] = fewest(active, free)
    grown = set()
    for proposal in ranked(situation, held):
        more = minus(proposal.nums, held[proposal.name])
        if proposal.name not in grown and fits(more, free_devices(situation.capacity, held)):
            held[proposal.name] = proposal.nums
            grown.add(proposal.name)
    return held


def easyscale_alike(situation: Situation) -> dict[str, Nums]:
    """Likewise, where every job stays on devices of one kind (the paper's EasyScale-homo)."""
    jobs = tuple(
        dataclasses.replace(active, job=dataclasses.replace(active.job, mixed=False))
        for active in situation.jobs
    )
    return easyscale(dataclasses.replace(situation, jobs=jobs))


def fewest(active: ActiveJob, free: Nums) -> Nums:
    """The fewest devices that a job runs on, of the slowest kind that has as many free."""
    num, nothing = active.job.min_devices, (0,) * len(free)
    choices = [tuple(num * (k == kind) for k in range(len(free))) for kind in range(len(free))]
    able = [nums for nums in choices if fits(nums, free) and active.job.allows(nums)]
    return max(able, key=active.job.step_seconds, default=nothing)


def ranked(situation: Situation, held: dict[str, Nums]) -> list[DeviceProposal]:
    """The best proposals of all jobs that were running, by speed-up per device."""
    free = free_devices(situation.capacity, held)
    found: list[DeviceProposal] = []
    for active in situation.jobs:
        if active.is_running and held[active.name] == active.nums:
            found += proposals(active, free)
    return sorted(found, key=lambda p: (-p.speedup_per_device, -p.num_more))


def one_at_a_time(situation: Situation) -> dict[str, Nums]:
    """The job that came first runs alone, as the artifact of EasyScale has YARN-CS."""
    first, nothing = situation.jobs[:1], (0,) * len(situation.kinds)
    return {a.name: gang(a, situation.capacity) or nothing for a in first}


def backfill(situation: Situation) -> dict[str, Nums]:
    """First come, first served; who fits behind starts if the first that waits is not delayed.

    Running jobs are never stopped. The end of each is known, so the time is known at which the
    first that waits can start, and what will be left then: a later job may start now if it ends
    before, or if it needs only what is left.

    References:
        Mu'alem and Feitelson, "Utilization, predictability, workloads, and user runtime estimates
        in scheduling the IBM SP2 with backfilling", IEEE TPDS 2001 (EASY backfilling).
    """
    held, free = _kept(situation)
    queue = [active for active in situation.jobs if active.name not in held]
    while queue and (first := gang(queue[0], situation.capacity)) and fits(first, free):
        held[queue.pop(0).name] = first
        free = minus(free, first)
    if not queue or not (first := gang(queue[0], situation.capacity)):
        return held
    start, spare = _reserved(situation, held, free, first)
    for active in queue[1:]:
        nums = gang(active, situation.capacity)
        if nums is None or not fits(nums, free):
            continue
        ends = active.seconds_left(nums, situation.move_seconds)
        if ends > start and not fits(nums, spare):
            continue
        if ends > start:
            spare = minus(spare, nums)
        held[active.name] = nums
        free = minus(free, nums)
    return held


def shortest_remaining(situation: Situation) -> dict[str, Nums]:
    """Gangs of the jobs that would be done first; longer ones are stopped for shorter ones.

    As in EasyScale's artifact, where it is `srtf`, a gang that does not fit is passed over.
    """
    gangs = {a.name: gang(a, situation.capacity) for a in situation.jobs}
    held: dict[str, Nums] = {}
    free = situation.capacity
    for active in sorted(situation.jobs, key=lambda a: _left(a, gangs[a.name])):
        nums = gangs[active.name]
        if nums is not None and fits(nums, free):
            held[active.name] = nums
            free = minus(free, nums)
    return held


def gang(active: ActiveJob, capacity: Nums) -> Nums | None:
    """The job's fixed set: as many as there are if it asks for more; None if there are none."""
    nums = tuple(min(n, c) for n, c in zip(active.job.gang, capacity, strict=True))
    return nums if any(nums) else None


def _left(active: ActiveJob, nums: Nums | None) -> float:
    return active.job.seconds(active.remaining_steps, nums) if nums else float("inf")


def _kept(situation: Situation) -> tuple[dict[str, Nums], Nums]:
    """What running jobs hold, the last that came stopped first if devices went away."""
    held: dict[str, Nums] = {}
    free = situation.capacity
    for active in situation.jobs:
        if active.is_running and fits(active.nums, free):
            held[active.name] = active.nums
            free = minus(free, active.nums)
    return held, free


def _reserved(
    situation: Situation, held: dict[str, Nums], free: Nums, wanted: Nums
) -> tuple[float, Nums]:
    """In how many seconds devices will be free, and what is left beside them then."""
    for seconds, nums in _ends(situation, held):
        free = plus(free, nums)
        if fits(wanted, free):
            return seconds, minus(free, wanted)
    return float("inf"), free


def _ends(situation: Situation, held: dict[str, Nums]) -> Iterator[tuple[float, Nums]]:
    running: Sequence[ActiveJob] = [a for a in situation.jobs if a.name in held]
    yield from sorted(
        (a.seconds_left(held[a.name], situation.move_seconds), held[a.name]) for a in running
    )


_EXPONENT = 1.5  # the best of 0.5, 1, 1.5 and 2 on EasyScale's trace, for moves of 1 to 20 s


def weighing(situation: Situation) -> dict[str, Nums]:
    """Devices go where they shorten what is left the most, in proportion to it.

    The sum over jobs of `L ** -1.5` is made large, where L are the seconds that a job would have
    left: its steps on the devices that it gets and, if those are not the ones that it holds, the
    pause of the move. The exponent is above 1 because jobs are better served one after another
    than side by side: where speed grows with the devices the job with the least left gets all that
    it can use, which is what makes the mean completion small; where it does not grow the next job
    gets them; and a job keeps what it holds unless the change pays for its pause.

    Devices are handed out from nothing, some of one kind at a time to one job: those that add the
    most to the sum for what they are worth, a device's worth being its speed among the kinds.

    Returns:
        The devices of each kind for each job.

    References:
        Shortest remaining processing time: Schrage, "A proof of the optimality of the shortest
        remaining processing time discipline", Operations Research 1968.
    """
    worth = _worth(situation)
    held = {active.name: (0,) * len(situation.kinds) for active in situation.jobs}
    free = situation.capacity
    offers = {a.name: _best(a, held[a.name], free, situation, worth) for a in situation.jobs}
    by_name = {active.name: active for active in situation.jobs}
    while offers:
        name = max(offers, key=lambda n: offers[n].gain)
        offer = offers[name]
        if offer.gain <= 0:
            del offers[name]
            continue
        more = minus(offer.nums, held[name])
        if fits(more, free):
            held[name], free = offer.nums, minus(free, more)
        offers[name] = _best(by_name[name], held[name], free, situation, worth)
    return held


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Offer:
    gain: float
    nums: Nums


def _best(
    active: ActiveJob, nums: Nums, free: Nums, situation: Situation, worth: tuple[float, ...]
) -> _Offer:
    """The best that the job could get beside what it was given in this round."""
    now = _value(active, nums, situation.move_seconds)
    best = _Offer(gain=0.0, nums=nums)
    for more in _choices(active, nums, free):
        cost = sum(w * (m - n) for w, m, n in zip(worth, more, nums, strict=True))
        gain = (_value(active, more, situation.move_seconds) - now) / cost
        if gain > best.gain:
            best = _Offer(gain=gain, nums=more)
    return best


def _choices(active: ActiveJob, nums: Nums, free: Nums) -> Iterator[Nums]:
    for kind in range(len(free)):
        for num in range(1, free[kind] + 1):
            more = plus(nums, tuple(num * (k == kind) for k in range(len(nums))))
            if sum(more) > active.job.num_microbatches:
                break
            if active.job.allows(more):
                yield more
    kept = minus(active.nums, nums)
    if any(kept) and min(kept) >= 0 and fits(kept, free) and active.job.allows(active.nums):
        yield active.nums


def _value(active: ActiveJob, nums: Nums, move_seconds: float) -> float:
    return active.seconds_left(nums, move_seconds) ** -_EXPONENT if any(nums) else 0.0


def _worth(situation: Situation) -> tuple[float, ...]:
    """The speed of a device of each kind, as a share of all kinds', the mean over the jobs."""
    shares = []
    for active in situation.jobs:
        speeds = [c.microbatches_per_second for c in active.job.capabilities]
        shares.append([speed / sum(speeds) for speed in speeds])
    return tuple(sum(kind) / len(shares) for kind in zip(*shares, strict=True))
