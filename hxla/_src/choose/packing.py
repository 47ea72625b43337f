"""Pipelines of one cut, shared by all replicas: which kinds on which stages, and how many.

`best_packing` takes those that run the most microbatches per step on the available devices.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy

from .apportionment import best_counts
from .chain import Array, ReplicaSort, Staging, Tables, fill_and_period, tail_seconds

_MOST_PIVOTS = 60  # many more than a few rows need
_SMALL = 4000  # states up to which the exact table is used


def best_packing(
    used: Array, value: Array, available: Sequence[int]
) -> tuple[dict[int, int], float]:
    """Integers y that maximise `value @ y` with `used.T @ y <= available`.

    Exact if devices are few. Otherwise the whole part of a linear programme's solution, repeated
    for the remaining devices, with the first programme's maximum as the bound. All columns take the
    same number of devices, so at most `available / that` of them can be built: this cut removes
    most of the gap of fractions.

    Args:
        used: [C, K] Devices of each kind that a column takes.
        value: [C] Whole numbers.
        available: [K]

    Returns:
        Column to count of a solution, and a number that no solution exceeds.
    """
    columns = np.flatnonzero((value > 0) & (used <= np.array(available)).all(axis=1))
    if not len(columns):
        return {}, 0.0
    columns = _best_of_each(used, value, columns)
    if np.prod(np.array(available) + 1) <= _SMALL:
        return _table(used, value, columns, available)
    chosen: dict[int, int] = {}
    left, bound = list(available), 0.0
    while True:
        columns = columns[(used[columns] <= left).all(axis=1)]
        if not len(columns):
            return chosen, bound
        shares, upper = fractional_packing(used[columns], value[columns], left)
        bound = bound or float(np.floor(upper + 1e-6))
        counts = np.floor(shares + 1e-9).astype(int)
        if not counts.any():
            counts[int(shares.argmax())] = 1
        for c, y in zip(columns, counts, strict=True):
            if y:
                chosen[int(c)] = chosen.get(int(c), 0) + int(y)
        left = [int(n) for n in left - used[columns].T @ counts]


def fractional_packing(
    used: Array, value: Array, available: Sequence[float]
) -> tuple[Array, float]:
    """The same with fractions, of at most as many columns: counts, and the maximum."""
    most = sum(available) // int(used[0].sum())
    rows = np.vstack([used.T, np.ones(len(used))])
    right = np.array([*available, most], float)
    scale = float(value.max()) or 1.0
    solution = _simplex(value / scale, rows, right)
    if solution is None:
        solved = scipy.optimize.linprog(-value / scale, A_ub=rows, b_ub=right, method="highs-ds")
        solution = solved.x, -solved.ineqlin.marginals
    counts, prices = solution[0], scale * np.maximum(solution[1], 0.0)
    # Any prices bound the maximum; so do these, however exact the solver was.
    excess = float(np.max(value - rows.T @ prices))
    upper = float(right @ prices) + most * max(0.0, excess)
    return counts, upper


def _simplex(value: Array, rows: Array, right: Array) -> tuple[Array, Array] | None:
    """The simplex method for few rows and many columns: counts and prices; None: it cycled.

    A search solves thousands, each in much less time than the start of a general solver.

    Args:
        value: [C] At most 1.
        rows: [R, C]
        right: [R] Not negative.
    """
    num = len(right)
    every = np.hstack([rows, np.eye(num)])
    worth = np.append(value, np.zeros(num))
    basis = np.arange(len(value), len(worth))
    for _ in range(_MOST_PIVOTS):
        inverse = np.linalg.inv(every[:, basis])
        prices = worth[basis] @ inverse
        gain = worth - prices @ every
        entering = int(gain.argmax())
        basic_values = inverse @ right
        if gain[entering] <= 1e-10:
            counts = np.zeros(len(worth))
            counts[basis] = np.maximum(basic_values, 0.0)
            return counts[: len(value)], prices
        column = inverse @ every[:, entering]
        ratio = np.full(num, np.inf)
        np.divide(np.maximum(basic_values, 0.0), column, out=ratio, where=column > 1e-9)
        leaving = int(ratio.argmin())
        if ratio[leaving] == np.inf:
            return None
        basis[leaving] = entering
    return None


def _best_of_each(used: Array, value: Array, columns: Array) -> Array:
    """The most valuable column for each set of devices."""
    order = columns[np.lexsort((columns, -value[columns]))]
    _, first = np.unique(used[order], axis=0, return_index=True)
    return np.sort(order[first])


def _table(
    used: Array, value: Array, columns: Array, available: Sequence[int]
) -> tuple[dict[int, int], float]:
    """The exact packing, by a table over every number of devices of each kind."""
    shape = tuple(n + 1 for n in available)
    best, last = np.zeros(shape), np.full(shape, -1)
    # Each round adds a pipeline, until none helps.
    changed = True
    while changed:
        changed = False
        for c in columns:
            there = tuple(slice(u, None) for u in used[c])
            here = tuple(slice(0, n - u) for n, u in zip(shape, used[c], strict=True))
            better = best[here] + value[c] > best[there]
            if better.any():
                changed = True
                best[there] = np.where(better, best[here] + value[c], best[there])
                last[there] = np.where(better, c, last[there])
    chosen: dict[int, int] = {}
    at = tuple(available)
    while (c := int(last[at])) >= 0:
        chosen[c] = chosen.get(c, 0) + 1
        at = tuple(n - int(u) for n, u in zip(at, used[c], strict=True))
    return chosen, float(best[tuple(available)])


_MAX_PERIODS = 24
_ANY = 1 << 40  # microbatches, where memory sets no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutPipelines:
    """The pipelines of one cut, by mix of devices and by limit on the period.

    Attributes:
        cuts: First layer of each stage.
        used: [C, K] Devices of each kind.
        period: [W] Limits.
        fill: [W, C] Least fill (inf: no such pipeline).
        most: [W] The most microbatches, by memory.
        first: [W, C] Kind of the first stage.
        after: Per stage and mix of the stages from it on, [W, before, this]: kind of the next.
    """

    cuts: tuple[int, ...]
    used: Array
    period: Array
    fill: Array
    most: Array
    first: Array
    after: tuple[Mapping[tuple[int, ...], Array], ...]

    @property
    def work(self) -> int:
        """The elements of the dynamic programme."""
        return sum(way.size for ways in self.after for way in ways.values())

    def microbatches(self, seconds: float) -> tuple[Array, Array]:
        """[C] The most microbatches of each mix in `seconds`, a real number, and [C] its limit."""
        count = 1 + (seconds - self.fill) / self.period[:, None]
        count = np.minimum(np.where(self.fill <= seconds, count, 0.0), self.most[:, None])
        at = count.argmax(axis=0)
        return np.take_along_axis(count, at[None], 0)[0], at

    def kinds(self, limit: int, mix: int) -> tuple[int, ...]:
        """Kind of each stage of the pipeline of a mix with the least fill at a limit."""
        left = tuple(int(n) for n in self.used[mix])
        before, kind = len(left), int(self.first[limit, mix])
        kinds = [kind]
        for after in self.after[:-1]:
            following = int(after[left][limit, before, kind])
            left = (*left[:kind], left[kind] - 1, *left[kind + 1 :])
            before, kind = kind, following
            kinds.append(kind)
        return tuple(kinds)


def cut_pipelines(t: Tables, cuts: tuple[int, ...]) -> CutPipelines:
    """All pipelines of a cut that can be best: the exact least fill by mix and period.

    A dynamic programme from the last stage to the first; its state is (devices used per kind, kind
    of the stage before, kind of the first stage), as in `best_pipeline` with the cut given.
    """
    num = len(cuts)
    depths = [num, *(d for d in range(1, num) if num <= 8 or d & (d - 1) == 0)]
    parts, seen = [], set()
    for depth in depths:
        fits = np.array(
            [
                t.fits(min(num - i, depth))[:, a, b]
                for i, (a, b) in enumerate(zip(cuts, (*cuts[1:], t.num_layers), strict=True))
            ]
        )
        # The full depth comes first: a lesser one matters only if more stages fit.
        if fits.tobytes() not in seen:
            seen.add(fits.tobytes())
            parts.append(_solve(t, cuts, fits, _ANY if depth == num else depth))
    return CutPipelines(
        cuts=cuts,
        used=parts[0].used,
        period=np.concatenate([p.period for p in parts]),
        fill=np.concatenate([p.fill for p in parts]),
        most=np.concatenate([p.most for p in parts]),
        first=np.concatenate([p.first for p in parts]),
        after=tuple(
            {mix: np.concatenate([p.after[i][mix] for p in parts]) for mix in parts[0].after[i]}
            for i in range(num)
        ),
    )


def _solve(t: Tables, cuts: tuple[int, ...], fits: Array, most: int) -> CutPipelines:
    num, kinds = len(cuts), t.num_kinds
    ends = (*cuts[1:], t.num_layers)
    busy = np.array([t.seconds[:, a, b] for a, b in zip(cuts, ends, strict=True)])  # [S, a]
    into = np.array([t.cross[a] for a in cuts])  # [S, b, a]
    out = np.array([t.cross[b] for b in ends])  # [S, a, n]
    period = busy[:, None, :, None] + into[:, :, :kinds, None] + out[:, None, :kinds, :]
    values = np.unique(np.where(fits[:, None, :, None], period, 0.0))
    longest = float(np.where(fits, period.min(axis=(1, 3)), np.inf).min(axis=1).max())
    limits = values[values >= longest] if (values >= longest).any() else values[-1:]
    if len(limits) > _MAX_PERIODS:
        pure = [
            max(period[i, a if i else kinds, a, a if i + 1 < num else kinds] for i in range(num))
            for a in range(kinds)
            if fits[:, a].all()
        ]
        limits = _thinned(limits, [x for x in pure if x >= longest])
    mixes = [(0,) * kinds]
    rest = np.full((len(limits), 1, kinds + 1, kinds + 1), np.inf)  # [W, C, before, first]
    rest[:, :, :, kinds] = 0.0
    after: list[dict[tuple[int, ...], Array]] = []
    for i in reversed(range(num)):
        index = {mix: j for j, mix in enumerate(mixes)}
        mixes = _mixes_of(num - i, t.num_devices)
        here = np.full((len(limits), len(mixes), kinds + 1, kinds + 1), np.inf)
        way = np.zeros(here.shape, np.int8)
        for a in range(kinds):
            rows = [j for j, mix in enumerate(mixes) if mix[a]]
            if not rows or not fits[i, a]:
                continue
            before = [index[(*mixes[j][:a], mixes[j][a] - 1, *mixes[j][a + 1 :])] for j in rows]
            allowed = period[i, :, a, :] <= limits[:, None, None]  # [W, b, n]
            cost = np.where(allowed, busy[i, a] + out[i, a], np.inf)
            total = rest[:, before, a, None, :] + cost[:, None]  # [W, R, b, n]
            at = total.argmin(axis=3)
            here[:, :, :, a][:, rows] = np.take_along_axis(total, at[..., None], 3)[..., 0]
            way[:, :, :, a][:, rows] = at
        rest = here
        after.append({mix: way[:, j] for j, mix in enumerate(mixes)})
    at = rest[:, :, kinds].argmin(axis=2)
    return CutPipelines(
        cuts=cuts,
        used=np.array(mixes).reshape(len(mixes), kinds),
        period=limits,
        fill=np.take_along_axis(rest[:, :, kinds], at[:, :, None], 2)[..., 0],
        most=np.full(len(limits), most),
        first=at,
        after=tuple(reversed(after)),
    )


def _thinned(values: Array, kept: Sequence[float]) -> Array:
    """Few of many periods: the last of each cluster, and those in `kept`."""
    ratio = 1.0005
    while len(lasts := _lasts(values, ratio)) > _MAX_PERIODS:
        ratio = 1 + 1.5 * (ratio - 1)
    return np.union1d(lasts, kept)


def _lasts(values: Array, ratio: float) -> Array:
    """The last of each run of ascending values, each run within a ratio."""
    ends = np.searchsorted(values, values * ratio, side="right").tolist()
    lasts, at = [], 0
    while at < len(ends):
        at = ends[at]
        lasts.append(at - 1)
    return values[lasts]


def _mixes_of(total: int, available: Sequence[int]) -> list[tuple[int, ...]]:
    if len(available) == 1:
        return [(total,)] if total <= available[0] else []
    return [
        (n, *rest)
        for n in range(min(total, available[0]) + 1)
        for rest in _mixes_of(total - n, available[1:])
    ]


def fractional_seconds(p: CutPipelines, available: Sequence[int], num_microbatches: int) -> float:
    """Time of the pipelines if their numbers and microbatches could be fractions (inf: none)."""

    def lacking(seconds: float) -> float:
        value, _ = p.microbatches(seconds)
        return num_microbatches * (1 - 1e-9) - fractional_packing(p.used, value, available)[1]

    low = high = start = float(p.fill.min())
    while high < np.inf and lacking(high) > 0:
        low, high = high, 4 * high if high < start * 2.0**60 else np.inf
    if low == high or high == np.inf:
        return high
    return float(scipy.optimize.brentq(lacking, low, high, rtol=1e-5))


def enough_for(
    p: CutPipelines, available: Sequence[int], num_microbatches: int, seconds: float
) -> bool:
    """Whether the devices might run all microbatches in a time."""
    value = np.minimum(np.floor(p.microbatches(seconds)[0] + 1e-9), num_microbatches)
    return best_packing(p.used, value, available)[1] >= num_microbatches


def best_replicas(
    t: Tables,
    p: CutPipelines,
    num_microbatches: int,
    kinds: Sequence[int],
    start: float,
    tolerance: float,
) -> Staging | None:
    """The fastest plan with one cut, on devices of some kinds.

    Bisection over the time of the slowest replica; at each time the mixes are packed into the
    devices there are (`best_packing`), and the microbatches are then dealt out exactly.
    """
    available = [n if k in kinds else 0 for k, n in enumerate(t.num_devices)]
    best: Staging | None = None

    def enough(seconds: float) -> bool:
        nonlocal best
        value, at = p.microbatches(seconds * (1 + 1e-12))
        value = np.minimum(np.floor(value + 1e-9), num_microbatches)
        chosen, _ = best_packing(p.used, value, available)
        if sum(value[c] * y for c, y in chosen.items()) < num_microbatches:
            return False
        sorts = [(p.kinds(int(at[c]), c), int(p.most[at[c]]), y) for c, y in sorted(chosen.items())]
        dealt = _deal_microbatches(t, p.cuts, sorts, num_microbatches)
        best = dealt if best is None else min(best, dealt, key=lambda plan: plan.step_seconds)
        return True

    _least(enough, start, tolerance)
    return best


def _deal_microbatches(
    t: Tables,
    cuts: tuple[int, ...],
    sorts: list[tuple[tuple[int, ...], int, int]],
    num_microbatches: int,
) -> Staging:
    rows = []
    for groups, most, count in sorts:
        fill, period = fill_and_period(t, cuts, groups)
        rows += [(groups, fill, period, most)] * count
    counts = best_counts(
        num_microbatches,
        [period for _, _, period, _ in rows],
        [fill - period for _, fill, period, _ in rows],
        [most for *_, most in rows],
    )
    together: dict[tuple[tuple[int, ...], int], int] = {}
    slowest = 0.0
    for (groups, fill, period, _), m in zip(rows, counts, strict=True):
        if m:
            together[groups, m] = together.get((groups, m), 0) + 1
            slowest = max(slowest, fill + (m - 1) * period)
    replicas = tuple(
        ReplicaSort(groups=groups, count=count, num_microbatches=m)
        for (groups, m), count in sorted(together.items())
    )
    step_seconds = slowest + tail_seconds(t, cuts, replicas)
    return Staging(cuts=cuts, replicas=replicas, step_seconds=step_seconds)


def _least(enough: Callable[[float], bool], start: float, tolerance: float) -> float:
    """The least time from `start` on that is enough, to a relative tolerance (inf: none)."""
    if not np.isfinite(start) or not enough(start * 2.0**60):
        return np.inf
    if enough(start):
        return start
    low, step = start, 0.01
    while not enough(high := low * (1 + step)):
        low, step = high, 2 * step
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
