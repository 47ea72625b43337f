"""Schedulers of fixed sets of devices: what elastic ones are compared with."""

from collections.abc import Iterator, Sequence

from ._elastic_jobs import ActiveJob, Situation, fits, minus, plus
from ._waste import Nums


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
