"""Jobs as a scheduler sees them: their size, their devices and their speed."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from ..core.errors import ScheduleError
from .waste import Capability, Configuration, Nums, best_configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """A job whose bits do not depend on its devices, so that a scheduler may choose them.

    Attributes:
        name: Unique among jobs.
        num_microbatches: Of a step, and the most devices that it uses, maxP.
        min_devices: The fewest devices that it runs on, minP.
        capabilities: Its speed on each kind of device, in the cluster's order of kinds.
        gang: Its devices of each kind under a scheduler of fixed sets.
        mixed: Whether devices of several kinds may share its steps.
        alone: The index of its only kind if `mixed` is false.
        sums_seconds: The seconds of a step's all-reduce of gradients: pairs of a number of devices
            and the seconds on up to so many, by number; more take as long as the last.
    """

    name: str
    arrival_seconds: float
    num_steps: int
    num_microbatches: int
    capabilities: tuple[Capability, ...]
    gang: Nums
    min_devices: int = 1
    mixed: bool = True
    alone: int = 0
    sums_seconds: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        wrong = []
        if self.num_steps < 1 or self.num_microbatches < 1:
            wrong.append(f"{self.num_steps} steps of {self.num_microbatches} microbatches")
        if not 1 <= self.min_devices <= self.num_microbatches:
            wrong.append(
                f"at least {self.min_devices} devices, of {self.num_microbatches} microbatches"
            )
        if not self.arrival_seconds >= 0:
            wrong.append(f"arrives at {self.arrival_seconds} s")
        if len(self.gang) != len(self.capabilities) or not any(self.gang):
            wrong.append(f"gang {self.gang} for {len(self.capabilities)} kinds of devices")
        if wrong:
            raise ScheduleError(f"job {self.name!r} cannot be scheduled: {'; '.join(wrong)}")

    def allows(self, nums: Nums) -> bool:
        """Whether the job may run on so many devices of each kind."""
        others = sum(nums) - nums[self.alone]
        return self.min_devices <= sum(nums) <= self.num_microbatches and (self.mixed or not others)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices with a known speed, in the cluster's order."""
        return tuple(capability.kind for capability in self.capabilities)

    def sum_seconds(self, num_devices: int) -> float:
        """Seconds of a step's all-reduce over so many devices."""
        for most, seconds in self.sums_seconds:
            if num_devices <= most:
                return seconds
        return self.sums_seconds[-1][1] if self.sums_seconds else 0.0

    def configuration(self, nums: Nums) -> Configuration | None:
        """The best configuration on so many devices; None without any."""
        return best_configuration(self.num_microbatches, self.capabilities, nums)

    def step_seconds(self, nums: Nums) -> float:
        """Seconds of a step on so many devices of each kind, its all-reduce included."""
        best = self.configuration(nums)
        if best is None:
            return math.inf
        return self.num_microbatches / best.perf + self.sum_seconds(sum(nums))

    def seconds(self, num_steps: float, nums: Nums) -> float:
        """Seconds of so many steps on so many devices."""
        return num_steps * self.step_seconds(nums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveJob:
    """A job between its arrival and its end.

    Attributes:
        remaining_steps: With fractions.
        nums: Its devices of each kind.
        pause_seconds: The rest of its last move's pause, in which it makes no step.
    """

    job: ElasticJob
    remaining_steps: float
    nums: Nums
    pause_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.name

    @property
    def is_running(self) -> bool:
        """Whether the job has any device."""
        return any(self.nums)

    def seconds_left(self, nums: Nums, move_seconds: float) -> float:
        """Seconds until the job ends if it gets these devices now and keeps them.

        Args:
            nums: The devices of each kind.
            move_seconds: The pause of a change of devices.
        """
        pause = self.pause_seconds if nums == self.nums else move_seconds
        return pause + self.job.seconds(self.remaining_steps, nums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """The input of a policy.

    Attributes:
        kinds: The names of the kinds of devices.
        capacity: The usable devices of each kind.
        jobs: The active jobs in the order of their arrival.
        move_seconds: The pause of a job when its devices change.
    """

    at_seconds: float
    kinds: tuple[str, ...]
    capacity: Nums
    jobs: tuple[ActiveJob, ...]
    move_seconds: float

    @property
    def holdings(self) -> dict[str, Nums]:
        """The devices of each job."""
        return {active.name: active.nums for active in self.jobs}


#: Devices of each kind by job name; a job that is not named has none.
Holdings = Mapping[str, Nums]


def plus(a: Nums, b: Nums) -> Nums:
    """The sum by kind."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Nums, b: Nums) -> Nums:
    """The difference by kind."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def fits(nums: Nums, free: Nums) -> bool:
    """Whether so many devices of each kind are free."""
    return all(n <= f for n, f in zip(nums, free, strict=True))


def free_devices(capacity: Nums, holdings: Holdings) -> Nums:
    """The devices of a cluster less all holdings; negative where these are too many."""
    return functools.reduce(minus, holdings.values(), capacity)
