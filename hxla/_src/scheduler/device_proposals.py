"""The intra-job scheduler: a job's proposals for more devices, and its measured speeds."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..core.timing import middle_mean
from .elastic_jobs import MOST_WASTE, ActiveJob, Capability, Configuration, ElasticJob, Nums, plus

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
