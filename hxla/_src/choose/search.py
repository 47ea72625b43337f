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
class _Progress:
    """The seconds of the fastest plan of all chains, and the work spent on improving plans."""

    fastest: float = math.inf
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
    progress = _Progress()
    searches = {
        key: _ChainSearch(
            chain, progress, functools.partial(can_run, key), functools.partial(place, key)
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
        before = progress.fastest
        is_enough = num_plans >= _MOST_PLANS or num_in_vain >= _PATIENCE
        if not all_stages and (is_enough or seconds > _NEAR * before):
            break
        each[i].first_plan(num)
        num_plans += num in each[i].plans
        num_in_vain = num_in_vain + 1 if progress.fastest == before < math.inf else 0
    if progress.fastest == math.inf:
        for key, s in searches.items():
            s.roomiest_plan()
            if not s.plans:
                infeasible[key] = s.why_not()
    if progress.fastest == math.inf:
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
        progress: _Progress,
        can_run: Callable[[int], bool],
        place: Callable[[Staging, float], Staging],
    ):
        self.chain = chain
        self.tables = t = tables(chain)
        self.plans: dict[int, Staging] = {}
        self._progress = progress
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
        #: Seconds of each cut that was tried, if replicas could be fractions.
        self._fractional: dict[tuple[int, ...], float] = {}

    def why_not(self) -> str:
        """Why there is no plan."""
        if not self._most_stages:
            return "none of the allowed numbers of stages can run it"
        return explain_infeasible(self.chain)

    def _estimate(self, num: int) -> float:
        """Seconds of pipelines of one kind each, or of mixed ones if that leaves devices over."""
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

    def _pipelines(self, cuts: tuple[int, ...]) -> CutPipelines:
        pipelines = cut_pipelines(self.tables, cuts)
        self._fractional[cuts] = fractional_seconds(pipelines, self.tables.num_devices, self._num)
        return pipelines

    def _try_cuts(self, starts: Sequence[tuple[int, ...] | None]) -> None:
        """The best plan for the two most promising of some cuts."""
        each = [self._pipelines(cuts) for cuts in filter(None, dict.fromkeys(starts))]
        scored = [p for p in each if self._fractional[p.cuts] < math.inf]
        scored.sort(key=lambda p: (self._fractional[p.cuts], p.cuts))
        for pipelines in scored[:2]:
            self._build(pipelines)

    def improve(self, num: int) -> None:
        """Move boundaries of the best plan of so many stages while that makes it faster."""
        while self._improve_once(num):
            pass

    def _improve_once(self, num: int) -> bool:
        """Whether a neighbour of the best plan's cuts, not tried before, is better."""
        best = self.plans[num]
        if best.cuts not in self._fractional:  # as placed on devices
            self._pipelines(best.cuts)
        # On few devices cuts differ by their updates, which fractions leave out.
        least = best.step_seconds if self._is_small else self._fractional[best.cuts]
        for cuts in neighbours(best.cuts, self.tables.num_layers):
            if self._progress.work > _MOST_WORK:
                return False
            if cuts in self._fractional:
                continue
            pipelines = self._pipelines(cuts)
            self._progress.work += pipelines.work
            if self._fractional[cuts] < least:
                self._build(pipelines)
                if self.plans[num].step_seconds < best.step_seconds * (1 - 1e-9):
                    return True
        return False

    def _build(self, pipelines: CutPipelines) -> None:
        """The best replicas for one cut, on all kinds and on subsets that may pay."""
        num_kinds, seconds = self.tables.num_kinds, self._fractional[pipelines.cuts]
        tolerance = 1e-6 if self._is_small else 2e-4
        subsets = [
            kinds
            for size in range(1, num_kinds + 1)
            for kinds in itertools.combinations(range(num_kinds), size)
        ]
        for kinds in reversed(subsets):
            if len(kinds) == num_kinds or self._may_pay(pipelines, kinds):
                plan = best_replicas(self.tables, pipelines, self._num, kinds, seconds, tolerance)
                if plan is not None:
                    self._keep(plan)

    def _may_pay(self, pipelines: CutPipelines, kinds: tuple[int, ...]) -> bool:
        """Whether fewer kinds of devices may be faster, by a shorter reduction or update."""
        t, cuts = self.tables, pipelines.cuts
        best = self.plans[len(cuts)].step_seconds if len(cuts) in self.plans else math.inf
        available = [n if k in kinds else 0 for k, n in enumerate(t.num_devices)]
        # Each kind has some stage, and each stage some kind.
        update = t.update[:, cuts, (*cuts[1:], t.num_layers)][list(kinds)]  # [K, S]
        left = best - max(update.min(axis=1).max(), update.min(axis=0).max())
        if sum(available) < len(cuts) or self._fractional[cuts] >= left:
            return False
        return left == math.inf or enough_for(pipelines, available, self._num, left)

    def _keep(self, plan: Staging) -> None:
        """Keep a plan if it is the best of its number of stages."""
        num = len(plan.cuts)
        best = self.plans[num].step_seconds if num in self.plans else math.inf
        if num in self.estimates and plan.step_seconds < best:
            # Shared cards make no plan faster, so a slower plan need not be placed.
            if plan.step_seconds < self._progress.fastest:
                plan = self._place(plan, self._progress.fastest)
            if plan.step_seconds < best:
                self.plans[num] = plan
                self._progress.fastest = min(self._progress.fastest, plan.step_seconds)
