"""Runs: stages of a pipeline that follow each other in one node, and pipelines made of them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ._chain_tables import Array, Tables

Span = tuple[int, int]  # of intervals: from, up to
_BLOCK = 32  # intervals that are made together


class RunGrid:
    """Runs by period: of each kind, of so many stages, over layers a to e - 1.

    A run is what follows each other in one node: its first stage receives over the card, its last
    one sends over it, and between them arrays stay in the node.

    Args:
        t: Of the chain.
        leaving: [K, L+1] What crossing a boundary takes that leaves a node, both ways, at least.
        low: No period is shorter.
        high: None that matters is longer.
        ratio: Of the longest to the least period of an interval.

    Attributes:
        first: [W] Least period of each interval.
        last: [W] Longest.
    """

    def __init__(self, t: Tables, leaving: Array, low: float, high: float, ratio: float):
        num = max(1, math.ceil(math.log(high / low) / math.log(ratio)))
        self.first = low * ratio ** np.arange(num)
        self.last = self.first * ratio * (1 + 1e-12)
        self._t = t
        self._leaving = leaving
        more, start = np.ogrid[: t.num_layers, : t.num_layers]
        end = start + more + 1
        self._at = start, np.minimum(end, t.num_layers)
        self._ends = end <= t.num_layers
        self._known: dict[int, list[list[Array]]] = {}  # by block

    def runs(
        self, span: Span, allowed: Sequence[Sequence[Array]], check: Callable[[], None]
    ) -> "list[RunBlock]":
        """Those of some intervals, block by block, by their number of stages.

        Args:
            span: The intervals: from, up to.
            allowed: By kind and stages, [L+1, L+1] whether there may be such a run.
            check: Called between kinds; may raise.
        """
        may = [[own[self._at] for own in rows] for rows in allowed]
        found = []
        for block in range(span[0] // _BLOCK, -(-span[1] // _BLOCK)):
            begin = block * _BLOCK
            if block not in self._known:
                at = np.arange(begin, min(begin + _BLOCK, len(self.first)))
                self._known[block] = [self._block(k, at, check) for k in range(len(allowed))]
            inside = slice(max(span[0] - begin, 0), min(span[1] - begin, _BLOCK))
            found.append(self._among(self._known[block], inside, may))
        return found

    def _block(self, k: int, at: Array, check: Callable[[], None]) -> list[Array]:
        """[L, L, W] By stages, runs of a kind: how many layers follow the first, and that one."""
        check()
        ends = self._ends[:, :, None]
        return [
            np.where(ends, made[self._at], np.float32(np.inf))
            for made in self._made(k, self._t.copies_inside[k], at)
        ]

    def _among(self, known: list[list[Array]], inside: slice, may: list[list[Array]]) -> "RunBlock":
        """What may be of some intervals of a block."""
        found = {}
        for j in range(1, max(self._t.copies_inside) + 1):
            own = {k: rows[j - 1][:, :, inside] for k, rows in enumerate(known) if j <= len(rows)}
            # What is there for short periods is there for the longest.
            here = {k: may[k][j - 1] & np.isfinite(x[:, :, -1]) for k, x in own.items()}
            lengths = np.flatnonzero(np.any([x.any(axis=1) for x in here.values()], axis=0))
            if len(lengths):
                long = slice(int(lengths[0]), int(lengths[-1]) + 1)
                bars = {k: np.where(x[long], 0.0, np.inf) for k, x in here.items()}
                found[j] = Runs(
                    shortest=long.start + 1,
                    costs={k: x[long] for k, x in own.items()},
                    barred={k: x.astype(np.float32)[:, :, None] for k, x in bars.items()},
                )
        return RunBlock(found, self._t.num_layers, inside.stop - inside.start)

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
    """Those of as many stages, by how many layers more than the shortest, and the first layer.

    Attributes:
        shortest: Layers.
        costs: By kind, [J, L, W] fill / period; infinite: there is none.
        barred: By kind, [J, L, 1] infinite where a run is not allowed, else 0.
    """

    shortest: int
    costs: dict[int, Array]
    barred: dict[int, Array]

    @property
    def longest(self) -> int:
        """Layers."""
        return self.shortest + len(next(iter(self.barred.values()))) - 1

    def priced(self, k: int, price: float) -> Array:
        """[J, L, 1] What is to be added to the costs of a kind: the price of the devices."""
        added: Array = self.barred[k] + np.float32(price)
        return added


@dataclasses.dataclass(frozen=True)
class RunBlock:
    """Runs of some intervals of periods.

    Attributes:
        runs: By their number of stages; as many of which there are none are left out.
        num_layers: L
        num_intervals: W
    """

    runs: dict[int, Runs]
    num_layers: int
    num_intervals: int


class RunPass:
    """The dynamic programme over runs, from the last stage to the first, at prices per device.

    Args:
        block: Its runs.
        prices: [K] Of a device.
        num: Most stages.
        exact: Whether there are as many stages: each has a layer, also those before.
        check: Called between positions; may raise.

    Attributes:
        num_intervals: W
    """

    def __init__(
        self,
        block: RunBlock,
        prices: Array,
        num: int,
        check: Callable[[], None],
        *,
        exact: bool,
    ):
        self._runs = runs = block.runs
        self._prices = prices
        self.num_intervals = block.num_intervals
        layers = block.num_layers
        longest = max((own.longest for own in runs.values()), default=0)
        room = np.empty((longest, layers, self.num_intervals), np.float32)
        self._best = {}  # of all kinds, by stages
        for j, some in runs.items():
            best: Array | None = None
            for k, own in some.costs.items():
                added = some.priced(k, j * prices[k])
                if best is None:
                    best = own + added
                else:
                    here = room[: len(own)]
                    np.add(own, added, out=here)
                    np.minimum(best, here, out=best)
            assert best is not None
            self._best[j] = best
        size = layers + 1 + longest
        start = np.full((size, self.num_intervals), np.inf, np.float32)
        start[layers] = 0.0
        self._rests = [start]  # by last stages, [L+1+J, W] by first layer
        for s in range(1, num + 1):
            check()
            rest = np.full_like(start, np.inf)
            low, high = num - s if exact else 0, layers + 1 - s
            for j, best in self._best.items():
                if j <= s and low < high:
                    after = self._after(j, s - j)[:, low:high]
                    total = room[: len(best), : high - low]
                    np.add(best[:, low:high], after, out=total)
                    np.minimum(rest[low:high], total.min(axis=0), out=rest[low:high])
            self._rests.append(rest)

    def _after(self, j: int, num: int) -> Array:
        """[J, L, W] What so many stages after a run take."""
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
                (self._best[j][:, layer, w] + self._after(j, num - j)[:, layer, w], j)
                for j in self._best
                if j <= num
            ]
            own, j = min(each, key=lambda x: float(x[0].min()))
            i, some = int(own.argmin()), self._runs[j]
            k = min(
                some.costs,
                key=lambda k: float(
                    some.costs[k][i, layer, w] + some.barred[k][i, layer, 0] + j * self._prices[k]
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
