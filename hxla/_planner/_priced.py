"""Relaxed pipelines at prices per device: one pass serves every number of stages and every mix."""

from collections.abc import Callable, Sequence

import numpy as np

from ._chain_tables import Array
from ._relaxed import Bands, Relaxation


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

    def _stage(self, position: int, prices: Sequence[float], at: slice, long: slice) -> Array:
        """[W, at, long] The least of all kinds."""
        limit, _ = self._limit(position)
        found: Array | None = None
        for k, price in enumerate(prices):
            own = self._base[k][:, at, long] + (limit[k, at, long] + price)
            found = own if found is None else np.minimum(found, own, out=found)
        assert found is not None
        return found

    def rests(self, num: int, prices: Sequence[float], bands: Bands | None = None) -> list[Array]:
        """Per position from the end (0: none), [W, L+1+J] the least fill / period + prices.

        Args:
            num: Positions.
            prices: [K]
            bands: Per position from the end the layers its stage may begin with, from, up to.
        """
        layers, width = self._relaxation.t.num_layers, self._width
        rest = np.full((len(self.first), layers + 1 + width), np.inf)
        rest[:, layers] = 0.0
        rests = [rest]
        low_end, high_end = layers, layers + 1
        whole = slice(0, layers), slice(0, width)
        shared = self._stage(1, prices, *whole) if self._same and bands is None else None
        for position in range(1, num + 1):
            self._check()
            low, high = (0, layers) if bands is None else bands[position - 1]
            short = 0 if bands is None else max(0, low_end - high)
            long = width if self._same else self._limit(position)[1]
            long = long if bands is None else min(long, high_end - 1 - low)
            here = np.full_like(rest, np.inf)
            if long > short:
                own = shared
                if own is None:
                    own = self._stage(position, prices, slice(low, high), slice(short, long))
                ends = np.lib.stride_tricks.sliding_window_view(rest, long - short, axis=1)
                after = ends[:, low + 1 + short : high + 1 + short]
                here[:, low:high] = (own + after).min(axis=2)
            rest = here
            rests.append(rest)
            low_end, high_end = low, high
        return rests

    def excess(self, num: int, prices: Sequence[float], seconds: Array) -> Array:
        """How many microbatches more than its devices are worth a pipeline can run.

        Args:
            num: Most stages.
            prices: [K]
            seconds: [num] That a pipeline has, by number of stages.

        Returns:
            [W, num] by number of stages, never too little.
        """
        found = np.stack([rest[:, 0] for rest in self.rests(num, prices)[1:]], axis=1)
        worth = self.most - np.arange(1, num + 1) * min(prices)
        return np.minimum(1 + seconds[None] / self.first[:, None] - found, worth)

    def pipeline(
        self, interval: int, rests: Sequence[Array], prices: Sequence[float]
    ) -> tuple[tuple[int, ...], tuple[int, ...], float, float]:
        """Cuts, devices of each kind, fill and period of the pipeline behind `rests`."""
        kinds, layer, fill, period = len(prices), 0, 0.0, 0.0
        cuts, used = [], [0] * kinds
        for position in reversed(range(1, len(rests))):
            cuts.append(layer)
            limit, _ = self._limit(position)
            after = rests[position - 1][interval, layer + 1 : layer + 1 + self._width]
            total = np.array(
                [
                    self._base[k][interval, layer] + limit[k, layer] + prices[k] + after
                    for k in range(kinds)
                ]
            )
            k, j = divmod(int(total.argmin()), self._width)
            used[k] += 1
            at = k, layer, layer + 1 + j
            fill += float(self._relaxation.cost[at])
            period = max(period, float(self._relaxation.period[at]))
            layer += 1 + j
        return tuple(cuts), tuple(used), fill, period
