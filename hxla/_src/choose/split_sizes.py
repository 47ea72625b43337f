"""How many units of a split each device gets: the exact integer optimum under memory limits.

A unit is what cannot be cut further: a head with its key-value group, a granule of columns, an
expert, a row of a vocabulary. SPMD gives the arrays of every device the shape of the largest part,
so what is held between steps counts by the largest part on all devices, and what a microbatch
needs by each device's own.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ..core.errors import PlanError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitDevice:
    """A device that takes part in a split.

    Attributes:
        unit_seconds: The seconds of one unit in a microbatch, positive.
        fixed_seconds: The seconds that do not depend on its units: what every device repeats.
        memory_bytes: The bytes that it has; None: not known, so no limit.
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

    def room(self, largest: np.ndarray, padded_bytes: float, own_bytes: float) -> np.ndarray:
        """The most units that fit beside arrays padded to `largest` units."""
        if self.memory_bytes is None:
            return largest
        left = self.memory_bytes - self.fixed_bytes - padded_bytes * largest
        if own_bytes:
            most = np.clip(np.floor(left / own_bytes), -1, largest).astype(np.int64)
            most += (most < largest) & ((most + 1) * own_bytes <= left)  # floor of a quotient
            most -= most * own_bytes > left
            return most  # type: ignore[no-any-return]
        return np.where(left >= 0, largest, -1)


def best_sizes(
    num_units: int,
    devices: Sequence[SplitDevice],
    *,
    padded_bytes: float = 0.0,
    own_bytes: float = 0.0,
    least: int = 1,
) -> tuple[int, ...]:
    """Sizes that minimise the time of the slowest device; of these, those of least padding.

    For each size of the largest part the rest is a bottleneck problem: a time is enough if the
    units that devices finish within it, as far as they fit, add up to all. So all sizes of the
    largest part are bisected at once.

    Args:
        padded_bytes: Of a unit in what is padded to the largest part: parameters, their gradients'
            sums, the optimizer's state.
        own_bytes: Of a unit in what follows a device's own size: activations.
        least: Units that each device takes at least.

    Returns:
        One size for each device, summing to `num_units`.

    Raises:
        PlanError: If there are fewer units than devices need, or they do not fit: which device
            lacks how many bytes.

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
    room = np.stack([d.room(largest, padded_bytes, own_bytes) for d in devices])
    possible = (room >= least).all(axis=0) & (room.sum(axis=0) >= num_units)
    if not possible.any():
        raise PlanError(
            _too_small(num_units, devices, largest, room, padded_bytes, own_bytes, least)
        )
    room = room[:, possible]
    if padded_bytes:
        key = min(_best_keys(num_units, devices, room, least))
    else:
        # The larger the largest part may be the sooner all are done: the least that is as soon.
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
    """For sizes of the largest part the time of the slowest device, the largest, and less each.

    The first is that of the best size, and of sizes that are worse than it there are none.

    Args:
        room: [n, sizes] The most units that fit each device.
        least: Units that each device takes at least.
    """
    unit = np.array([[d.unit_seconds] for d in devices])
    fixed = np.array([[d.fixed_seconds] for d in devices])

    def finished(seconds: np.ndarray) -> np.ndarray:
        # What costs no time, as where rules cut nothing, is done at once.
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
        found = _trimmed(sizes[:, column].tolist(), num_units, devices, least)
        slowest = max(d.seconds(size) for d, size in zip(devices, found, strict=True))
        best = min(best, slowest)
        yield slowest, max(found), tuple(-size for size in found)  # the larger ones first


def _trimmed(
    sizes: list[int], num_units: int, devices: Sequence[SplitDevice], least: int
) -> list[int]:
    """Without the units above all, taken from the devices that finish last."""
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
    own_bytes: float,
    least: int,
) -> str:
    """The one device that would have to grow the least, and by how much."""
    n, found = len(devices), []
    others = room.sum(axis=0) - room
    is_enough = room >= least
    num_enough = is_enough.sum(axis=0)
    for i, device in enumerate(devices):
        own = np.maximum(num_units - others[i], least)
        possible = (num_enough - is_enough[i] == n - 1) & (own <= largest)
        if device.memory_bytes is None or not possible.any():
            continue
        missing = device.fixed_bytes + padded_bytes * largest + own_bytes * own
        missing = np.where(possible, missing - device.memory_bytes, np.inf)
        at = int(missing.argmin())
        found.append((float(missing[at]), i, int(largest[at]), int(own[at])))
    if found:
        missing, i, padded, own = min(found)
        return (
            f"{num_units} units of a split do not fit: {devices[i].name} lacks {missing:,.0f} "
            f"bytes for {own} of them, its arrays padded to the {padded} of the largest part. Use "
            "a smaller microbatch_size, more devices, or leave less to the split"
        )
    even = max(-(-num_units // n), least)
    lacking = [
        (d.fixed_bytes + padded_bytes * even + own_bytes * max(num_units // n, least), d)
        for d in devices
    ]
    told = "; ".join(
        f"{d.name} lacks {needed - d.memory_bytes:,.0f} bytes"
        for needed, d in lacking
        if d.memory_bytes is not None and needed > d.memory_bytes
    )
    return (
        f"{num_units} units of a split do not fit, however they are handed out: with even parts "
        f"{told}. Use a smaller microbatch_size, more devices, or leave less to the split"
    )
