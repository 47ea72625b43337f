"""Search over stages, replicas and kinds of devices, for each chain that the caller lists."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy

from ..core.errors import NothingFitsError, PlanError
from .chain import (
    Chain,
    ReplicaSort,
    Staging,
    Tables,
    best_pipeline,
    explain_infeasible,
    roomiest_pipeline,
    step_seconds,
    tables,
)
from .cuts import Cutter, neighbours
from .homogeneous_replicas import homogeneous_plans
from .packing import CutPipelines, best_replicas, cut_pipelines, enough_for, fractional_seconds

_NEAR = 1.1  # estimates within this ratio of the best plan are tried
_MOST_PLANS, _PATIENCE = 24, 8  # from estimates: in all, and one after another in vain
_NUM_IMPROVED = 4  # plans whose cuts are improved
_MOST_WORK = 1e8  # of improving plans, in elements of dynamic programmes
_ALIKE = 6  # plans of equal replicas to place, per chain
_SMALL_DEVICES, _SMALL_LAYERS = 8, 16  # up to which the best single pipeline is found exactly
_SLACKS = (1.05, 1.2, 1.5, 2.5, math.inf)  # of the longest period over that of even stages


@dataclasses.dataclass
class _Fastest:
    """The fastest plan of a search over several chains, and the work spent on improving plans."""

    seconds: float = math.inf
    work: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """A plan of the search, and its alternative."""

    alternative: Any
    staging: Staging


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Plans and a bound.

    Attributes:
        ranked: Plans, the fastest first: at most one per alternative and number of stages.
        bound_seconds: A step at the summed speeds of all devices; no plan is faster.
        infeasible: Alternatives without a plan that fits, and why.
    """

    ranked: tuple[RankedPlan, ...]
    bound_seconds: float
    infeasible: Mapping[Any, str]


def search(
    chains: Mapping[Any, Chain],
    *,
    all_stages: bool = False,
    can_run: Callable[[Any, int], bool] = lambda _key, _num_stages: True,
    place: Callable[[Any, Staging, float], Staging] = lambda _key, staging, _best: staging,
) -> SearchResult:
    """Find a fast plan over data x stage parallelism, for any of several chains.

    Alternatives are what changes the chain itself: microbatch size, tensor parallelism,
    recomputation. Pairs of an alternative and a number of stages are ordered by an estimate. Each
    of the most promising pairs gets the best replicas for a few cuts. The cuts of the fastest plans
    are then improved by descent, a few boundaries at a time. The result depends on the input alone,
    not on the machine.

    Args:
        chains: Alternative to chain; all of the same global batch.
        all_stages: Whether to try each number of stages of each alternative, however slow.
        can_run: Whether an alternative may have a number of stages.
        place: Maps an alternative, a plan and the seconds of the best plan to the plan with shared
            network cards counted: never faster.

    Raises:
        NothingFitsError: If no alternative has a plan, with the reason of each.
        PlanError: If there is nothing to search.

    References:
        Whale, USENIX ATC 2022, section 3.3; Strati et al., "Sailor", SOSP 2025, section 4.
    """
    if not chains:
        raise PlanError("there is nothing to search: give at least one chain")
    fastest = _Fastest()
    searches = {
        key: _ChainSearch(
            chain, fastest, functools.partial(can_run, key), functools.partial(place, key)
        )
        for key, chain in chains.items()
    }
    infeasible = {key: s.why_not() for key, s in searches.items() if not s.estimates}
    pairs = sorted(
        (seconds, i, num)
        for i, s in enumerate(searches.values())
        for num, seconds in s.estimates.items()
    )
    each = list(searches.values())
    num_plans = num_in_vain = 0
    for seconds, i, num in pairs:
        before = fastest.seconds
        is_enough = num_plans >= _MOST_PLANS or num_in_vain >= _PATIENCE
        if not all_stages and (is_enough or seconds > _NEAR * before):
            break
        each[i].first_plan(num)
        num_plans += num in each[i].plans
        num_in_vain = num_in_vain + 1 if fastest.seconds == before < math.inf else 0
    if fastest.seconds == math.inf:
        for key, s in searches.items():
            s.roomiest_plan()
            if not s.plans:
                infeasible[key] = s.why_not()
    if fastest.seconds == math.inf:
        raise NothingFitsError("\n".join(f"{key}: {why}" for key, why in infeasible.items()))
    ranked = _ranked(searches)
    for plan in ranked[:_NUM_IMPROVED]:
        searches[plan.alternative].improve(len(plan.staging.cuts))
    return SearchResult(
        ranked=_ranked(searches),
        bound_seconds=min(
            work_bound(s.tables, s.chain.num_microbatches)
            for key, s in searches.items()
            if key not in infeasible
        ),
        infeasible=infeasible,
    )


