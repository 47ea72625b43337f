"""A time that no plan beats on nodes that have several devices and one network card each."""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from ._bound import Bound
from ._branch_node import span_of
from ._chain_tables import Array
from ._packing import fractional_packing
from ._runs import RunBlock, RunGrid, RunPass, Span

_RATIOS = (1.1, 1.03, 1.008)  # of the periods of an interval, finer and finer
_MOST_PASSES = 8  # of prices, at a cell
_NEW = 4  # columns of a pass
_BETTER = 1e-3  # a pass that gains less is the last
_LEAST_TAIL = 1e-3  # of the time: no narrower limits on the tail
_ROUNDED = 1 - 2e-5  # sums of float32


@dataclasses.dataclass(frozen=True)
class _Column:
    """A relaxed pipeline.

    Attributes:
        used: Devices of each kind.
        fill: Seconds.
        period: Seconds.
        tail: Of no plan with less reduction and update is it a part.
    """

    used: tuple[int, ...]
    fill: float
    period: float
    tail: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cell:
    """Plans of one number of stages, of some numbers of copies, and of some tails.

    Attributes:
        floor: None of them takes fewer seconds.
        num: Stages.
        copies: The fewest and the most.
        tail: The least reduction and update, and the most.
        level: Of the grid of periods.
        span: Intervals of periods of that grid that their copies can have.
        prices: Of a device of each kind.
        columns: Pipelines that were met, among them those of other cells.
    """

    floor: float
    num: int
    copies: tuple[int, int]
    tail: tuple[float, float]
    level: int
    span: Span
    prices: Array
    columns: tuple[_Column, ...] = ()


