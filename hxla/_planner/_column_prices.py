"""Prices at which pipelines of runs are worth what nodes can hold of them."""

import dataclasses
from typing import NamedTuple

import numpy as np

from ._chain_tables import Array
from ._node_packing import NodePacking

_MOST_TIMES = 5  # of which a packing is asked for
_NEAR = 1e-4  # two times are one
_EXACT = 1e-6  # of a microbatch


class _Packed(NamedTuple):
    """What a linear programme packs in a time.

    Attributes:
        value: [C] Microbatches of each pipeline.
        prices: [T]
        beyond: More microbatches than there are.
        slope: So many more in a second.
    """

    value: Array
    prices: Array
    beyond: float
    slope: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnPrices:
    """Pipelines that are to run a global batch, and what nodes they may use.

    Attributes:
        packing: The nodes.
        used: [C, T] What each pipeline takes of them.
        fill: [C] Seconds.
        period: [C] Seconds.
        most: Pipelines in all.
        wanted: Microbatches.
        card_seconds: Of each node.
    """

    packing: NodePacking
    used: Array
    fill: Array
    period: Array
    most: int
    wanted: int
    card_seconds: float

    def fractional(self, seconds: float, last: float) -> tuple[Array, float]:
        """Where pipelines run fractions of microbatches.

        Args:
            seconds: A first guess.
            last: No more is asked for.

        Returns:
            [T] Prices, and the least time in which the global batch can be run; `last`: it cannot.
        """
        found = self._at(seconds, is_integral=False)
        for _ in range(_MOST_TIMES):
            # What is packed is a convex function of the time, of which this is Newton's method.
            more = found.beyond / found.slope if found.slope else -np.inf
            before, seconds = seconds, min(seconds - more, last)
            if abs(seconds - before) < _NEAR * last:
                break
            found = self._at(seconds, is_integral=False)
        # In less time all is worth less, by about the same factor, until it is the global batch.
        excess = float((found.value - self.used @ found.prices).max())
        worth = self.packing.priced(found.prices, self.card_seconds).worth
        wanted = self.wanted * (1 - _EXACT) - self.most * max(0.0, excess)
        return found.prices * (wanted / worth if worth else 0.0), seconds

    def integral(self, low: float, high: float) -> tuple[Array, float]:
        """Where they run whole ones: of a time that is too short, as long as was found.

        Args:
            low: Too short.
            high: The longest that is asked for.

        Returns:
            [T] Prices, and a time that is not too short; `high`: none such may have been found.
        """
        found = self._at(high, is_integral=True)
        if found.beyond >= 0:
            for _ in range(_MOST_TIMES):
                middle = (low + high) / 2
                other = self._at(middle, is_integral=True)
                if other.beyond < 0:
                    low, found = middle, other
                else:
                    high = middle
        return found.prices, high

    def microbatches(self, seconds: float, *, is_integral: bool) -> Array:
        """[C] That are run in a time by each pipeline, as often as it is packed."""
        value = self._value(seconds, is_integral=is_integral)
        counts, _ = self.packing.packed(self.used, value, self.most, self.card_seconds)
        return counts * value

    def _value(self, seconds: float, *, is_integral: bool) -> Array:
        value = np.maximum(0.0, 1 + (seconds - self.fill) / self.period)
        return np.floor(value + _EXACT) if is_integral else value

    def _at(self, seconds: float, *, is_integral: bool) -> _Packed:
        value = self._value(seconds, is_integral=is_integral)
        counts, prices = self.packing.packed(self.used, value, self.most, self.card_seconds)
        slope = float((counts / self.period)[value > 0].sum())
        return _Packed(value, prices, float(counts @ value) - self.wanted, slope)