def work_bound(t: Tables, num_microbatches: int) -> float:
    """Seconds of all work, shared without loss between the kinds: a linear programme.

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


def _ranked(searches: "Mapping[Any, _ChainSearch]") -> tuple[RankedPlan, ...]:
    plans = [
        RankedPlan(alternative=key, staging=staging)
        for key, s in searches.items()
        for _, staging in sorted(s.plans.items())
    ]
    return tuple(sorted(plans, key=lambda plan: plan.staging.step_seconds))


class _ChainSearch:
    """One chain: the best known plan for each number of stages.

    Attributes:
        plans: By number of stages.
        estimates: Seconds of a step by number of stages, if memory may suffice.
    """

    def __init__(
        self,
        chain: Chain,
        fastest: _Fastest,
        can_run: Callable[[int], bool],
        place: Callable[[Staging, float], Staging],
    ):
        self.chain = chain
        self.tables = t = tables(chain)
        self.plans: dict[int, Staging] = {}
        self._fastest = fastest
        self._place = place
        self._num = chain.num_microbatches
        most = min(t.num_layers, sum(t.num_devices))
        wanted = [num for num in range(1, most + 1) if can_run(num)]
        self._most_stages = max(wanted, default=0)
        self._cutter = Cutter(t)
        self._pure = self._cutter.pure_periods(self._most_stages)
        fits = self._cutter.fitting(self._most_stages, self._num)
        self.estimates = {num: self._estimate(num) for num in wanted if fits[num - 1]}
        self._is_small = sum(t.num_devices) <= _SMALL_DEVICES
        self._has_common_plans = False
        self._tried: set[tuple[int, ...]] = set()

    def why_not(self) -> str:
        """Why there is no plan."""
        if not self._most_stages:
            return "none of the allowed numbers of stages can run it"
        return explain_infeasible(self.chain)

    def _estimate(self, num: int) -> float:
        """Seconds of pipelines of one kind each, or of mixed ones if a kind cannot have its own."""
        t = self.tables
        speed = work = mixed_speed = 0.0
        for k, n in enumerate(t.num_devices):
            fill = float(t.seconds[k, 0, -1])
            mixed_speed += n / fill
            period = self._pure[k, num - 1]
            if math.isfinite(period) and n >= num:
                speed += (n // num) / period
                work += (n // num) * (fill / period - 1)
        replicas = sum(t.num_devices) // num
        used = replicas * num / sum(t.num_devices)
        mixed = (self._num + (num - 1) * replicas) / (used * mixed_speed)
        pure = (self._num + work) / speed if speed else math.inf
        return min(pure, mixed) if any(n % num for n in t.num_devices) else pure

    def first_plan(self, num: int) -> None:
        """The best plan of so many stages for a few cuts; first those of any number of stages."""
        if not self._has_common_plans:
            self._has_common_plans = True
            self._common_plans()
        t = self.tables
        starts = [self._cutter.even(num, self._pure[:, num - 1])]
        if starts == [None]:
            even = (1 / t.seconds[:, 0, -1]).tolist()
            for k, slack in itertools.product(range(t.num_kinds), _SLACKS):
                period = float(t.seconds[k, 0, -1]) / num
                starts.append(self._cutter.mixed(num, even, period, period * slack))
        self._try_cuts(starts)

    def _common_plans(self) -> None:
        alike = homogeneous_plans(self.tables, self._num, self._most_stages)
        for plan in alike[:_ALIKE]:
            self._keep(plan)
        if self._is_small and self.tables.num_layers <= _SMALL_LAYERS:
            with contextlib.suppress(PlanError):
                self._keep(best_pipeline(self.chain))
        if self.tables.meeting and 1 in self.estimates:  # of which a device alone has none
            self._keep_alone()

    def _keep_alone(self) -> None:
        """One replica on the fastest device alone."""
        t = self.tables
        fitting = [k for k, fits in enumerate(t.fits(1)[:, 0, -1]) if fits and t.num_devices[k]]
        if fitting:
            kind = min(fitting, key=lambda k: self._num * t.seconds[k, 0, -1] + t.update[k, 0, -1])
            alone = (ReplicaSort(groups=(kind,), count=1, num_microbatches=self._num),)
            seconds = step_seconds(self.chain, (0,), alone)
            self._keep(Staging(cuts=(0,), replicas=alone, step_seconds=seconds))

    def roomiest_plan(self) -> None:
        """The plan of the pipeline with the most room, if it fits."""
        stages = roomiest_pipeline(self.chain)
        if stages and all(stage.lack_bytes <= 0 for stage in stages):
            self._try_cuts([tuple(stage.layers[0] for stage in stages)])

    def _try_cuts(self, starts: Sequence[tuple[int, ...] | None]) -> None:
        """The best plan for the two most promising of some cuts."""
        scored = []
        for cuts in filter(None, dict.fromkeys(starts)):
            self._tried.add(cuts)
            pipelines = cut_pipelines(self.tables, cuts)
            seconds = fractional_seconds(pipelines, self.tables.num_devices, self._num)
            if seconds < math.inf:
                scored.append((seconds, cuts, pipelines))
        for seconds, _, pipelines in sorted(scored, key=lambda item: item[:2])[:2]:
            self._build(pipelines, seconds)

    def improve(self, num: int) -> None:
        """Move boundaries of the best plan of so many stages while that makes it faster."""

        def lower(cuts: tuple[int, ...]) -> tuple[CutPipelines, float]:
            self._tried.add(cuts)
            pipelines = cut_pipelines(self.tables, cuts)
            self._fastest.work += pipelines.work
            return pipelines, fractional_seconds(pipelines, self.tables.num_devices, self._num)

        is_better = True
        while is_better:
            is_better, best = False, self.plans[num]
            _, least = lower(best.cuts)
            for cuts in neighbours(best.cuts, self.tables.num_layers):
                if self._fastest.work > _MOST_WORK:
                    return
                if cuts in self._tried:
                    continue
                pipelines, seconds = lower(cuts)
                # On few devices cuts differ by their updates, which this leaves out.
                if seconds < (best.step_seconds if self._is_small else least):
                    self._build(pipelines, seconds)
                    if self.plans[num].step_seconds < best.step_seconds * (1 - 1e-9):
                        is_better = True
                        break

    def _build(self, pipelines: CutPipelines, seconds: float) -> None:
        """The best replicas for one cut, on all kinds and on subsets that may pay.

        Args:
            seconds: The least of any.
        """
        t, num = self.tables, len(pipelines.cuts)
        tolerance = 1e-6 if self._is_small else 2e-4
        ends = (*pipelines.cuts[1:], t.num_layers)
        updates = t.update[:, pipelines.cuts, ends]  # [K, S]
        for size in range(t.num_kinds, 0, -1):
            for kinds in reversed(list(itertools.combinations(range(t.num_kinds), size))):
                if size < t.num_kinds:
                    # Fewer kinds pay only by a shorter reduction or update.
                    best = self.plans[num].step_seconds if num in self.plans else math.inf
                    available = [n if k in kinds else 0 for k, n in enumerate(t.num_devices)]
                    # Each kind has some stage, and each stage some kind.
                    own = updates[list(kinds)]
                    tail = max(own.min(axis=1).max(), own.min(axis=0).max())
                    if sum(available) < num or seconds + tail >= best:
                        continue
                    left = best - tail
                    if left < math.inf and not enough_for(pipelines, available, self._num, left):
                        continue
                plan = best_replicas(t, pipelines, self._num, kinds, seconds, tolerance)
                if plan is not None:
                    self._keep(plan)

    def _keep(self, plan: Staging) -> None:
        """Keep a plan if it is the best of its number of stages."""
        num = len(plan.cuts)
        best = self.plans[num].step_seconds if num in self.plans else math.inf
        if num in self.estimates and plan.step_seconds < best:
            # Shared cards make no plan faster, so a slower plan need not be placed.
            if plan.step_seconds < self._fastest.seconds:
                plan = self._place(plan, self._fastest.seconds)
            if plan.step_seconds < best:
                self.plans[num] = plan
                self._fastest.seconds = min(self._fastest.seconds, plan.step_seconds)