class NodeRuns:
    """Lower bounds by number of stages, for plans on devices that lie in several nodes.

    *What `Bound` leaves out.* A kind may have more devices than a node has, so that some boundaries
    between its stages are crossed over network cards; and what saves crossings costs sums: a card
    carries the rings of all stages that its node has.

    *Runs.* The stages of a copy fall into runs: those that follow each other in one node. A run is
    no longer than the node has devices, and the boundaries at its ends take what the cards take.
    Every stage of it of which not all copies are in that node has a ring over its card. So if a
    plan's reduction takes so long, the rings of each run take no longer; and a stage that a node
    has of all copies sends the whole global batch over its card, in each direction.

    *Cells.* Plans are parted by the number of copies, for a node can have all of them only of few,
    and by the seconds of their reduction and update: those of a part have runs that their greatest
    allows, and pay for their least. Within a part a dynamic programme over runs gives, at prices
    per device, the pipeline with the most microbatches beyond what its devices are worth; devices
    and copies are as many as there are. So any prices bound the part, in the same pass for every
    time: as in `Bound.refute`. Prices are those of a packing of the pipelines that were met. The
    part with the least bound is looked at next: at better prices and finer periods, then in halves.

    Args:
        bound: Of the chain, whose kinds lie in nodes of their own.
        seconds: No plan that takes as long is asked about.
        numbers: Of stages, to the least time that is known of plans of so many.
        prices: Of a device of each kind, to begin with.
        check: Called often; may raise.

    References:
        Barnhart et al., "Branch-and-Price: Column Generation for Solving Huge Integer Programs",
        Operations Research 46(3), 1998.
    """

    def __init__(
        self,
        bound: Bound,
        seconds: float,
        numbers: dict[int, float],
        prices: Sequence[float],
        check: Callable[[], None],
    ):
        t = bound.t
        assert t.shared is not None
        self._t, self._bound, self._check = t, bound, check
        self.seconds = seconds
        self._num_microbatches = bound.num_microbatches
        self._devices = np.array(t.num_devices, float)
        kinds = np.arange(t.num_kinds)
        crossed = np.maximum(t.cross[:, :-1, :-1], t.shared)  # [L+1, K, K]
        crossed[:, kinds, kinds] = np.where(
            np.array(t.num_nodes) > 1, crossed[:, kinds, kinds], np.inf
        )
        leaving = crossed.min(axis=2).T  # [K, L+1]
        leaving[:, [0, -1]] = 0.0
        leaving = np.where(np.isfinite(leaving), leaving, t.cross[:, kinds, kinds].T)
        low = bound.relaxation.least_period() * (1 - 1e-9)
        self._grids = [RunGrid(t, leaving, low, max(seconds, low), ratio) for ratio in _RATIOS]
        one_way = t.shared[:, kinds, kinds].T / 2  # [K, L+1]
        self._passed = self._num_microbatches * (one_way[:, :, None] + one_way[:, None, :])
        self._open: list[tuple[float, int, _Cell]] = []
        self._made = 0
        self._floors = {num: seconds for num in numbers}
        self._begin(numbers, np.array(bound.worth_batch(prices)))

    @property
    def floors(self) -> dict[int, float]:
        """By number of stages, what no plan takes less than."""
        floors = dict(self._floors)
        for floor, _, cell in self._open:
            floors[cell.num] = min(floors[cell.num], floor)
        return floors

    @property
    def least(self) -> float:
        """The least time that any plan may take."""
        return min(self._open[0][0] if self._open else self.seconds, *self._floors.values())

    def step(self) -> bool:
        """Look closer at the plans that are bounded least; False: nothing is left to look at."""
        if not self._open or self._open[0][0] > min(self._floors.values()):
            return False
        cell = self._open[0][2]
        cells = self._refined(cell)
        heapq.heappop(self._open)
        for new in cells:
            self._push(new)
        return True

    def _push(self, cell: _Cell) -> None:
        if cell.floor < self.seconds * (1 - 1e-9):
            self._made += 1
            heapq.heappush(self._open, (cell.floor, self._made, cell))

    def _begin(self, numbers: dict[int, float], prices: Array) -> None:
        """A cell for every number of stages and class of copies, from one pass over all of them."""
        total, inside = sum(self._t.num_devices), max(self._t.copies_inside)
        classes = [*((n, n) for n in range(1, inside + 1)), (inside + 1, total)]
        cells = []
        for num, floor in numbers.items():
            least, most = self._bound.copies(num, self.seconds), total // num
            for first, last in classes:
                copies = max(first, least), min(last, most)
                if copies[0] <= copies[1]:
                    cells.append(self._cell(num, copies, prices, floor))
        if cells:
            any_run = dataclasses.replace(cells[0], copies=(1, total), tail=(0.0, math.inf))
            most = max(cell.num for cell in cells)
            found = self._passes(self._blocks(any_run), prices, most, exact=False)
            for cell in cells:
                self._push(self._bounded(cell, _fills(found, cell.num)))

    def _cell(self, num: int, copies: tuple[int, int], prices: Array, floor: float) -> _Cell:
        bound, span = self._bound, (0, len(self._grids[0].first))
        single = bound.least_tails(num)[1]
        least = single if copies[1] == 1 else max(single, bound.tails_of(copies[0])[1][num - 1])
        tail = least, max(least, self.seconds - bound.least_work)
        return _Cell(
            floor=floor, num=num, copies=copies, tail=tail, level=0, span=span, prices=prices
        )

    def _allowed(self, copies: int, tail: float) -> list[list[Array]]:
        """[L+1, L+1] By kind and stages, which runs plans of so many copies or more can have."""
        t = self._t
        stage = t.least_reduce(copies) + t.update <= tail * (1 + 1e-9)
        ring = t.card_sums * (1 - 1 / copies) <= tail * (1 + 1e-9)
        found = []
        for k, inside in enumerate(t.copies_inside):
            # A node may have all copies of one stage of the run, if it has devices for the rest.
            free = inside - copies + 1
            # If it has for nothing else, all of the global batch comes and goes.
            passed = (free > 1) | (free == 1) & (self._passed[k] <= self.seconds)
            single = stage[k] & (ring | passed)
            found.append([single, *(ring | (j <= free) for j in range(2, inside + 1))])
        return found

    def _blocks(self, cell: _Cell) -> list[RunBlock]:
        """The runs that the plans of a cell can have, by period."""
        allowed = self._allowed(cell.copies[0], cell.tail[1])
        return self._grids[cell.level].runs(cell.span, allowed, self._check)

    def _passes(
        self, blocks: Sequence[RunBlock], prices: Array, num: int, *, exact: bool = True
    ) -> list[RunPass]:
        return [RunPass(block, prices, num, self._check, exact=exact) for block in blocks]

    def _excess(self, cell: _Cell, fills: Array) -> Array:
        """[W] Microbatches beyond what the devices are worth, by fills / periods + prices."""
        first = self._grids[cell.level].first[slice(*cell.span)]
        excess: Array = 1 + (self.seconds - cell.tail[0]) / first - fills
        return excess

    def _bounded(self, cell: _Cell, fills: Array) -> _Cell:
        """The cell with what its fills / periods + prices say: floor, and periods that matter."""
        first = self._grids[cell.level].first[slice(*cell.span)]
        wanted = self._num_microbatches * (1 - 1e-9)
        worth, most = float(cell.prices @ self._devices), cell.copies[1]
        needed = (wanted - worth) / most
        floor = cell.floor
        if needed > 0:
            seconds = (first * (needed - 1 + fills)).min(initial=np.inf)
            floor = max(floor, min(self.seconds, cell.tail[0] + _ROUNDED * float(seconds)))
        excess = self._excess(cell, fills * _ROUNDED)
        others = worth + (most - 1) * max(0.0, float(excess.max(initial=-np.inf)))
        low, high = span_of(others + excess >= wanted)
        begin = cell.span[0]
        return dataclasses.replace(cell, floor=floor, span=(begin + low, begin + high))

    def _refined(self, cell: _Cell) -> list[_Cell]:
        """A cell at better prices and finer periods, or its halves."""
        columns = [x for x in cell.columns if x.tail <= cell.tail[1]]
        prices = self._prices(cell, columns) if columns else cell.prices
        blocks, num_alike = self._blocks(cell), 0
        for _ in range(_MOST_PASSES):
            found = self._passes(blocks, prices, cell.num)
            fills = _fills(found, cell.num)
            columns += self._columns(cell, found, fills, prices)
            new = self._bounded(dataclasses.replace(cell, prices=prices), fills)
            if new.span[0] == new.span[1] or new.floor >= self.seconds * (1 - 1e-9):
                return []
            if new.span != cell.span:
                blocks = self._blocks(new)
            num_alike = 0 if new.floor > cell.floor * (1 + _BETTER) else num_alike + 1
            cell = new
            if num_alike == 2 or not columns:
                break
            prices = self._prices(cell, columns)
        cell = dataclasses.replace(cell, prices=prices, columns=tuple(columns))
        low, high = cell.tail
        is_narrow = high - low <= _LEAST_TAIL * self.seconds
        is_near = cell.floor * (1 + 1.5 * (_RATIOS[cell.level] - 1)) > self.seconds
        if cell.level + 1 < len(_RATIOS) and (is_narrow or is_near):
            span = self._finer(cell.level, cell.span)
            return [dataclasses.replace(cell, span=span, level=cell.level + 1)]
        if is_narrow:
            self._floors[cell.num] = min(self._floors[cell.num], cell.floor)
            return []
        middle = (low + high) / 2
        return [dataclasses.replace(cell, tail=half) for half in ((low, middle), (middle, high))]

    def _finer(self, level: int, span: Span) -> Span:
        """Intervals of the next grid that hold what some of a grid hold."""
        grid, finer = self._grids[level], self._grids[level + 1]
        low, high = grid.first[span[0]], grid.last[span[1] - 1]
        return span_of((finer.last >= low) & (finer.first <= high))

    def _columns(
        self, cell: _Cell, found: list[RunPass], fills: Array, prices: Array
    ) -> list[_Column]:
        """The pipelines of the greatest excess."""
        t, copies = self._t, cell.copies[0]
        first = self._grids[cell.level].first[slice(*cell.span)]
        places = [(own, w) for own in found for w in range(own.num_intervals)]
        excess = self._excess(cell, fills)
        columns = []
        for w in np.argsort(-excess)[:_NEW]:
            if not np.isfinite(excess[w]):
                continue
            used, tail = np.zeros(t.num_kinds, int), 0.0
            own, at_w = places[w]
            for run in own.pipeline(at_w, cell.num):
                used[run.kind] += run.stages
                at = run.kind, *run.layers
                free = t.copies_inside[run.kind] - copies + 1
                if run.stages == 1:
                    tail = max(tail, float(t.least_reduce(copies)[at] + t.update[at]))
                if run.stages > max(free, 1):
                    tail = max(tail, float(t.card_sums[run.layers]) * (1 - 1 / copies))
            fill = float(first[w] * (fills[w] - prices @ used))
            columns.append(_Column(tuple(used.tolist()), fill, float(first[w]), tail))
        return columns

    def _prices(self, cell: _Cell, columns: Sequence[_Column]) -> Array:
        """What devices are worth where they are packed with these pipelines."""
        left = self.seconds - cell.tail[0]
        used = np.array([x.used for x in columns])
        value = np.array([max(0.0, 1 + (left - x.fill) / x.period) for x in columns])
        most = cell.copies[1]
        _, prices, _ = fractional_packing(used, value, self._t.num_devices, most=most)
        # In less time all devices are worth less, by about the same, until it is the global batch.
        worth = self._num_microbatches - most * max(0.0, float((value - used @ prices).max()))
        return np.array(self._bound.worth_batch(prices.tolist(), worth))


def _fills(passes: Sequence[RunPass], num: int) -> Array:
    """[W] Of all of them."""
    return np.concatenate([own.fills(num) for own in passes])
