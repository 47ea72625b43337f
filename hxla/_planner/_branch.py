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
_FEW = 1e6  # elements of a dynamic programme over mixes that is worth its time


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    """A relaxed pipeline."""

    cuts: tuple[int, ...]
    used: tuple[int, ...]
    fill: float
    period: float
    most: int


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
        t, r = bound.t, bound.relaxation
        self.prices = list(prices)
        self.least = math.inf
        self._bound = bound
        self._num = num_stages
        self._known = known
        self._available = np.array(t.num_devices)
        self._columns: list[_Column] = []
        boxes = []
        self._parts: list[Priced] = []
        for depth, most, first, last in bound.classes(
            num_stages, seconds, known, _RATIO, _MAX_INTERVALS
        ):
            self._parts += priced(r, first, last, depth=depth, most=most, check=check)
            boxes.append(r.bands(num_stages, float(last.max()), depth))
        _, several, single = bound.tails(num_stages)[0]
        one = [0.0] * t.num_kinds
        wanted = bound.num_microbatches * (1 - 1e-9)
        alone = any(
            1 + (seconds - single) / part.first[0] >= wanted
            and part.excess(num_stages, one, seconds - single)[:, -1].max() >= wanted
            for part in self._parts
        )
        self._tail = single if alone or sum(t.num_devices) < 2 * num_stages else several
        root = tuple((min(a for a, _ in x), max(b for _, b in x)) for x in zip(*boxes, strict=True))
        self._nodes: list[tuple[float, int, tuple[tuple[int, int], ...], list[float]]] = []
        self._made = 0
        if boxes:
            self._push(0.0, root, self.prices)

    @property
    def num_open(self) -> int:
        """Nodes left."""
        return len(self._nodes)

    def step(self, seconds: float) -> list[tuple[int, ...]]:
        """Refute or part one node.

        Args:
            seconds: Whether plans can be faster than this.

        Returns:
            Cuts that may have such a plan.
        """
        _, _, box, prices = heapq.heappop(self._nodes)
        refuted, most, prices, shares = self._solve(box, seconds, prices)
        if refuted:
            self.prices = prices
            return []
        single = all(high - low == 1 for low, high in box)
        work = math.inf if single else _FEW
        stages = self._bound.stages(self._num, seconds, self._known, box, work=work)
        if stages is not None and not self._bound.possible(stages, seconds):
            return []
        if single and stages is not None:
            low = self._bound.floor
            self.least = min(self.least, self._bound.least_seconds(stages, low, seconds))
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
        for part in ((low, at + 1), (at + 1, high)):
            self._push(most, _narrowed(box, len(box) - 1 - stage, part), prices)
        return tried

    def may_pay(self, cuts: tuple[int, ...], seconds: float) -> bool:
        """Whether a cut may have a plan faster than `seconds`."""
        return not self._solve([(c, c + 1) for c in reversed(cuts)], seconds, self.prices)[0]

    def _push(self, most: float, box: Bands, prices: list[float]) -> None:
        if all(low < high for low, high in box):
            self._made += 1
            heapq.heappush(self._nodes, (-most, self._made, tuple(box), prices))

    def _solve(
        self, box: Bands, seconds: float, prices: list[float]
    ) -> tuple[bool, float, list[float], list[tuple[float, _Column]]]:
        """Whether it is refuted, the programme's maximum, prices, and the columns it uses."""
        left = seconds - self._tail
        wanted = self._bound.num_microbatches * (1 - 1e-9)
        replicas = int(self._available.sum()) // self._num
        mine = [
            column
            for column in self._columns
            if all(a <= c < b for c, (a, b) in zip(reversed(column.cuts), box, strict=True))
        ]
        best, at, most = np.inf, prices, 0.0
        shares: list[tuple[float, _Column]] = []
        for _ in range(_MAX_PASSES):
            top, new = self._price(box, left, prices)
            upper = float(np.dot(prices, self._available)) + replicas * max(0.0, top)
            if upper < best:
                best, at = upper, prices
            if best < wanted:
                return True, best, at, []
            new = [column for column in new if column not in mine]
            if not new and shares:
                break
            mine += new
            self._columns += new
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
        return False, most, at, shares

    def _price(self, box: Bands, left: float, prices: list[float]) -> tuple[float, list[_Column]]:
        """The greatest excess of a pipeline, and the pipelines of great excess."""
        top, new = -np.inf, []
        for part in self._parts:
            worth = part.most - self._num * min(prices)
            if worth <= max(0.0, top):
                continue
            rests = part.rests(self._num, prices, box)
            excess = np.minimum(1 + left / part.first - rests[-1][:, 0], worth)
            top = max(top, float(excess.max()))
            for w in np.argsort(-excess, kind="stable")[:_NEW]:
                if excess[w] > -np.inf:
                    cuts, used, fill = part.pipeline(int(w), rests, prices)
                    period = float(part.first[w])
                    new.append(
                        _Column(cuts=cuts, used=used, fill=fill, period=period, most=part.most)
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
