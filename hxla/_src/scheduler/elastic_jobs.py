"""Jobs as a scheduler sees them: their size, their devices and their speed.

EasyScale's waste model gives a job's speed on devices of unlike kinds, and their idle share. A step
has `num_microbatches` (maxP) microbatches. There are N devices of each kind and m executors on each
of them. Each executor runs A microbatches a step one after another, and is able to run C
microbatches a second. All sums are over kinds:

    (a)  N m A, summed, is at least maxP
    (b)  f = max(A / C), the seconds of a step
    (c)  waste = sum(N m (C - A / f)) + (sum(N m A) - maxP) / f
    (d)  the share of waste: waste / sum(N m C)
    (e)  perf = sum(N m C) - waste

The first part of the waste is of executors that wait for the slowest, the second of places without
a microbatch. The remainder, perf, is maxP / f: the microbatches of a second.

References:
    Li et al., "EasyScale", SC 2023, equation 1, in the form that its artifact computes
    (sUntvoOk/EasyScale_info_for_SC23).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from ..choose.apportionment import best_counts
from ..core.errors import ScheduleError

#: Share of the devices' capability that a configuration may waste (EasyScale, section 3.4).
MOST_WASTE = 0.3
Nums = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability:
    """The speed of one kind of device on the microbatches of one job.

    Attributes:
        kind: The name of the kind.
        microbatches_per_second: The speed of one executor alone on the device, C.
        interference: The share of that speed that each of m executors keeps, for m = 1, 2, ... up
            to the most executors of a device. The first is 1.
    """

    kind: str
    microbatches_per_second: float
    interference: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        shares = self.interference
        if not (0 < self.microbatches_per_second < math.inf):
            raise ScheduleError(
                f"{self.kind}: {self.microbatches_per_second} microbatches per second, give a "
                "positive number"
            )
        if not shares or shares[0] != 1 or not all(0 < share <= 1 for share in shares):
            raise ScheduleError(
                f"{self.kind}: interference {shares}, give the share of its speed that each of 1, "
                "2, ... executors keeps: 1 first, then numbers above 0 and at most 1"
            )

    def of_executor(self, num_executors: int) -> float:
        """The microbatches per second of each of so many executors on one device."""
        return self.microbatches_per_second * self.interference[num_executors - 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """EasyScale's `<nums, executors, threads, waste, perf>` of a job, with a value per kind.

    Attributes:
        nums: The devices of each kind, N.
        executors: The executors on each device of the kind, m.
        threads: The microbatches of each executor in a step, A.
        waste: The idle share of the capability.
        perf: The microbatches of a second.
    """

    nums: Nums
    executors: tuple[int, ...]
    threads: tuple[int, ...]
    waste: float
    perf: float

    @property
    def num_devices(self) -> int:
        """The devices of all kinds together."""
        return sum(self.nums)


def configuration(
    num_microbatches: int,
    capabilities: Sequence[Capability],
    nums: Sequence[int],
    executors: Sequence[int],
    threads: Sequence[int],
) -> Configuration:
    """Equation 1 for one choice of devices, executors and microbatches.

    Args:
        executors: On each device of a kind.
        threads: The microbatches of each executor; those of a kind without devices do not count.

    Raises:
        ScheduleError: If there are fewer places than microbatches.
    """
    used = [i for i, num in enumerate(nums) if num and threads[i]]
    places = sum(nums[i] * executors[i] * threads[i] for i in used)
    if places < num_microbatches:
        raise ScheduleError(
            f"{num_microbatches} microbatches on {places} places: {tuple(nums)} devices, "
            f"{tuple(executors)} executors each, {tuple(threads)} microbatches each"
        )
    speeds = [c.of_executor(m) for c, m in zip(capabilities, executors, strict=True)]
    slowest = max(threads[i] / speeds[i] for i in used)
    total = sum(n * m * c for n, m, c in zip(nums, executors, speeds, strict=True))
    busy = sum(nums[i] * executors[i] * threads[i] for i in used) / slowest
    waste = total - busy + (places - num_microbatches) / slowest
    return Configuration(
        nums=tuple(nums),
        executors=tuple(m if n else 0 for m, n in zip(executors, nums, strict=True)),
        threads=tuple(a if n else 0 for a, n in zip(threads, nums, strict=True)),
        waste=waste / total,
        perf=total - waste,
    )


@functools.lru_cache(maxsize=1 << 16)
def best_configuration(
    num_microbatches: int, capabilities: tuple[Capability, ...], nums: Nums
) -> Configuration | None:
    """The fastest configuration on some devices: the exact optimum; None without any device.

    The seconds of a step are the smallest T in which the executors run enough microbatches:
    `sum(N m floor(T C)) >= maxP`. EasyScale tries, for each whole multiple of the speeds, both
    roundings of each, and takes the best; it never finds a better one, see the tests. Among equally
    fast configurations the one with the fewest executors is taken.
    """
    if not any(nums):
        return None
    choices = [
        range(1, len(c.interference) + 1 if n else 2)
        for c, n in zip(capabilities, nums, strict=True)
    ]
    return max(
        (_fastest(num_microbatches, capabilities, nums, m) for m in itertools.product(*choices)),
        key=lambda choice: (choice.perf, -sum(choice.executors)),
    )


def _fastest(
    num_microbatches: int,
    capabilities: tuple[Capability, ...],
    nums: Nums,
    executors: tuple[int, ...],
) -> Configuration:
    kinds = [k for k, num in enumerate(nums) for _ in range(num * executors[k])]
    speeds = [c.of_executor(m) for c, m in zip(capabilities, executors, strict=True)]
    counts = best_counts(num_microbatches, [1 / speeds[k] for k in kinds])
    threads = [0] * len(nums)
    for kind, count in zip(kinds, counts, strict=True):
        threads[kind] = max(threads[kind], count)
    return configuration(num_microbatches, capabilities, nums, executors, threads)


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
