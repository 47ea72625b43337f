"""A time that no staging of a chain can beat."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy

from .chain import Array, Tables
from .packing import best_packing
from .relaxation import Bands, Pipelines, Relaxation, bisected, priced, subsets, suffixes

_MAX_INTERVALS = 80
FINE, _MAX_FINE = 1.003, 4000  # intervals times stages
_COARSE = 1.06
Class = tuple[int, int, Array, Array]
_TAILS, _TAIL_STEP = 12, 0.003  # most limits on the tail, and the least step, of the whole time


def work_bound(t: Tables, num_microbatches: int) -> float:
    """All work shared without loss between the kinds: a linear programme.

    Every layer's microbatches are dealt to kinds in any fractions, and no kind is busy for longer
    than the step. This counts no fill, no transfers, no memory and no whole layers.
    """
    kinds, layers = t.num_kinds, t.num_layers
    layer_seconds = t.seconds[:, np.arange(layers), np.arange(layers) + 1]
    work = np.zeros((kinds, kinds * layers + 1))
    deal = np.zeros((layers, kinds * layers + 1))
    for k in range(kinds):
        work[k, k * layers : (k + 1) * layers] = layer_seconds[k] * num_microbatches
        deal[:, k * layers : (k + 1) * layers] = np.eye(layers)
    work[:, -1] = -np.array(t.num_devices)
    solved = scipy.optimize.linprog(
        np.eye(kinds * layers + 1)[-1], work, np.zeros(kinds), deal, np.ones(layers)
    )
    # The dual is a bound even where the solver stopped a little short.
    return float(solved.fun) * (1 - 1e-9)


def most_stages(t: Tables) -> int:
    """The most stages: each has a layer and a device."""
    return min(t.num_layers, sum(t.num_devices))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """Relaxed pipelines of all stagings of so many stages.

    Attributes:
        parts: The relaxed pipelines, together all that can matter.
        cuts: The cut, if there is only one.
    """

    num_stages: int
    parts: tuple[Pipelines, ...]
    cuts: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Alive:
    """Possible periods of pipelines in a plan faster than some time.

    Attributes:
        first: [W] Least period of each interval.
        last: [W] Longest.
        shallow: Possible depths of pipelines with fewer microbatches than stages.
        floor: The least seconds of a plan.
    """

    first: Array
    last: Array
    shallow: frozenset[int]
    floor: float = 0.0


class Bound:
    """Lower bounds by number of stages; the bound of the chain is the least of them.

    *Plan space.* Any number of stages S; one cut for all replicas; any number of replicas; for each
    replica any kind on each stage, and any number of microbatches; devices may stay idle; every
    stage fits its device under 1F1B; time as in `fill_and_period`.

    *Relaxation.* Replicas may have different cuts; a boundary is crossed at the speed of the
    fastest pair of kinds; reduction and update take the least for S stages. Not relaxed:
    whole layers, memory by position, whole replicas, whole microbatches. For each mix of devices
    and each (narrow) interval of periods a dynamic programme gives the least fill, thus the most
    microbatches a pipeline of that mix runs in a time T; a packing problem gives the most
    microbatches that all devices run in T (its solver's own dual bound is used, not its solution).
    If that is less than the global batch no staging of S stages takes T or less. This is monotone
    in T, so bisection finds the greatest T that is refuted.

    *Tail.* The tail is the largest stage's reduction and update, the same for all replicas. So
    plans are partitioned by its seconds (`limited`): within a part the upper end restricts stages,
    and the lower end is added to the bound.

    *One cut for all.* The same bound holds for a box of cuts, down to a single one: then the shared
    cut is not relaxed any more. `Branching` partitions the cuts so.

    *Many numbers of stages at once.* At prices per device (the packing's dual) a pipeline's excess
    is its microbatches less the price of its devices. All devices together run at most
    `prices @ devices + replicas * (greatest excess)` microbatches, whatever the prices, and the
    greatest excess needs no mixes: one pass serves all S. Most S are refuted so. For the others,
    periods are dropped whose excess rules out a faster plan (fixing by reduced costs). The excess
    of a period is linear in the time, so the same pass gives the time at which it is just too
    little: no plan of S stages is faster.

    References:
        Whale, USENIX ATC 2022, section 3.3 (the problem); Gilmore and Gomory, "A Linear Programming
        Approach to the Cutting-Stock Problem", 1961 (patterns and prices); Strati et al., "Sailor",
        SOSP 2025 (the search to compare with).
    """

    def __init__(
        self,
        t: Tables,
        num_microbatches: int,
        check: Callable[[], None],
        max_stages: int | None = None,
    ):
        self.t = t
        self.relaxation = Relaxation(t, check)
        self.max_stages = max_stages or most_stages(t)
        self.num_microbatches = self._num = num_microbatches
        self._check = check
        self._least = float(t.seconds[:, np.arange(t.num_layers), np.arange(1, t.num_layers + 1)]
                            .min(axis=0).sum())  # fmt: skip
        self._always_fits = np.array_equal(t.fits(1), t.fits(self.max_stages))
        self.tails = Tails(t=t, max_stages=self.max_stages)
        self._fastest = self._device_rates()
        self._classes: tuple[tuple[object, ...], Alive | None, list[Class]] | None = None
        self.least_work = work_bound(t, num_microbatches)
        self.floor = self.least_work + self.tails.of_all

    def some_plan_fits(self) -> bool:
        """Whether some pipeline fits, however many devices of each kind it takes."""
        return self.relaxation.some_pipeline_fits(self.max_stages, self._num)

    def refute(
        self,
        seconds: float,
        prices: Sequence[float],
        known: "dict[int, Alive] | None" = None,
        *,
        ratio: float = FINE,
    ) -> dict[int, Alive]:
        """Numbers of stages that may take less than `seconds`, with their possible periods.

        Args:
            prices: Of a device of each kind, in any unit.
            known: The result for a longer time.
            ratio: Of the longest to the least period of an interval.
        """
        r = self.relaxation
        left = seconds - self.tails.of_all
        low = r.least_period()
        if known is None:
            whole = Alive(*r.periods(low, left, _COARSE), shallow=frozenset(self._depths()))
            known = self._survivors(
                seconds, prices, dict.fromkeys(range(1, self.max_stages + 1), whole)
            )
        # Few stages have long periods, so finer intervals, by similar numbers of stages.
        alive: dict[int, Alive] = {}
        start = 1
        while start <= self.max_stages:
            members = {num: x for num, x in known.items() if start <= num < 1.5 * start + 1}
            start = int(1.5 * start + 1)
            spans = {(a, b) for x in members.values() for a, b in zip(x.first, x.last, strict=True)}
            shallow = frozenset(depth for x in members.values() for depth in x.shallow)
            if spans or shallow:
                coarse = np.array(sorted(spans)).reshape(-1, 2).T
                fine = r.within(low, left, ratio, (coarse[0], coarse[1]), _MAX_FINE // max(members))
                some = {n: Alive(*fine, shallow=shallow, floor=x.floor) for n, x in members.items()}
                alive |= self._survivors(seconds, prices, some)
        return alive

    def _survivors(
        self, seconds: float, prices: Sequence[float], known: "dict[int, Alive]"
    ) -> "dict[int, Alive]":
        t, r = self.t, self.relaxation
        prices = self.worth_batch(prices)
        worth = float(np.dot(prices, t.num_devices))
        most = max(known)
        some = next(iter(known.values()))
        left = np.array([seconds - self._tail_of(num, seconds) for num in range(1, most + 1)])
        number = np.arange(1, most + 1)
        replicas = sum(t.num_devices) // number
        wanted = self._num * (1 - 1e-9)
        needed = (wanted - worth) / replicas  # of the greatest excess

        def excess(first: Array, last: Array, depth: int, limit: int) -> tuple[Array, Array]:
            """[W, S] Excess, and [S] the time before which no excess is enough."""
            rows, least = [np.zeros((0, most))], np.full(most, np.inf)
            for x in priced(r, first, last, depth=depth, most=limit, check=self._check):
                fills = x.fills(most, prices)
                rows.append(1 + left / x.first[:, None] - fills)
                least = np.minimum(least, x.seconds_with(needed, fills, prices))
            return np.minimum(np.concatenate(rows), limit - number * min(prices)), least

        deep, least = excess(some.first, some.last, self.max_stages, self._num)
        shallow = {}
        for depth, limit in self._shallow(most):
            if depth not in some.shallow:
                continue
            # Fewer microbatches than stages cannot pay for dear devices: no closer look needed.
            shallow[depth] = np.minimum(limit, number - 1) - number * min(prices)
            if (shallow[depth] >= needed)[[n - 1 for n in known]].any():
                coarse = r.periods(r.least_period(), float(left.max()), _COARSE)
                closer, sooner = excess(*coarse, depth, limit)
                closer = np.minimum(shallow[depth], closer.max(axis=0, initial=-np.inf))
                sooner = np.where(shallow[depth] < needed, np.inf, sooner)
                shallow[depth], least = closer, np.minimum(least, sooner)
        floor = np.minimum(seconds, np.where(needed > 0, least + seconds - left, 0.0)) * (1 - 1e-9)
        alive = {}
        for num in known:
            by_period = deep[:, num - 1]
            greatest = max(
                [by_period.max(initial=-np.inf), *(float(e[num - 1]) for e in shallow.values())]
            )
            others = worth + (replicas[num - 1] - 1) * max(0.0, greatest)
            if others + greatest >= wanted:
                kept = (others + by_period >= wanted) & np.isfinite(by_period)
                alive[num] = Alive(
                    first=some.first[kept],
                    last=some.last[kept],
                    shallow=frozenset(
                        d for d, e in shallow.items() if others + e[num - 1] >= wanted
                    ),
                    floor=max(known[num].floor, float(floor[num - 1])),
                )
        return alive

    def _depths(self) -> list[int]:
        return [depth for depth, _ in self._shallow(self.max_stages)]

    def worth_batch(self, prices: Sequence[float]) -> list[float]:
        """Prices lowered by the same amount until all devices are worth the global batch.

        A fill costs every device the same share of a microbatch, however fast it is.

        Args:
            prices: Of a device of each kind.
        """
        wanted = self._num * (1 - 1e-6)
        rows = list(zip(self.t.num_devices, prices, strict=True))

        def enough(less: float) -> bool:
            return sum(n * max(0.0, p - less) for n, p in rows) < wanted

        _, less = bisected(enough, 0.0, max(prices), 1e-12)
        return [max(0.0, p - less) for p in prices]

    def stages(
        self,
        num_stages: int,
        seconds: float,
        known: Alive | None,
        box: Bands | None = None,
        *,
        work: float = math.inf,
    ) -> Stages | None:
        """Relaxed pipelines for plans of less than `seconds` (None: more than `work` elements).

        Args:
            known: Possible periods of such plans.
            box: Per position from the end, the first layers that its stage may have.
        """
        t, r = self.t, self.relaxation
        classes = self.classes(num_stages, seconds, known, 1.0005, _MAX_INTERVALS)
        needed = 0
        for depth, _, first, last in classes:
            widths = [b - a for a, b in box or r.bands(num_stages, float(last.max()), depth)]
            longest = r.longest_stage(float(last.max()))
            needed += len(first) * sum(
                _count_mixes(i + 1, t.num_devices) * widths[i] * min(longest, widths[i - 1])
                for i in range(1, num_stages)
            )
        if needed * t.num_kinds > work:
            return None
        parts = [
            r.pipelines(num_stages, first, last, depth=depth, most=most, bands=box)
            for depth, most, first, last in classes
        ]
        cuts = None
        if box is not None and all(b - a == 1 for a, b in box):
            cuts = tuple(a for a, _ in reversed(box))
        return Stages(num_stages=num_stages, parts=tuple(parts), cuts=cuts)

    def classes(
        self,
        num_stages: int,
        seconds: float,
        known: Alive | None,
        ratio: float,
        most_intervals: int,
    ) -> list[Class]:
        """Pipelines by microbatches in flight: depth, most microbatches, intervals of periods."""
        key = num_stages, seconds, id(known), ratio, most_intervals
        if self._classes is None or self._classes[0] != key:
            classes = self._make_classes(num_stages, seconds, known, ratio, most_intervals)
            self._classes = key, known, classes
        return self._classes[2]

    def _make_classes(
        self,
        num_stages: int,
        seconds: float,
        known: Alive | None,
        ratio: float,
        most_intervals: int,
    ) -> list[Class]:
        r = self.relaxation
        low = max(r.least_period(), self._least / num_stages)
        spans = None if known is None else (known.first, known.last)
        first, last = r.within(low, seconds, ratio, spans, most_intervals)
        classes = [(num_stages, self._num, first, last)] if len(first) else []
        for depth, most in self._shallow(num_stages):
            if known is None or depth in known.shallow:
                first, last = r.periods(low, seconds, 1.05)
                if len(first):
                    classes.append((depth, most, first, last))
        return classes

    def possible(self, stages: Stages, seconds: float) -> bool:
        """Whether a plan of so many stages might take no longer than `seconds`."""
        self._check()
        for kinds, several, single in self.tails.by_kinds(stages.num_stages, stages.cuts):
            available = [n if k in kinds else 0 for k, n in enumerate(self.t.num_devices)]
            for part in stages.parts:
                are_available = (part.used <= np.array(available)).all(axis=1)
                if (part.microbatches(seconds - single)[are_available] >= self._num).any():
                    return True
            used, value = self._columns(stages, seconds - several)
            if len(value) and best_packing(used, value, available)[1] >= self._num:
                return True
        return False

    def least_seconds(self, stages: Stages, low: float, high: float) -> float:
        """The greatest time in [low, high] that is refuted."""
        if not self.possible(stages, high * (1 - 1e-9)):
            return high
        return bisected(lambda seconds: self.possible(stages, seconds), low, high, 1e-5)[0]

    def _columns(self, stages: Stages, seconds: float) -> tuple[Array, Array]:
        used = [part.used for part in stages.parts]
        value = [np.minimum(part.microbatches(seconds), self._num) for part in stages.parts]
        if not used:
            return np.zeros((0, self.t.num_kinds), int), np.zeros(0)
        return np.concatenate(used), np.concatenate(value)

    def _shallow(self, num_stages: int) -> list[tuple[int, int]]:
        """Pipelines of fewer microbatches than stages need less memory: (depth, most)."""
        if self._always_fits:
            return []
        depths = []
        depth = 1
        while depth < num_stages:
            depths.append((depth, min(2 * depth - 1, num_stages - 1, self._num)))
            depth *= 2
        return [x for x in depths if x[0] <= self._num]

    def with_tail(self, seconds: float) -> "Bound":
        """The same bound where several replicas have at least this tail."""
        other = copy.copy(self)
        other.tails = dataclasses.replace(self.tails, least=max(self.tails.least, seconds))
        return other

    def _device_rates(self) -> Array:
        """[D] The most microbatches per second of the fastest d devices, cumulated.

        The work of a layer is its seconds on the fastest kind. So no device does more work in a
        second than in the layer that suits it best.
        """
        t, layers = self.t, np.arange(self.t.num_layers)
        layer_seconds = t.seconds[:, layers, layers + 1]
        speed = (layer_seconds.min(axis=0) / layer_seconds).max(axis=1) / self._least
        return np.cumsum(np.sort(np.repeat(speed, t.num_devices))[::-1])

    def copies(self, num_stages: int, seconds: float) -> int:
        """The fewest replicas of so many stages that might run all microbatches in a time."""
        left = (seconds - self.tails.of_stages(num_stages)[1]) * (1 + 1e-9)
        if left <= 0:
            return self._num
        period = max(self.relaxation.least_period(), self._least / num_stages)
        most = math.floor(1 + (left - self._least) / period + 1e-9)
        by_fill = math.ceil(self._num / most) if most > 0 else self._num
        num_devices = int(np.searchsorted(self._fastest * left, self._num * (1 - 1e-9))) + 1
        least = max(1, by_fill, math.ceil(num_devices / num_stages))
        # Few numbers, each with separate tails: the limits of nodes count, else the share.
        limits = (inside + 1 for inside in self.t.copies_inside)
        return max(x for x in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, *limits) if x <= least)

    def _tail_of(self, num_stages: int, seconds: float) -> float:
        """The least tail of plans of so many stages within a time."""
        least = self.tails.of_stages(num_stages)[1]
        copies = self.copies(num_stages, seconds)
        if copies == 1 or sum(self.t.num_devices) < 2 * num_stages:
            return least
        return max(least, self.tails.of_copies(copies)[1][num_stages - 1])

    def limited(self, num_stages: int, seconds: float, most_parts: int = _TAILS) -> "list[Bound]":
        """Plans of so many stages below a time, partitioned by the largest stage."""
        copies = self.copies(num_stages, seconds)
        if copies == 1 or sum(self.t.num_devices) < 2 * num_stages:
            return [self]
        tail, low = self.tails.of_copies(copies)[0], self._tail_of(num_stages, seconds)
        high = seconds - self.least_work
        num = min(most_parts, math.ceil(max(0.0, high - low) / (_TAIL_STEP * seconds)) + 1)
        values = np.unique(tail[self.t.fits(1)])
        values = values[(values >= low * (1 - 1e-12)) & (values <= high * (1 + 1e-12))]
        parts = []
        for tails in np.split(
            values, np.searchsorted(values, np.linspace(low, high, num + 1)[1:-1])
        ):
            if len(tails):
                part = copy.copy(self)
                is_less = tail <= tails[-1] * (1 + 1e-12)
                state_bytes = np.where(is_less, self.t.state_bytes, np.inf)
                part.t = dataclasses.replace(self.t, state_bytes=state_bytes)
                part.relaxation = Relaxation(part.t, self._check)
                part._classes = None  # noqa: SLF001
                least = float(tails[0]) * (1 - 1e-12)
                part.tails = dataclasses.replace(self.tails, num_copies=copies, least=least)
                parts.append(part)
        return parts


def _count_mixes(total: int, available: Sequence[int]) -> int:
    counts = np.zeros(total + 1, int)
    counts[0] = 1
    for n in available:
        counts = np.array([counts[max(0, i - n) : i + 1].sum() for i in range(total + 1)])
    return int(counts[total])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tails:
    """The least tails of plans, by number of stages and of replicas.

    A tail is the reduction and the update of the largest stage, after all microbatches.

    Attributes:
        max_stages: The most stages of a plan.
        num_copies: The fewest replicas of a plan with several.
        least: The least tail of plans with several replicas.

    Values that `dataclasses.replace` makes share what is known by number of replicas.
    """

    t: Tables
    max_stages: int
    num_copies: int = 2
    least: float = 0.0
    _known: dict[int, tuple[Array, list[float]]] = dataclasses.field(default_factory=dict)

    def by_kinds(
        self, num_stages: int, cuts: tuple[int, ...] | None = None
    ) -> list[tuple[tuple[int, ...], float, float]]:
        """Sets of kinds, with the least reduction plus update: of several replicas, and of one.

        Args:
            cuts: First layer of each stage; None: any.
        """
        t = self.t
        meeting = t.meeting if num_stages > 1 else 0.0  # of a single replica
        if num_stages == 1:
            cuts = (0,)
        if cuts is not None:
            ends = (*cuts[1:], t.num_layers)
            cases, reduce = [], t.least_reduce(self.num_copies)
            for kinds in subsets(t.num_kinds):
                # Each kind has some stage, and each stage some kind.
                least = []
                for table in (reduce, t.update):
                    rows = np.array([[table[k, a, b] for a, b in zip(cuts, ends, strict=True)]
                                    for k in kinds])  # fmt: skip
                    least.append(
                        max(
                            float(rows.min(axis=1).max()),
                            float(rows.min(axis=0).max()),
                        )
                    )
                several = max(least[0], t.meeting) + least[1]
                cases.append((kinds, max(self.least, several), meeting + least[1]))
            return cases
        update = meeting + max(self._least_update[0], self._least_update[1] / num_stages)
        several = max(self.least, self.of_copies(self.num_copies)[1][num_stages - 1], update)
        return [(tuple(range(t.num_kinds)), several, update)]

    @functools.cached_property
    def _least_update(self) -> tuple[float, float]:
        """The least seconds of the largest layer's update, and of all layers'."""
        layers = np.arange(self.t.num_layers)
        update = self.t.update[:, layers, layers + 1].min(axis=0)
        return float(update.max()), float(update.sum())

    def of_stages(self, num_stages: int) -> tuple[float, float]:
        """The least reduction plus update for so many stages: of several replicas, and of one."""
        cases = self.by_kinds(num_stages)
        return min(several for _, several, _ in cases), min(single for *_, single in cases)

    @property
    def of_all(self) -> float:
        """The least tail of one replica with any number of stages."""
        return min(self.of_stages(1)[1], self.of_stages(self.max_stages)[1])

    def of_copies(self, copies: int) -> tuple[Array, list[float]]:
        """Tails of at least `copies` replicas: [K, L+1, L+1] per stage, and the least of a plan.

        The latter by number of stages, from one.
        """
        if copies not in self._known:
            meeting = self.t.meeting if copies > 1 else 0.0
            tail = np.maximum(self.t.least_reduce(copies), meeting) + self.t.update
            best = tail.min(axis=0)
            best = np.where(np.triu(np.ones(best.shape, bool), 1), best, np.inf)
            by_stages = suffixes(self.max_stages, lambda _: best, np.maximum)
            self._known[copies] = tail, [float(rest[0]) for rest, _ in by_stages]
        return self._known[copies]
