"""Integer shares that minimise the time of the slowest device: of microbatches, or of a split.

A unit of a split cannot be cut further: a head with its key-value group, a granule of columns, an
expert, a row of a vocabulary. SPMD gives the arrays of every device the shape of the largest shard.
So state between steps counts by the largest shard on all devices, activations by each device's
shard.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitDevice:
    """A device that takes part in a split.

    Attributes:
        unit_seconds: The seconds of one unit in a microbatch, positive.
        fixed_seconds: The seconds of repeated work, whatever its units.
        memory_bytes: None: not known, so no limit.
        fixed_bytes: The bytes that do not depend on the split.
    """

    name: str
    unit_seconds: float
    fixed_seconds: float = 0.0
    memory_bytes: float | None = None
    fixed_bytes: float = 0.0

    def seconds(self, num_units: int) -> float:
        """The time of so many units."""
        return self.fixed_seconds + num_units * self.unit_seconds

    def room(self, largest: np.ndarray, padded_bytes: float, shard_bytes: float) -> np.ndarray:
        """The most units that fit beside arrays padded to `largest` units."""
        if self.memory_bytes is None:
            return largest
        left = self.memory_bytes - self.fixed_bytes - padded_bytes * largest
        if shard_bytes:
            most = np.clip(np.floor(left / shard_bytes), -1, largest).astype(np.int64)
            most += (most < largest) & ((most + 1) * shard_bytes <= left)  # floor of a quotient
            most -= most * shard_bytes > left
            return most  # type: ignore[no-any-return]
        return np.where(left >= 0, largest, -1)


def best_sizes(
    num_units: int,
    devices: Sequence[SplitDevice],
    *,
    padded_bytes: float = 0.0,
    shard_bytes: float = 0.0,
    least: int = 1,
) -> tuple[int, ...]:
    """Sizes that minimise the time of the slowest device; of these, those of least padding.

    For each size of the largest shard the rest is a bottleneck problem: a time is enough if the
    fitting units that devices finish within it add up to all. So all sizes of the largest shard are
    bisected at once.

    Args:
        padded_bytes: Of a unit in arrays padded to the largest shard: parameters, sums of their
            gradients, the optimizer's state.
        shard_bytes: Of a unit in arrays of a device's size: activations.
        least: The fewest units of a device.

    Returns:
        One size for each device, summing to `num_units`.

    Raises:
        PlanError: If there are too few units, or they do not fit: which device lacks how many
            bytes.

    References:
        Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 (the problem; its Algorithm 1 moves load
        from full devices to free ones and may end above the optimum).
    """
    n = len(devices)
    if num_units < least * n:
        raise PlanError(
            f"{num_units} units cannot be split over {n} devices with at least {least} each: use "
            "fewer devices, or leave this out of the split"
        )
    largest = np.arange(max(-(-num_units // n), least), num_units - least * (n - 1) + 1)
    room = np.stack([d.room(largest, padded_bytes, shard_bytes) for d in devices])
    possible = (room >= least).all(axis=0) & (room.sum(axis=0) >= num_units)
    if not possible.any():
        raise PlanError(
            _too_small(num_units, devices, largest, room, padded_bytes, shard_bytes, least)
        )
    room = room[:, possible]
    if padded_bytes:
        key = min(_best_keys(num_units, devices, room, least))
    else:
        # A larger largest shard never takes longer: find the least that is as fast.
        low, high = 0, room.shape[1] - 1
        (key,) = _best_keys(num_units, devices, room[:, high:], least)
        while low < high:
            middle = (low + high) // 2
            (other,) = _best_keys(num_units, devices, room[:, middle : middle + 1], least)
            if other[0] <= key[0]:
                key, high = other, middle
            else:
                low = middle + 1
    return tuple(-size for size in key[2])


def _best_keys(
    num_units: int, devices: Sequence[SplitDevice], room: np.ndarray, least: int
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Per size of the largest shard: the slowest device's time, the largest, and minus each size.

    The best size comes first; worse sizes are left out.

    Args:
        room: [n, sizes] The most units that fit each device.
        least: The fewest units of a device.
    """
    unit = np.array([[d.unit_seconds] for d in devices])
    fixed = np.array([[d.fixed_seconds] for d in devices])

    def finished(seconds: np.ndarray) -> np.ndarray:
        # Units that cost no time are done at once, such as those of rules that shard nothing.
        done = np.full(np.broadcast_shapes(np.shape(seconds), unit.shape), np.inf)
        np.divide(seconds - fixed, unit, out=done, where=unit > 0)
        done = np.floor(done + 1e-9)
        return np.clip(done, least, room)  # type: ignore[no-any-return]

    high = (fixed + room * unit).max(axis=0)
    low = np.minimum((fixed + least * unit).max(axis=0), high)
    enough = finished(low).sum(axis=0) >= num_units
    high = np.where(enough, low, high)
    for _ in range(64):
        middle = (low + high) / 2
        enough = finished(middle).sum(axis=0) >= num_units
        high, low = np.where(enough, middle, high), np.where(enough, low, middle)
    sizes = finished(high).astype(np.int64)
    best = np.inf
    for column in np.argsort(high, kind="stable"):
        if high[column] > best * (1 + 1e-6):
            break
        trimmed = _trimmed(sizes[:, column].tolist(), num_units, devices, least)
        slowest = max(d.seconds(size) for d, size in zip(devices, trimmed, strict=True))
        best = min(best, slowest)
        yield slowest, max(trimmed), tuple(-size for size in trimmed)  # the larger ones first


