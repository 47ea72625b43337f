"""How many microbatches each device runs, the exact integer optimum, and of which size."""

import heapq
import math
from collections.abc import Mapping, Sequence

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


_CANDIDATES = 4
_FEWEST_MICROBATCHES = 8


def default_sizes(batch_size: int, num_replicas: int) -> tuple[int, ...]:
    """Default sizes; a job takes the first with which a plan fits.

    They leave at least eight microbatches, and no fewer than the examples of a microbatch, so that
    larger batches can be shared by more devices. No clock decides, nor the number of devices up to
    that many: the same call gives the same bits elsewhere.

    Args:
        batch_size: Examples of a global batch.
        num_replicas: Replicas that share the batch.

    Returns:
        Divisors of the batch, the largest first.
    """
    divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    few = [b for b in divisors if batch_size // b >= max(_FEWEST_MICROBATCHES, b)] or [1]
    return tuple(b for b in reversed(few) if batch_size // b >= num_replicas) or (1,)


def candidate_sizes(batch_size: int, num_devices: int) -> tuple[int, ...]:
    """Divisors of the global batch that give each device enough microbatches to share finely.

    Args:
        batch_size: Examples of a global batch.

    Returns:
        At most four sizes, largest first, spread evenly over the useful divisors. The default size
        is one of them, so that no choice among them is worse than none.

    Raises:
        PlanError: If there are more devices than examples.
    """
    if batch_size < num_devices:
        raise PlanError(
            f"batch_size={batch_size} gives {num_devices} devices less than one example each: "
            "use fewer devices or a larger batch"
        )
    divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
    fitting = [b for b in divisors if batch_size // b >= num_devices]
    # Finer than 64 microbatches a device the split gains nothing and each costs a dispatch.
    useful = [b for b in fitting if 4 * num_devices <= batch_size // b <= 64 * num_devices]
    pool = useful or fitting[-1:]
    if num_devices == 1:
        pool = [b for b in fitting if batch_size // b <= 64]
    step = max(1, -(-len(pool) // _CANDIDATES))
    sizes = pool[::-1][::step]
    usual = default_sizes(batch_size, num_devices)[0]
    if usual not in sizes:
        if len(sizes) == _CANDIDATES:
            sizes.remove(min(sizes, key=lambda size: abs(math.log(size / usual))))
        sizes = sorted([*sizes, usual], reverse=True)
    return tuple(sizes)


def best_size(
    batch_size: int, measured: Mapping[int, Sequence[float]]
) -> tuple[int, Mapping[int, float]]:
    """The size whose best integer split is fastest.

    Args:
        batch_size: Examples of a global batch.
        measured: Size to seconds of one microbatch on each device.

    Returns:
        The best size (of those within one per cent the largest) and the predicted seconds of a
        step for each.
    """
    steps = {}
    for size, seconds in measured.items():
        counts = best_counts(batch_size // size, seconds)
        steps[size] = max(finish_seconds(counts, seconds, [0.0] * len(seconds)))
    fastest = min(steps.values())
    return max(size for size, s in steps.items() if s <= 1.01 * fastest), steps
