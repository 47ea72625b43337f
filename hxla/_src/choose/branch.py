"""Refutes plans of one number of stages below a time, by branching on the shared cut."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from .chain import Array, ReplicaSort, Tables, fill_and_period, tail_seconds
from .lower_bound import Alive, Bound
from .packing import fractional_packing
from .relaxation import Bands, Pins, Priced, priced

FREE, MIXED = -1, -2  # a stage of any kinds, and one of several kinds
Box = tuple[tuple[int, int], ...]
Spans = tuple[tuple[int, int], ...]
Modes = tuple[int, ...]  # per position from the end: the kind of all replicas, or FREE or MIXED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A relaxed pipeline."""

    cuts: tuple[int, ...]
    kinds: tuple[int, ...]  # by position from the end
    used: tuple[int, ...]
    fill: float
    period: float
    most: int
    modes: Modes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchPart:
    """Plans whose largest stages are of similar size.

    Attributes:
        grid: The same for every period, for nodes with fixed kinds.
    """

    bound: Bound
    tail: float
    priced: list[Priced]
    grid: list[Priced]
    columns: list[Column]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchNode:
    """Plans whose boundaries and kinds are within limits.

    Attributes:
        box: Per position from the end, the first layers that its stage may have: from, up to.
        modes: The kinds of their stages.
        spans: Per programme of the part, the intervals of periods that can matter: from, up to;
            None: all.
    """

    part: BranchPart
    box: Box
    modes: Modes
    prices: list[float]
    spans: Spans | None = None

    @property
    def is_free(self) -> bool:
        """Whether all stages may have any kinds."""
        return all(mode == FREE for mode in self.modes)

    def programmes(self) -> list[Priced]:
        """The programmes of its pipelines, by period."""
        every = self.part.priced if self.is_free else self.part.grid
        if self.spans is None:
            return every
        return [x.within(*span) for x, span in zip(every, self.spans, strict=True)]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.modes)

    @property
    def is_single(self) -> bool:
        """Whether there is one cut."""
        return all(high - low == 1 for low, high in self.box)

    @property
    def cut(self) -> tuple[list[int], list[int]]:
        """First layer and mode of each stage, for a node of a single cut."""
        return [low for low, _ in reversed(self.box)], list(reversed(self.modes))

    @property
    def most_copies(self) -> int:
        """The most replicas that stages of fixed kinds allow (0: too few)."""
        num_devices, least = self.part.bound.t.num_devices, self.part.bound.tails.num_copies
        pure = [(self.modes.count(k), int(n)) for k, n in enumerate(num_devices)]
        most = min([sum(num_devices) // self.num_stages, *(n // m for m, n in pure if m)])
        return most if most >= least or not any(m for m, _ in pure) else 0

    @property
    def tail(self) -> float:
        """The least tail of its plans."""
        if self.is_free:
            return self.part.tail
        bound, t = self.part.bound, self.part.bound.t
        ring = t.card_sums * (1 - 1 / bound.tails.num_copies)
        inside = t.least_reduce(bound.tails.num_copies)
        pure, mixed = 0.0, []
        for mode, spans in zip(self.modes, self._stage_spans(), strict=True):
            if mode == MIXED:
                mixed.append(min(float(ring[span]) for span in spans))
            elif mode != FREE:
                pure = max(pure, min(float(inside[mode][span]) for span in spans))
        # A ring of several kinds passes two cards, and the last to end had the whole card.
        shared = max([0.0, *mixed, 2 / t.num_kinds * sum(mixed)])
        if FREE not in self.modes:
            rest = float(ring[0, -1]) - self._most_pure(ring)
            shared = max(shared, 2 / t.num_kinds * rest)
        meeting = t.meeting if self.num_stages > 1 else 0.0
        update = bound.tails.of_stages(self.num_stages)[1] - meeting
        return max(self.part.tail, (max(pure, shared, meeting) + update) * (1 - 1e-9))

    def _stage_spans(self) -> list[tuple[tuple[int, int], ...]]:
        """Per position from the end, the spans of layers of which its stage includes one."""
        layers = self.part.bound.t.num_layers
        nexts = [layers, *(low for low, _ in self.box)]
        return [
            tuple((a, max(a + 1, after)) for a in range(low, high) if a < layers)
            for (low, high), after in zip(self.box, nexts, strict=False)
        ]

    def _most_pure(self, ring: Array) -> float:
        """The largest rings of the stages of one kind, as if they had several."""
        ends = [self.part.bound.t.num_layers, *(high - 1 for _, high in self.box)]
        spans = zip(self.modes, self.box, ends, strict=False)
        return sum(float(ring[low, end]) for mode, (low, _), end in spans if mode != MIXED)

    @property
    def least(self) -> float:
        """The best time of equal replicas, for a node of one cut with one kind per stage."""
        if not self.part.grid or min(self.modes) < 0:
            return 0.0
        bound = self.part.bound
        return homogeneous_seconds(
            bound.t, *self.cut, bound.tails.num_copies, bound.num_microbatches
        )

    def may_pass_cards(self, left: float) -> bool:
        """Whether all microbatches might pass the cards in a time, for a node of a single cut."""
        bound = self.part.bound
        num_choices = bound.t.num_kinds ** sum(mode < 0 for mode in self.modes)
        if not (self.part.grid and self.is_single) or num_choices > _MAX_CHOICES:
            return True
        copies = range(bound.tails.num_copies, self.most_copies + 1)
        return enough_for_cards(bound.t, *self.cut, copies, bound.num_microbatches, left)

    def pins(self) -> Pins | None:
        """The fixed kinds of its stages, for `Priced`."""
        if self.is_free:
            return None
        bound = self.part.bound
        crossed = bound.relaxation.cross[:, None, None]
        return Pins(
            kinds=tuple(mode if mode >= 0 else None for mode in self.modes),
            extra=np.maximum(bound.t.cross[:, :-1, :-1] - crossed, 0.0),
        )


def span_of(kept: Array) -> tuple[int, int]:
    """From the first kept index up to after the last."""
    at = np.flatnonzero(kept)
    return (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)


def narrowed(box: Bands, place: int, part: tuple[int, int]) -> list[tuple[int, int]]:
    """A box with one boundary confined further; the others stay in order."""
    new = list(box)
    new[place] = part
    for i in range(place + 1, len(new)):  # towards the first stage
        new[i] = (new[i][0], min(new[i][1], new[i - 1][1] - 1))
    for i in reversed(range(place)):
        new[i] = (max(new[i][0], new[i + 1][0] + 1), new[i][1])
    return new


def homogeneous_seconds(
    t: Tables, cuts: Sequence[int], groups: Sequence[int], least_copies: int, num_microbatches: int
) -> float:
    """The least time of replicas with the same kinds, for every number that devices allow.

    All of them pass the same cards, so they begin one transfer after another.

    Args:
        cuts: First layer of each stage.
        groups: The kind of each stage.
    """
    most = min(int(n) // groups.count(k) for k, n in enumerate(t.num_devices) if k in groups)
    fill, period = fill_and_period(t, cuts, groups)
    assert t.shared is not None
    pairs = zip(cuts[1:], itertools.pairwise(groups), strict=True)
    apart = max((float(t.shared[cut, a, b]) / 2 for cut, (a, b) in pairs if a != b), default=0.0)
    best = math.inf
    for copies in range(least_copies, min(most, num_microbatches) + 1):
        sorts = [ReplicaSort(groups=tuple(groups), count=copies, num_microbatches=1)]
        # The ends of all microbatches of all replicas, in order; each replica runs at least one.
        first = fill + apart * np.arange(copies)
        done = np.sort((first[:, None] + period * np.arange(num_microbatches)).ravel())
        seconds = max(float(first[-1]), float(done[num_microbatches - 1]))
        best = min(best, seconds + tail_seconds(t, cuts, sorts))
    return best * (1 - 1e-9)


def enough_for_cards(
    t: Tables,
    cuts: Sequence[int],
    modes: Sequence[int],
    copies: Iterable[int],
    num_microbatches: int,
    seconds: float,
) -> bool:
    """Whether all microbatches might pass the network cards in a time.

    In each direction a card carries one message after another: of every microbatch the activations
    over boundaries that leave the node and the gradients over those that enter it, or the reverse.
    A linear programme over every choice of kinds.

    Args:
        cuts: First layer of each stage.
        modes: Per stage, the kind of all replicas; below 0: several kinds, or any.
        copies: The possible numbers of replicas.
    """
    assert t.shared is not None
    kinds = range(t.num_kinds)

    def are_possible(num: int) -> bool:
        # A mixed stage needs devices of several kinds beside the other stages.
        left = [int(n) - num * modes.count(k) for k, n in enumerate(t.num_devices)]
        return min(left) >= 0 and (MIXED not in modes or sum(n > 0 for n in left) > 1)

    most_copies = max(filter(are_possible, copies), default=0)  # fewer replicas run no more
    one_way = t.shared[list(cuts)].diagonal(axis1=1, axis2=2) / 2  # [S, K] on a card of the kind
    used, value = [], []
    for groups in _choices(t, modes):
        fill, period = fill_and_period(t, cuts, groups)
        most = math.floor(1 + (seconds - fill) / period * (1 + 1e-9) + 1e-9)
        most = min(most, num_microbatches)
        if most >= 1:
            passed = [0.0] * t.num_kinds
            for i, (a, b) in enumerate(itertools.pairwise(groups), 1):
                for k in {a, b} if a != b else ():
                    passed[k] += most * float(one_way[i, k])
            used.append([*(groups.count(k) for k in kinds), 1, *passed])
            value.append(most)
    if not (used and most_copies):
        return False
    room = [seconds * (1 + 1e-9)] * t.num_kinds
    available = [*map(float, t.num_devices), float(most_copies), *room]
    upper = fractional_packing(np.array(used), np.array(value), available, whole=False)[2]
    return upper >= num_microbatches * (1 - 1e-9)


def _choices(t: Tables, modes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every allowed choice of kinds, stage by stage."""
    return itertools.product(*((mode,) if mode >= 0 else range(t.num_kinds) for mode in modes))


_RATIO = 1.003
_MAX_INTERVALS = 200
_MAX_PASSES = 40
_NEW = 5  # columns of one pass
_MAX_CHOICES = 1024  # of kinds, to enumerate
_MAX_HALVES, _CLOSE = 5, 1.005  # of a first look
_GRID = 1.004  # ratio of periods, for boundaries slower than in the relaxation
_FEW = 1e6  # elements of a dynamic programme over mixes, at most


class Branching:
    """Whether a plan of so many stages can be faster than a time, by branch and price.

    A node is a box of cuts: the layers that each boundary may have. At a node replicas may have
    different cuts, all of them in the box. The most microbatches of all devices is then a linear
    programme whose columns, the pipelines, are generated by its prices (`Priced`). Any prices bound
    it, so a node is refuted as soon as some prices do. Otherwise, if the mixes of devices are few,
    `Bound.possible` looks closer: at whole microbatches. Periods of no faster plan, by those
    prices, are dropped in the children of a node. If the programme's pipelines disagree about a
    boundary, the box is split there.

    If every kind of device is a separate node of the cluster, the kinds are branched on first: at a
    stage all replicas have one kind, or another, or several. Rings of stages of several kinds share
    the cards of at least two nodes (`Rings`). The bound is then one for placed plans.

    Args:
        seconds: The longest time of any later question.
        known: Possible periods of plans faster than that.
        prices: The first prices of a device of each kind.
        is_rough: Whether plans are not partitioned by their largest stage.

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
        *,
        is_rough: bool = False,
    ):
        t = bound.t
        self.prices = list(prices)
        self.least = math.inf
        self._num = num_stages
        self._is_rough = is_rough
        self._pins = t.knows_cards and num_stages > 1
        self._num_microbatches = bound.num_microbatches
        self._wanted = bound.num_microbatches * (1 - 1e-9)
        self._known = known
        self._available = np.array(t.num_devices)
        self._nodes: list[tuple[float, int, BranchNode]] = []
        self._made = 0
        self._parts: list[BranchPart] = []
        self._floors: list[float] = []  # per part, a bound on its plans
        parts = bound.limited(num_stages, seconds, *([1] if is_rough else []))
        for limited in parts:
            r = limited.relaxation
            boxes, programmes, grid = [], [], []
            for depth, most, first, last in limited.classes(
                num_stages, seconds, known, _RATIO, _MAX_INTERVALS
            ):
                programmes += priced(r, first, last, depth=depth, most=most, check=check)
                boxes.append(r.bands(num_stages, float(last.max()), depth))
                if self._pins and limited is not bound:
                    # No plan with longer periods runs two microbatches.
                    low = r.least_period()
                    num = math.ceil(math.log(max(seconds / low, 1.0)) / math.log(_GRID)) + 1
                    ends = low * _GRID ** np.arange(num + 1)
                    grid += priced(
                        r, ends, np.append(ends[1:], np.inf), depth=depth, most=most, check=check
                    )
            if boxes:
                tail = self._tail(limited, programmes, seconds)
                part = BranchPart(
                    bound=limited, tail=tail, priced=programmes, grid=grid, columns=[]
                )
                root = [
                    (min(a for a, _ in x), max(b for _, b in x)) for x in zip(*boxes, strict=True)
                ]
                self._parts.append(part)
                self._floors.append(0.0)
                free = (FREE,) * num_stages
                self._push(
                    math.inf,
                    BranchNode(part=part, box=tuple(root), modes=free, prices=self.prices),
                )

    def _tail(self, bound: Bound, parts: Sequence[Priced], seconds: float) -> float:
        """The least tail of a plan: of one replica only if one may be enough."""
        several, single = bound.tails.of_stages(self._num)
        if int(self._available.sum()) < 2 * self._num:
            return single
        if bound.copies(self._num, seconds) > 1:
            return several
        free = [0.0] * bound.t.num_kinds

        def most(x: Priced) -> float:
            fill = x.fills(self._num, free)[:, -1]
            return min(x.most, float((1 + (seconds - single) / x.first - fill).max()))

        alone = any(most(x) >= self._wanted for x in parts)
        return single if alone else several

    @property
    def num_open(self) -> int:
        """Nodes left."""
        return len(self._nodes)

    @property
    def num_roots(self) -> int:
        """Nodes left that are whole parts."""
        return sum(most == -math.inf for most, *_ in self._nodes)

    @property
    def floor(self) -> float:
        """A bound on all plans, by the prices of the whole parts."""
        return min(self._floors, default=math.inf)

    def _floor(self, part: BranchPart, upper: float, prices: Sequence[float]) -> float:
        """A time below which no plan of a part can be, by prices that bound it at a longer one.

        Args:
            upper: The most microbatches of all devices in the longer time, by the prices.
            prices: Of a device of each kind.
        """
        scale = self._num_microbatches * (1 - 1e-6) / upper
        prices = [scale * price for price in prices]
        replicas = int(self._available.sum()) // self._num
        left = self._wanted - float(np.dot(prices, self._available))
        worth, floor = left / replicas, math.inf  # the price of a replica beside its devices
        for x in part.priced:
            if x.most - self._num * min(prices) >= worth:
                fills = x.fills(self._num, prices)
                floor = min(floor, float(x.seconds_with(worth, fills, prices)[-1]))
        return part.tail + floor * (1 - 1e-9)

    def _bisect_floor(self, node: BranchNode, low: float, high: float) -> float:
        """A greater time below which no plan exists, between two times; `low` is known."""
        tail = node.tail
        for _ in range(_MAX_HALVES):
            if high <= low * _CLOSE:
                break
            middle = (low + high) / 2
            is_enough = self._solve(node, middle - tail)[0] >= self._wanted
            if is_enough and node.may_pass_cards(middle - tail):
                high = middle
            else:
                low = middle
        return low

    def step(self, seconds: float) -> list[tuple[int, ...]]:
        """Refute or split one node.

        Args:
            seconds: Whether plans can be faster than this.

        Returns:
            Cuts that may have such a plan.
        """
        before, _, node = heapq.heappop(self._nodes)
        part, box = node.part, node.box
        tail = node.tail
        upper, most, prices, shares, spans = self._solve(node, seconds - tail)
        self.prices = prices
        is_refuted = upper < self._wanted
        if before == -math.inf:
            floor = seconds if is_refuted else self._floor(part, upper, prices)
            if self._is_rough:
                floor = self._bisect_floor(node, floor, seconds)
            self._floors[self._parts.index(part)] = floor
        if is_refuted:
            return []
        work = math.inf if node.is_single else _FEW
        stages = part.bound.stages(self._num, seconds, self._known, box, work=work)
        bound = part.bound.with_tail(tail)
        if stages is not None and not bound.possible(stages, seconds):
            return []
        if not node.may_pass_cards(seconds - tail):
            return []
        pinned = not part.grid or FREE not in node.modes
        if node.is_single and stages is not None and pinned:
            low = max(part.bound.floor, node.least)
            if low >= seconds:
                return []
            low = bound.least_seconds(stages, low, seconds)
            self.least = min(
                self.least, self._bisect_floor(node, low, seconds) if part.grid else low
            )
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
        if not pinned:
            at = self._most_disputed(node, shares)
            for mode in (*range(len(self._available)), MIXED):
                modes = (*node.modes[:at], mode, *node.modes[at + 1 :])
                kept = None if node.is_free else spans
                self._push(most, dataclasses.replace(node, modes=modes, prices=prices, spans=kept))
            return tried
        stage = int(spread.argmax())
        at = int(np.floor(mean[stage]))
        if spread[stage] < 1e-9:
            stage = max(range(self._num), key=lambda i: box[-1 - i][1] - box[-1 - i][0])
            low, high = box[-1 - stage]
            at = min(int(cuts[0][stage]), high - 2)
        low, high = box[-1 - stage]
        for half in ((low, at + 1), (at + 1, high)):
            new = tuple(narrowed(box, len(box) - 1 - stage, half))
            self._push(most, dataclasses.replace(node, box=new, prices=prices, spans=spans))
        return tried

    def _most_disputed(self, node: BranchNode, shares: Sequence[tuple[float, Column]]) -> int:
        """The free position about whose kind the columns disagree most."""
        kinds = range(len(self._available))

        def agreed(position: int) -> float:
            each = [[y for y, c in shares if c.kinds[position] == k] for k in kinds]
            return max(map(sum, each))

        free = [i for i, mode in enumerate(node.modes) if mode == FREE]
        return min(free, key=agreed)

    def may_pay(self, cuts: tuple[int, ...], seconds: float) -> bool:
        """Whether a cut may have a plan faster than `seconds`."""
        box = tuple((c, c + 1) for c in reversed(cuts))
        free = (FREE,) * self._num
        nodes = [BranchNode(part=x, box=box, modes=free, prices=self.prices) for x in self._parts]
        return any(self._solve(node, seconds - node.part.tail)[0] >= self._wanted for node in nodes)

    def _push(self, most: float, node: BranchNode) -> None:
        if all(low < high for low, high in node.box) and node.most_copies:
            self._made += 1
            heapq.heappush(self._nodes, (-most, self._made, node))

    def _solve(
        self, node: BranchNode, left: float
    ) -> tuple[float, float, list[float], list[tuple[float, Column]], Spans | None]:
        """The bound by the best prices, the programme's maximum, the prices, its columns, and the
        possible periods of a plan that runs all microbatches, by these prices.
        """
        part, box, prices = node.part, node.box, node.prices
        wanted, replicas = self._wanted, node.most_copies
        columns = [
            column
            for column in part.columns
            if column.modes == node.modes
            and all(a <= c < b for c, (a, b) in zip(reversed(column.cuts), box, strict=True))
        ]
        best, at, most, spans = np.inf, prices, 0.0, node.spans
        shares: list[tuple[float, Column]] = []
        programmes, pins = node.programmes(), node.pins()
        for _ in range(_MAX_PASSES):
            top, excess, new = self._price(node, programmes, pins, left, prices)
            worth = float(np.dot(prices, self._available))
            others = worth + (replicas - 1) * max(0.0, top)
            upper = others + top  # every plan has a pipeline
            if upper < best:
                best, at = upper, prices
                kept = [span_of(others + x >= wanted) for x in excess]
                before = node.spans or [(0, 0)] * len(kept)
                spans = tuple(
                    (a + low, a + high) for (a, _), (low, high) in zip(before, kept, strict=True)
                )
            if best < wanted:
                break
            new = [column for column in new if column not in columns]
            if not new and shares:
                break
            columns += new
            part.columns.extend(new)
            if not columns:  # too dear for any pipeline
                prices = [price / 2 for price in prices]
                continue
            value = np.array(
                [max(0.0, min(c.most, 1 + (left - c.fill) / c.period)) for c in columns]
            )
            counts, dual, most = fractional_packing(
                np.array([c.used for c in columns]), value, self._available.tolist()
            )
            shares = sorted(
                ((float(y), c) for y, c in zip(counts, columns, strict=True) if y > 1e-6),
                key=lambda x: (-x[0], x[1].cuts),
            )
            if most >= wanted or best - most < 1e-4 * wanted:
                break
            prices = [(a + b) / 2 for a, b in zip(at, map(float, dual), strict=True)]
        return best, most, at, shares, spans

    def _price(
        self,
        node: BranchNode,
        programmes: Sequence[Priced],
        pins: Pins | None,
        left: float,
        prices: list[float],
    ) -> tuple[float, list[Array], list[Column]]:
        """The greatest excess of a pipeline, the excess by programme and period, and the pipelines
        of greatest excess.
        """
        top, excesses, candidates = -np.inf, [], []
        for programme in programmes:
            worth = programme.most - self._num * min(prices)
            if not len(programme.first):
                excesses.append(programme.first)
                continue
            if worth <= max(0.0, top):  # no closer look needed
                excesses.append(np.full(len(programme.first), worth))
                top = max(top, worth)
                continue
            rests = programme.rests(self._num, prices, node.box, pins)
            excess = np.minimum(1 + left / programme.first - rests[-1][:, 0], worth)
            excesses.append(excess)
            top = max(top, float(excess.max()))
            greatest = np.argsort(-excess, kind="stable")[:_NEW]
            candidates += [
                (float(excess[w]), programme, int(w), rests)
                for w in greatest
                if excess[w] > -np.inf
            ]
        candidates.sort(key=lambda x: -x[0])
        new = []
        for _, programme, w, rests in candidates[:_NEW]:
            cuts, kinds, fill, period = programme.pipeline(w, rests, prices, pins)
            new.append(
                Column(
                    cuts=cuts,
                    kinds=kinds,
                    used=tuple(kinds.count(k) for k in range(len(prices))),
                    fill=fill,
                    period=period,
                    most=programme.most,
                    modes=node.modes,
                )
            )
        return top, excesses, new
