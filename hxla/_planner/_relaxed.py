"""Pipelines freed of what couples them: for each mix of devices the least fill at each period."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ._chain_tables import Array, Tables

Bands = Sequence[tuple[int, int]]  # per position from the end: from, up to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelines:
    """What a pipeline of some number of stages can be at best.

    Attributes:
        used: [C, K] Devices of each kind.
        period: [W] Periods are at least this.
        fill: [W, C] Fill is at least this (inf: no such pipeline).
        most: Microbatches it can run at most, because its memory was counted for so few.
    """

    used: Array
    period: Array
    fill: Array
    most: int

    def microbatches(self, seconds: float) -> Array:
        """[C] The most that each mix can run in `seconds`: never too few."""
        count = np.floor(1 + (seconds - self.fill) / self.period[:, None] * (1 + 1e-12) + 1e-9)
        count = np.where(self.fill <= seconds * (1 + 1e-12), count, 0.0)
        return np.minimum(count.max(axis=0), self.most)


class Relaxation:
    """A chain with every boundary crossed at the speed of the fastest pair of kinds."""

    def __init__(self, t: Tables, check: Callable[[], None]):
        self.t = t
        self._check = check
        kinds, size = t.num_kinds, t.num_layers + 1
        # A kind of one device has no second one that it could send to.
        pairs = ~np.eye(kinds, dtype=bool) | (np.array(t.num_devices) > 1)[:, None]
        pairs &= np.outer(t.num_devices, t.num_devices) > 0
        cross = np.zeros(size)
        if pairs.any():
            cross = t.cross[:, :kinds, :kinds][:, pairs].min(axis=1)
        after = np.triu(np.ones((size, size), bool), 1)
        self.cross = cross
        self.cost = np.where(after, t.seconds + cross[None, None, :], np.inf)
        self.period = np.where(after, t.seconds + cross[None, :, None] + cross[None, None, :], 0.0)
        # Periods of stages that fit at all.
        self._values = np.unique(self.period[t.fits(1) & after])
        # The shortest period of a stage of at least so many layers.
        fitting = np.where(t.fits(1) & after, self.period, np.inf).min(axis=0)
        least = [fitting.diagonal(n).min() for n in range(1, size)]
        self._reach = np.minimum.accumulate(least[::-1])[::-1]

    def periods(self, low: float, high: float, ratio: float) -> tuple[Array, Array]:
        """Intervals that hold every period there can be from `low` on: first and last member.

        Longer periods than `high` share one interval: such a pipeline runs one microbatch.
        """
        return _intervals(self._values[self._values >= low * (1 - 1e-12)], high, ratio)

    def within(
        self,
        low: float,
        high: float,
        ratio: float,
        coarse: tuple[Array, Array] | None,
        most: int,
    ) -> tuple[Array, Array]:
        """The same of periods in some coarser interval; wider ones where they are too many."""
        values = self._values[self._values >= low * (1 - 1e-12)]
        if coarse is not None:
            begun = np.searchsorted(np.sort(coarse[0]), values * (1 + 1e-12), side="right")
            ended = np.searchsorted(np.sort(coarse[1]), values * (1 - 1e-12), side="left")
            values = values[begun > ended]
        while True:
            first, last = _intervals(values, high, ratio)
            if len(first) <= most:
                return first, last
            ratio = 1 + 1.5 * (ratio - 1)

    def least_period(self) -> float:
        """Every layer lies in some stage; a longer one may have cheaper boundaries."""
        layers = np.arange(self.t.num_layers)
        least = np.where(np.isfinite(self.cost), self.period, np.inf).min(axis=0)
        begun = np.minimum.accumulate(least, axis=0)  # at that boundary or before it
        around = np.minimum.accumulate(begun[:, ::-1], axis=1)[:, ::-1]
        return float(around[layers, layers + 1].max())

    def some_pipeline_fits(self, max_stages: int, num_microbatches: int) -> bool:
        """Whether some pipeline fits, however many devices of each kind it takes."""

        def score(position: int) -> Array:
            fits = self.t.fits(min(position, num_microbatches))
            return np.where(fits, self.cost, np.inf).min(axis=0)

        return any(np.isfinite(rest[0]) for rest, _ in suffixes(max_stages, score, np.add))

    def longest_stage(self, limit: float) -> int:
        """Layers of the longest stage that fits some device and has a period up to a limit."""
        return int(np.searchsorted(self._reach, limit * (1 + 1e-12), side="right"))

    def pipelines(
        self,
        num_stages: int,
        first: Array,
        last: Array,
        *,
        depth: int,
        most: int,
        bands: Bands | None = None,
    ) -> Pipelines:
        """All mixes of devices over `num_stages` stages.

        A dynamic programme from the last stage to the first; its state is (devices used per kind,
        first layer). All periods are solved at once.

        Args:
            num_stages: Stages.
            first: [W] Least period of each interval.
            last: [W] Longest period of each interval.
            depth: Microbatches in flight that memory is counted for at most.
            most: Microbatches that such a pipeline runs at most.
            bands: Per position from the end, the layers its stage may begin with (default: any).
        """
        t = self.t
        if bands is None:
            bands = self.bands(num_stages, float(last.max()), depth)
        mixes = [(0,) * t.num_kinds]
        rest = np.full((len(last), 1, t.num_layers + 1), np.inf)
        rest[:, :, -1] = 0.0
        size, longest = t.num_layers + 1, last.max()
        before_low, before_high = t.num_layers, size
        for position in range(1, num_stages + 1):
            self._check()
            fits = t.fits(min(position, depth))
            low, high = bands[position - 1]
            index = {mix: i for i, mix in enumerate(mixes)}
            mixes = mixes_of(position, t.num_devices)
            here = np.full((len(last), len(mixes), t.num_layers + 1), np.inf)
            for k in range(t.num_kinds):
                rows = [i for i, mix in enumerate(mixes) if mix[k]]
                before = [index[(*mixes[i][:k], mixes[i][k] - 1, *mixes[i][k + 1 :])] for i in rows]
                if not rows:
                    continue
                source = rest[:, before]
                best = np.full((len(last), len(rows), high - low), np.inf)
                start = np.arange(low, high)
                shortest = max(1, before_low - high + 1)
                for length in range(shortest, before_high - low):
                    lows = start[start + length < size]
                    ok = fits[k, lows, lows + length]
                    ok = ok & (self.period[k, lows, lows + length] <= longest)
                    if not ok.any():
                        continue
                    ok = ok & (self.period[k, lows, lows + length] <= last[:, None])
                    cost = np.where(ok, self.cost[k, lows, lows + length], np.inf)
                    total = source[:, :, lows + length] + cost[:, None, :]
                    np.minimum(best[:, :, : len(lows)], total, out=best[:, :, : len(lows)])
                here[:, rows, low:high] = np.minimum(here[:, rows, low:high], best)
            rest, before_low, before_high = here, low, high
        return Pipelines(used=np.array(mixes), period=first, fill=rest[:, :, 0], most=most)

    def bands(self, num_stages: int, longest: float, depth: int) -> list[tuple[int, int]]:
        """Per position from the end, where its stage can begin: within reach from both ends."""
        size = self.t.num_layers + 1
        allowed = np.isfinite(self.cost) & (self.period <= longest)
        reach = []  # [L+1] how far a stage that begins there can go
        for position in range(1, num_stages + 1):
            ok = (allowed & self.t.fits(min(position, depth))).any(axis=0)
            reach.append(np.where(ok, np.arange(size)[None, :], -1).max(axis=1))
        lows, low = [], size - 1
        for far in reach:
            begins = np.flatnonzero(far >= low)
            low = int(begins[0]) if len(begins) else size - 1
            lows.append(low)
        highs, high = [0], 0
        for far in reversed(reach[1:]):
            high = max(high, int(far[: high + 1].max()))
            highs.append(high)
        bands = []
        for position, (low, high) in enumerate(zip(lows, reversed(highs), strict=True), 1):
            low = max(low, num_stages - position)
            bands.append((low, max(low, min(high, size - 1 - position)) + 1))
        return [*bands[:-1], (0, 1)]

    def cut(
        self, num_stages: int, prices: Sequence[float], period: float, limit: float
    ) -> tuple[int, ...] | None:
        """The cut with the least fill / period + prices, of periods up to a limit."""
        price = np.array(prices)[:, None, None]
        allowed = np.where(self.period <= limit, self.cost / period + price, np.inf)

        def score(position: int) -> Array:
            return np.where(self.t.fits(position), allowed, np.inf).min(axis=0)

        return best_cut(num_stages, score, np.add)


def _intervals(values: Array, high: float, ratio: float) -> tuple[Array, Array]:
    short, long = np.split(values, [np.searchsorted(values, high, side="right")])
    first, last = clusters(short, ratio)
    return np.append(first, long[:1]), np.append(last, long[-1:])


def clusters(values: Array, ratio: float) -> tuple[Array, Array]:
    """First and last of each run of ascending values, none of them beyond its first times ratio."""
    ends = np.searchsorted(values, values * ratio, side="right").tolist()
    begins, at = [], 0
    while at < len(ends):
        begins.append(at)
        at = ends[at]
    first = np.array(begins, int)
    return values[first], values[np.append(first[1:], len(values)) - 1] if begins else values


def bisected(
    enough: Callable[[float], bool], low: float, high: float, tolerance: float
) -> tuple[float, float]:
    """Two numbers within a relative tolerance, of which the second is enough and the first not."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low, high


