"""Search over everything at once: stages, replicas, kinds, and what the caller lists."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping

import numpy as np

from .._core._errors import PlanError
from ._best_pipeline import best_pipeline, explain_infeasible
from ._bound import Alive, Bound
from ._branch import Branching
from ._chain import Chain, ReplicaSort, Staging
from ._chain_tables import tables
from ._cuts import (
    CutPipelines,
    best_replicas,
    cut_pipelines,
    enough_for,
    even_cut,
    fractional_seconds,
    pure_periods,
)
from ._deadline import Deadline, OutOfTime
from ._packing import fractional_packing
from ._relaxed import subsets

_LEVELS = (1.1, 1.3)
_SMALL_DEVICES, _SMALL_LAYERS, _FEW_CUTS = 8, 16, 40
_MAX_CUTS = 20
_FEW_MIXES = 4e8  # elements of a dynamic programme over mixes that is worth its time
_ROUGH = 1.01
_NODES = (1, 4, 16, 128)  # of branching, visit by visit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A plan and where it comes from.

    Attributes:
        alternative: Key of the chain.
        staging: The plan; its bound is that of its own chain.
    """

    alternative: Hashable
    staging: Staging


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search found.

    Attributes:
        ranked: Plans, the fastest first: at most one for each alternative and number of stages, and
            none of those that were seen early to be no better.
        bound_seconds: No plan of any alternative is faster.
        exhausted: Whether time ran out: the plans and the bound hold, but more time may better
            them, and another run may find others.
        infeasible: Alternatives that no plan fits, and why.
    """

    ranked: tuple[Found, ...]
    bound_seconds: float
    exhausted: bool
    infeasible: Mapping[Hashable, str]

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: the best plan's step over the bound, minus one."""
        return self.ranked[0].staging.step_seconds / self.bound_seconds - 1


def search(
    chains: Mapping[Hashable, Chain],
    *,
    time_budget_seconds: float = 10.0,
    good_enough: float = 0.005,
    num_ranked: int = 8,
    can_run: Callable[[Hashable, int], bool] = lambda key, num_stages: True,
) -> Searched:
    """Find the fastest plan over data x stage parallelism, for any of several chains.

    Alternatives are what changes the chain itself: microbatch size, tensor parallelism,
    recomputation. The plan space of one chain is that of `Bound`. First each alternative gets a
    plan, at the number of stages that promises most, unless a simple bound says that it cannot be
    the best; then every number of stages of all of them is held against the best plan known
    (`Bound.refute`); what is left is worked on, the most promising first, by `Branching`, which
    refutes it or names cuts, and each cut that may be better is given the replicas that suit it
    best.

    Args:
        chains: Alternative to chain; all must stand for the same global batch.
        time_budget_seconds: Where it runs out, what is known by then is returned; but never before
            there is a plan.
        good_enough: Certified gap at which the search may end.
        num_ranked: Most plans to return.
        can_run: Whether plans of an alternative with a number of stages are wanted; the bound holds
            for those that are.

    Returns:
        Plans, the bound, and whether time ran out. Without that the result depends on the input
        alone, not on the machine.

    Raises:
        PlanError: If no alternative has a plan: why not, for each.

    References:
        Whale, USENIX ATC 2022, section 3.3; Strati et al., "Sailor", SOSP 2025, section 4.
    """
    if not chains:
        raise PlanError("there is nothing to search: give at least one chain")
    if not time_budget_seconds > 0:
        raise PlanError(f"time_budget_seconds is {time_budget_seconds}: give a positive number")
    deadline = Deadline(time_budget_seconds)
    searches = {
        key: _Search(chain, deadline, functools.partial(can_run, key))
        for key, chain in chains.items()
    }
    infeasible: dict[Hashable, str] = {}
    try:
        _run(searches, infeasible, good_enough, deadline)
        exhausted = False
    except OutOfTime:
        exhausted = True
    if len(infeasible) == len(chains):
        raise PlanError("\n".join(f"{key}: {why}" for key, why in infeasible.items()))
    feasible = {key: s for key, s in searches.items() if key not in infeasible}
    bounds = [s.bound_seconds() for s in feasible.values()]
    plans = [
        (seconds, order, num, key, cuts, replicas)
        for order, (key, s) in enumerate(feasible.items())
        for num, (seconds, cuts, replicas) in s.plans.items()
    ]
    ranked = tuple(
        Found(
            alternative=key,
            staging=Staging(cuts=cuts, replicas=replicas, step_seconds=seconds),
        )
        for seconds, _, _, key, cuts, replicas in sorted(plans, key=lambda plan: plan[:3])
    )
    return Searched(
        ranked=ranked[:num_ranked],
        bound_seconds=min(*bounds, ranked[0].staging.step_seconds),
        exhausted=exhausted,
        infeasible=infeasible,
    )


