"""A time that no plan beats on nodes that have several devices and one network card each."""

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ._bound import Bound
from ._branch_node import span_of
from ._cell_packing import CellPacking
from ._chain_tables import Array
from ._node_packing import RunPrices
from ._run_cells import RunCell, RunColumn, RunForm
from ._runs import Run, RunBlock, RunGrid, RunPass, Sort, Span

_RATIOS = (1.1, 1.03, 1.008)  # of the periods of an interval, finer and finer
_MOST_PASSES = 8  # of prices, at a cell
_NEW = 8  # columns of a pass
_MOST_COLUMNS = 150  # of a cell
_BETTER = 1e-3  # a pass that gains less
_PATIENCE = 4  # such passes in a row
_ENOUGH = 0.5  # of what a cell falls short, for which no more passes are worth it
_WIDE_TAIL = 0.05  # of the time: limits on the tail that are halved before numbers of stages
_SLIM_TAIL = 0.01  # likewise, before what of all copies lies in one node
_TOLD_TAIL = 0.02  # likewise, before what pipelines that were met have unlike
_LEAST_TAIL = 1e-3  # of the time: no narrower limits on the tail
_MOST_COUNTED = 9  # stages that nodes have of all copies; more of them are not counted
_SHARP = 0.3  # of a microbatch: periods that are known so well tell whole ones
_MOST_WHOLE = 100  # microbatches of a copy: of more it matters little that they are whole
_ROUNDED = 1 - 2e-5  # sums of float32


