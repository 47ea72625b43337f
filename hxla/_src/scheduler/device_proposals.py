"""The intra-job scheduler: what a job would do with more devices, and what it learns in its run."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..core.timing import middle_mean
from .elastic_jobs import ActiveJob, ElasticJob, plus
from .waste import MOST_WASTE, Capability, Configuration, Nums

#: Proposals that a job makes at a time (EasyScale, section 3.4: the top K).
MOST_PROPOSALS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProposal:
    """A job's offer to use more devices of one kind.

    Attributes:
        kind: The kind, as an index.
        nums: All devices of each kind that it would hold then.
        after: What it would run on them.
        speedup: How much faster its steps would be: 1.5 for two thirds of the time.
    """

    name: str
    kind: int
    num_more: int
    nums: Nums
    after: Configuration
    speedup: float

    @property
    def speedup_per_device(self) -> float:
        """The gain that each more device brings."""
        return (self.speedup - 1) / self.num_more


def proposals(
    active: ActiveJob,
    free: Nums,
    *,
    most: int = MOST_PROPOSALS,
    most_waste: float = MOST_WASTE,
    refused: frozenset[Nums] = frozenset(),
) -> tuple[DeviceProposal, ...]:
    """The best uses of more devices, by the gain of each, those of more devices first on ties.

    A proposal adds devices of one kind, at most as many as the job holds of all: a job's speed
    beyond what it ran on is an estimate, so it doubles at most.

    Args:
        free: The devices of each kind that it could get.
        most: The most proposals.
        most_waste: The most of a configuration's capability that may lie idle.
        refused: What it has tried and left, see `Trials`.

    Returns:
        None that would not make it faster.
    """
    now = active.job.step_seconds(active.nums)
    found = []
    for kind in range(len(free)):
        for nums in _more(active.job, active.nums, kind, min(free[kind], sum(active.nums))):
            after = active.job.configuration(nums)
            if after is None or after.waste > most_waste or nums in refused:
                continue
            speedup = now / active.job.step_seconds(nums)
            if speedup > 1:
                found.append(
                    DeviceProposal(
                        name=active.name,
                        kind=kind,
                        num_more=nums[kind] - active.nums[kind],
                        nums=nums,
                        after=after,
                        speedup=speedup,
                    )
                )
    found.sort(key=lambda p: (-p.speedup_per_device, -p.num_more))
    return tuple(found[:most])


def _more(job: ElasticJob, nums: Nums, kind: int, most: int) -> Iterator[Nums]:
    for num in range(1, most + 1):
        more = plus(nums, tuple(num * (k == kind) for k in range(len(nums))))
        if job.allows(more):
            yield more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """What a job has tried in its run, and what it learned of it.

    Attributes:
        nums: The devices that it holds.
        before: Those that it held before, to which it falls back; None at the start.
        before_seconds: The measured seconds of a step on those.
        refused: Devices on which its steps were no faster than before.
    """

    nums: Nums
    before: Nums | None = None
    before_seconds: float = 0.0
    refused: frozenset[Nums] = frozenset()

    def grown(self, nums: Nums, step_seconds: float) -> "Trials":
        """After a growth.

        Args:
            nums: The devices that it holds now.
            step_seconds: The measured seconds of a step until now.
        """
        return dataclasses.replace(self, nums=nums, before=self.nums, before_seconds=step_seconds)

    def measured(self, step_seconds: Sequence[float]) -> "Trials":
        """After some steps on what it holds: it stays, or falls back to what it held before.

        Devices that made the job no faster are wanted elsewhere, whatever was expected of them.

        Args:
            step_seconds: The measured seconds of these steps.
        """
        if self.before is None or middle_mean(step_seconds) < self.before_seconds:
            return dataclasses.replace(self, before=None, before_seconds=0.0)
        return Trials(nums=self.before, refused=self.refused | {self.nums})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorTime:
    """What a step of one executor took.

    Attributes:
        kind: The kind of its device.
        num_executors: How many ran on that device.
        num_microbatches: How many microbatches it ran, on average.
        seconds: How long it was busy with them.
    """

    kind: str
    num_executors: int
    num_microbatches: float
    seconds: float


def learned(
    capabilities: Sequence[Capability], times: Sequence[ExecutorTime]
) -> tuple[Capability, ...]:
    """Capabilities as a run shows them.

    The speed of a kind is that of the executors which had a device to themselves; where there were
    none it is reckoned back from several by the interference that was known. The interference of a
    number of executors is their speed beside that. What was not seen stays as it was.

    Args:
        times: What was measured, the recent steps of all executors.
    """
    speeds: dict[tuple[str, int], list[float]] = {}
    for time in times:
        if time.num_microbatches and time.seconds > 0:
            speed = time.num_microbatches / time.seconds
            speeds.setdefault((time.kind, time.num_executors), []).append(speed)
    found = {key: middle_mean(values) for key, values in speeds.items()}
    return tuple(_learned(known, found) for known in capabilities)


def _learned(known: Capability, found: Mapping[tuple[str, int], float]) -> Capability:
    shares = list(known.interference)
    seen = {m: found[known.kind, m] for m in range(1, len(shares) + 1) if (known.kind, m) in found}
    if not seen:
        return known
    fewest = min(seen)
    alone = seen[fewest] / shares[fewest - 1]
    for m, speed in seen.items():
        if m > fewest:
            shares[m - 1] = min(1.0, speed / alone)
    return Capability(kind=known.kind, microbatches_per_second=alone, interference=tuple(shares))
