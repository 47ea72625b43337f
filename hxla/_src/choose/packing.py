"""Which pipelines to build from the available devices: the most microbatches per step."""

from collections.abc import Sequence

import numpy as np
import scipy

from .chain import Array

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
        shares, _, upper = fractional_packing(used[columns], value[columns], left)
        bound = bound or float(np.floor(upper + 1e-6))
        counts = np.floor(shares + 1e-9).astype(int)
        if not counts.any():
            counts[int(shares.argmax())] = 1
        for c, y in zip(columns, counts, strict=True):
            if y:
                chosen[int(c)] = chosen.get(int(c), 0) + int(y)
        left = [int(n) for n in left - used[columns].T @ counts]


def fractional_packing(
    used: Array,
    value: Array,
    available: Sequence[float],
    *,
    whole: bool = True,
) -> tuple[Array, Array, float]:
    """The same with fractions: counts, price of a device of each kind, and the maximum.

    Args:
        whole: Whether to limit the number of columns to that of whole columns.
    """
    most = sum(available) // int(used[0].sum()) if whole else sum(available)
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
    return counts, prices[:-1], upper


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
