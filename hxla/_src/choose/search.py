"""Search over everything at once: stages, replicas, kinds, and what the caller lists."""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import NothingFitsError, PlanError
from .branch import Branching
from .chain import (
    Chain,
    ReplicaSort,
    Staging,
    best_pipeline,
    explain_infeasible,
    roomiest_pipeline,
    step_seconds,
    tables,
)
from .homogeneous_replicas import homogeneous_plans
from .lower_bound import FINE, Alive, Bound, most_stages
from .packing import (
    CutPipelines,
    best_replicas,
    cut_pipelines,
    enough_for,
    even_cut,
    fractional_packing,
    fractional_seconds,
    pure_periods,
)
from .relaxation import subsets

_BETWEEN = 0.02  # seconds between two reads of the thread's CPU time, a system call


class OutOfTime(Exception):  # noqa: N818
    """The time is up; plans and bounds so far are valid."""


class Deadline:
    """A budget of this thread's CPU seconds, so other work on the machine does not count.

    It counts from the start but ends nothing before it is armed.

    Args:
        most: The longest budget when it is armed.
    """

    def __init__(self, seconds: float, most: float = 0.0):
        self._begun, self._most = time.thread_time(), most
        self._at = self._begun + seconds
        self._looked = time.monotonic()
        self.armed = False

    def arm(self, worth: float) -> None:
        """Let the time run out from now on, extended to `worth` seconds, at most to `most`."""
        self._at = max(self._at, self._begun + min(worth, self._most))
        self.armed = True

    def check(self) -> None:
        """Call this often.

        Raises:
            OutOfTime: If the time is up.
        """
        now = time.monotonic()
        if self.armed and now > self._looked + _BETWEEN:
            self._looked = now
            if time.thread_time() > self._at:
                raise OutOfTime

    def limit(self, seconds: float) -> None:
        """End at most so many seconds from now."""
        self._at = min(self._at, time.thread_time() + seconds)


@dataclasses.dataclass
class Goal:
    """The target of a search over several chains.

    Attributes:
        good_enough: Gap at which the search may end.
        fastest: Seconds of the best plan, with the costs that bounds include.
        placed: Seconds of the best plan on its devices.
    """

    good_enough: float
    fastest: float = math.inf
    placed: float = math.inf

    @property
    def worthwhile(self) -> float:
        """The time that a plan must beat to matter."""
        return self.fastest / (1 + self.good_enough)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """A plan of the search, and its alternative."""

    alternative: Any
    staging: Staging


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Plans and a bound.

    Attributes:
        ranked: Plans, the fastest first: at most one per alternative and number of stages, without
            those refuted early.
        bound_seconds: No plan of any alternative is faster.
        exhausted: Whether time ran out: plans and bound are valid, but more time may improve them,
            and another run may give others.
        infeasible: Alternatives without a plan that fits, and why.
    """

    ranked: tuple[RankedPlan, ...]
    bound_seconds: float
    exhausted: bool
    infeasible: Mapping[Any, str]

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: the best plan's step over the bound, minus one."""
        return self.ranked[0].staging.step_seconds / self.bound_seconds - 1


_ROUGHLY = 0.0195  # gap to reach for all chains before any goes below it
_OF_A_STEP = 0.5  # of a step: a search of so many seconds is short
_ALIKE = 6  # plans of equal replicas to place, per chain
_FINER = 0.2  # of the time: for a gap below that
_SMALL_DEVICES, _SMALL_LAYERS = 8, 16
_ROUGH = 1.01  # ratio of the periods of an interval, at first
_FEW_MIXES = 4e8  # elements of a dynamic programme over mixes, at most
_SLACKS = (1.05, 1.2, 1.5, 2.5, math.inf)  # of the longest period over that of even stages
_NODES = (1, 4, 16, 128, 512, 2048)  # of branching, visit by visit


