"""Runs: stages of a pipeline that follow each other in one node, and pipelines made of them."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ._branch_node import span_of
from ._chain_tables import Array, Tables

Span = tuple[int, int]  # of intervals or layers: from, up to
#: By last stages and kind whether of their first a node of that kind has all copies.
Wholes = Mapping[tuple[int, int], bool]


class Sort(NamedTuple):
    """Of a run.

    Attributes:
        stages: How many.
        whole: So many of them its node must have of all copies.
    """

    stages: int
    whole: int = 0

    def suits(self, num: int, kinds: Collection[int], wholes: Wholes) -> bool:
        """Whether a run on one of some kinds may begin where there are so many stages left."""
        wanted = unwanted = 0
        for (own, k), is_whole in wholes.items():
            if num - self.stages < own <= num:
                wanted += self.stages + 1 if is_whole and k not in kinds else is_whole
                unwanted += not is_whole and k in kinds
        return wanted <= self.whole <= self.stages - unwanted


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
        self._card_sums = t.card_sums[self._at].astype(np.float32)
        self._known: dict[int, list[list[Array]]] = {}  # by block
        self._rings: dict[tuple[int, int], Array] = {}  # by block and kind

    def runs(
        self,
        span: Span,
        allowed: Mapping[Sort, Mapping[int, Array]],
        ringed: Mapping[Sort, Mapping[int, Array]],
        check: Callable[[], None],
    ) -> "list[RunBlock]":
        """Those of some intervals, block by block, by their sort.

        Args:
            span: The intervals: from, up to.
            allowed: By sort and kind, [L+1, L+1] whether there may be such a run.
            ringed: Of some of them, [L+1, L+1] the seconds that the ring of one of their stages
                takes at least.
            check: Called between kinds; may raise.
        """
        may = {sort: {k: x[self._at] for k, x in own.items()} for sort, own in allowed.items()}
        least = {sort: {k: x[self._at] for k, x in own.items()} for sort, own in ringed.items()}
        found = []
        for block in range(span[0] // _BLOCK, -(-span[1] // _BLOCK)):
            begin = block * _BLOCK
            if block not in self._known:
                at = np.arange(begin, min(begin + _BLOCK, len(self.first)))
                self._known[block] = [self._block(k, at, check) for k in range(self._t.num_kinds)]
            inside = slice(max(span[0] - begin, 0), min(span[1] - begin, _BLOCK))
            found.append(self._among(block, inside, may, least))
        return found

    def _longest_ring(self, block: int, k: int) -> Array:
        """[L, L, W] Of a stage that lies inside of a run, the seconds of its ring."""
        if (block, k) not in self._rings:
            t, num = self._t, self._t.num_layers
            begin = block * _BLOCK
            last = self.last[begin : begin + _BLOCK]
            found = np.zeros((num + 1, num + 1, len(last)), np.float32)
            ends = np.arange(num + 1)[:, None]
            for a in range(num - 1, -1, -1):
                # [W] Where a stage that begins here ends at last.
                most = a + np.searchsorted(t.seconds[k, a, a:], last, side="right") - 1
                own = t.card_sums[a, np.minimum(most, ends)]
                np.maximum(found[a + 1], np.where(ends > a, own, 0.0), out=found[a])
            self._rings[block, k] = found[self._at]
        return self._rings[block, k]

    def _block(self, k: int, at: Array, check: Callable[[], None]) -> list[Array]:
        """[L, L, W] By stages, runs of a kind: how many layers follow the first, and that one."""
        check()
        ends = self._ends[:, :, None]
        return [
            np.where(ends, made[self._at], np.float32(np.inf))
            for made in self._made(k, self._t.copies_inside[k], at)
        ]

    def _among(
        self,
        block: int,
        inside: slice,
        may: Mapping[Sort, Mapping[int, Array]],
        least: Mapping[Sort, Mapping[int, Array]],
    ) -> "RunBlock":
        """What may be of some intervals of a block."""
        known, found = self._known[block], {}
        for sort, kinds in may.items():
            own = {k: known[k][sort.stages - 1][:, :, inside] for k in kinds}
            # What is there for short periods is there for the longest.
            here = {k: kinds[k] & np.isfinite(x[:, :, -1]) for k, x in own.items()}
            lengths = np.flatnonzero(np.any([x.any(axis=1) for x in here.values()], axis=0))
            if len(lengths):
                long = slice(int(lengths[0]), int(lengths[-1]) + 1)
                bars = {k: x[long, :, None] for k, x in here.items()}
                for k, x in least.get(sort, {}).items():
                    longest = self._longest_ring(block, k)[long, :, inside]
                    bars[k] = bars[k] & (longest >= x[long, :, None])
                zero, none = np.float32(0), np.float32(np.inf)
                found[sort] = Runs(
                    shortest=long.start + 1,
                    costs={k: x[long] for k, x in own.items()},
                    barred={k: np.where(x, zero, none) for k, x in bars.items()},
                    rings=self._card_sums[long, :, None],
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
        sort: Of it.
        layers: The first, and the one after the last.
    """

    kind: int
    sort: Sort
    layers: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Those of as many stages, by how many layers more than the shortest, and the first layer.

    Attributes:
        shortest: Layers.
        costs: By kind, [J, L, W] fill / period; infinite: there is none.
        barred: By kind, [J, L, 1 or W] infinite where a run is not allowed, else 0.
        rings: [J, L, 1] Seconds of the ring of very many copies.
    """

    shortest: int
    costs: dict[int, Array]
    barred: dict[int, Array]
    rings: Array

    @property
    def longest(self) -> int:
        """Layers."""
        return self.shortest + len(next(iter(self.barred.values()))) - 1

    def cost(self, k: int, more: int, first: int, w: int, price: float, card: float) -> float:
        """Of one of a kind, at its price and that of its ring."""
        barred = self.barred[k][more, first]
        own = self.costs[k][more, first, w] + barred[min(w, len(barred) - 1)]
        return float(own) + price + card * float(self.rings[more, first, 0])

    def priced(self, k: int, price: float, card: float) -> Array:
        """[J, L, 1 or W] What is to be added to the costs of a kind."""
        added: Array = self.barred[k] + np.float32(price)
        if card:
            added = added + np.float32(card) * self.rings
        return added


@dataclasses.dataclass(frozen=True)
class RunBlock:
    """Runs of some intervals of periods.

    Attributes:
        runs: By their sort; sorts of which there are none are left out.
        num_layers: L
        num_intervals: W
    """

    runs: dict[Sort, Runs]
    num_layers: int
    num_intervals: int


@dataclasses.dataclass(frozen=True)
class _RunMove:
    """Runs of a sort on some kinds at prices.

    Attributes:
        sort: Theirs.
        counts: How many of the counted whole stages they have.
        kinds: Theirs.
        best: [J, L, W] The least of all kinds.
    """

    sort: Sort
    counts: int
    kinds: tuple[int, ...]
    best: Array


class RunPass:
    """The dynamic programme over runs, from the last stage to the first, at prices of runs.

    Args:
        block: Its runs.
        prices: By sort, [K] of a run, and [K] of a second of its ring.
        forms: Of pipelines stages, and how many of them nodes of the counted kind have of all
            copies; None: any number.
        counted: That kind; None: that is not asked.
        windows: Of some numbers of last stages, the layers with which they may begin.
        wholes: What is known of stages.
        check: Called between positions; may raise.
        has_fills: Whether the seconds of runs count, and not their prices alone.

    Attributes:
        num_intervals: W
    """

    def __init__(
        self,
        block: RunBlock,
        prices: Mapping[Sort, tuple[Array, Array]],
        forms: Collection[tuple[int, int | None]],
        counted: int | None,
        windows: Mapping[int, Span],
        wholes: Wholes,
        check: Callable[[], None],
        *,
        has_fills: bool = True,
    ):
        self._runs = runs = block.runs
        self._has_fills = has_fills
        self._prices = prices
        self.num_intervals = block.num_intervals
        nums = [num for num, _ in forms]
        layers = block.num_layers
        longest = max((own.longest for own in runs.values()), default=0)
        room = np.empty((longest, layers, self.num_intervals), np.float32)
        self._moves = []
        for sort, some in runs.items():
            for kinds in [[k] for k in some.costs] if sort.whole else [list(some.costs)]:
                counts = sort.whole if kinds == [counted] else 0
                self._moves.append(self._move(sort, counts, kinds, room))
        size = layers + 1 + longest
        start = np.full((size, self.num_intervals), np.inf, np.float32)
        start[layers] = 0.0
        # By last stages and by counted ones among them, [L+1+J, W] by first layer.
        self._rests = [{0: start}]
        alive = [(layers, layers + 1)]  # by last stages, where there are some
        self._first_moves: list[list[_RunMove]] = [[]]  # by last stages, with which they may begin
        latest = self._latest(max(nums), layers)
        for s in range(1, max(nums) + 1):
            check()
            self._first_moves.append(
                [
                    move
                    for move in self._moves
                    if move.sort.stages <= s and move.sort.suits(s, move.kinds, wholes)
                ]
            )
            # Stages before and after have a layer each.
            low, high = max(0, min(nums) - s), min(layers - s, latest[max(nums) - s]) + 1
            if s in windows:
                low, high = max(low, windows[s][0]), min(high, windows[s][1])
            rests = {}
            # So many are counted of these that those before can have the others.
            ends = [
                (max(0, own - num + s), own) for num, own in forms if own is not None and num >= s
            ]
            told = {whole for least, most in ends for whole in range(least, min(most, s) + 1)}
            for whole in {0} if counted is None else told:
                rest = np.full_like(start, np.inf)
                for move in self._may(s, whole):
                    self._lengthen(move, s, whole, (low, high), alive, room, rest)
                rests[whole] = rest
            self._rests.append(rests)
            there = [np.isfinite(rest[:, -1]) for rest in rests.values()]
            alive.append(span_of(np.any(there, axis=0)))

    def _latest(self, num: int, layers: int) -> list[int]:
        """By first stages, with which layer others begin at last."""
        moves: dict[int, Array] = {}
        for move in self._moves:
            lengths = np.arange(len(move.best))[:, None] + self._runs[move.sort].shortest
            ends = np.where(np.isfinite(move.best[:, :, -1]), lengths + np.arange(layers), 0)
            last = np.maximum.accumulate(ends.max(axis=0))
            moves[move.sort.stages] = np.maximum(last, moves.get(move.sort.stages, 0))
        found = [0]
        for n in range(1, num + 1):
            each = [
                own[min(found[n - stages], layers - 1)]
                for stages, own in moves.items()
                if stages <= n
            ]
            found.append(int(max(each, default=0)))
        return found

    def _lengthen(
        self,
        move: _RunMove,
        num: int,
        whole: int,
        rows: Span,
        alive: Sequence[Span],
        room: Array,
        rest: Array,
    ) -> None:
        """Put runs before what is left, where their first layers and those after them may lie."""
        shortest, (first, last) = self._runs[move.sort].shortest, alive[num - move.sort.stages]
        low = max(rows[0], first - shortest - len(move.best) + 1)
        high = min(rows[1], last - shortest)
        begin = max(0, first - shortest - high + 1)
        end = min(len(move.best), last - shortest - low)
        if low < high and begin < end:
            after = self._after(move, num, whole, (low, high), (begin, end))
            total = room[: end - begin, : high - low]
            np.add(move.best[begin:end, low:high], after, out=total)
            least = np.minimum.reduce(total, axis=0)
            np.minimum(rest[low:high], least, out=rest[low:high])

    def _move(self, sort: Sort, counts: int, kinds: Sequence[int], room: Array) -> _RunMove:
        some, best = self._runs[sort], None
        for k in kinds:
            added = some.priced(k, *(float(own[k]) for own in self._prices[sort]))
            costs = some.costs[k]
            if not self._has_fills:
                costs = np.where(np.isfinite(costs), np.float32(0), costs)
            if best is None:
                best = costs + added
            else:
                here = room[: len(best)]
                np.add(costs, added, out=here)
                np.minimum(best, here, out=best)
        assert best is not None
        return _RunMove(sort, counts, tuple(kinds), best)

    def _may(self, num: int, whole: int) -> list[_RunMove]:
        """Runs with which so many stages, of which so many are counted, may begin."""
        return [
            move
            for move in self._first_moves[num]
            if whole - move.counts in self._rests[num - move.sort.stages]
        ]

    def _after(self, move: _RunMove, num: int, whole: int, rows: Span, more: Span) -> Array:
        """[J, R, W] What is left of them after runs that begin at these layers, of such lengths."""
        rest = self._rests[num - move.sort.stages][whole - move.counts]
        by_layer, by_interval = rest.strides
        return np.ndarray(
            (more[1] - more[0], rows[1] - rows[0], self.num_intervals),
            rest.dtype,
            rest,
            (rows[0] + self._runs[move.sort].shortest + more[0]) * by_layer,
            (by_layer, by_layer, by_interval),
        )

    def fills(self, num: int, whole: int | None) -> Array:
        """[W] The least fill / period + prices of pipelines of so many stages.

        Args:
            num: Stages.
            whole: How many of them are counted; None: that is not asked.
        """
        return self._rests[num][whole or 0][0].astype(float)

    def pipeline(self, w: int, num: int, whole: int | None) -> list[Run]:
        """The runs of the best one of an interval."""
        found, layer, whole = [], 0, whole or 0
        while num:
            each = []
            for move in self._may(num, whole):
                after = self._after(move, num, whole, (layer, layer + 1), (0, len(move.best)))
                each.append((move.best[:, layer, w] + after[:, 0, w], move))
            own, move = min(each, key=lambda x: float(x[0].min()))
            i, some, sort = int(own.argmin()), self._runs[move.sort], move.sort
            price, card = self._prices[sort]
            k = min(
                move.kinds,
                key=lambda k: some.cost(k, i, layer, w, float(price[k]), float(card[k])),
            )
            end = layer + some.shortest + i
            found.append(Run(k, sort, (layer, end)))
            num, layer, whole = num - sort.stages, end, whole - move.counts
        return found


def _joined(before: Array, after: Array) -> Array:
    """[L+1, L+1, W] The least of what begins with one and ends with another."""
    found = np.full_like(before, np.inf)
    for m in range(1, len(before) - 1):
        part = found[:m, m + 1 :]
        np.minimum(part, before[:m, m, None] + after[None, m, m + 1 :], out=part)
    return found