def _run(
    searches: "Mapping[Hashable, _Search]",
    infeasible: dict[Hashable, str],
    good_enough: float,
    deadline: Deadline,
) -> None:
    """Plans for all chains, then bounds for all, then whatever bounds the whole search least."""
    fastest = math.inf
    # The most promising first: its plan refutes others before any time is spent on them.
    order = sorted(searches, key=lambda key: searches[key].estimate)
    for key in order:
        s = searches[key]
        if not s.can_run or not s.bound.relaxation.some_pipeline_fits(s.bound.max_stages):
            infeasible[key] = s.why_not()
        elif s.bound.floor < fastest:
            s.first_plans(3 if fastest == math.inf else 1)
            if not s.plans:
                infeasible[key] = s.why_not()
            fastest = min(fastest, s.fastest)
            deadline.armed |= fastest < math.inf
    left = [s for key, s in searches.items() if key not in infeasible]
    if not left:
        return
    for s in sorted(left, key=lambda s: (s.fastest, s.estimate)):
        s.first_bounds(fastest, good_enough)
        fastest = min(fastest, s.fastest)
    while True:
        s = min(left, key=lambda s: s.urgency(fastest, good_enough))
        if s.urgency(fastest, good_enough)[0] == math.inf:
            break
        s.work(fastest, good_enough)
        fastest = min(fastest, s.fastest)


