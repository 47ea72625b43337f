"""EasyScale's inter-job scheduler: its Algorithm 1, over the proposals of all jobs."""

import dataclasses

from ._device_proposals import DeviceProposal, proposals
from ._elastic_jobs import ActiveJob, Situation, fits, free_devices, minus
from ._returns import returned
from ._waste import Nums


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
