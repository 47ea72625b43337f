"""One pipeline over unlike devices: the exact optimum."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..core.errors import PlanError
from .chain import Array, Chain, ReplicaSort, Staging, Tables, step_seconds, tables

_FEW = 4000  # states, for a message
_Plan = tuple[tuple[int, ...], tuple[int, ...]]  # cuts, kind of each stage


def best_pipeline(chain: Chain, *, num_stages: int | None = None) -> Staging:
    """Cuts and placement of the fastest single pipeline on the chain's devices.

    Plan space: any number of stages, any cut of the chain into them, any order of kinds, devices
    may stay idle. The time to minimise is `fill + (m - 1) * period + update` (`fill_and_period`).

    *Inner problem.* The least fill, with limits on the period and on the update, by a dynamic
    programme from the last stage to the first. Its state is (devices used per kind, first layer,
    kind of the first stage, kind of the stage before it). The devices used give the number of
    stages that follow, hence the microbatches in flight and the memory. The two kinds give the
    transfer over the boundary, so a stage's whole period is known when it is added. The fill is a
    sum over stages. Every plan is a path and every path a plan, so the result is exact.

    *Outer problem.* Let W be the least period of any plan (binary search over all periods) and F
    the least fill with no limit on the period. A plan that beats the best one has a period of at
    most `(best - F) / (m - 1)`. From that limit downwards: solve, record the plan, set the limit
    just below the plan's period. No plan in between is missed: it would have a shorter fill within
    the same limit. Stop when the fill plus `(m - 1) * W` is no better than the best. The update is
    enumerated in the same way in an outer loop: a better plan must have a shorter update than the
    plan that is fastest without its update.

    Args:
        num_stages: Of the plan; None: any number.

    Raises:
        PlanError: If nothing fits: stage, device and lacking bytes of the plan that lacks least.

    References:
        Narayanan et al., "PipeDream", SOSP 2019, section 3.1 (cuts by dynamic programming);
        Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
        NeurIPS 2020.
    """
    t = tables(chain)
    num = chain.num_microbatches
    solver = _Solver(t, num, num_stages)
    if solver.solve(math.inf, math.inf) is None:
        raise PlanError(explain_infeasible(chain))
    best: tuple[float, _Plan] | None = None
    limit, least = math.inf, _least_update(t)
    while True:
        fastest = _fastest(solver, limit, num)
        if fastest is None:
            break
        seconds, update, plan = fastest
        if best is None or seconds + update < best[0]:
            best = (seconds + update, plan)
        if seconds + least >= best[0]:
            break
        limit = np.nextafter(update, -math.inf)
    assert best is not None
    cuts, groups = best[1]
    replica = ReplicaSort(groups=groups, count=1, num_microbatches=num)
    return Staging(
        cuts=cuts, replicas=(replica,), step_seconds=step_seconds(chain, cuts, [replica])
    )


def _fastest(solver: "_Solver", update: float, num: int) -> tuple[float, float, _Plan] | None:
    """The least fill + (num - 1) * period with updates up to a limit, its update, and the plan."""
    best: tuple[float, float, _Plan] | None = None

    def solve(period: float) -> tuple[float, float] | None:
        """Fill and period of the plan of least fill up to a period, recorded if it is the best."""
        nonlocal best
        solution = solver.solve(period, update)
        if solution is None:
            return None
        fill, period, slowest, plan = solution
        plans = [(fill + (num - 1) * period, slowest, plan), *([best] if best else [])]
        best = min(plans)
        return fill, period

    first = solve(math.inf)
    if first is None or best is None or num == 1:
        return best
    least_fill, period = first
    # The least period of any plan: no better limit exists below it.
    periods = solver.periods(period)
    least_period = periods[bisect.bisect_left(periods, True, key=lambda p: solve(p) is not None)]
    limit = math.inf
    while True:
        limit = min(limit, (best[0] - least_fill) / (num - 1) * (1 + 1e-12))
        solution = solve(limit)
        if solution is None or solution[0] + (num - 1) * least_period >= best[0]:
            return best
        limit = float(np.nextafter(solution[1], -math.inf))


class _Solver:
    """The dynamic programme. Axes: boundaries l, e; kinds b before, a, n next (K: none)."""

    def __init__(self, t: Tables, num_microbatches: int, num_stages: int | None):
        self.t = t
        self._num_stages = num_stages
        size, kinds = t.num_layers + 1, t.num_kinds
        self._num_microbatches = num_microbatches
        # cost and period of a stage of kind a over [l, e) between kinds b and n: [a, l, b, e, n]
        cross_in = t.cross[:, :, :kinds].transpose(2, 0, 1)[:, :, :, None, None]
        cross_out = t.cross[:, :kinds, :].transpose(1, 0, 2)[:, None, None, :, :]
        busy = t.seconds[:, :, None, :, None]
        shape = (kinds, size, kinds + 1, size, kinds + 1)
        bound = np.arange(size)
        first = (bound == 0)[:, None] == (np.arange(kinds + 1) == kinds)[None, :]  # [l, b]
        last = (bound == size - 1)[:, None] == (np.arange(kinds + 1) == kinds)[None, :]  # [e, n]
        real = (
            (bound[:, None] < bound[None, :])[None, :, None, :, None]
            & first[None, :, :, None, None]
            & last[None, None, None, :, :]
        )
        self._cost = np.where(real, np.broadcast_to(busy + cross_out, shape), math.inf)
        self._period = np.where(real, busy + cross_in + cross_out, math.inf)
        self._used = _states(t.num_devices, t.num_layers)

    def periods(self, limit: float) -> list[float]:
        """Periods of stages up to `limit`, sorted."""
        values = np.unique(self._period)
        return list(map(float, values[values <= limit]))

    def solve(self, period: float, update: float) -> tuple[float, float, float, _Plan] | None:
        """Fill, period, update and plan of the least fill within limits; None: no plan."""
        t = self.t
        allowed = np.where(self._period <= period, self._cost, math.inf)
        if update < math.inf:
            allowed[np.broadcast_to(t.update[:, :, None, :, None] > update, allowed.shape)] = (
                math.inf
            )
        costs: dict[int, Array] = {}
        size, kinds = t.num_layers + 1, t.num_kinds
        nothing = np.full((size, kinds + 1, kinds + 1), math.inf)
        start = nothing.copy()
        start[-1, :, kinds] = 0.0
        suffix = {(0,) * kinds: start}  # [l, b, a]
        for used in self._used:
            depth = sum(used)
            if depth not in costs:
                fits = t.fits(min(depth, self._num_microbatches))
                costs[depth] = np.where(fits[:, :, None, :, None], allowed, math.inf)
            here = nothing.copy()
            for a in range(kinds):
                if used[a]:
                    rest = suffix[_less(used, a)]
                    here[:, :, a] = (costs[depth][a] + rest[:, a, :]).min(axis=(2, 3))
            suffix[used] = here
        best, at, kind = min(
            (float(suffix[used][0, kinds, a]), used, a)
            for used in self._used
            if self._num_stages in (None, sum(used))
            for a in range(kinds)
        )
        if best == math.inf:
            return None
        cuts, groups, before = [0], [kind], kinds
        slowest, longest = 0.0, 0.0
        while True:
            total = costs[sum(at)][kind][cuts[-1], before] + suffix[_less(at, kind)][:, kind, :]
            e, after = (int(i) for i in np.unravel_index(int(total.argmin()), total.shape))
            longest = max(longest, float(self._period[kind, cuts[-1], before, e, after]))
            slowest = max(slowest, float(t.update[kind, cuts[-1], e]))
            if e == t.num_layers:
                return best, longest, slowest, (tuple(cuts), tuple(groups))
            at, before, kind = _less(at, kind), kind, after
            cuts.append(e)
            groups.append(kind)


def _states(num_devices: Sequence[int], num_layers: int) -> list[tuple[int, ...]]:
    """Devices of each kind that a pipeline can use, fewer before more."""
    used = itertools.product(*(range(n + 1) for n in num_devices))
    return sorted((u for u in used if 0 < sum(u) <= num_layers), key=lambda u: (sum(u), u))


def _less(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] - 1, *used[kind + 1 :])


def _least_update(t: Tables) -> float:
    """A bound on the slowest update: the longest layer on its best kind."""
    layers = np.arange(t.num_layers)
    return float(t.update[:, layers, layers + 1].min(axis=0).max())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoomyStage:
    """A stage of the pipeline that lacks least memory.

    Attributes:
        layers: First layer, and the one after its last.
        lack_bytes: Missing on its device (below 0: bytes to spare).
    """

    kind: int
    layers: tuple[int, int]
    lack_bytes: float


def roomiest_pipeline(chain: Chain) -> list[RoomyStage]:
    """Stages of the pipeline whose worst stage lacks least memory, found exactly.

    With many devices the numbers of each kind are ignored: there are more devices than stages.
    """
    t = tables(chain)
    size = t.num_layers + 1
    after = np.triu(np.ones((size, size), bool), 1) & (np.array(t.num_devices) > 0)[:, None, None]
    few = math.prod(n + 1 for n in t.num_devices) <= _FEW
    devices = t.num_devices if few else (sum(t.num_devices),)
    lack: dict[int, Array] = {}
    for depth in range(1, min(sum(devices), t.num_layers) + 1):
        need = t.state_bytes + min(depth, chain.num_microbatches) * t.stash_bytes
        lack[depth] = np.where(after, need - t.memory[:, None, None], math.inf)

    def least(used: tuple[int, ...]) -> Array:
        """[l, a, e] The greatest lack from each layer on, by the first stage's kind and end."""
        stage_lack = lack[sum(used)] if few else lack[sum(used)].min(axis=0, keepdims=True)
        rests = [suffix[_less(used, a)] if n else nothing for a, n in enumerate(used)]
        return np.maximum(stage_lack, np.array(rests)[:, None, :]).transpose(1, 0, 2)

    nothing = np.full(size, math.inf)
    start = nothing.copy()
    start[-1] = -math.inf
    suffix = {(0,) * len(devices): start}
    for used in _states(devices, t.num_layers):
        suffix[used] = least(used).min(axis=(1, 2))
    used = min(suffix, key=lambda used: float(suffix[used][0]))
    layer, stages = 0, []
    while layer < t.num_layers:
        kind, end = divmod(int(least(used)[layer].argmin()), size)
        by_kind = lack[sum(used)][:, layer, end]
        used = _less(used, kind)
        kind = kind if few else int(by_kind.argmin())
        stages.append(RoomyStage(kind=kind, layers=(layer, end), lack_bytes=float(by_kind[kind])))
        layer = end
    return stages


def explain_infeasible(chain: Chain) -> str:
    """The message about the pipeline that lacks least memory."""
    stages = roomiest_pipeline(chain)
    lines = [
        f"stage {i} of {len(stages)} (layers {stage.layers[0]} to {stage.layers[1] - 1} on "
        f"{group.kind} of {group.memory_bytes:,.0f} bytes) lacks {stage.lack_bytes:,.0f} bytes"
        for i, stage in enumerate(stages)
        for group in [chain.groups[stage.kind]]
        if stage.lack_bytes > 0
    ]
    remedy = "Use a smaller microbatch_size, recomputation, a larger tensor group or more devices"
    if not lines:
        return f"a pipeline fits, but none was found that takes the whole batch. {remedy}"
    return (
        f"no pipeline fits these devices. In the one that lacks least, {'; '.join(lines)}. {remedy}"
    )