def suffixes(
    num_stages: int, score: Callable[[int], Array], combine: np.ufunc
) -> Iterator[tuple[Array, Array]]:
    """The least score of so many last stages that begin with a layer: a dynamic programme.

    Args:
        num_stages: Most of them.
        score: Position from the end to [L+1, L+1], the score of a stage over some layers.
        combine: Makes the score of a cut from that of its stages: `np.add` or `np.maximum`.

    Yields:
        For one stage, for two, and so on: [L+1] by first layer the score, and where its stage ends.
    """
    rest: Array | None = None
    for position in range(1, num_stages + 1):
        own = score(position)
        if rest is None:
            rest = np.full(len(own), np.inf)
            rest[-1] = 0.0
        total = combine(own, rest[None, :])
        rest = total.min(axis=1)
        yield rest, total.argmin(axis=1)


def best_cut(
    num_stages: int, score: Callable[[int], Array], combine: np.ufunc
) -> tuple[int, ...] | None:
    """The cut of the least score, if there is any: see `suffixes`."""
    found = list(suffixes(num_stages, score, combine))
    rest, _ = found[-1]
    if not np.isfinite(rest[0]):
        return None
    cuts = [0]
    for _, after in reversed(found[1:]):
        cuts.append(int(after[cuts[-1]]))
    return tuple(cuts)


def mixes_of(total: int, available: Sequence[int]) -> list[tuple[int, ...]]:
    if len(available) == 1:
        return [(total,)] if total <= available[0] else []
    return [
        (n, *rest)
        for n in range(min(total, available[0]) + 1)
        for rest in mixes_of(total - n, available[1:])
    ]


def subsets(num_kinds: int) -> list[tuple[int, ...]]:
    """Sets of kinds, none of them empty."""
    return [
        kinds
        for num in range(1, num_kinds + 1)
        for kinds in itertools.combinations(range(num_kinds), num)
    ]
