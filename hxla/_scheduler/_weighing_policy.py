"""A policy that grows, shrinks and moves jobs, and weighs what each move costs."""

import dataclasses
from collections.abc import Iterator

from ._elastic_jobs import ActiveJob, Situation, fits, minus, plus
from ._waste import Nums

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
