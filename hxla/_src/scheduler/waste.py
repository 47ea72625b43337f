"""EasyScale's waste model: what a job gets of devices of unlike kinds, and what lies idle.

A step has `num_microbatches` (maxP) microbatches. There are N devices of each kind, m executors run
on each of them, each executor runs A microbatches a step one after another, and it could run C
microbatches a second. All sums are over kinds:

    (a)  N m A, summed, is at least maxP
    (b)  f = max(A / C), the seconds of a step
    (c)  waste = sum(N m (C - A / f)) + (sum(N m A) - maxP) / f
    (d)  the share of it: waste / sum(N m C)
    (e)  perf = sum(N m C) - waste

The first part of the waste is of executors that wait for the slowest, the second of places without
a microbatch. What is left is maxP / f: the microbatches of a second.

References:
    Li et al., "EasyScale", SC 2023, equation 1, in the form that its artifact computes
    (sUntvoOk/EasyScale_info_for_SC23).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from ..choose.counts import best_counts
from ..core.errors import ScheduleError

#: Share of the devices' capability that a configuration may waste (EasyScale, section 3.4).
MOST_WASTE = 0.3
Nums = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability:
    """How fast one kind of device runs the microbatches of one job.

    Attributes:
        kind: The name of the kind.
        microbatches_per_second: The speed of one executor that has the device to itself, C.
        interference: The share of that speed which each of m executors keeps, for m = 1, 2, ...:
            as many as a device may run at once. The first is 1.
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
        """Microbatches a second of each of so many executors on one device."""
        return self.microbatches_per_second * self.interference[num_executors - 1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a job runs on: EasyScale's `<nums, executors, threads, waste, perf>`, a value per kind.

    Attributes:
        nums: The devices of each kind, N.
        executors: The executors on each device of the kind, m.
        threads: The microbatches of each executor in a step, A.
        waste: The share of the capability that lies idle.
        perf: The microbatches of a second.
    """

    nums: Nums
    executors: tuple[int, ...]
    threads: tuple[int, ...]
    waste: float
    perf: float

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(self.nums)


def configuration(
    num_microbatches: int,
    capabilities: Sequence[Capability],
    nums: Sequence[int],
    executors: Sequence[int],
    threads: Sequence[int],
) -> Configuration:
    """Equation 1, of devices, executors and microbatches that are given.

    Args:
        num_microbatches: The microbatches of a step.
        capabilities: The speed of each kind.
        nums: The devices of each kind.
        executors: The executors on each of its devices.
        threads: The microbatches of each executor; of a kind without devices they do not count.

    Returns:
        The configuration with its waste and its speed.

    Raises:
        ScheduleError: If the places are fewer than the microbatches.
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
    """The fastest configuration of given devices: the exact optimum.

    The seconds of a step are the smallest T for which the executors run enough microbatches within
    it: `sum(N m floor(T C)) >= maxP`. EasyScale tries, for each whole multiple of the speeds, both
    roundings of each, and takes the best of these: never better than this, see the tests.

    Args:
        num_microbatches: The microbatches of a step, maxP.
        capabilities: The speed of each kind.
        nums: The devices of each kind.

    Returns:
        The configuration: of equally fast ones that with the fewest executors. None without any
        device.
    """
    if not any(nums):
        return None
    choices = [
        range(1, len(c.interference) + 1 if n else 2)
        for c, n in zip(capabilities, nums, strict=True)
    ]
    return max(
        (_fastest(num_microbatches, capabilities, nums, m) for m in itertools.product(*choices)),
        key=lambda found: (found.perf, -sum(found.executors)),
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