@dataclasses.dataclass(frozen=True)
class _Look:
    """What prices say of a cell.

    Attributes:
        floors: By form.
        span: Intervals that matter.
        columns: The best pipelines.
    """

    floors: Mapping[RunForm, float]
    span: Span
    columns: list[RunColumn]


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
    allows, and pay for their least. Within a part a dynamic programme over runs gives, at prices of
    what runs take of nodes, the pipeline with the most microbatches beyond what it costs; nodes and
    copies are as many as there are. So any prices bound the part, in the same pass for every time:
    as in `Bound.refute`. They are on the way to those of a packing of the pipelines that were met.

    *Whole numbers.* A stage of which a node has all copies is a stage of all copies, so that all
    have as many. A copy runs whole microbatches: at a period no more than fit after the least fill,
    and at no less than the least price. Either is asked for where it may tell.

    *Alike in all copies.* All copies have one cut, and a stage of which a node has all copies is
    one of each of them. Pipelines that pack best often have neither: a cell is then parted by the
    layer with which some stage begins, or by whether a node has all copies of it.

    The part with the least bound is looked at next: at better prices and finer periods, then by
    halves of its tails, by numbers of stages, by how many a node has of all copies, and by what
    copies have alike: of such parts by those in which the pipelines that were met run least.

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
        self._largest = int(np.argmax(t.copies_inside))  # the kind of the largest nodes
        self._packing = CellPacking(t, bound.num_microbatches, seconds)
        self._least_tails: dict[tuple[int, int], float] = {}
        self._open: list[tuple[float, int, RunCell]] = []
        self._made = 0
        self._floors = {num: seconds for num in numbers}
        self._begin(numbers, bound.worth_batch(prices))

    @property
    def floors(self) -> dict[int, float]:
        """By number of stages, what no plan takes less than."""
        floors = dict(self._floors)
        for _, _, cell in self._open:
            for form, floor in cell.floors.items():
                floors[form.num] = min(floors[form.num], floor)
        return floors

    @property
    def least(self) -> float:
        """The least time that any plan may take."""
        return min(self._open[0][0] if self._open else self.seconds, *self._floors.values())

    def step(self) -> bool:
        """Look closer at the plans that are bounded least; False: nothing is left to look at."""
        while self._open:
            cell = self._open[0][2]
            # No better is known of a number of stages than of the part that stays as it is.
            floors = {f: x for f, x in cell.floors.items() if x < self._floors[f.num]}
            if floors:
                break
            heapq.heappop(self._open)
        else:
            return False
        cells = self._refined(dataclasses.replace(cell, floors=floors))
        heapq.heappop(self._open)
        for new in cells:
            self._push(new)
        return True

    def _push(self, cell: RunCell) -> None:
        cell = cell.below(self.seconds * (1 - 1e-9))
        if cell.floors:
            self._made += 1
            heapq.heappush(self._open, (cell.floor, self._made, cell))

    def _begin(self, numbers: dict[int, float], prices: Sequence[float]) -> None:
        """A cell for every class of copies."""
        total, inside = sum(self._t.num_devices), max(self._t.copies_inside)
        most_tail = self.seconds - self._bound.least_work
        for copies in [*((n, n) for n in range(1, inside + 1)), (inside + 1, total)]:
            floors = {}
            for num, floor in numbers.items():
                most = self._packing.most_copies(copies, num)
                if max(copies[0], self._bound.copies(num, self.seconds)) <= most:
                    floors[RunForm(num)] = floor
                    self._least_tails[num, copies[0]] = self._least_tail(num, copies[0], most)
            if floors:
                least = min(self._least_tails[form.num, copies[0]] for form in floors)
                self._push(
                    RunCell(
                        floors=floors,
                        copies=copies,
                        tail=(least, max(least, most_tail)),
                        level=0,
                        span=(0, len(self._grids[0].first)),
                        prices=self._packing.nodes(copies[0]).by_device(prices),
                    )
                )

    def _least_tail(self, num: int, least: int, most: int) -> float:
        single = self._bound.least_tails(num)[1]
        return single if most == 1 else max(single, self._bound.tails_of(least)[1][num - 1])

    def _allowed(self, copies: int, tail: float) -> dict[Sort, dict[int, Array]]:
        """[L+1, L+1] By sort and kind, which runs plans of so many copies or more can have."""
        t = self._t
        stage = t.least_reduce(copies) + t.update <= tail * (1 + 1e-9)
        ring = t.card_sums * (1 - 1 / copies) <= tail * (1 + 1e-9)
        found: dict[Sort, dict[int, Array]] = {}
        for k, sorts in enumerate(self._packing.nodes(copies).sorts):
            for sort in sorts:
                own = np.ones_like(ring) if sort.whole else ring
                if sort.stages == 1:
                    own = own & stage[k]
                if sort.whole and t.copies_inside[k] == copies:
                    # It has devices for nothing else: all of the global batch comes and goes.
                    own = own & (self._passed[k] <= self.seconds)
                found.setdefault(sort, {})[k] = own
        return found

    def _ringed(self, copies: int, tail: float) -> dict[Sort, dict[int, Array]]:
        """[L+1, L+1] What the ring of one of its whole stages takes, as the others fit the tail."""
        found: dict[Sort, dict[int, Array]] = {}
        for k, sorts in enumerate(self._packing.nodes(copies).sorts):
            for sort in sorts:
                if sort.whole:
                    more = self._t.card_sums - tail / (1 - 1 / copies)
                    found.setdefault(sort, {})[k] = more * (1 - 1e-6) / sort.whole
        return found

    def _blocks(self, cell: RunCell) -> list[RunBlock]:
        """The runs that the plans of a cell can have, by period."""
        known = cell.copies[0], cell.tail[1]
        grid = self._grids[cell.level]
        return grid.runs(cell.span, self._allowed(*known), self._ringed(*known), self._check)

    def _most_whole(self, cell: RunCell) -> int:
        """Stages of which those nodes can have all copies."""
        return self._packing.nodes(cell.copies[0]).most_whole(self._largest)

    def _with_count(self, cell: RunCell, columns: Sequence[RunColumn]) -> RunCell:
        """Counted, if some pipelines have more such stages than can be, or not all as many."""
        most = self._most_whole(cell)
        if cell.counted is not None or not 0 < most < _MOST_COUNTED:
            return cell
        counts = {x.form(self._largest).whole or 0 for x in columns}
        is_rough = not cell.level or len(cell.nums) > 1
        if max(counts, default=0) <= most and (len(counts) < 2 or is_rough):
            return cell
        # What lies in one node of all copies is the same of all copies.
        floors = {
            RunForm(form.num, whole): floor
            for form, floor in cell.floors.items()
            for whole in range(min(most, form.num) + 1)
        }
        return dataclasses.replace(cell, floors=floors, counted=self._largest)

    def _run_prices(self, cell: RunCell, items: Array) -> RunPrices:
        return self._packing.nodes(cell.copies[0]).priced(items, cell.tail[1])

    def _pass(
        self,
        cell: RunCell,
        blocks: Sequence[RunBlock],
        prices: RunPrices,
        *,
        has_fills: bool = True,
    ) -> tuple[list[RunPass], dict[RunForm, Array]]:
        """And [W] by form fill / period + prices."""
        known = cell.floors, cell.counted, cell.windows, cell.wholes
        passes = [
            RunPass(block, prices.runs, *known, self._check, has_fills=has_fills)
            for block in blocks
        ]
        fills = {
            form: _ROUNDED * np.concatenate([own.fills(*form) for own in passes])
            for form in cell.floors
        }
        return passes, fills

    def _least_fills(self, cell: RunCell, blocks: Sequence[RunBlock]) -> dict[RunForm, Array]:
        """[W] By form, in periods, at any prices; none where microbatches need not be whole."""
        if not cell.is_integral:
            return {}
        return self._pass(cell, blocks, self._run_prices(cell, np.zeros_like(cell.prices)))[1]

    def _looked(
        self,
        cell: RunCell,
        items: Array,
        blocks: Sequence[RunBlock],
        least: Mapping[RunForm, Array],
    ) -> _Look:
        """At prices: a cell's floors, the periods that matter, and its best pipelines."""
        prices = self._run_prices(cell, items)
        passes, fills = self._pass(cell, blocks, prices)
        first = self._grids[cell.level].first[slice(*cell.span)]
        if cell.is_integral:
            _, costs = self._pass(cell, blocks, prices, has_fills=False)
        wanted, worth = self._num_microbatches * (1 - 1e-9), prices.worth
        floors, excesses, matter = {}, {}, np.zeros(len(first), bool)
        for form, fill in fills.items():
            most = self._packing.most_copies(cell.copies, form.num)
            tail = max(cell.tail[0], self._least_tails[form.num, cell.copies[0]])
            needed = (wanted - worth) / most
            seconds = first * (needed - 1 + fill)
            excess = 1 + (self.seconds - tail) / first - fill
            if cell.is_integral:
                num = np.ceil(needed + costs[form] - 1e-6)
                seconds = np.maximum(seconds, first * (num - 1 + least[form]))
                num = np.floor(1 + (self.seconds - tail) / first - least[form] + 1e-6)
                with np.errstate(invalid="ignore"):
                    excess = np.where(
                        np.isfinite(fill), np.minimum(excess, num - costs[form]), -np.inf
                    )
            floors[form] = tail + float(seconds.min(initial=np.inf)) if needed > 0 else 0.0
            others = worth + (most - 1) * max(0.0, float(excess.max(initial=-np.inf)))
            matter |= others + excess >= wanted
            excesses[form] = excess
        columns = self._columns(cell, prices, passes, fills, excesses)
        begin, (low, high) = cell.span[0], span_of(matter)
        return _Look(floors, (begin + low, begin + high), columns)

    def _refined(self, cell: RunCell) -> list[RunCell]:
        """A cell at better prices and finer periods, or its parts."""
        columns = cell.suiting
        blocks, best, num_alike = self._blocks(cell), 0.0, 0
        least = self._least_fills(cell, blocks)
        center, prices, seconds = cell.prices, cell.prices, self.seconds
        if columns:
            asked, seconds = self._packing.prices(cell, columns, seconds)
            if seconds < self.seconds * (1 - 1e-6):
                prices = asked
        for _ in range(_MOST_PASSES):
            look = self._looked(cell, prices, blocks, least)
            columns = [*columns, *look.columns][-_MOST_COLUMNS:]
            floor = min(look.floors.values())
            num_alike = 0 if floor > best * (1 + _BETTER) else num_alike + 1
            if floor > best:
                best, center = floor, prices
            before, cell = cell, self._narrowed(cell, look, center)
            cell = self._with_count(cell, look.columns)
            if not cell.floors or cell.span[0] == cell.span[1]:
                return []
            if num_alike == _PATIENCE or not columns:
                break
            if (cell.span, cell.counted) != (before.span, before.counted):
                blocks = self._blocks(cell)
                least = self._least_fills(cell, blocks)
            prices, seconds = self._packing.prices(cell, columns, seconds)
            if best > seconds - _ENOUGH * (self.seconds - seconds):
                break
        return self._parts(dataclasses.replace(cell, columns=tuple(columns)))

    def _narrowed(self, cell: RunCell, look: _Look, prices: Array) -> RunCell:
        """What a look left of it."""
        floors = {form: max(own, look.floors[form]) for form, own in cell.floors.items()}
        cell = dataclasses.replace(cell, floors=floors, span=look.span, prices=prices)
        return cell.below(self.seconds * (1 - 1e-9))

    def _parts(self, cell: RunCell) -> list[RunCell]:
        """With finer periods, or of each form, or halves of a cell; none: it stays so."""
        low, high = cell.tail
        is_narrow = high - low <= _LEAST_TAIL * self.seconds
        is_near = cell.floor * (1 + 1.5 * (_RATIOS[cell.level] - 1)) > self.seconds
        # A copy's microbatches, and how many of them a period of an interval may mean more.
        num = self._num_microbatches / self._packing.most_copies(cell.copies, cell.nums[-1])
        is_finest = cell.level + 1 == len(_RATIOS)
        is_sharp = is_finest or num * (_RATIOS[cell.level] - 1) < _SHARP
        matters = is_narrow or cell.floor * (1 + 1 / num) > self.seconds
        if is_sharp and matters and num < _MOST_WHOLE and not cell.is_integral:
            return [dataclasses.replace(cell, is_integral=True)]
        if not is_finest and (is_narrow or is_near):
            span = self._finer(cell.level, cell.span)
            return [dataclasses.replace(cell, span=span, level=cell.level + 1)]
        nums = cell.nums
        parts: list[dict[RunForm, float]] = []
        if len(nums) > 1 and high - low < _WIDE_TAIL * self.seconds:
            parts = [{f: x for f, x in cell.floors.items() if f.num == num} for num in nums]
        elif len(cell.floors) > 1 and high - low < _SLIM_TAIL * self.seconds:
            parts = [{form: floor} for form, floor in cell.floors.items()]
        if parts:
            return [dataclasses.replace(cell, floors=own) for own in parts]
        options = self._packing.told(cell) if high - low < _TOLD_TAIL * self.seconds else []
        if not is_narrow:
            middle = (low + high) / 2
            halves = (low, middle), (middle, high)
            options.append([dataclasses.replace(cell, tail=half) for half in halves])
        if len(options) < 2:
            return options[0] if options else self._ended(cell)
        return max(
            options, key=lambda parts: sorted(self._packing.lack(x, cell.floor) for x in parts)
        )

    def _ended(self, cell: RunCell) -> list[RunCell]:
        """It stays as it is."""
        for form, floor in cell.floors.items():
            self._floors[form.num] = min(self._floors[form.num], floor)
        return []

    def _finer(self, level: int, span: Span) -> Span:
        """Intervals of the next grid that hold what some of a grid hold."""
        grid, finer = self._grids[level], self._grids[level + 1]
        low, high = grid.first[span[0]], grid.last[span[1] - 1]
        return span_of((finer.last >= low) & (finer.first <= high))

    def _columns(
        self,
        cell: RunCell,
        prices: RunPrices,
        passes: Sequence[RunPass],
        fills: Mapping[RunForm, Array],
        excesses: Mapping[RunForm, Array],
    ) -> list[RunColumn]:
        """Pipelines of the greatest excess, of periods that differ."""
        first = self._grids[cell.level].first[slice(*cell.span)]
        places = [(own, w) for own in passes for w in range(own.num_intervals)]
        forms, each = list(excesses), np.array(list(excesses.values()))
        form_at, excess = each.argmax(axis=0), each.max(axis=0)
        apart, columns = len(excess) // (3 * _NEW), []
        taken: list[int] = []
        for w in np.argsort(-excess).tolist():
            if not np.isfinite(excess[w]) or len(taken) == _NEW:
                break
            if any(abs(w - other) < apart for other in taken):
                continue
            taken.append(w)
            own, at_w = places[w]
            form = forms[int(form_at[w])]
            runs = own.pipeline(at_w, *form)
            cost = sum(self._cost(run, prices) for run in runs)
            fill = float(first[w] * (fills[form][w] - cost))
            tail = max(self._run_tail(run, cell.copies[0]) for run in runs)
            columns.append(RunColumn(tuple(runs), fill, float(first[w]), tail))
        return columns

    def _run_tail(self, run: Run, copies: int) -> float:
        """Plans that have the run reduce and update no less long."""
        t, at = self._t, (run.kind, *run.layers)
        tail = 0.0
        if run.sort.stages == 1:
            tail = float(t.least_reduce(copies)[at] + t.update[at])
        if run.sort.stages > max(t.copies_inside[run.kind] - copies + 1, 1):
            tail = max(tail, self._ring(run, copies))
        return tail

    def _ring(self, run: Run, copies: int) -> float:
        return float(self._t.card_sums[run.layers]) * (1 - 1 / copies)

    def _cost(self, run: Run, prices: RunPrices) -> float:
        price, card = prices.runs[run.sort]
        return float(price[run.kind] + card[run.kind] * self._t.card_sums[run.layers])
