"""Which pipelines to build from the devices there are: the most microbatches they can run."""

from collections.abc import Sequence

import numpy as np
import scipy.optimize

from ._pipeline import Array

_SMALL = 4000  # states up to which the exact table is faster than branch and bound
# Nodes, not seconds, end a search that is not done: the same answer on every machine.
_OPTIONS = {"mip_rel_gap": 2e-4, "node_limit": 400}


def best_packing(
    used: Array, value: Array, available: Sequence[int]
) -> tuple[dict[int, int], float]:
    """Integers y that maximise `value @ y` with `used.T @ y <= available`.

    Args:
        used: [C, K] Devices of each kind that a column takes.
        value: [C] Whole numbers.
        available: [K]

    Returns:
        Column to count of a solution, and a number that no solution exceeds.
    """
    columns = np.flatnonzero((value > 0) & (used <= np.array(available)).all(axis=1))
    columns = columns[_undominated(used[columns], value[columns])]
    if not len(columns):
        return {}, 0.0
    if np.prod(np.array(available) + 1) <= _SMALL:
        return _table(used, value, columns, available)
    solved = scipy.optimize.milp(
        -value[columns],
        constraints=scipy.optimize.LinearConstraint(used[columns].T, -np.inf, available),
        integrality=np.ones(len(columns)),
        options=_OPTIONS,
    )
    if solved.x is None:
        shares, _, upper = fractional_packing(used[columns], value[columns], available)
        counts = np.floor(shares + 1e-9)
    else:
        counts, upper = np.round(solved.x), -float(solved.mip_dual_bound)
    chosen = {int(c): int(y) for c, y in zip(columns, counts, strict=True) if y}
    return chosen, float(np.floor(upper + 1e-6))


def fractional_packing(
    used: Array, value: Array, available: Sequence[int]
) -> tuple[Array, Array, float]:
    """The same with fractions: counts, price of a device of each kind, and the maximum."""
    solved = scipy.optimize.linprog(
        -value, A_ub=used.T, b_ub=np.array(available, float), method="highs"
    )
    return solved.x, -solved.ineqlin.marginals, -float(solved.fun)


def _undominated(used: Array, value: Array) -> Array:
    """Indices of columns no other column beats with fewer or the same devices."""
    order = np.lexsort((*used.T, used.sum(axis=1), -value))
    kept: list[int] = []
    for c in order:
        if not kept or not (used[kept] <= used[c]).all(axis=1).any():
            kept.append(int(c))
    return np.array(sorted(kept), int)


def _table(
    used: Array, value: Array, columns: Array, available: Sequence[int]
) -> tuple[dict[int, int], float]:
    """Exact, over every number of devices of each kind."""
    shape = tuple(n + 1 for n in available)
    best, last = np.zeros(shape), np.full(shape, -1)
    # Devices only add up, so by rounds: what is best with one pipeline more.
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
