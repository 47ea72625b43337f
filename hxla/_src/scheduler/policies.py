"""Policies that share devices among jobs: EasyScale's, fixed gangs, and one that weighs moves.

The intra-job scheduler makes a job's proposals for more devices, from its measured speeds.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..core.timing import middle_mean
from .elastic_jobs import (
    MOST_WASTE,
    ActiveJob,
    Capability,
    Configuration,
    ElasticJob,
    Holdings,
    Nums,
    Situation,
    fits,
    free_devices,
    minus,
    plus,
)

#: Proposals that a job makes at a time (EasyScale, section 3.4: the top K).
MOST_PROPOSALS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProposal:
    """A job's offer to use more devices of one kind.

    Attributes:
        kind: The index of the kind.
        nums: The devices of each kind that the job would then have in all.
        after: The configuration on these devices.
        speedup: The step time now over the step time then: 1.5 for two thirds of the time.
    """

    name: str
    kind: int
    num_more: int
    nums: Nums
    after: Configuration
    speedup: float

    @property
    def speedup_per_device(self) -> float:
        """The gain per additional device."""
        return (self.speedup - 1) / self.num_more


def proposals(
    active: ActiveJob,
    free: Nums,
    *,
    most: int = MOST_PROPOSALS,
    most_waste: float = MOST_WASTE,
    refused: frozenset[Nums] = frozenset(),
) -> tuple[DeviceProposal, ...]:
    """A job's best proposals, by speed-up per device, those of more devices first on ties.

    A proposal adds devices of one kind, at most as many as the job has of all kinds: its speed on
    more devices is an estimate, so it doubles at most. Every proposal makes the job faster.

    Args:
        free: The free devices of each kind.
        most_waste: The largest share of a configuration's capability that may be idle.
        refused: Devices that the job tried and left, see `Trials`.
    """
    now = active.job.step_seconds(active.nums)
    offers = []
    for kind in range(len(free)):
        for nums in _more(active.job, active.nums, kind, min(free[kind], sum(active.nums))):
            after = active.job.configuration(nums)
            if after is None or after.waste > most_waste or nums in refused:
                continue
            speedup = now / active.job.step_seconds(nums)
            if speedup > 1:
                offers.append(
                    DeviceProposal(
                        name=active.name,
                        kind=kind,
                        num_more=nums[kind] - active.nums[kind],
                        nums=nums,
                        after=after,
                        speedup=speedup,
                    )
                )
    offers.sort(key=lambda p: (-p.speedup_per_device, -p.num_more))
    return tuple(offers[:most])


def _more(job: ElasticJob, nums: Nums, kind: int, most: int) -> Iterator[Nums]:
    for num in range(1, most + 1):
        more = plus(nums, tuple(num * (k == kind) for k in range(len(nums))))
        if job.allows(more):
            yield more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """The devices that a job has tried in its run, with the outcome.

    Attributes:
        before: The devices before its last growth, to which it falls back; None at the start.
        before_seconds: The measured seconds of a step on these.
        refused: Devices on which its steps were no faster than before.
    """

    nums: Nums
    before: Nums | None = None
    before_seconds: float = 0.0
    refused: frozenset[Nums] = frozenset()

    def grown(self, nums: Nums, step_seconds: float) -> "Trials":
        """The trials after a growth.

        Args:
            step_seconds: The measured seconds of a step before it.
        """
        return dataclasses.replace(self, nums=nums, before=self.nums, before_seconds=step_seconds)

    def measured(self, step_seconds: Sequence[float]) -> "Trials":
        """The trials after some measured steps: the job stays, or falls back to the devices before.

        Devices that made the job no faster are better used elsewhere.
        """
        if self.before is None or middle_mean(step_seconds) < self.before_seconds:
            return dataclasses.replace(self, before=None, before_seconds=0.0)
        return Trials(nums=self.before, refused=self.refused | {self.nums})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorTime:
    """The measured time of one executor in a step.

    Attributes:
        kind: The kind of its device.
        num_executors: The executors on that device.
        num_microbatches: The microbatches that it ran, on average.
        seconds: The busy time of these microbatches.
    """

    kind: str
    num_executors: int
    num_microbatches: float
    seconds: float


def learned(
    capabilities: Sequence[Capability], times: Sequence[ExecutorTime]
) -> tuple[Capability, ...]:
    """Capabilities corrected by the measured times of a run.

    The speed of a kind is that of executors alone on their device. Without any, it is computed from
    several executors and their known interference. The interference of several executors is their
    speed relative to one alone. Values without measurements stay.

    Args:
        times: The recent steps of all executors.
    """
    speeds: dict[tuple[str, int], list[float]] = {}
    for time in times:
        if time.num_microbatches and time.seconds > 0:
            speed = time.num_microbatches / time.seconds
            speeds.setdefault((time.kind, time.num_executors), []).append(speed)
    means = {key: middle_mean(values) for key, values in speeds.items()}
    return tuple(_learned(known, means) for known in capabilities)


def _learned(known: Capability, speeds: Mapping[tuple[str, int], float]) -> Capability:
    shares = list(known.interference)
    seen = {
        m: speeds[known.kind, m] for m in range(1, len(shares) + 1) if (known.kind, m) in speeds
    }
    if not seen:
        return known
    fewest = min(seen)
    alone = seen[fewest] / shares[fewest - 1]
    for m, speed in seen.items():
        if m > fewest:
            shares[m - 1] = min(1.0, speed / alone)
    return Capability(kind=known.kind, microbatches_per_second=alone, interference=tuple(shares))


def returned(jobs: Sequence[ActiveJob], capacity: Nums, holdings: Holdings) -> dict[str, Nums]:
    """Holdings reduced to a smaller capacity.

    Each device is returned by a device of the same kind. It is taken from the job whose step time
    grows least, among jobs that stay above their fewest devices. If there is none, the last job
    returns all its devices and waits.

    Args:
        jobs: In the order of their arrival.
        capacity: The remaining devices of each kind.
    """
    kept = {active.name: holdings.get(active.name, (0,) * len(capacity)) for active in jobs}
    for kind in range(len(capacity)):
        while free_devices(capacity, kept)[kind] < 0:
            owners = [active for active in jobs if kept[active.name][kind]]
            shrunk = {a.name: _less(kept[a.name], kind) for a in owners}
            able = [a for a in owners if a.job.allows(shrunk[a.name])]
            if able:
                least = min(able, key=lambda a: _slowdown(a, kept[a.name], shrunk[a.name]))
                kept[least.name] = shrunk[least.name]
            else:
                kept[owners[-1].name] = (0,) * len(capacity)
    return kept


def _less(nums: Nums, kind: int) -> Nums:
    return minus(nums, tuple(int(k == kind) for k in range(len(nums))))


def _slowdown(active: ActiveJob, nums: Nums, shrunk: Nums) -> float:
    return active.job.step_seconds(shrunk) / active.job.step_seconds(nums)


def easyscale(situation: Situation) -> dict[str, Nums]:
    """Jobs keep their devices, new ones get their fewest, then the best proposals win.

    Proposals are taken in the order of their speed-up per device, those of more devices first on
    ties, one for each job.

    References:
        Li et al., "EasyScale", SC 2023, Algorithm 1. Its artifact has the first devices of a job,
        and growth by one kind at a time that at most doubles a job.
    """
    holdings = returned(situation.jobs, situation.capacity, situation.holdings)
    for active in situation.jobs:
        if not any(holdings[active.name]):
            free = free_devices(situation.capacity, holdings)
            holdings[active.name] = fewest(active, free)
    grown = set()
    for proposal in ranked(situation, holdings):
        more = minus(proposal.nums, holdings[proposal.name])
        if proposal.name not in grown and fits(more, free_devices(situation.capacity, holdings)):
            holdings[proposal.name] = proposal.nums
            grown.add(proposal.name)
    return holdings


def easyscale_alike(situation: Situation) -> dict[str, Nums]:
    """EasyScale with every job on devices of one kind (the paper's EasyScale-homo)."""
    jobs = tuple(
        dataclasses.replace(active, job=dataclasses.replace(active.job, mixed=False))
        for active in situation.jobs
    )
    return easyscale(dataclasses.replace(situation, jobs=jobs))


def fewest(active: ActiveJob, free: Nums) -> Nums:
    """The fewest devices of a job, of the slowest kind with enough free ones."""
    num, nothing = active.job.min_devices, (0,) * len(free)
    choices = [tuple(num * (k == kind) for k in range(len(free))) for kind in range(len(free))]
    able = [nums for nums in choices if fits(nums, free) and active.job.allows(nums)]
    return max(able, key=active.job.step_seconds, default=nothing)


def ranked(situation: Situation, holdings: dict[str, Nums]) -> list[DeviceProposal]:
    """The best proposals of all running jobs, by speed-up per device."""
    free = free_devices(situation.capacity, holdings)
    candidates: list[DeviceProposal] = []
    for active in situation.jobs:
        if active.is_running and holdings[active.name] == active.nums:
            candidates += proposals(active, free)
    return sorted(candidates, key=lambda p: (-p.speedup_per_device, -p.num_more))


def one_at_a_time(situation: Situation) -> dict[str, Nums]:
    """The first job runs alone, as YARN-CS does in the artifact of EasyScale."""
    first, nothing = situation.jobs[:1], (0,) * len(situation.kinds)
    return {a.name: gang(a, situation.capacity) or nothing for a in first}


def backfill(situation: Situation) -> dict[str, Nums]:
    """First come, first served; a later job starts early if it does not delay the first in line.

    Running jobs are never stopped. Their ends determine when the first waiting job can start, and
    which devices will be spare then. A later job starts now if it ends before that time, or needs
    only spare devices.

    References:
        Mu'alem and Feitelson, "Utilization, predictability, workloads, and user runtime estimates
        in scheduling the IBM SP2 with backfilling", IEEE TPDS 2001 (EASY backfilling).
    """
    holdings, free = _keep_running(situation)
    queue = [active for active in situation.jobs if active.name not in holdings]
    while queue and (first := gang(queue[0], situation.capacity)) and fits(first, free):
        holdings[queue.pop(0).name] = first
        free = minus(free, first)
    if not queue or not (first := gang(queue[0], situation.capacity)):
        return holdings
    start, spare = _reserved(situation, holdings, free, first)
    for active in queue[1:]:
        nums = gang(active, situation.capacity)
        if nums is None or not fits(nums, free):
            continue
        ends = active.seconds_left(nums, situation.move_seconds)
        if ends > start and not fits(nums, spare):
            continue
        if ends > start:
            spare = minus(spare, nums)
        holdings[active.name] = nums
        free = minus(free, nums)
    return holdings


def shortest_remaining(situation: Situation) -> dict[str, Nums]:
    """Gangs of the jobs with the least remaining time; longer jobs are stopped for shorter ones.

    A gang that does not fit is skipped, as by `srtf` in EasyScale's artifact.
    """
    gangs = {a.name: gang(a, situation.capacity) for a in situation.jobs}
    holdings: dict[str, Nums] = {}
    free = situation.capacity
    for active in sorted(situation.jobs, key=lambda a: _left(a, gangs[a.name])):
        nums = gangs[active.name]
        if nums is not None and fits(nums, free):
            holdings[active.name] = nums
            free = minus(free, nums)
    return holdings


def gang(active: ActiveJob, capacity: Nums) -> Nums | None:
    """The job's fixed set, at most the capacity; None if there is none of these devices."""
    nums = tuple(min(n, c) for n, c in zip(active.job.gang, capacity, strict=True))
    return nums if any(nums) else None


def _left(active: ActiveJob, nums: Nums | None) -> float:
    return active.job.seconds(active.remaining_steps, nums) if nums else float("inf")


def _keep_running(situation: Situation) -> tuple[dict[str, Nums], Nums]:
    """The gangs of running jobs, and free devices; the last jobs stop first if devices are lost."""
    holdings: dict[str, Nums] = {}
    free = situation.capacity
    for active in situation.jobs:
        if active.is_running and fits(active.nums, free):
            holdings[active.name] = active.nums
            free = minus(free, active.nums)
    return holdings, free


def _reserved(
    situation: Situation, holdings: dict[str, Nums], free: Nums, wanted: Nums
) -> tuple[float, Nums]:
    """The seconds until wanted devices are free, and the devices spare beside them then."""
    for seconds, nums in _ends(situation, holdings):
        free = plus(free, nums)
        if fits(wanted, free):
            return seconds, minus(free, wanted)
    return float("inf"), free


def _ends(situation: Situation, holdings: dict[str, Nums]) -> Iterator[tuple[float, Nums]]:
    running: Sequence[ActiveJob] = [a for a in situation.jobs if a.name in holdings]
    yield from sorted(
        (a.seconds_left(holdings[a.name], situation.move_seconds), holdings[a.name])
        for a in running
    )


_EXPONENT = 1.5  # the best of 0.5, 1, 1.5 and 2 on EasyScale's trace, for moves of 1 to 20 s


def weighing(situation: Situation) -> dict[str, Nums]:
    """Devices go to the jobs whose remaining time they shorten most, relative to that time.

    The policy maximizes the sum over jobs of `L ** -1.5`, where L is a job's remaining time: its
    steps on its new devices and, if its devices change, the pause of the move. The exponent is
    above 1 because serving jobs one after another gives a smaller mean completion than side by
    side. Where speed grows with the devices, the job with the least remaining time gets all that it
    can use; where it does not, the next job gets them. A job keeps its devices unless the change
    pays for its pause.

    Devices are shared out greedily, some of one kind to one job at a time: those that add most to
    the sum for their worth. The worth of a device is its speed relative to the other kinds.

    References:
        Shortest remaining processing time: Schrage, "A proof of the optimality of the shortest
        remaining processing time discipline", Operations Research 1968.
    """
    worth = _worth(situation)
    holdings = {active.name: (0,) * len(situation.kinds) for active in situation.jobs}
    free = situation.capacity
    offers = {a.name: _best(a, holdings[a.name], free, situation, worth) for a in situation.jobs}
    by_name = {active.name: active for active in situation.jobs}
    while offers:
        name = max(offers, key=lambda n: offers[n].gain)
        offer = offers[name]
        if offer.gain <= 0:
            del offers[name]
            continue
        more = minus(offer.nums, holdings[name])
        if fits(more, free):
            holdings[name], free = offer.nums, minus(free, more)
        offers[name] = _best(by_name[name], holdings[name], free, situation, worth)
    return holdings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Offer:
    gain: float
    nums: Nums


def _best(
    active: ActiveJob, nums: Nums, free: Nums, situation: Situation, worth: tuple[float, ...]
) -> _Offer:
    """The job's best further devices beside those of this round."""
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
    """The speed of a device of each kind as a share of all kinds', averaged over the jobs."""
    shares = []
    for active in situation.jobs:
        speeds = [c.microbatches_per_second for c in active.job.capabilities]
        shares.append([speed / sum(speeds) for speed in speeds])
    return tuple(sum(kind) / len(shares) for kind in zip(*shares, strict=True))