def search(
    chains: Mapping[Any, Chain],
    *,
    time_budget_seconds: float = 10.0,
    most_seconds: float = 0.0,
    good_enough: float = 0.005,
    can_run: Callable[[Any, int], bool] = lambda _key, _num_stages: True,
    place: Callable[[Any, Staging, float], Staging] = lambda _key, staging, _best: staging,
) -> SearchResult:
    """Find the fastest plan over data x stage parallelism, for any of several chains.

    Alternatives are what changes the chain itself: microbatch size, tensor parallelism,
    recomputation. The plan space of one chain is that of `Bound`. First the most promising
    alternative gets a plan, at its most promising number of stages. Every number of stages of all
    alternatives is compared with it (`Bound.refute`), and each alternative that remains gets a plan
    too. Then `Branching` refutes the remaining numbers of stages, the most promising first, or
    names cuts; each cut that may be better gets its best replicas.

    Args:
        chains: Alternative to chain; all of the same global batch.
        time_budget_seconds: CPU seconds. When they run out, plans and bound so far are returned,
            but never before there is a plan.
        most_seconds: The budget grows to half a step of the first plan, up to this limit.
        good_enough: Certified gap at which the search may end.
        can_run: Whether an alternative may have a number of stages; the bound is for those.
        place: Maps an alternative, a plan and the seconds of the best plan to the plan with shared
            network cards counted: never faster.

    Returns:
        Plans, the bound, and whether time ran out. If it did not, the result depends on the input
        alone, not on the machine.

    Raises:
        NothingFitsError: If no alternative has a plan, with the reason of each.
        PlanError: If there is nothing to search.

    References:
        Whale, USENIX ATC 2022, section 3.3; Strati et al., "Sailor", SOSP 2025, section 4.
    """
    if not chains:
        raise PlanError("there is nothing to search: give at least one chain")
    if not time_budget_seconds > 0:
        raise PlanError(f"time_budget_seconds is {time_budget_seconds}: give a positive number")
    deadline = Deadline(time_budget_seconds, most_seconds)
    goal = Goal(max(good_enough, _ROUGHLY))
    searches = {
        key: _Search(
            chain, goal, deadline, functools.partial(can_run, key), functools.partial(place, key)
        )
        for key, chain in chains.items()
    }
    infeasible: dict[Any, str] = {}
    try:
        _run(searches, infeasible, goal, deadline)
        if good_enough < goal.good_enough:
            goal.good_enough = good_enough
            deadline.limit(_FINER * time_budget_seconds)
            _refine([s for key, s in searches.items() if key not in infeasible])
        exhausted = False
    except OutOfTime:
        exhausted = True
    if len(infeasible) == len(chains):
        raise NothingFitsError("\n".join(f"{key}: {why}" for key, why in infeasible.items()))
    feasible = {key: s for key, s in searches.items() if key not in infeasible}
    plans = [
        RankedPlan(alternative=key, staging=staging)
        for key, s in feasible.items()
        for _, staging in sorted(s.plans.items())
    ]
    plans.sort(key=lambda plan: plan.staging.step_seconds)
    return SearchResult(
        ranked=tuple(plans),
        bound_seconds=min(s.bound_seconds for s in feasible.values()),
        exhausted=exhausted,
        infeasible=infeasible,
    )


def _run(
    searches: "Mapping[Any, _Search]",
    infeasible: dict[Any, str],
    goal: Goal,
    deadline: Deadline,
) -> None:
    """First plans and bounds of all chains, then work on the chain with the least bound."""
    # The most promising first: its plan refutes others before any time is spent on them.
    left = sorted(searches.items(), key=lambda item: item[1].estimate)
    for i, (key, s) in enumerate(left):
        if not s.can_run or not s.bound.some_plan_fits():
            infeasible[key] = s.why_not()
        elif not s.is_refuted():
            s.first_plans(3 if goal.fastest == math.inf else 1)
            if not s.plans:
                infeasible[key] = s.why_not()
            if not deadline.armed and goal.fastest < math.inf:
                deadline.arm(_OF_A_STEP * goal.fastest)
                for _, other in left[i:]:
                    other.bound_by_prices(_ROUGH)
    _refine([s for key, s in searches.items() if key not in infeasible])


def _refine(left: "Sequence[_Search]") -> None:
    """Raise bounds until the best plan is good enough, or no chain can be improved."""
    for s in sorted(left, key=lambda s: (s.fastest, s.estimate)):
        s.first_bounds()
    while left:
        urgency, s = min(((s.urgency(), s) for s in left), key=lambda item: item[0])
        if urgency[0] == math.inf:
            break
        s.work()


