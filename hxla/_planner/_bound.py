"""A time that no staging of a chain can beat."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize

from ._packing import best_packing, fractional_packing
from ._pipeline import Array, Tables
from ._relaxed import Pipelines, Relaxation, subsets

_MAX_INTERVALS = 120
_MAX_WORK = 1.5e9  # elements of the dynamic programme over mixes
_LEVELS = (1.0, 0.995, 0.99, 0.98, 0.96, 0.92, 0.85, 0.7)


def work_bound(t: Tables, num_microbatches: int) -> float:
    """All work shared without loss between the kinds: a linear programme.

    Every layer's microbatches are dealt to kinds in any fractions, and no kind is busy for longer
    than the step. This counts no fill, no transfers, no memory and no whole layers.
    """
    kinds, layers = t.num_kinds, t.num_layers
    own = t.seconds[:, np.arange(layers), np.arange(layers) + 1]
    work = np.zeros((kinds, kinds * layers + 1))
    deal = np.zeros((layers, kinds * layers + 1))
    for k in range(kinds):
        work[k, k * layers : (k + 1) * layers] = own[k] * num_microbatches
        deal[:, k * layers : (k + 1) * layers] = np.eye(layers)
    work[:, -1] = -np.array(t.num_devices)
    solved = scipy.optimize.linprog(
        np.eye(kinds * layers + 1)[-1], work, np.zeros(kinds), deal, np.ones(layers)
    )
    # The dual is a bound even where the solver stopped a little short.
    return float(solved.fun) * (1 - 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """What is known of all stagings of so many stages.

    Attributes:
        num_stages: Stages.
        parts: Relaxed pipelines, together all that can matter.
    """

    num_stages: int
    parts: tuple[Pipelines, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alive:
    """Periods of pipelines that a plan faster than some time can have.

    Attributes:
        first: [W] Least period of each interval.
        last: [W] Longest.
        excess: [W] Microbatches that a pipeline can run more than its devices are worth.
    """

    first: Array
    last: Array
    excess: Array


class Bound:
    """Lower bounds by number of stages; the bound of the chain is the least of them.

    *Plan space.* Any number of stages S; one cut for all replicas; any number of replicas; for each
    replica any kind on each stage, and any number of microbatches; devices may stay idle; every
    stage fits its device under 1F1B; time as in `_pipeline.py`.

    *Relaxation.* Replicas may have cuts of their own; a boundary is crossed at the speed of the
    fastest pair of kinds; reduction and update take the least that S stages allow. What is kept:
    whole layers, memory by position, whole replicas, whole microbatches. For each mix of devices
    and each (narrow) interval of periods a dynamic programme gives the least fill, thus the most
    microbatches a pipeline of that mix runs in a time T; a packing problem gives the most
    microbatches that all devices run in T (its solver's own dual bound is used, not its solution).
    If that is less than the global batch no staging of S stages takes T or less. This is monotone
    in T, so bisection finds the greatest T that is refuted.

    *Many numbers of stages at once.* At prices per device (the packing's dual) a pipeline's excess
    is its microbatches less the price of its devices. All devices together run at most
    `prices @ devices + replicas * (greatest excess)` microbatches, whatever the prices, and the
    greatest excess needs no mixes: one pass serves all S. Most S are refuted so, and for the others
    those periods are dropped whose excess shows that they cannot occur in a faster plan (fixing by
    reduced costs).

    References:
        Whale, USENIX ATC 2022, section 3.3 (the problem); Gilmore and Gomory, "A Linear Programming
        Approach to the Cutting-Stock Problem", 1961 (patterns and prices); Strati et al., "Sailor",
        SOSP 2025 (the search this is held against).
    """

    def __init__(self, t: Tables, num_microbatches: int):
        self.t = t
        self.relaxation = Relaxation(t)
        self.max_stages = min(t.num_layers, sum(t.num_devices))
        self._num = num_microbatches
        self._least = float(t.seconds[:, np.arange(t.num_layers), np.arange(1, t.num_layers + 1)]
                            .min(axis=0).sum())  # fmt: skip
        self._always_fits = np.array_equal(t.fits(1), t.fits(self.max_stages))
        self.floor = work_bound(t, num_microbatches) + self._tails(self.max_stages)[0][2]

    def refute(self, seconds: float, prices: Sequence[float]) -> dict[int, "Alive"]:
        """Numbers of stages that may take less than `seconds`: with what is known of periods."""
        t = self.t
        left = seconds - self._tails(self.max_stages)[0][2]
        parts = [(self.max_stages, self._num), *self._shallow(self.max_stages)]
        prices = self._worth_batch(prices)
        worth = float(np.dot(prices, t.num_devices))
        found = []
        for depth, most in parts:
            if (
                depth < self.max_stages
                and worth + sum(t.num_devices) * (1 - min(prices)) < self._num
            ):
                continue
            excess, first, last = self.relaxation.excess(
                self.max_stages, prices, left, depth=depth, most=most
            )
            found.append((excess, first, last))
        alive = {}
        for num in range(1, self.max_stages + 1):
            replicas = sum(t.num_devices) // num
            greatest = max(float(excess[:, num - 1].max()) for excess, _, _ in found)
            others = worth + (replicas - 1) * max(0.0, greatest)
            if others + greatest >= self._num * (1 - 1e-9):
                excess, first, last = found[0]
                kept = others + excess[:, num - 1] >= self._num * (1 - 1e-9)
                kept &= np.isfinite(excess[:, num - 1])
                alive[num] = Alive(first=first[kept], last=last[kept], excess=excess[kept, num - 1])
        return alive

    def _worth_batch(self, prices: Sequence[float]) -> list[float]:
        """Prices lowered by the same amount until all devices are worth the global batch.

        A fill costs every device the same share of a microbatch, however fast it is.
        """
        low, high = 0.0, max(prices)
        for _ in range(60):
            middle = (low + high) / 2
            worth = sum(n * max(0.0, p - middle) for n, p in
                        zip(self.t.num_devices, prices, strict=True))  # fmt: skip
            low, high = (low, middle) if worth < self._num * (1 - 1e-6) else (middle, high)
        return [max(0.0, p - high) for p in prices]

    def stages(self, num_stages: int, seconds: float, known: "Alive | None") -> Stages | None:
        """Relaxed pipelines for plans of less than `seconds` (None: too many mixes)."""
        t, r = self.t, self.relaxation
        low = max(r.least_period(), self._least / num_stages)
        mixes = sum(_count_mixes(n, t.num_devices) for n in range(1, num_stages + 1))
        ratio = 1.0005
        while True:
            first, last = r.periods(low, seconds, ratio)
            if known is not None:
                inside = np.zeros(len(first), bool)
                for a, b in zip(known.first, known.last, strict=True):
                    inside |= (last >= a * (1 - 1e-12)) & (first <= b * (1 + 1e-12))
                first, last = first[inside], last[inside]
            if len(first) <= _MAX_INTERVALS:
                break
            ratio = 1 + 1.5 * (ratio - 1)
        if mixes * max(1, len(first)) * t.num_layers * t.num_kinds * 4 > _MAX_WORK:
            return None
        parts = []
        if len(first):
            parts.append(r.pipelines(num_stages, first, last, depth=num_stages, most=self._num))
        for depth, most in self._shallow(num_stages):
            first, last = r.periods(low, seconds, 1.02)
            parts.append(r.pipelines(num_stages, first, last, depth=depth, most=most))
        return Stages(num_stages=num_stages, parts=tuple(parts))

    def possible(self, stages: Stages, seconds: float) -> bool:
        """Whether a plan of so many stages might take no longer than `seconds`."""
        for kinds, several, single in self._tails(stages.num_stages):
            available = [n if k in kinds else 0 for k, n in enumerate(self.t.num_devices)]
            for part in stages.parts:
                mine = (part.used <= np.array(available)).all(axis=1)
                if (part.microbatches(seconds - single)[mine] >= self._num).any():
                    return True
            used, value = self._columns(stages, seconds - several)
            if len(value) and best_packing(used, value, available)[1] >= self._num:
                return True
        return False

    def prices(self, stages: Stages, seconds: float) -> list[float]:
        """Of a device of each kind, in microbatches of a step of `seconds`."""
        used, value = self._columns(stages, seconds)
        if not len(value):
            return [0.0] * self.t.num_kinds
        return [max(0.0, float(x)) for x in
                fractional_packing(used, value, self.t.num_devices)[1]]  # fmt: skip

    def least_seconds(self, stages: Stages, low: float, high: float) -> float:
        """The greatest time in [low, high] that is refuted."""
        if not self.possible(stages, high * (1 - 1e-9)):
            return high
        while high - low > 1e-5 * high:
            middle = (low + high) / 2
            if self.possible(stages, middle):
                high = middle
            else:
                low = middle
        return low

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

    def _tails(self, num_stages: int) -> list[tuple[tuple[int, ...], float, float]]:
        """Sets of kinds, with the least reduction and update of several replicas, and of one."""
        t = self.t
        if num_stages == 1:
            return [
                (
                    kinds,
                    max(float(t.reduce[k, 0, -1]) for k in kinds)
                    + max(float(t.update[k, 0, -1]) for k in kinds),
                    max(float(t.update[k, 0, -1]) for k in kinds),
                )
                for kinds in subsets(t.num_kinds)
            ]
        layers = np.arange(t.num_layers)

        def least(table: Array) -> float:
            own = table[:, layers, layers + 1].min(axis=0)
            return max(float(own.max()), float(own.sum()) / num_stages)

        update = least(t.update)
        return [(tuple(range(t.num_kinds)), least(t.reduce) + update, update)]


def _count_mixes(total: int, available: Sequence[int]) -> int:
    counts = np.zeros(total + 1, int)
    counts[0] = 1
    for n in available:
        counts = np.array([counts[max(0, i - n) : i + 1].sum() for i in range(total + 1)])
    return int(counts[total])
