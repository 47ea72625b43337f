"""Cutting a chain of layers into stages: the problem, its seconds and bytes, and its optimum.

`best_pipeline` is exact for one pipeline over unlike devices.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..core.errors import PlanError

UNBOUNDED = 2.0**60  # bytes of memory: no limit that a plan could meet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Devices of one kind, each "device" possibly a whole tensor-parallel group.

    Attributes:
        forward_seconds: Of one microbatch, per layer of the chain.
        update_seconds: Optimizer update per layer, once a step.
        parameter_bytes: Per layer, on one device.
        stash_bytes: Per layer, the residuals of one microbatch on one device.
    """

    kind: str
    num_devices: int
    memory_bytes: float
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    parameter_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rings:
    """Seconds of a stage's all-reduce over replicas, as rings over the links that they pass.

    A ring's reduce-scatter and all-gather send `2 (n - 1) / n` of the bytes of a stage of n
    replicas. So rates are those of very many replicas, and n of them take `(n - 1) / n` of that.

    Attributes:
        inside_seconds: Per group, seconds per byte of gradient if all replicas of a stage are in
            one node.
        copies_inside: Per group, the most replicas of a stage in one node.
        num_nodes: Per group; empty: not known.
        card_seconds: `card_seconds[a][b]`: seconds per byte from a node of group a to another of
            group b; empty if some node has two groups.

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009, section 3.
    """

    inside_seconds: tuple[float, ...]
    copies_inside: tuple[int, ...]
    num_nodes: tuple[int, ...] = ()
    card_seconds: tuple[tuple[float, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """A chain of layers and the devices that may hold its stages.

    Attributes:
        groups: One per kind of device; all have the same number of layers.
        num_microbatches: Of a global batch, over all replicas.
        state_factor: Bytes of a device per byte of parameters: 1 for the parameters, 1 for the
            gradient's sum, and the optimizer state (Adam: 2).
        workspace_bytes: Further bytes of every device.
        keeps_inputs: Whether a microbatch in flight keeps only its stage's input. Its backward
            recomputes the stash of the whole stage, one microbatch at a time. The first stage's
            input is the batch, which counts elsewhere.
        output_bytes: Per layer, bytes of one microbatch to the next layer.
        send_seconds: `send_seconds[a][b]`: seconds per byte from a device of group a to one of b.
        send_latency_seconds: The same for the latency of one message.
        reduce_seconds: Per group, seconds per byte of gradient of the reduction over replicas
            (0: not counted).
        meeting_seconds: The least seconds once a step, beside computations and updates, of any plan
            with several devices: their reduction, or the filling and emptying of stages.
        rings: Reductions of few replicas, or of replicas in one node; None: the same for any
            number, as when measured.
    """

    groups: tuple[Group, ...]
    num_microbatches: int
    output_bytes: tuple[float, ...]
    state_factor: float = 4.0
    workspace_bytes: float = 0.0
    keeps_inputs: bool = False
    send_seconds: tuple[tuple[float, ...], ...] = ()
    send_latency_seconds: tuple[tuple[float, ...], ...] = ()
    reduce_seconds: tuple[float, ...] = ()
    meeting_seconds: float = 0.0
    rings: Rings | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSort:
    """Replicas of one sort: the kind of each stage's device.

    Attributes:
        groups: Index of the group of each stage's device.
        count: How many such replicas there are.
        num_microbatches: Of each replica in a step.
    """

    groups: tuple[int, ...]
    count: int
    num_microbatches: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staging:
    """A cut of the chain and a placement of its stages.

    Attributes:
        cuts: First layer of each stage; begins with 0. All replicas share it.
        replicas: Sorts of replicas; their microbatches sum to the chain's.
        step_seconds: Predicted time of a step.
    """

    cuts: tuple[int, ...]
    replicas: tuple[ReplicaSort, ...]
    step_seconds: float


Array = np.ndarray

_OF_LAYERS = (
    *("forward_seconds", "backward_seconds", "update_seconds"),
    *("parameter_bytes", "stash_bytes"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """A chain as arrays. K kinds, L layers, boundary l is before layer l.

    Attributes:
        seconds: [K, L+1, L+1] `seconds[k, l, e]`: forward and backward of layers l to e - 1.
        update: [K, L+1, L+1] Their optimizer update.
        reduce: [K, L+1, L+1] The reduction of their gradients over very many replicas in several
            nodes.
        reduce_inside: [K, L+1, L+1] The same in one node.
        meeting: The least seconds of a reduction of any plan with several devices.
        copies_inside: [K] The most replicas of a stage in one node; empty: the reduction is the
            same for any number.
        num_nodes: [K] Nodes of a kind; empty: not known.
        shared: [L+1, K, K] `shared[l, b, a]`: the least seconds over a boundary from a node of kind
            b to another of kind a and back; None: some node has devices of two kinds.
        state_bytes: [K, L+1, L+1] Parameters, gradients, optimizer state, workspace, and the
            stash that a backward recomputes.
        stash_bytes: [K, L+1, L+1] The stash of one microbatch in flight.
        cross: [L+1, K+1, K+1] `cross[l, b, a]`: one microbatch's activations over boundary l from
            kind b to kind a and its gradients back. Index K stands for no stage: 0.
        memory: [K] Bytes of a device.
        num_devices: [K]
    """

    seconds: Array
    update: Array
    reduce: Array
    reduce_inside: Array
    meeting: float
    copies_inside: tuple[int, ...]
    num_nodes: tuple[int, ...]
    shared: Array | None
    state_bytes: Array
    stash_bytes: Array
    cross: Array
    memory: Array
    num_devices: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the chain."""
        return self.seconds.shape[1] - 1

    @property
    def num_kinds(self) -> int:
        """Kinds of devices."""
        return len(self.num_devices)

    def least_reduce(self, num_copies: int) -> Array:
        """[K, L+1, L+1] The least reduction over so many replicas, or more (0: a single one)."""
        if num_copies < 2:
            return np.zeros_like(self.reduce)
        if not self.copies_inside:
            return self.reduce
        inside = num_copies <= np.array(self.copies_inside)
        reduce_seconds = np.where(inside[:, None, None], self.reduce_inside, self.reduce)
        return reduce_seconds * (1 - 1 / num_copies)

    def fits(self, depth: int) -> Array:
        """[K, L+1, L+1] Whether a stage fits its device with `depth` microbatches in flight."""
        if depth not in self._fitting:
            need = self.state_bytes + depth * self.stash_bytes
            self._fitting[depth] = need <= self.memory[:, None, None]
            self._fitting[depth].setflags(write=False)
        return self._fitting[depth]

    @functools.cached_property
    def _fitting(self) -> dict[int, Array]:
        """Results of `fits` by depth: a search asks for the same many times."""
        return {}


def tables(chain: Chain) -> Tables:
    """The chain's sums over all intervals of layers.

    Raises:
        PlanError: If the chain is invalid, with all faults.
    """
    faults = list(_faults(chain))
    if faults:
        raise PlanError("the chain cannot be planned:\n" + "\n".join(f"  {f}" for f in faults))
    num_kinds, num_layers = len(chain.groups), len(chain.output_bytes)

    def spans(rows: Sequence[Sequence[float]]) -> Array:
        sums = np.concatenate([np.zeros((num_kinds, 1)), np.cumsum(rows, axis=1)], axis=1)
        return np.maximum(sums[:, None, :] - sums[:, :, None], 0.0)

    parameters = spans([g.parameter_bytes for g in chain.groups])
    rates = np.array(chain.reduce_seconds or [0.0] * num_kinds)
    inside = np.array(chain.rings.inside_seconds) if chain.rings else rates
    zero = np.zeros((num_kinds, num_kinds))
    rate = np.array(chain.send_seconds) if chain.send_seconds else zero
    latency = np.array(chain.send_latency_seconds) if chain.send_latency_seconds else zero
    cross = np.zeros((num_layers + 1, num_kinds + 1, num_kinds + 1))
    sent = np.array(chain.output_bytes)[:-1, None, None]
    cross[1:-1, :-1, :-1] = (latency + latency.T) + sent * (rate + rate.T)
    shared = None
    if chain.rings and chain.rings.card_seconds:
        card = np.array(chain.rings.card_seconds)
        shared = np.zeros((num_layers + 1, num_kinds, num_kinds))
        shared[1:-1] = sent * (card + card.T)
    state = chain.state_factor * parameters + chain.workspace_bytes
    stash = spans([g.stash_bytes for g in chain.groups])
    if chain.keeps_inputs:
        state = state + stash
        inputs = np.array([0.0, *chain.output_bytes])
        stash = np.broadcast_to(inputs[None, :, None], stash.shape)
    return Tables(
        seconds=spans(
            [np.add(g.forward_seconds, g.backward_seconds).tolist() for g in chain.groups]
        ),
        update=spans([g.update_seconds for g in chain.groups]),
        reduce=parameters * rates[:, None, None],
        reduce_inside=parameters * np.minimum(rates, inside)[:, None, None],
        meeting=chain.meeting_seconds,
        copies_inside=chain.rings.copies_inside if chain.rings else (),
        num_nodes=chain.rings.num_nodes if chain.rings else (),
        shared=shared,
        state_bytes=state,
        stash_bytes=stash,
        cross=cross,
        memory=np.array([g.memory_bytes for g in chain.groups], float),
        num_devices=tuple(g.num_devices for g in chain.groups),
    )


def fill_and_period(t: Tables, cuts: Sequence[int], groups: Sequence[int]) -> tuple[float, float]:
    """Seconds of a pipeline's first microbatch, and of each further one.

    A device cannot compute while it sends or receives (XLA's permutes stand between the
    computations of a step), so a transfer is part of the period of both its ends:
    `period = max over stages of (forward + backward + transfers at both boundaries)`, and the fill
    counts each stage and each transfer once. m microbatches then take

        fill + (m - 1) * period.

    Replaying the 1F1B schedule event by event never takes longer where all stages spend the same
    share of their time on the forward, whether transfers hold up both ends, one, or only the data.
    Where shares differ, a backward can wait behind a longer forward while the pipeline fills:
    at most (S - 2) * (longest forward + longest backward - period) more, once a step, for S >= 3.

    References:
        Narayanan et al., "PipeDream", SOSP 2019, section 3.2 (1F1B); Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters", SC 2021, section 2.2.1 (fill).
    """
    num, ends = len(cuts), (*cuts[1:], t.num_layers)
    kinds = (t.num_kinds, *groups, t.num_kinds)
    edges = [t.cross[cut, kinds[i], kinds[i + 1]] for i, cut in enumerate((*cuts, t.num_layers))]
    busy = [t.seconds[k, a, b] for k, a, b in zip(groups, cuts, ends, strict=True)]
    fill = math.fsum(busy) + math.fsum(edges)
    return float(fill), float(max(busy[i] + edges[i] + edges[i + 1] for i in range(num)))


def times_with_edges(
    t: Tables, cuts: Sequence[int], groups: Sequence[int], edges: Sequence[float]
) -> tuple[float, float]:
    """Fill and period of a replica by the seconds of its boundaries.

    Args:
        cuts: First layer of each stage.
        groups: The kind of each stage.
        edges: Seconds of crossing each boundary between two stages.
    """
    around = [0.0, *edges, 0.0]
    busy = [float(t.seconds[s]) for s in zip(groups, cuts, (*cuts[1:], t.num_layers), strict=True)]
    period = max(seconds + around[i] + around[i + 1] for i, seconds in enumerate(busy))
    return sum(busy) + sum(around), period


def reductions(t: Tables, cuts: Sequence[int], replicas: Sequence[ReplicaSort]) -> list[float]:
    """Per stage the reduction of its gradients over replicas (0 for a single device).

    A single pipeline reduces nothing, and fills and empties its stages instead.

    A ring of one kind of devices counts as inside a node if a node has enough of them: without
    places it is not known to leave the node.
    """
    ends, num = (*cuts[1:], t.num_layers), sum(r.count for r in replicas)
    if num < 2:
        return [t.meeting if len(cuts) > 1 else 0.0] * len(cuts)
    by_stage = []
    for i, (a, b) in enumerate(zip(cuts, ends, strict=True)):
        kinds = {r.groups[i] for r in replicas if r.count}
        seconds = max(float(t.reduce[k, a, b]) for k in kinds)
        if t.copies_inside:
            (kind, *others) = kinds
            if not others and num <= t.copies_inside[kind]:
                seconds = float(t.reduce_inside[kind, a, b])
            seconds *= 1 - 1 / num
        by_stage.append(max(seconds, t.meeting))
    return by_stage


def tail_seconds(t: Tables, cuts: Sequence[int], replicas: Sequence[ReplicaSort]) -> float:
    """Slowest reduction of gradients and slowest optimizer update."""
    ends = (*cuts[1:], t.num_layers)
    stages = [
        (k, a, b) for r in replicas for k, a, b in zip(r.groups, cuts, ends, strict=True) if r.count
    ]
    return max(reductions(t, cuts, replicas)) + float(max(t.update[s] for s in stages))


def step_seconds(chain: Chain, cuts: Sequence[int], replicas: Sequence[ReplicaSort]) -> float:
    """Slowest replica, then the reduction of gradients over replicas, then the update."""
    t = tables(chain)
    slowest = 0.0
    for r in replicas:
        fill, period = fill_and_period(t, cuts, r.groups)
        slowest = max(slowest, fill + (r.num_microbatches - 1) * period)
    return slowest + tail_seconds(t, cuts, replicas)


def _faults(chain: Chain) -> Iterator[str]:
    groups, num_layers = chain.groups, len(chain.output_bytes)
    if not any(g.num_devices > 0 for g in groups):
        yield "there are no devices: give a Group with num_devices of at least 1"
    if chain.num_microbatches < 1:
        yield f"num_microbatches is {chain.num_microbatches}: give at least one"
    if not num_layers:
        yield "there are no layers: output_bytes is empty"
    rows = [
        ("output_bytes", chain.output_bytes, num_layers, "layers"),
        ("state_factor", [chain.state_factor], 1, "chain"),
        ("workspace_bytes", [chain.workspace_bytes], 1, "chain"),
        ("meeting_seconds", [chain.meeting_seconds], 1, "chain"),
    ]
    for g in groups:
        if not (math.isfinite(g.memory_bytes) and g.memory_bytes > 0):
            yield f"{g.kind}: memory_bytes is {g.memory_bytes}: give what a device may use"
        if 0 in g.forward_seconds:
            at = g.forward_seconds.index(0)
            yield f"{g.kind}: forward_seconds[{at}] is 0: no layer takes no time"
        rows += [(f"{g.kind}: {x}", getattr(g, x), num_layers, "layers") for x in _OF_LAYERS]
    for name in ("send_seconds", "send_latency_seconds"):
        matrix = getattr(chain, name)
        if matrix and len(matrix) != len(groups):
            yield f"{name} has {len(matrix)} rows for {len(groups)} groups: give one per group"
        rows += [(f"{name}[{i}]", row, len(groups), "groups") for i, row in enumerate(matrix)]
    rows += _reduction_rows(chain)
    for where, row, num, what in rows:
        if len(row) != num:
            yield f"{where} has {len(row)} values for {num} {what}: give one for each"
        for i, x in enumerate(row):
            if not (math.isfinite(x) and x >= 0):
                yield f"{where}[{i}] is {x}: measure it again"


def _reduction_rows(chain: Chain) -> Iterator[tuple[str, Sequence[float], int, str]]:
    """The times of reductions: name, values, how many there must be, and of what."""
    num, rings = len(chain.groups), chain.rings
    if chain.reduce_seconds:
        yield "reduce_seconds", chain.reduce_seconds, num, "groups"
    if not rings:
        return
    yield "rings.inside_seconds", rings.inside_seconds, num, "groups"
    yield "rings.copies_inside", rings.copies_inside, num, "groups"
    if rings.card_seconds:
        yield "rings.num_nodes", rings.num_nodes, num, "groups"
    for i, seconds in enumerate(rings.card_seconds):
        yield f"rings.card_seconds[{i}]", seconds, num, "groups"


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
