"""Runs: stages of a pipeline that follow each other in one node, and pipelines made of them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ._chain_tables import Array, Tables

Span = tuple[int, int]  # of intervals: from, up to


class RunGrid:
    """Runs by period: of each kind, of so many stages, over layers a to e - 1.

    A run is what follows each other in one node: its first stage receives over the card, its last
    one sends over it, and between them arrays stay in the node.
    """

    def __init__(self, t: Tables, leaving: Array, low: float, high: float, ratio: float):
        num = max(1, math.ceil(math.log(high / low) / math.log(ratio)))
        self.first = low * ratio ** np.arange(num)
        self.last = self.first * ratio * (1 + 1e-12)
        self._t = t
        self._leaving = leaving
        start, more = np.ogrid[: t.num_layers, : t.num_layers]
        end = start + more + 1
        self._at = start, np.minimum(end, t.num_layers)
        self._ends = end <= t.num_layers
        # [L, L, W] By first layer and how many follow it; made where asked for.
        self._runs = [
            [np.empty((*end.shape, num), np.float32) for _ in range(inside)]
            for inside in t.copies_inside
        ]
        self._known = np.zeros(num, bool)
        self._there = [[np.zeros(end.shape, bool) for _ in own] for own in self._runs]

    def runs(
        self, span: Span, allowed: Sequence[Sequence[Array]], check: Callable[[], None]
    ) -> "dict[int, Runs]":
        """Those of some intervals, by their number of stages.

        Args:
            span: The intervals: from, up to.
            allowed: By kind and stages, [L+1, L+1] whether there may be such a run.
            check: Called between kinds; may raise.
        """
        at = np.arange(*span)
        self._make(at[~self._known[at]], check)
        found = {}
        for j in range(1, max(self._t.copies_inside) + 1):
            may = {
                k: allowed[k][j - 1][self._at] & there[j - 1]
                for k, there in enumerate(self._there)
                if j <= len(there)
            }
            lengths = np.flatnonzero(np.any([own.any(axis=0) for own in may.values()], axis=0))
            if not len(lengths):
                continue
            long = slice(int(lengths[0]), int(lengths[-1]) + 1)
            own = Runs(
                shortest=long.start + 1,
                costs={k: self._runs[k][j - 1][:, long, slice(*span)] for k in may},
                barred={
                    k: np.where(x[:, long], np.float32(0), np.float32(np.inf))[:, :, None]
                    for k, x in may.items()
                },
            )
            found[j] = own
        return found

    def _make(self, at: Array, check: Callable[[], None]) -> None:
        """Those of intervals that nobody asked for before."""
        for k, own in enumerate(self._runs if len(at) else ()):
            check()
            made = self._made(k, len(own), at)
            for rows, there, new in zip(own, self._there[k], made, strict=True):
                rows[:, :, at] = np.where(self._ends[:, :, None], new[self._at], np.inf)
                there |= np.isfinite(rows[:, :, at]).any(axis=2)
        self._known[at] = True

    def _made(self, k: int, most: int, at: Array) -> Iterable[Array]:
        t, leaving = self._t, self._leaving[k]
        after = np.triu(np.ones((t.num_layers + 1,) * 2, bool), 1)
        seconds = np.where(after & t.fits(1)[k], t.seconds[k], np.inf)[:, :, None]
        first, last = self.first[at], self.last[at]
        stays = t.cross[:, k, k]

        def stages(into: Array, out: Array) -> Array:
            period = seconds + into[:, None, None] + out[None, :, None]
            own: Array = np.where(period <= last, (seconds + out[None, :, None]) / first, np.inf)
            return own.astype(np.float32)

        yield stages(leaving, leaving)
        if most > 1:
            begun, middle, end = (
                stages(leaving, stays),
                stages(stays, stays),
                stages(stays, leaving),
            )
            for num in range(2, most + 1):
                yield _joined(begun, end)
                if num < most:
                    begun = _joined(begun, middle)


@dataclasses.dataclass(frozen=True)
class Run:
    """What follows each other in one node.

    Attributes:
        kind: Of its devices.
        stages: How many.
        layers: The first, and the one after the last.
    """

    kind: int
    stages: int
    layers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Those of as many stages, by first layer and how many more than the shortest follow it.

    Attributes:
        shortest: Layers.
        costs: By kind, [L, J, W] fill / period; infinite: there is none.
        barred: By kind, [L, J, 1] infinite where a run is not allowed, else 0.
    """

    shortest: int
    costs: dict[int, Array]
    barred: dict[int, Array]

    def among(self, span: Span) -> "Runs":
        """Those of some of the intervals: from, up to."""
        costs = {k: own[:, :, slice(*span)] for k, own in self.costs.items()}
        return dataclasses.replace(self, costs=costs)

    def priced(self, k: int, price: Any) -> Array:
        """[L, J, 1] What is to be added to the costs of a kind: the price of the devices."""
        added: Array = self.barred[k] + np.float32(price)
        return added


