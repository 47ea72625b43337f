"""Pipelines without their coupling, by mix of devices or at prices per device."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .chain import Array, Tables

Bands = Sequence[tuple[int, int]]  # per position from the end: from, up to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelines:
    """Lower bounds on the pipelines of some number of stages.

    Attributes:
        used: [C, K] Devices of each kind.
        period: [W] The least period.
        fill: [W, C] The least fill (inf: no such pipeline).
        most: The most microbatches, because memory was counted for so few.
    """

    used: Array
    period: Array
    fill: Array
    most: int

    def microbatches(self, seconds: float) -> Array:
        """[C] An upper bound on the microbatches of each mix in `seconds`."""
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
        # Periods of stages that fit.
        self._values = np.unique(self.period[t.fits(1) & after])
        # The shortest period of a stage of at least so many layers.
        fitting = np.where(t.fits(1) & after, self.period, np.inf).min(axis=0)
        least = [fitting.diagonal(n).min() for n in range(1, size)]
        self._reach = np.minimum.accumulate(least[::-1])[::-1]

    def periods(self, low: float, high: float, ratio: float) -> tuple[Array, Array]:
        """Intervals of all possible periods from `low` on: first and last member.

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
        """As `periods`, inside coarser intervals; wider intervals if there are too many."""
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
        """The least period: each layer is in a stage; longer stages may have cheaper boundaries."""
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
            first: [W] Least period of each interval.
            last: [W] Longest period of each interval.
            depth: The most microbatches in flight that memory is counted for.
            most: The most microbatches of such a pipeline.
            bands: Per position from the end, the first layers of its stage (default: any).
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
        """Per position from the end, the possible first layers of its stage, from both ends."""
        size = self.t.num_layers + 1
        allowed = np.isfinite(self.cost) & (self.period <= longest)
        reach = []  # [L+1] the last end of a stage, by its first layer
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
    """First and last of each run of ascending values, each run within a ratio."""
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
    """Two numbers within a relative tolerance: the second is enough, the first is not."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low, high


def suffixes(
    num_stages: int, score: Callable[[int], Array], combine: np.ufunc
) -> Iterator[tuple[Array, Array]]:
    """The least score of the last stages by their first layer: a dynamic programme.

    Args:
        score: Position from the end to [L+1, L+1], the score of a stage by its layers.
        combine: Joins the scores of stages: `np.add` or `np.maximum`.

    Yields:
        For one stage, for two, and so on: [L+1] by first layer the score, and the stage's end.
    """
    rest: Array | None = None
    for position in range(1, num_stages + 1):
        stage_scores = score(position)
        if rest is None:
            rest = np.full(len(stage_scores), np.inf)
            rest[-1] = 0.0
        total = combine(stage_scores, rest[None, :])
        rest = total.min(axis=1)
        yield rest, total.argmin(axis=1)


def best_cut(
    num_stages: int, score: Callable[[int], Array], combine: np.ufunc
) -> tuple[int, ...] | None:
    """The cut of the least score, if there is any: see `suffixes`."""
    by_stages = list(suffixes(num_stages, score, combine))
    rest, _ = by_stages[-1]
    if not np.isfinite(rest[0]):
        return None
    cuts = [0]
    for _, after in reversed(by_stages[1:]):
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pins:
    """Fixed kinds of the stages of a plan, by position from the end.

    Attributes:
        kinds: The kind of all replicas; None: any.
        extra: [L+1, K, K] Seconds of a boundary beyond the relaxation, by the layer after it and
            the kinds before and after it.
    """

    kinds: tuple[int | None, ...]
    extra: Array


def priced(
    relaxation: Relaxation,
    first: Array,
    last: Array,
    *,
    depth: int,
    most: int,
    check: Callable[[], None],
) -> "list[Priced]":
    """Programmes for all intervals, grouped by the length of their stages.

    Args:
        first: [W] Least period of each interval, ascending.
        last: [W] Longest.
        depth: The most microbatches in flight that memory is counted for.
        most: The most microbatches of such a pipeline.
        check: Called between positions; may raise.
    """
    longest = np.array([relaxation.longest_stage(limit) for limit in last], int)
    parts, at = [], 0
    while at < len(last):
        end = int(np.searchsorted(longest, 1.5 * longest[at], side="right"))
        parts.append(
            Priced(relaxation, first[at:end], last[at:end], depth=depth, most=most, check=check)
        )
        at = end
    return parts


class Priced:
    """The dynamic programme over stages, from the last to the first, for one set of periods.

    With a price per device, a pipeline's fill and its devices' prices add up stage by stage, so
    that the state is the first layer alone. Axes: W intervals of periods, L first layers of a
    stage, J its further layers. Arguments: see `priced`.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        first: Array,
        last: Array,
        *,
        depth: int,
        most: int,
        check: Callable[[], None],
    ):
        t = relaxation.t
        self.first = first
        self.last = last
        self.most = most
        self._relaxation = relaxation
        self._depth = depth
        self._check = check
        start = np.arange(t.num_layers)[:, None]
        self._width = relaxation.longest_stage(float(last[-1]))
        end = start + 1 + np.arange(self._width)[None, :]
        self._there = end <= t.num_layers
        self._at = (start, np.minimum(end, t.num_layers))
        self._base = [  # [K] of [W, L, J]
            np.where(
                self._there & (relaxation.period[k][self._at] <= last[:, None, None]),
                relaxation.cost[k][self._at] / first[:, None, None],
                np.inf,
            )
            for k in range(t.num_kinds)
        ]
        self._limits: dict[int, tuple[Array, int]] = {}
        self._same = bool(np.array_equal(t.fits(1), t.fits(max(1, min(depth, t.num_layers)))))

    def _limit(self, position: int) -> tuple[Array, int]:
        """[K, L, J] 0 where a stage at a position from the end fits its device, else infinity.

        Also the length of J before all is infinite.
        """
        depth = 1 if self._same else min(position, self._depth)
        if depth not in self._limits:
            fits = self._relaxation.t.fits(depth)[:, self._at[0], self._at[1]] & self._there
            width = int(np.flatnonzero(fits.any(axis=(0, 1))).max(initial=-1)) + 1
            self._limits[depth] = np.where(fits, 0.0, np.inf), width
        return self._limits[depth]

    def _pinned(
        self, position: int, pins: Pins | None, k: int, where: tuple[slice | int, ...]
    ) -> Array:
        """[W, at, long] fill / period on one kind, infinite where not allowed."""
        cost = self._base[k][where]
        if pins is None:
            return cost
        if pins.kinds[position - 1] not in (None, k):
            return np.full_like(cost, np.inf)
        into, out = self._extra(position, pins, k)
        if not (into.any() or out.any()):
            return cost
        r, (w, *rest) = self._relaxation, where
        start, end = (np.broadcast_to(x, self._there.shape)[tuple(rest)] for x in self._at)
        period = r.period[k][start, end] + into[start] + out[end]
        first, last = (np.asarray(x[w])[..., None, None] for x in (self.first, self.last))
        if isinstance(rest[0], int):
            first, last = first[..., 0], last[..., 0]
        added = cost + out[end] / first
        return np.where(period <= last, added, np.inf)

    def _extra(self, position: int, pins: Pins, k: int) -> tuple[Array, Array]:
        """[L+1] Seconds of the boundaries before and after a stage beyond the relaxation."""
        into = out = np.zeros(self._relaxation.t.num_layers + 1)
        before = pins.kinds[position] if position < len(pins.kinds) else None
        after = pins.kinds[position - 2] if position > 1 else None
        if before is not None:
            into = pins.extra[:, before, k]
        if after is not None:
            out = pins.extra[:, k, after]
        return into, out

    def _stage(
        self, position: int, prices: Sequence[float], at: slice, long: slice, pins: Pins | None
    ) -> Array:
        """[W, at, long] The least fill / period + price over all kinds."""
        limit, _ = self._limit(position)
        least: Array | None = None
        for k, price in enumerate(prices):
            cost = self._pinned(position, pins, k, (slice(None), at, long))
            cost = cost + (limit[k, at, long] + price)
            least = cost if least is None else np.minimum(least, cost, out=least)
        assert least is not None
        return least

    def rests(
        self,
        num: int,
        prices: Sequence[float],
        bands: Bands | None = None,
        pins: Pins | None = None,
    ) -> list[Array]:
        """Per position from the end (0: none), [W, L+1+J] the least fill / period + prices.

        Args:
            prices: [K]
            bands: Per position from the end the first layers of its stage: from, up to.
            pins: Fixed kinds; only together with bands.
        """
        layers, width = self._relaxation.t.num_layers, self._width
        rest = np.full((len(self.first), layers + 1 + width), np.inf)
        rest[:, layers] = 0.0
        rests = [rest]
        low_end, high_end = layers, layers + 1
        whole = slice(0, layers), slice(0, width)
        is_alike = self._same and pins is None
        # One table of all stages serves every position, unless bands need little of it.
        if bands is not None:
            is_alike = is_alike and layers < sum(high - low for low, high in bands[:num])
        shared = self._stage(1, prices, *whole, None) if is_alike else None
        for position in range(1, num + 1):
            self._check()
            low, high = (0, layers) if bands is None else bands[position - 1]
            short = 0 if bands is None else max(0, low_end - high)
            long = width if self._same else self._limit(position)[1]
            long = long if bands is None else min(long, high_end - 1 - low)
            here = np.full_like(rest, np.inf)
            if long > short:
                if shared is not None:
                    stage_costs = shared[:, low:high, short:long]
                else:
                    stage_costs = self._stage(
                        position, prices, slice(low, high), slice(short, long), pins
                    )
                ends = np.lib.stride_tricks.sliding_window_view(rest, long - short, axis=1)
                after = ends[:, low + 1 + short : high + 1 + short]
                here[:, low:high] = (stage_costs + after).min(axis=2)
            rest = here
            rests.append(rest)
            low_end, high_end = low, high
        return rests

    def within(self, start: int, end: int) -> "Priced":
        """This programme for some of the intervals: from, up to."""
        if (start, end) == (0, len(self.first)):
            return self
        other = copy.copy(self)
        other.first, other.last = self.first[start:end], self.last[start:end]
        other._base = [x[start:end] for x in self._base]  # noqa: SLF001
        return other

    def fills(self, num: int, prices: Sequence[float]) -> Array:
        """[W, num] By number of stages, the least fill in periods with the prices of the devices.

        Args:
            prices: [K]
        """
        return np.stack([rest[:, 0] for rest in self.rests(num, prices)[1:]], axis=1)

    def seconds_with(self, excess: float | Array, fills: Array, prices: Sequence[float]) -> Array:
        """[num] By number of stages, the time before which no pipeline has an excess (inf: never).

        The excess is its microbatches minus the price of its devices.

        Args:
            excess: Per number of stages, or one for all.
            fills: [W, num] The result of `fills` at these prices.
            prices: [K]
        """
        least = (self.first[:, None] * (excess - 1 + fills)).min(axis=0)
        most = self.most - np.arange(1, fills.shape[1] + 1) * min(prices)
        return np.where(most < excess, np.inf, least)

    def pipeline(
        self,
        interval: int,
        rests: Sequence[Array],
        prices: Sequence[float],
        pins: Pins | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], float, float]:
        """Cuts, kinds from the last stage on, fill and period of the pipeline behind `rests`."""
        kinds, layer, fill, period = len(prices), 0, 0.0, 0.0
        cuts, taken = [], []
        nothing = np.zeros(self._relaxation.t.num_layers + 1)
        for position in reversed(range(1, len(rests))):
            cuts.append(layer)
            limit, _ = self._limit(position)
            after = rests[position - 1][interval, layer + 1 : layer + 1 + self._width]
            total = np.array(
                [
                    self._pinned(position, pins, k, (interval, layer, slice(None)))
                    + (limit[k, layer] + prices[k] + after)
                    for k in range(kinds)
                ]
            )
            k, j = divmod(int(total.argmin()), self._width)
            taken.append(k)
            at = k, layer, layer + 1 + j
            into, out = self._extra(position, pins, k) if pins else (nothing, nothing)
            fill += float(self._relaxation.cost[at] + out[at[2]])
            period = max(period, float(self._relaxation.period[at] + into[layer] + out[at[2]]))
            layer += 1 + j
        return tuple(cuts), tuple(reversed(taken)), fill, period
