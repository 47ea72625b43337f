"""Plans of one number of stages below a time: refuted by branching on the cut that all share."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ._bound import Alive, Bound
from ._packing import fractional_packing
from ._priced import Priced, priced
from ._relaxed import Bands

_RATIO = 1.003
_MAX_INTERVALS = 200
_MAX_PASSES = 40
_NEW = 5  # columns of one pass
Box = tuple[tuple[int, int], ...]
_FEW = 1e6  # elements of a dynamic programme over mixes that is worth its time


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    """A relaxed pipeline."""

    cuts: tuple[int, ...]
    used: tuple[int, ...]
    fill: float
    period: float
    most: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Plans whose largest stage is of like size.

    Attributes:
        bound: Of them.
        tail: That they have at least.
        priced: Their pipelines by period.
        columns: Of all nodes.
    """

    bound: Bound
    tail: float
    priced: list[Priced]
    columns: list[_Column]


class Branching:
    """Whether a plan of so many stages can be faster than a time, by branch and price.

    A node is a box of cuts: for each boundary the layers it may lie at. At a node replicas may
    have cuts of their own, all of them in the box. The most microbatches that all devices can run
    is then a linear programme whose columns, the pipelines, are made as its prices ask for them
    (`Priced`); any prices bound it, so a node is refuted as soon as some prices do. Where they do
    not and the mixes of devices are few, `Bound.possible` looks closer: at whole microbatches.
    Where the programme's pipelines disagree about a boundary the box is parted there.

    Args:
        bound: Of the chain.
        num_stages: Stages.
        seconds: No later question is about a longer time.
        known: What the bound knows of plans faster than that.
        prices: Of a device of each kind, to begin with.
        check: Called often; may raise.

    References:
        Barnhart et al., "Branch-and-Price: Column Generation for Solving Huge Integer Programs",
        Operations Research 46(3), 1998.
    """

    def __init__(
        self,
        bound: Bound,
        num_stages: int,
        seconds: float,
        known: Alive | None,
        prices: Sequence[float],
        check: Callable[[], None],
    ):
        t = bound.t
        self.prices = list(prices)
        self.least = math.inf
        self._num = num_stages
        self._num_microbatches = bound.num_microbatches
        self._wanted = bound.num_microbatches * (1 - 1e-9)
        self._known = known
        self._available = np.array(t.num_devices)
        self._nodes: list[tuple[float, int, Box, list[float], _Part]] = []
        self._made = 0
        self._parts: list[_Part] = []
        self._floors: list[float] = []  # of each part: no plan of it is faster
        for limited in bound.limited(num_stages, seconds):
            r = limited.relaxation
            boxes, own = [], []
            for depth, most, first, last in limited.classes(
                num_stages, seconds, known, _RATIO, _MAX_INTERVALS
            ):
                own += priced(r, first, last, depth=depth, most=most, check=check)
                boxes.append(r.bands(num_stages, float(last.max()), depth))
            if boxes:
                tail = self._tail(limited, own, seconds)
                part = _Part(bound=limited, tail=tail, priced=own, columns=[])
                root = [
                    (min(a for a, _ in x), max(b for _, b in x)) for x in zip(*boxes, strict=True)
                ]
                self._parts.append(part)
                self._floors.append(0.0)
                self._push(math.inf, root, self.prices, part)

    def _tail(self, bound: Bound, parts: Sequence[Priced], seconds: float) -> float:
        """The least tail of a plan: that of one replica only where one may do."""
        several, single = bound.least_tails(self._num)
        if int(self._available.sum()) < 2 * self._num:
            return single
        if bound.copies(self._num, seconds) > 1:
            return several
        one = [0.0] * bound.t.num_kinds
        left = np.full(self._num, seconds - single)
        alone = any(x.excess(self._num, one, left)[:, -1].max() >= self._wanted for x in parts)
        return single if alone else several

    @property
    def num_open(self) -> int:
        """Nodes left."""
        return len(self._nodes)

    @property
    def num_roots(self) -> int:
        """Nodes left that are whole parts of the plans."""
        return sum(most == -math.inf for most, *_ in self._nodes)

    @property
    def floor(self) -> float:
        """No plan is faster, as far as the prices of the whole parts say."""
        return min(self._floors, default=math.inf)

    def _floor(self, part: _Part, upper: float, prices: Sequence[float]) -> float:
        """A time below which no plan of a part can be, by prices that bound it at a longer one.

        Args:
            part: Of the plans.
            upper: What all devices run at most in the longer time, by the prices.
            prices: Of a device of each kind.
        """
        scale = self._num_microbatches * (1 - 1e-6) / upper
        prices = [scale * price for price in prices]
        replicas = int(self._available.sum()) // self._num
        left = self._wanted - float(np.dot(prices, self._available))
        worth, floor = left / replicas, math.inf  # of a replica beside its devices
        for own in part.priced:
            if own.most - self._num * min(prices) >= worth:
                rest = own.rests(self._num, prices)[-1][:, 0]
                floor = min(floor, float((own.first * (rest - 1 + worth)).min()))
        return part.tail + floor * (1 - 1e-9)

    def step(self, seconds: float) -> list[tuple[int, ...]]:
        """Refute or part one node.

        Args:
            seconds: Whether plans can be faster than this.

        Returns:
            Cuts that may have such a plan.
        """
        before, _, box, prices, part = heapq.heappop(self._nodes)
        upper, most, prices, shares = self._solve(part, box, seconds, prices)
        self.prices = prices
        is_refuted = upper < self._wanted
        if before == -math.inf:
            floor = seconds if is_refuted else self._floor(part, upper, prices)
            self._floors[self._parts.index(part)] = floor
        if is_refuted:
            return []
        single = all(high - low == 1 for low, high in box)
        work = math.inf if single else _FEW
        stages = part.bound.stages(self._num, seconds, self._known, box, work=work)
        if stages is not None and not part.bound.possible(stages, seconds):
            return []
        if single and stages is not None:
            low = part.bound.floor
            self.least = min(self.least, part.bound.least_seconds(stages, low, seconds))
            return [tuple(low for low, _ in reversed(box))]
        if not shares:
            self.least = 0.0
            return []
        total = sum(share for share, _ in shares)
        cuts = np.array([column.cuts for _, column in shares])
        weights = np.array([share / total for share, _ in shares])
        mean = weights @ cuts
        spread = weights @ np.abs(cuts - mean)
        middle = tuple(int(x) for x in np.rint(mean))
        tried = list(dict.fromkeys([*(column.cuts for _, column in shares[:2]), middle]))
        tried = [x for x in tried if all(a < b for a, b in itertools.pairwise(x))]
        stage = int(spread.argmax())
        at = int(np.floor(mean[stage]))
        if spread[stage] < 1e-9:
            stage = max(range(self._num), key=lambda i: box[-1 - i][1] - box[-1 - i][0])
            low, high = box[-1 - stage]
            at = min(int(cuts[0][stage]), high - 2)
        low, high = box[-1 - stage]
        for half in ((low, at + 1), (at + 1, high)):
            self._push(most, _narrowed(box, len(box) - 1 - stage, half), prices, part)
        return tried

    def may_pay(self, cuts: tuple[int, ...], seconds: float) -> bool:
        """Whether a cut may have a plan faster than `seconds`."""
        box = [(c, c + 1) for c in reversed(cuts)]
        uppers = (self._solve(part, box, seconds, self.prices)[0] for part in self._parts)
        return any(upper >= self._wanted for upper in uppers)

    def _push(self, most: float, box: Bands, prices: list[float], part: _Part) -> None:
        if all(low < high for low, high in box):
            self._made += 1
            heapq.heappush(self._nodes, (-most, self._made, tuple(box), prices, part))

    def _solve(
        self, part: _Part, box: Bands, seconds: float, prices: list[float]
    ) -> tuple[float, float, list[float], list[tuple[float, _Column]]]:
        """What the best prices bound it by, its maximum, the prices, and the columns it uses."""
        left = seconds - part.tail
        wanted, replicas = self._wanted, int(self._available.sum()) // self._num
        mine = [
            column
            for column in part.columns
            if all(a <= c < b for c, (a, b) in zip(reversed(column.cuts), box, strict=True))
        ]
        best, at, most = np.inf, prices, 0.0
        shares: list[tuple[float, _Column]] = []
        for _ in range(_MAX_PASSES):
            top, new = self._price(part, box, left, prices)
            upper = float(np.dot(prices, self._available)) + replicas * max(0.0, top)
            if upper < best:
                best, at = upper, prices
            if best < wanted:
                break
            new = [column for column in new if column not in mine]
            if not new and shares:
                break
            mine += new
            part.columns.extend(new)
            if not mine:  # too dear for any pipeline
                prices = [price / 2 for price in prices]
                continue
            value = np.array([max(0.0, min(c.most, 1 + (left - c.fill) / c.period)) for c in mine])
            counts, dual, most = fractional_packing(
                np.array([c.used for c in mine]), value, self._available.tolist()
            )
            shares = sorted(
                ((float(y), c) for y, c in zip(counts, mine, strict=True) if y > 1e-6),
                key=lambda x: (-x[0], x[1].cuts),
            )
            if most >= wanted or best - most < 1e-4 * wanted:
                break
            prices = [(a + b) / 2 for a, b in zip(at, map(float, dual), strict=True)]
        return best, most, at, shares

    def _price(
        self, part: _Part, box: Bands, left: float, prices: list[float]
    ) -> tuple[float, list[_Column]]:
        """The greatest excess of a pipeline, and the pipelines of great excess."""
        top, new = -np.inf, []
        for own in part.priced:
            worth = own.most - self._num * min(prices)
            if worth <= max(0.0, top):
                continue
            rests = own.rests(self._num, prices, box)
            excess = np.minimum(1 + left / own.first - rests[-1][:, 0], worth)
            top = max(top, float(excess.max()))
            for w in np.argsort(-excess, kind="stable")[:_NEW]:
                if excess[w] > -np.inf:
                    cuts, used, fill, period = own.pipeline(int(w), rests, prices)
                    new.append(
                        _Column(cuts=cuts, used=used, fill=fill, period=period, most=own.most)
                    )
        return top, new


def _narrowed(box: Bands, place: int, part: tuple[int, int]) -> list[tuple[int, int]]:
    """A box with one boundary confined further; the others are kept in order."""
    new = list(box)
    new[place] = part
    for i in range(place + 1, len(new)):  # towards the first stage
        new[i] = (new[i][0], min(new[i][1], new[i - 1][1] - 1))
    for i in reversed(range(place)):
        new[i] = (max(new[i][0], new[i + 1][0] + 1), new[i][1])
    return new
