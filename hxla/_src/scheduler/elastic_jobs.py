"""Jobs as a scheduler sees them: what they are, what they hold, and how fast that is."""

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
        name: The name, of no other job.
        num_steps: The steps that it takes.
        num_microbatches: The microbatches of a step: it never uses more devices, maxP.
        min_devices: The fewest devices that it runs on, minP.
        capabilities: Its speed on each kind of device, in the cluster's order of kinds.
        gang: The devices of each kind that it takes where a scheduler gives fixed sets.
        mixed: Whether devices of several kinds may share its steps.
        alone: The kind that it takes if `mixed` is false, as an index.
        sums_seconds: The seconds that a step's sum of gradients adds: pairs of a number of devices
            and the seconds for up to so many, by number; more take as long as the last.
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
        """Whether it may run on so many devices of each kind."""
        others = sum(nums) - nums[self.alone]
        return self.min_devices <= sum(nums) <= self.num_microbatches and (self.mixed or not others)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices on which its speed is known, in the cluster's order."""
        return tuple(capability.kind for capability in self.capabilities)

    def sum_seconds(self, num_devices: int) -> float:
        """Seconds that the sum over so many devices adds to a step."""
        for most, seconds in self.sums_seconds:
            if num_devices <= most:
                return seconds
        return self.sums_seconds[-1][1] if self.sums_seconds else 0.0

    def configuration(self, nums: Nums) -> Configuration | None:
        """The best that it can do on so many devices; None without any."""
        return best_configuration(self.num_microbatches, self.capabilities, nums)

    def step_seconds(self, nums: Nums) -> float:
        """Seconds of a step on so many devices of each kind, its sum included."""
        found = self.configuration(nums)
        if found is None:
            return math.inf
        return self.num_microbatches / found.perf + self.sum_seconds(sum(nums))

    def seconds(self, num_steps: float, nums: Nums) -> float:
        """Seconds of so many steps on so many devices."""
        return num_steps * self.step_seconds(nums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActiveJob:
    """A job that has arrived and is not done.

    Attributes:
        remaining_steps: The steps that are left, with fractions.
        nums: The devices of each kind that it holds.
        pause_seconds: What is left of its last move: until then it makes no step.
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
        """Whether it holds any device."""
        return any(self.nums)

    def seconds_left(self, nums: Nums, move_seconds: float) -> float:
        """Seconds until it is done if it gets these devices now and keeps them.

        Args:
            nums: The devices of each kind.
            move_seconds: The pause of a change of devices.
        """
        pause = self.pause_seconds if nums == self.nums else move_seconds
        return pause + self.job.seconds(self.remaining_steps, nums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What a policy decides on.

    Attributes:
        kinds: The names of the kinds of devices.
        capacity: The devices of each kind that may be used.
        jobs: The jobs that have arrived and are not done, in the order of their arrival.
        move_seconds: How long a job pauses when its devices change.
    """

    at_seconds: float
    kinds: tuple[str, ...]
    capacity: Nums
    jobs: tuple[ActiveJob, ...]
    move_seconds: float

    @property
    def held(self) -> dict[str, Nums]:
        """What each job holds."""
        return {active.name: active.nums for active in self.jobs}


#: Devices of each kind by the name of the job that gets them; a job that is not named gets none.
Holdings = Mapping[str, Nums]


def plus(a: Nums, b: Nums) -> Nums:
    """Devices of both."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Nums, b: Nums) -> Nums:
    """Devices of the first less those of the second, by kind."""
    return tuple(x - y for x, y in zip(a, b, strict=True))


def fits(nums: Nums, free: Nums) -> bool:
    """Whether devices are among those that are free."""
    return all(n <= f for n, f in zip(nums, free, strict=True))


def free_devices(capacity: Nums, holdings: Holdings) -> Nums:
    """What holdings leave of a cluster; negative where they hold too much."""
    return functools.reduce(minus, holdings.values(), capacity)
