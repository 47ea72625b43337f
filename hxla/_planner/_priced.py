"""Relaxed pipelines at prices per device: one pass serves every number of stages and every mix."""

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ._chain_tables import Array
from ._relaxed import Bands, Relaxation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pins:
    """What is laid down of the stages of a plan, by position from the end.

    Attributes:
        kinds: The kind that all copies have there; None: any.
        extra: [L+1, K, K] What a boundary takes beyond the relaxation's crossing of it, by the
            layer after it and the kinds before and after it.
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
    """Programmes for all intervals: together those whose stages are of like length.

    Args:
        relaxation: The chain.
        first: [W] Least period of each interval, ascending.
        last: [W] Longest.
        depth: Microbatches in flight that memory is counted for at most.
        most: Microbatches that such a pipeline runs at most.
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

        And how many of J there are before all is infinite.
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
        """[W, at, long] Of one kind: fill / period, infinite where that is not allowed."""
        own = self._base[k][where]
        if pins is None:
            return own
        if pins.kinds[position - 1] not in (None, k):
            return np.full_like(own, np.inf)
        into, out = self._extra(position, pins, k)
        if not (into.any() or out.any()):
            return own
        r, (w, *rest) = self._relaxation, where
        start, end = (np.broadcast_to(x, self._there.shape)[tuple(rest)] for x in self._at)
        period = r.period[k][start, end] + into[start] + out[end]
        first, last = (np.asarray(x[w])[..., None, None] for x in (self.first, self.last))
        if isinstance(rest[0], int):
            first, last = first[..., 0], last[..., 0]
        added = own + out[end] / first
        return np.where(period <= last, added, np.inf)

    def _extra(self, position: int, pins: Pins, k: int) -> tuple[Array, Array]:
        """[L+1] What the boundaries before and after a stage take beyond the relaxation's."""
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
        """[W, at, long] The least of all kinds."""
        limit, _ = self._limit(position)
        found: Array | None = None
        for k, price in enumerate(prices):
            own = self._pinned(position, pins, k, (slice(None), at, long))
            own = own + (limit[k, at, long] + price)
            found = own if found is None else np.minimum(found, own, out=found)
        assert found is not None
        return found

    def rests(
        self,
        num: int,
        prices: Sequence[float],
        bands: Bands | None = None,
        pins: Pins | None = None,
    ) -> list[Array]:
        """Per position from the end (0: none), [W, L+1+J] the least fill / period + prices.

        Args:
            num: Positions.
            prices: [K]
            bands: Per position from the end the layers its stage may begin with, from, up to.
            pins: What else is laid down; only together with bands.
        """
        layers, width = self._relaxation.t.num_layers, self._width
        rest = np.full((len(self.first), layers + 1 + width), np.inf)
        rest[:, layers] = 0.0
        rests = [rest]
        low_end, high_end = layers, layers + 1
        whole = slice(0, layers), slice(0, width)
        is_alike = self._same and pins is None
        # One table of all stages serves every position, unless bands leave little of it.
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
                    own = shared[:, low:high, short:long]
                else:
                    own = self._stage(position, prices, slice(low, high), slice(short, long), pins)
                ends = np.lib.stride_tricks.sliding_window_view(rest, long - short, axis=1)
                after = ends[:, low + 1 + short : high + 1 + short]
                here[:, low:high] = (own + after).min(axis=2)
            rest = here
            rests.append(rest)
            low_end, high_end = low, high
        return rests

    def within(self, start: int, end: int) -> "Priced":
        """The same for some of the intervals: from, up to."""
        if (start, end) == (0, len(self.first)):
            return self
        other = copy.copy(self)
        other.first, other.last = self.first[start:end], self.last[start:end]
        other._base = [own[start:end] for own in self._base]
        return other

    def fills(self, num: int, prices: Sequence[float]) -> Array:
        """[W, num] By number of stages, the least fill in periods with the prices of the devices.

        Args:
            num: Most stages.
            prices: [K]
        """
        return np.stack([rest[:, 0] for rest in self.rests(num, prices)[1:]], axis=1)

    def seconds_with(self, excess: float | Array, fills: Array, prices: Sequence[float]) -> Array:
        """[num] By number of stages, the time before which no pipeline has some excess: how many
        microbatches more than its devices are worth it runs (inf: it never has).

        Args:
            excess: Of each number of stages, or one for all.
            fills: [W, num] As `fills` says.
            prices: [K] That they are of.
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
