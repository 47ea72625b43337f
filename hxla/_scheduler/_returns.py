"""Devices that are asked back: which jobs return them, like for like."""

from collections.abc import Sequence

from ._elastic_jobs import ActiveJob, Holdings, free_devices, minus
from ._waste import Nums


def returned(jobs: Sequence[ActiveJob], capacity: Nums, holdings: Holdings) -> dict[str, Nums]:
    """Holdings after devices went away: of each kind no more are held than there are.

    A device that is asked back is returned by one of its own kind: whoever lent a V100 gets a
    V100. Each goes from the job that it costs least, the growth of its step's time being the
    cost, as long as one stays above its fewest devices. If none does the job that came last
    returns all that it holds, and waits.

    Args:
        jobs: The jobs that hold them, in the order of their arrival.
        capacity: The devices of each kind that are left.
        holdings: What each job holds.
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
