"""How many microbatches each device runs: the exact integer optimum."""

import heapq
from collections.abc import Sequence

from ..core.errors import PlanError


def finish_seconds(
    counts: Sequence[int], seconds: Sequence[float], fixed: Sequence[float]
) -> tuple[float, ...]:
    """Busy time of each device in a step: `fixed + count * seconds`."""
    return tuple(f + c * s for c, s, f in zip(counts, seconds, fixed, strict=True))


def best_counts(
    num_microbatches: int,
    seconds: Sequence[float],
    fixed: Sequence[float] | None = None,
    limits: Sequence[int | None] | None = None,
) -> tuple[int, ...]:
    """Counts that minimise the time of the slowest device.

    Microbatches go one by one to the device that would finish its next one first. Finish times
    only grow with the count, so this visits the (device, count) pairs in the order of their finish
    time, and the first `num_microbatches` of them are an optimum; proportional shares with
    rounding are not. A device that would only delay the others gets none.

    Args:
        seconds: Of one microbatch on each device, positive.
        fixed: Seconds of each device's step that do not depend on its count (default 0).
        limits: Most microbatches each device can take (None: no limit).

    Returns:
        One count per device, summing to `num_microbatches`.

    Raises:
        PlanError: If the limits add up to fewer than `num_microbatches`.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 (the problem; its Algorithm 1 rounds).
    """
    num = len(seconds)
    offsets = [0.0] * num if fixed is None else list(fixed)
    room = [num_microbatches if x is None else x for x in limits or [None] * num]
    if sum(room) < num_microbatches:
        raise PlanError(
            f"{num_microbatches} microbatches do not fit: the devices' memory takes {room} "
            f"({sum(room)} in all); use a smaller microbatch_size or batch_size"
        )
    counts = [0] * num
    heap = [(offsets[d] + seconds[d], d) for d in range(num) if room[d] > 0]
    heapq.heapify(heap)
    for _ in range(num_microbatches):
        _, d = heapq.heappop(heap)
        counts[d] += 1
        if counts[d] < room[d]:
            heapq.heappush(heap, (offsets[d] + (counts[d] + 1) * seconds[d], d))
    return tuple(counts)


def even_counts(num_microbatches: int, num_devices: int) -> tuple[int, ...]:
    """Counts that differ by one at most, the larger ones first."""
    small, rest = divmod(num_microbatches, num_devices)
    return tuple(small + (d < rest) for d in range(num_devices))


def bound_seconds(num_microbatches: int, seconds: Sequence[float], fixed: Sequence[float]) -> float:
    """Shortest step if microbatches could be cut anywhere: no counts can be faster.

    Devices whose fixed time alone exceeds the bound take no part in the microbatches; the step
    still waits for them.
    """
    active = sorted(zip(fixed, seconds, strict=True))
    best = max(fixed)
    speed = work = 0.0
    level = 0.0
    for i, (offset, second) in enumerate(active):
        speed += 1 / second
        work += offset / second
        level = (num_microbatches + work) / speed
        if i + 1 == len(active) or level <= active[i + 1][0]:
            break
    return max(best, level)