class RunPass:
    """The dynamic programme over runs, from the last stage to the first, at prices per device.

    Args:
        runs: By their number of stages.
        prices: [K]
        num: Most stages.
        exact: Whether there are as many stages: each has a layer, also those before.
        check: Called between positions; may raise.
    """

    def __init__(
        self,
        runs: dict[int, Runs],
        prices: Array,
        num: int,
        check: Callable[[], None],
        *,
        exact: bool,
    ):
        self._runs = runs
        self._prices = prices
        layers, _, num_intervals = next(iter(next(iter(runs.values())).costs.values())).shape
        longest = max(own.shape[1] for x in runs.values() for own in x.costs.values())
        room = np.empty((layers, longest, num_intervals), np.float32)
        self._best = {}  # of all kinds, by stages
        for j, some in runs.items():
            best: Array | None = None
            for k, own in some.costs.items():
                added = some.priced(k, j * prices[k])
                if best is None:
                    best = own + added
                else:
                    here = room[:, : own.shape[1]]
                    np.add(own, added, out=here)
                    np.minimum(best, here, out=best)
            assert best is not None
            self._best[j] = best
        beyond = max(x.shortest for x in runs.values()) + longest
        start = np.full((layers + 1 + beyond, num_intervals), np.inf, np.float32)
        start[layers] = 0.0
        self._rests = [start]  # by last stages, [L+1+J, W] by first layer
        for s in range(1, num + 1):
            check()
            rest = np.full_like(start, np.inf)
            low, high = num - s if exact else 0, layers + 1 - s
            for j, best in self._best.items():
                if j <= s and low < high:
                    after = self._after(j, s - j)[low:high]
                    total = room[: high - low, : best.shape[1]]
                    np.add(best[low:high], after, out=total)
                    np.minimum(rest[low:high], total.min(axis=1), out=rest[low:high])
            self._rests.append(rest)

    def _after(self, j: int, num: int) -> Array:
        """[L, J, W] What so many stages after a run take."""
        rest, best = self._rests[num][self._runs[j].shortest :], self._best[j]
        by_layer, by_interval = rest.strides
        return np.lib.stride_tricks.as_strided(
            rest, best.shape, (by_layer, by_layer, by_interval), writeable=False
        )

    def fills(self, num: int) -> Array:
        """[W] The least fill / period + prices of pipelines of so many stages."""
        fills: Array = self._rests[num][0].astype(float)
        return fills

    def pipeline(self, w: int, num: int) -> list[Run]:
        """The runs of the best one of an interval."""
        found, layer = [], 0
        while num:
            each = [
                (self._best[j][layer, :, w] + self._after(j, num - j)[layer, :, w], j)
                for j in self._best
                if j <= num
            ]
            own, j = min(each, key=lambda x: float(x[0].min()))
            i, some = int(own.argmin()), self._runs[j]
            k = min(
                some.costs,
                key=lambda k: float(
                    some.costs[k][layer, i, w] + some.barred[k][layer, i, 0] + j * self._prices[k]
                ),
            )
            end = layer + some.shortest + i
            found.append(Run(k, j, (layer, end)))
            num, layer = num - j, end
        return found


def _joined(before: Array, after: Array) -> Array:
    """[L+1, L+1, W] The least of what begins with one and ends with another."""
    found = np.full_like(before, np.inf)
    for m in range(1, len(before) - 1):
        part = found[:m, m + 1 :]
        np.minimum(part, before[:m, m, None] + after[None, m, m + 1 :], out=part)
    return found