def _trimmed(
    sizes: list[int], num_units: int, devices: Sequence[SplitDevice], least: int
) -> list[int]:
    """Sizes without the surplus units, taken from the devices that finish last."""
    for _ in range(sum(sizes) - num_units):
        able = [d for d in range(len(sizes)) if sizes[d] > least]
        last = max(able, key=lambda d: (devices[d].seconds(sizes[d]), sizes[d], d))
        sizes[last] -= 1
    return sizes


def _too_small(
    num_units: int,
    devices: Sequence[SplitDevice],
    largest: np.ndarray,
    room: np.ndarray,
    padded_bytes: float,
    shard_bytes: float,
    least: int,
) -> str:
    """The message that names the device that lacks the fewest bytes."""
    n, candidates = len(devices), []
    others = room.sum(axis=0) - room
    is_enough = room >= least
    num_enough = is_enough.sum(axis=0)
    for i, device in enumerate(devices):
        size = np.maximum(num_units - others[i], least)
        possible = (num_enough - is_enough[i] == n - 1) & (size <= largest)
        if device.memory_bytes is None or not possible.any():
            continue
        missing = device.fixed_bytes + padded_bytes * largest + shard_bytes * size
        missing = np.where(possible, missing - device.memory_bytes, np.inf)
        at = int(missing.argmin())
        candidates.append((float(missing[at]), i, int(largest[at]), int(size[at])))
    if candidates:
        missing, i, padded, size = min(candidates)
        return (
            f"{num_units} units of a split do not fit: {devices[i].name} lacks {missing:,.0f} "
            f"bytes for {size} of them, its arrays padded to the {padded} of the largest part. Use "
            "a smaller microbatch_size, more devices, or leave less to the split"
        )
    even = max(-(-num_units // n), least)
    lacking = [
        (d.fixed_bytes + padded_bytes * even + shard_bytes * max(num_units // n, least), d)
        for d in devices
    ]
    lacks = "; ".join(
        f"{d.name} lacks {needed - d.memory_bytes:,.0f} bytes"
        for needed, d in lacking
        if d.memory_bytes is not None and needed > d.memory_bytes
    )
    return (
        f"{num_units} units of a split do not fit, however they are handed out: with even parts "
        f"{lacks}. Use a smaller microbatch_size, more devices, or leave less to the split"
    )
