"""The choices of least total cost, one variable eliminated after another.

Costs are tables over a few variables each. All that read one variable are added up, and its best
choice, for any choice of the others in them, makes one table without it. A chain of layers, however
many, needs tables of a few variables only.

References:
    Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 1999.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

Table = tuple[tuple[int, ...], np.ndarray]


def least_cost(sizes: Sequence[int], tables: Iterable[Table], most: int) -> list[int] | None:
    """Choices whose costs add up to the least, proven; of equal ones the first, as it comes.

    Args:
        sizes: For each variable the number of its choices.
        tables: Costs: variables in ascending order, and an axis for each.
        most: Entries of the largest table that may be made.

    Returns:
        For each variable its choice; None: a larger table would have to be made.
    """
    of: list[list[Table]] = [[] for _ in sizes]
    beside: list[set[int]] = [set() for _ in sizes]

    def add(table: Table) -> None:
        for v in table[0]:
            of[v].append(table)
            beside[v].update(table[0])

    def entries(v: int) -> int:
        return math.prod(sizes[u] for u in beside[v] | {v})

    for table in tables:
        add(table)
    heap = [(entries(v), v) for v in range(len(sizes))]
    heapq.heapify(heap)
    is_left = [True] * len(sizes)
    best: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    while heap:
        num, v = heapq.heappop(heap)
        if not is_left[v]:
            continue
        if num != entries(v):
            heapq.heappush(heap, (entries(v), v))
            continue
        if num > most:
            return None
        scope = sorted(beside[v] | {v})
        total = np.zeros([sizes[u] for u in scope])
        for variables, costs in of[v]:
            total += costs.reshape([sizes[u] if u in variables else 1 for u in scope])
        others, axis = tuple(u for u in scope if u != v), scope.index(v)
        best.append((v, others, total.argmin(axis)))
        is_left[v] = False
        for u in others:
            of[u] = [table for table in of[u] if v not in table[0]]
            beside[u] = set().union(*(table[0] for table in of[u]))
        if others:
            add((others, total.min(axis)))
            for u in others:
                heapq.heappush(heap, (entries(u), u))
    chosen = [0] * len(sizes)
    for v, others, choice in reversed(best):
        chosen[v] = int(choice[tuple(chosen[u] for u in others)])
    return chosen