class _Search:
    """One chain: the best plan known and the bound for each number of stages."""

    def __init__(
        self,
        chain: Chain,
        goal: Goal,
        deadline: Deadline,
        can_run: Callable[[int], bool],
        place: Callable[[Staging, float], Staging],
    ):
        self.chain = chain
        self._place = place
        t = tables(chain)
        wanted = [num for num in range(1, most_stages(t) + 1) if can_run(num)]
        most = max(wanted, default=None)
        self.bound = Bound(t, chain.num_microbatches, deadline.check, most)
        self.plans: dict[int, Staging] = {}
        self._t = t
        self._goal = goal
        self._check = deadline.check
        self._num = chain.num_microbatches
        self._pure = pure_periods(self.bound.relaxation, self.bound.max_stages)
        self.has_several_nodes = t.shared is not None and not t.knows_cards
        self._small = sum(self._t.num_devices) <= _SMALL_DEVICES
        self._order = sorted(wanted, key=lambda num: (self._estimate(num), num))
        self.can_run = bool(self._order)
        self.estimate = self._estimate(self._order[0]) if self._order else math.inf
        self._bounds = dict.fromkeys(self._order, self.bound.floor)
        self._promise = {num: i for i, num in enumerate(self._order)}
        self._visits = dict.fromkeys(self._order, 0)
        self._known: dict[int, Alive] = {}
        self._known_for = 0.0  # seconds of those plans
        self._branchings: dict[int, Branching] = {}
        self._bounded_for = math.inf  # seconds
        self._is_priced = False
        self._wait, self._patience = 0, 1  # prices of one number of stages may not refute others
        self._tried: set[tuple[int, ...]] = set()
        rates = 1 / self._t.seconds[:, 0, -1]
        scale = self._num / float(np.dot(rates, self._t.num_devices))
        self._prices: list[float] = (scale * rates).tolist()

    @property
    def fastest(self) -> float:
        """Seconds of the best plan."""
        return min((plan.step_seconds for plan in self.plans.values()), default=math.inf)

    @property
    def bound_seconds(self) -> float:
        """No plan of this chain is faster."""
        return min(*self._bounds.values(), self.fastest)

    def why_not(self) -> str:
        """Why there is no plan."""
        if not self.can_run:
            return "none of the allowed numbers of stages can run it"
        return explain_infeasible(self.chain)

    def is_refuted(self) -> bool:
        """Whether the bound shows that no plan of this chain matters."""
        return self.bound_seconds >= self._goal.worthwhile

    def first_plans(self, num_tried: int) -> None:
        """Plans of the most promising numbers of stages, of more if none fits."""
        for i, num in enumerate(self._order):
            if i < num_tried or not self.plans:
                self._first_plan(num)
        alike = homogeneous_plans(self._t, self._num, self.bound.max_stages, self._check)
        for plan in alike[:_ALIKE]:
            self._keep(plan)
        stages = [] if self.plans else roomiest_pipeline(self.chain)
        if stages and all(stage.lack_bytes <= 0 for stage in stages):
            self._try_cuts([tuple(stage.layers[0] for stage in stages)])
        if self._small and self._t.num_layers <= _SMALL_LAYERS:
            with contextlib.suppress(PlanError):
                self._keep(best_pipeline(self.chain))
        if self._t.meeting and 1 in self._order:  # of which a device alone has none
            self._keep_alone()

    def _keep_alone(self) -> None:
        """One replica on the fastest device alone."""
        t = self._t
        fitting = [k for k, fits in enumerate(t.fits(1)[:, 0, -1]) if fits and t.num_devices[k]]
        if fitting:
            kind = min(fitting, key=lambda k: self._num * t.seconds[k, 0, -1] + t.update[k, 0, -1])
            alone = (ReplicaSort(groups=(kind,), count=1, num_microbatches=self._num),)
            seconds = step_seconds(self.chain, (0,), alone)
            self._keep(Staging(cuts=(0,), replicas=alone, step_seconds=seconds))

    def _first_plan(self, num: int) -> None:
        """The best plan of so many stages for a few cuts, and its prices of devices."""
        t, r = self._t, self.bound.relaxation
        starts = [even_cut(r, num, self._pure[:, num - 1])]
        if starts == [None]:
            even = (1 / t.seconds[:, 0, -1]).tolist()
            for k, slack in itertools.product(range(t.num_kinds), _SLACKS):
                period = float(t.seconds[k, 0, -1]) / num
                starts.append(r.cut(num, even, period, period * slack))
        self._try_cuts(starts)

    def _try_cuts(self, starts: Sequence[tuple[int, ...] | None]) -> None:
        """The best plan for a few cuts of as many stages."""
        t = self._t
        scored = []
        for cuts in filter(None, dict.fromkeys(starts)):
            pipelines = cut_pipelines(t, cuts, self._check)
            seconds = fractional_seconds(pipelines, t.num_devices, self._num)
            if seconds < math.inf:
                scored.append((seconds, cuts, pipelines))
        scored.sort(key=lambda item: item[:2])
        before = self.fastest
        for seconds, _, pipelines in scored[:2]:
            self._build(pipelines, seconds)
        if self.fastest < before:
            seconds, _, pipelines = scored[0]
            value, _ = pipelines.microbatches(1.05 * seconds)
            _, prices, _ = fractional_packing(pipelines.used, value, t.num_devices, whole=False)
            self._prices = prices.tolist()

    def first_bounds(self) -> None:
        """Bounds for every number of stages at once, by the plans' prices of devices."""
        if self._known_for < self._goal.worthwhile:
            self._known = {}  # of plans faster than the present target
        self._branchings = {}
        self._visits = dict.fromkeys(self._order, 0)
        self.bound_by_prices()
        # Alternate between the best estimates and the fewest stages.
        for i, num in enumerate(sorted(self._known)):
            self._promise[num] = min(self._promise[num], i)

    def bound_by_prices(self, ratio: float = FINE) -> None:
        """Bounds of all numbers of stages by the prices, for plans faster than the target."""
        level = self._bounded_for = self._goal.worthwhile
        left = {num for num in self._order if self._bounds[num] < level}
        known = {num: x for num, x in self._known.items() if num in left}
        if left:
            alive = self.bound.refute(level, self._prices, known or None, ratio=ratio)
            self._learn(left, alive, level)

    def _learn(self, nums: Iterable[int], alive: Mapping[int, Alive], seconds: float) -> None:
        """Keep a bound's result for some numbers of stages and plans faster than a time."""
        self._known = {num: alive[num] for num in self._order if num in alive and num in nums}
        self._known_for = seconds
        self._raise_to(nums, alive, seconds)

    def _raise_to(self, nums: Iterable[int], alive: Mapping[int, Alive], seconds: float) -> None:
        """Raise the bounds of some numbers of stages to their floors, or to the time."""
        for num in nums:
            self._raise(num, alive[num].floor if num in alive else seconds)

    def urgency(self) -> tuple[float, float]:
        """The key by which the next chain is chosen, least first (infinity: done)."""
        num = self._next()
        return (math.inf, 0.0) if num is None else (self._visits[num], self._bounds[num])

    def _next(self) -> int | None:
        enough = self._goal.worthwhile * (1 - 1e-9)
        left = [
            num
            for num in self._order
            if self._bounds[num] < enough and self._visits[num] < len(_NODES)
        ]

        def urgency(num: int) -> tuple[float, float, int]:
            return self._visits[num], self._bounds[num], self._promise[num]

        return min(left, key=urgency, default=None)

    def work(self) -> None:
        """Raise the bound, or improve the plan, of the most urgent number of stages."""
        num = self._next()
        assert num is not None
        if self._goal.worthwhile < self._bounded_for / (1 + self._goal.good_enough):
            self.bound_by_prices()
            return
        visit = self._visits[num]
        self._visits[num] += 1
        if visit == 1:
            high = self._goal.worthwhile  # longer times have weaker bounds
            parts = self.bound.limited(num, high)
            known, work = self._known.get(num), _FEW_MIXES / max(1, len(parts))
            each = [x.stages(num, high, known, work=work) for x in parts]
            pairs = [(x, stages) for x, stages in zip(parts, each, strict=True) if stages]
            if len(pairs) == len(parts):
                low = self._bounds[num]
                least = [x.least_seconds(stages, low, high) for x, stages in pairs]
                self._raise(num, min(least, default=high))
                return
        self._branch(num, _NODES[visit])

    def _branch(self, num: int, num_nodes: int) -> None:
        """Branch on the cuts of so many stages, and try those that may have a better plan."""
        is_rough = num_nodes == _NODES[0]  # the first look at each number of stages
        branching = self._branchings.get(num)
        if branching is None:
            branching = Branching(
                self.bound,
                num,
                self._goal.worthwhile,
                self._known.get(num),
                self._prices,
                self._check,
                is_rough=is_rough,
            )
            if not is_rough:
                self._branchings[num] = branching
        for _ in range(num_nodes + branching.num_roots):
            if not branching.num_open:
                break
            seconds = self._goal.worthwhile
            worth = self._goal.fastest / (1 + self._goal.good_enough / 2)
            met = branching.step(seconds)
            if is_rough and self.has_several_nodes:
                continue  # a plan without places says little there: bounds come first
            for cuts in met:
                if cuts not in self._tried and branching.may_pay(cuts, worth):
                    self._tried.add(cuts)
                    pipelines = cut_pipelines(self._t, cuts, self._check)
                    least = fractional_seconds(pipelines, self._t.num_devices, self._num)
                    if least < worth:
                        self._build(pipelines, least)
        # A programme's first prices bound all numbers of stages better than a plan's, and one pass
        # for all is cheaper than one for each.
        self._bounded_for = math.inf if not self._is_priced else self._bounded_for
        self._prices, self._is_priced = branching.prices, True
        self._raise(num, min(branching.floor, self._goal.worthwhile))
        if branching.num_open:
            return
        self._raise(num, min(branching.least, self._goal.worthwhile))
        if branching.least >= self._goal.worthwhile:
            self._refute_others(branching.prices)

    def _refute_others(self, prices: list[float]) -> None:
        """The prices that refuted one number of stages may refute others."""
        self._prices, level = prices, self._goal.worthwhile
        left = [n for n in self._order if self._bounds[n] < level]
        known = {n: self._known[n] for n in left if n in self._known}
        self._wait -= 1
        if self._wait < 0 and len(left) == len(known) > 2:
            alive = self.bound.refute(level, prices, known)
            self._learn(left, alive, level)
            if len(left) - len(alive) < 4:
                self._patience = self._wait = 2 * self._patience

    def _raise(self, num: int, seconds: float) -> None:
        self._bounds[num] = max(self._bounds[num], seconds)

    def _estimate(self, num: int) -> float:
        """Estimated time of pipelines of one kind each, with the least period of each kind."""
        speed = work = 0.0
        for k, n in enumerate(self._t.num_devices):
            period = self._pure[k, num - 1]
            if math.isfinite(period) and n >= num:
                fill = self._t.seconds[k, 0, -1]
                speed += (n // num) / period
                work += (n // num) * (fill / period - 1)
        return (self._num + work) / speed if speed else math.inf

    def _build(self, pipelines: CutPipelines, seconds: float) -> None:
        """The best replicas for one cut, on all kinds and on subsets that may pay."""
        t, num = self._t, len(pipelines.cuts)
        tolerance = 1e-6 if self._small else 2e-4
        tails = {kinds: tail for kinds, _, tail in self.bound.tails.by_kinds(num, pipelines.cuts)}
        for kinds in reversed(subsets(t.num_kinds)):
            if len(kinds) < t.num_kinds:
                # Fewer kinds pay only by a shorter reduction or update.
                best = self.plans[num].step_seconds if num in self.plans else math.inf
                available = [n if k in kinds else 0 for k, n in enumerate(t.num_devices)]
                if sum(available) < num or seconds + tails[kinds] >= best:
                    continue
                left = best - tails[kinds]
                if left < math.inf and not enough_for(pipelines, available, self._num, left):
                    continue
            plan = best_replicas(t, pipelines, self._num, kinds, seconds, tolerance, self._check)
            if plan is not None:
                self._keep(plan)

    def _keep(self, plan: Staging) -> None:
        """Keep a plan if it is the best of its number of stages."""
        num = len(plan.cuts)
        best = self.plans[num].step_seconds if num in self.plans else math.inf
        if num in self._bounds and plan.step_seconds < best:
            # Shared cards make no plan faster, so a slower plan need not be placed.
            may_be_best = plan.step_seconds < self._goal.placed
            on_devices = self._place(plan, self._goal.placed) if may_be_best else plan
            # A bound without cards cannot be compared with a plan that pays for them.
            counted = on_devices if self._t.knows_cards else plan
            self._goal.fastest = min(self._goal.fastest, counted.step_seconds)
            if on_devices.step_seconds < best:
                self.plans[num] = on_devices
                self._goal.placed = min(self._goal.placed, on_devices.step_seconds)