class _Search:
    """One chain: the best plan known and the bound for each number of stages."""

    def __init__(self, chain: Chain, deadline: Deadline, can_run: Callable[[int], bool]):
        self.chain = chain
        self.t = tables(chain)
        self._check = deadline.check
        self.bound = Bound(self.t, chain.num_microbatches, deadline.check)
        self.plans: dict[int, tuple[float, tuple[int, ...], tuple[ReplicaSort, ...]]] = {}
        self._num = chain.num_microbatches
        self._target = math.inf
        self._pure = pure_periods(self.bound.relaxation, self.bound.max_stages)
        self._small = sum(self.t.num_devices) <= _SMALL_DEVICES
        self._order = sorted(
            filter(can_run, range(1, self.bound.max_stages + 1)),
            key=lambda num: (self._estimate(num), num),
        )
        self.can_run = bool(self._order)
        self._bounds = dict.fromkeys(self._order, self.bound.floor)
        self._promise = {num: i for i, num in enumerate(self._order)}
        self._visits = dict.fromkeys(self._order, 0)
        self._known: dict[int, Alive] = {}
        self._branchings: dict[int, Branching] = {}
        self._wait, self._patience = 0, 1  # prices of some stages may refute others or not
        self._tried: set[tuple[int, ...]] = set()
        self._prices = [1 / float(total) for total in self.t.seconds[:, 0, -1]]
        scale = self._num / float(np.dot(self._prices, self.t.num_devices))
        self._prices = [scale * price for price in self._prices]
        self.estimate = self._estimate(self._order[0]) if self._order else math.inf

    @property
    def fastest(self) -> float:
        """Of the plans known."""
        return min((seconds for seconds, _, _ in self.plans.values()), default=math.inf)

    def first_plans(self, num_tried: int) -> None:
        """Plans of the most promising numbers of stages, of more where none fits."""
        for i, num in enumerate(self._order):
            if i < num_tried or not self.plans:
                before = self.fastest
                prices = self._improve(num, None, None, moves=0)
                if prices is not None and self.fastest < before:
                    self._prices = prices
        if self._small and self.t.num_layers <= _SMALL_LAYERS:
            self._try_single()

    def first_bounds(self, fastest: float, good_enough: float) -> None:
        """Bounds for every number of stages at once, by levels below the best plan known."""
        self._target = fastest
        left = set(self._order)
        for level in (1.0 + good_enough, *_LEVELS):
            if self._best() <= self.bound.floor * level:
                break
            best = self._best()
            if level == 1.0 + good_enough:
                alive = self._wanted(self.bound.refute(best / level, self._prices))
            else:
                alive = self.bound.refute(best / level, self._prices, alive, ratio=_ROUGH)
            self._raise(left - set(alive), best / level)
            left &= set(alive)
            if level == 1.0 + good_enough:
                self._known = alive
                # By turns those of the best plans and those where all devices might run most.
                for i, num in enumerate(sorted(alive, key=lambda n: (-self._room(alive[n], n), n))):
                    self._promise[num] = min(self._promise[num], i)
            if not left:
                break

    def urgency(self, fastest: float, good_enough: float) -> tuple[float, float]:
        """Which chain to work on: the one with the least first (infinity: none is needed)."""
        self._target = fastest
        num = self._next(good_enough)
        return (math.inf, 0.0) if num is None else (self._visits[num], self._bounds[num])

    def _next(self, good_enough: float) -> int | None:
        enough = self._best() / (1 + good_enough) * (1 - 1e-9)
        left = [
            num
            for num in self._order
            if self._bounds[num] < enough and self._visits[num] < len(_NODES)
        ]

        def urgency(num: int) -> tuple[float, float, int]:
            visits = self._visits[num]
            return visits, self._bounds[num] if visits else 0.0, self._promise[num]

        return min(left, key=urgency, default=None)

    def work(self, fastest: float, good_enough: float) -> None:
        """Raise the bound, or better the plan, of the number of stages that needs it most."""
        self._target = fastest
        num = self._next(good_enough)
        assert num is not None
        visit = self._visits[num]
        self._visits[num] += 1
        if visit == 1 and self._has_few_cuts(num):
            self._visits[num] = len(_NODES)
            self._cut_by_cut(num, self._known.get(num))
            return
        if visit == 1:
            stages = self.bound.stages(num, self._best(), self._known.get(num), work=_FEW_MIXES)
            if stages is not None:
                low = self._bounds[num]
                self._raise([num], self.bound.least_seconds(stages, low, self._best()))
                return
        self._branch(num, _NODES[visit], good_enough)

    def _branch(self, num: int, num_nodes: int, good_enough: float) -> None:
        """Part the cuts of so many stages, and try those that may have a better plan."""
        if num not in self._branchings:
            self._branchings[num] = Branching(
                self.bound, num, self._best(), self._known.get(num), self._prices, self._check
            )
        branching = self._branchings[num]
        for _ in range(num_nodes):
            if not branching.num_open:
                break
            seconds = self._best() / (1 + good_enough)
            worth = self._best() / (1 + good_enough / 2)
            for cuts in branching.step(seconds):
                if cuts not in self._tried and branching.may_pay(cuts, worth):
                    self._tried.add(cuts)
                    pipelines = cut_pipelines(self.t, cuts, self._num, self._check)
                    least = fractional_seconds(pipelines, self.t.num_devices, self._num)
                    if least < worth:
                        self._build(pipelines, least)
        if branching.stuck:
            self._visits[num] = len(_NODES)
        if branching.refuted:
            level = self._best() / (1 + good_enough)
            self._raise([num], level)
            self._prices = branching.prices
            # The prices that refuted these stages may refute others.
            left = [n for n in self._order if self._bounds[n] < level]
            known = {n: self._known[n] for n in left if n in self._known}
            self._wait -= 1
            if self._wait < 0 and len(left) == len(known) > 2:
                alive = self.bound.refute(level, self._prices, known)
                self._known |= alive
                self._raise(set(left) - set(alive), level)
                if len(left) - len(alive) < 4:
                    self._patience = self._wait = 2 * self._patience

    def _wanted(self, alive: dict[int, Alive]) -> dict[int, Alive]:
        return {num: found for num, found in alive.items() if num in self._bounds}

    def _raise(self, nums: Iterable[int], seconds: float) -> None:
        for num in nums:
            self._bounds[num] = max(self._bounds[num], seconds)

    def _room(self, alive: Alive, num: int) -> float:
        excess = float(alive.excess.max(initial=0.0))
        return excess * (sum(self.t.num_devices) // num)

    def _has_few_cuts(self, num: int) -> bool:
        return num > 1 and math.comb(self.t.num_layers - 1, num - 1) <= _MAX_CUTS

    def _cut_by_cut(self, num: int, alive: Alive | None) -> None:
        """Bound and plan for each cut of so many stages."""
        least = math.inf
        for inner in itertools.combinations(range(1, self.t.num_layers), num - 1):
            self._check()
            cuts, best = (0, *inner), self._best()
            box = [(cut, cut + 1) for cut in reversed(cuts)]
            stages = self.bound.stages(num, best, alive, box)
            if stages is not None and self.bound.possible(stages, best * (1 - 1e-9)):
                pipelines = cut_pipelines(self.t, cuts, self._num, self._check)
                seconds = fractional_seconds(pipelines, self.t.num_devices, self._num)
                if seconds < math.inf:
                    self._build(pipelines, seconds)
                least = min(
                    least, self.bound.least_seconds(stages, self._bounds[num], self._best())
                )
            least = min(least, self._best())
        self._bounds[num] = max(self._bounds[num], least)

    def _try_single(self) -> None:
        """The best single pipeline."""
        try:
            staging = best_pipeline(self.chain)
        except PlanError:
            return
        num = len(staging.cuts)
        if num not in self._bounds:
            return
        if num not in self.plans or staging.step_seconds < self.plans[num][0]:
            self.plans[num] = (staging.step_seconds, staging.cuts, staging.replicas)

    def bound_seconds(self) -> float:
        """No plan of this chain is faster."""
        return min(*self._bounds.values(), self.fastest)

    def _best(self) -> float:
        return min(self.fastest, self._target)

    def why_not(self) -> str:
        """Why no plan was found."""
        if not self.can_run:
            return "no number of stages with which it can be run"
        return explain_infeasible(self.chain)

    def _estimate(self, num: int) -> float:
        """Time of whole pipelines of one kind each, with the least period of each kind."""
        speed = work = 0.0
        for k, n in enumerate(self.t.num_devices):
            period = self._pure[k, num - 1]
            if math.isfinite(period) and n >= num:
                fill = self.t.seconds[k, 0, -1]
                speed += (n // num) / period
                work += (n // num) * (fill / period - 1)
        return (self._num + work) / speed if speed else math.inf

    def _improve(
        self, num: int, alive: Alive | None, prices: list[float] | None, *, moves: int
    ) -> list[float] | None:
        """The best plan of so many stages, from several cuts by moving boundaries.

        Returns:
            What a device of each kind is worth in it, in microbatches of a step.
        """
        t, r = self.t, self.bound.relaxation
        scored: dict[tuple[int, ...], float] = {}

        def score(cuts: tuple[int, ...]) -> float:
            if cuts not in scored:
                pipelines = cut_pipelines(t, cuts, self._num, self._check)
                scored[cuts] = fractional_seconds(pipelines, t.num_devices, self._num)
            return scored[cuts]

        starts = [even_cut(r, num, self._pure[:, num - 1])]
        if (
            self._small
            and t.num_layers <= _SMALL_LAYERS
            and math.comb(t.num_layers - 1, num - 1) <= _FEW_CUTS
        ):
            inner = itertools.combinations(range(1, t.num_layers), num - 1)
            starts += [(0, *cut) for cut in inner]
        if alive is not None and prices is not None:
            for i in np.argsort(-alive.excess, kind="stable")[:2]:
                starts.append(r.cut(num, prices, float(alive.first[i]), float(alive.last[i])))
        if starts == [None]:
            even = [1 / float(total) for total in t.seconds[:, 0, -1]]
            for k in range(t.num_kinds):
                period = float(t.seconds[k, 0, -1]) / num
                for slack in (1.05, 1.2, 1.5, 2.5, math.inf):
                    starts.append(r.cut(num, even, period, period * slack))
        for cuts in starts:
            if cuts is not None:
                score(cuts)
        if not scored:
            return None
        cuts = min(scored, key=lambda cuts: (scored[cuts], cuts))
        for _ in range(moves):
            near = min(_neighbours(cuts, t.num_layers), key=lambda x: (score(x), x), default=cuts)
            if score(near) >= score(cuts) * (1 - 1e-9):
                break
            cuts = near
        prices = None
        for cuts in sorted(scored, key=lambda cuts: (scored[cuts], cuts))[:2]:
            if scored[cuts] == math.inf:
                continue
            pipelines = cut_pipelines(t, cuts, self._num, self._check)
            if prices is None:
                value, _ = pipelines.microbatches(1.05 * scored[cuts])
                prices = fractional_packing(pipelines.used, value, t.num_devices, whole=False)[
                    1
                ].tolist()
            self._build(pipelines, scored[cuts])
        return prices

    def _build(self, pipelines: CutPipelines, seconds: float) -> None:
        """Replicas for one cut, on all kinds and where it may pay on some of them."""
        t, num = self.t, len(pipelines.cuts)
        tolerance = 1e-6 if self._small else 2e-4
        tails = {kinds: tail for kinds, _, tail in self.bound.tails(num, pipelines.cuts)}
        for kinds in reversed(subsets(t.num_kinds)):
            best = self.plans[num][0] if num in self.plans else math.inf
            tail = tails[kinds]
            if len(kinds) < t.num_kinds:
                # Fewer kinds pay only by a shorter reduction or update.
                available = [n if k in kinds else 0 for k, n in enumerate(t.num_devices)]
                if (
                    sum(available) < num
                    or seconds + tail >= best
                    or not enough_for(pipelines, available, self._num, best - tail)
                ):
                    continue
            found = best_replicas(t, pipelines, self._num, kinds, seconds, tolerance, self._check)
            if found and found[0] < best:
                self.plans[num] = (found[0], pipelines.cuts, found[1])


def _neighbours(cuts: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Cuts with one boundary moved by one layer."""
    edges = (*cuts, num_layers)
    return [
        (*cuts[:i], cuts[i] + move, *cuts[i + 1 :])
        for i in range(1, len(cuts))
        for move in (-1, 1)
        if edges[i - 1] < cuts[i] + move < edges[i + 1]
    ]
