"""The dimension of each array that one mesh axis cuts, for the whole program at once.

Every equation takes one of its factors or runs whole. Every array has the state that its maker
leaves, and is resharded to the state that each reader wants. The goal is the least communication,
forward and backward, proven optimal.

Variables are eliminated one after another. The cost tables that contain a variable are added up and
minimised over it, which gives one table over the others. A chain of layers, however long, needs
small tables only. Where equations are connected too densely for that, HiGHS solves an integer
program: first its linear relaxation, which takes half the time and mostly has an integer solution.

References:
    Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 1999.
    Whale, USENIX ATC 2022, section 3.2.2 (patterns of least communication).
    Zheng et al., "Alpa", OSDI 2022, section 4.2 (the integer program over equations).
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import scipy

from ..core.errors import PlanError

Table = tuple[tuple[int, ...], np.ndarray]


def least_cost(sizes: Sequence[int], tables: Iterable[Table], most: int) -> list[int] | None:
    """The choices of least total cost, proven.

    Args:
        sizes: For each variable the number of its choices.
        tables: Variables in ascending order, and costs with an axis for each.
        most: Entries of the largest table that may be made.

    Returns:
        For each variable its choice; None: a larger table is needed.
    """
    tables_of: list[list[Table]] = [[] for _ in sizes]
    beside: list[set[int]] = [set() for _ in sizes]

    def add(table: Table) -> None:
        for v in table[0]:
            tables_of[v].append(table)
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
        for variables, costs in tables_of[v]:
            total += costs.reshape([sizes[u] if u in variables else 1 for u in scope])
        others, axis = tuple(u for u in scope if u != v), scope.index(v)
        best.append((v, others, total.argmin(axis)))
        is_left[v] = False
        for u in others:
            tables_of[u] = [table for table in tables_of[u] if v not in table[0]]
            beside[u] = set().union(*(table[0] for table in tables_of[u]))
        if others:
            add((others, total.min(axis)))
            for u in others:
                heapq.heappush(heap, (entries(u), u))
    chosen = [0] * len(sizes)
    for v, others, choice in reversed(best):
        chosen[v] = int(choice[tuple(chosen[u] for u in others)])
    return chosen


_INTEGER_TOLERANCE = 1e-6  # HiGHS's default

_MOST_ENTRIES = 1 << 20  # of a table of costs: 8 MB

State = int | None  # the dimension that is cut; None: whole on each device


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceNode:
    """An equation or an input, which leaves arrays in a state.

    Attributes:
        choices: For each choice the states of operands, the states of results, and the cost.
    """

    choices: tuple[tuple[tuple[State, ...], tuple[State, ...], float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """An array from the node that makes it to a node that reads it.

    Attributes:
        num_bytes: On one device before this axis cuts the array.
        differentiable: Whether a cotangent is sent back.
        free: Whether every state costs nothing (a batch, a literal).
    """

    source: int
    result: int
    target: int
    operand: int
    num_bytes: float
    differentiable: bool
    free: bool = False

    def sent_bytes(self, made: State, wanted: State, n: int) -> float:
        """Bytes that a device sends between two states of the array."""
        if self.free:
            return 0.0
        return reshard_bytes(made, wanted, self.num_bytes, n, differentiable=self.differentiable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The nodes, in the order of execution, and the edges."""

    num_devices: int
    nodes: tuple[ChoiceNode, ...]
    edges: tuple[Edge, ...]


def all_reduce_bytes(num_bytes: float, n: int) -> float:
    """Bytes each device sends in a ring all-reduce (Patarasuk and Yuan, JPDC 2009)."""
    return 2 * (n - 1) / n * num_bytes


def all_gather_bytes(num_bytes: float, n: int) -> float:
    """Bytes each device sends in a ring all-gather of `num_bytes` in all."""
    return (n - 1) / n * num_bytes


def all_to_all_bytes(num_bytes: float, n: int) -> float:
    """Bytes each device sends in an all-to-all of `num_bytes` in all."""
    return (n - 1) / n**2 * num_bytes


def reshard_bytes(
    made: State, wanted: State, num_bytes: float, n: int, *, differentiable: bool
) -> float:
    """Bytes each device sends, forward and backward, to reshard an array of `num_bytes` in all.

    A slice forward is a gather of the cotangent backward, and vice versa.
    """
    if made == wanted:
        return 0.0
    if made is None:
        return all_gather_bytes(num_bytes, n) if differentiable else 0.0
    if wanted is None:
        return all_gather_bytes(num_bytes, n)
    return all_to_all_bytes(num_bytes, n) * (1 + differentiable)


def _sent(problem: Problem, chosen: Sequence[int]) -> Iterator[tuple[Edge, State, State, float]]:
    """For each edge the array's state as it is made and as it is wanted, and the bytes between."""
    for edge in problem.edges:
        made = problem.nodes[edge.source].choices[chosen[edge.source]][1][edge.result]
        wanted = problem.nodes[edge.target].choices[chosen[edge.target]][0][edge.operand]
        yield edge, made, wanted, edge.sent_bytes(made, wanted, problem.num_devices)


def cost(problem: Problem, chosen: Sequence[int]) -> float:
    """Bytes that one device sends in a step, for given choices."""
    total = sum(node.choices[c][2] for node, c in zip(problem.nodes, chosen, strict=True))
    for _, _, _, num_bytes in _sent(problem, chosen):
        total += num_bytes
    return total


def num_collectives(problem: Problem, chosen: Sequence[int], free: Collection[int]) -> int:
    """The collectives of a step's forward and backward, for given choices.

    Args:
        free: Nodes whose cost is no collective.
    """
    nodes = enumerate(zip(problem.nodes, chosen, strict=True))
    num = sum(i not in free and node.choices[c][2] > 0 for i, (node, c) in nodes)
    for edge, made, wanted, num_bytes in _sent(problem, chosen):
        if num_bytes:
            is_all_to_all = made is not None and wanted is not None
            num += 1 + (is_all_to_all and edge.differentiable)
    return num


def solve(problem: Problem) -> tuple[int, ...]:
    """The choice of least cost, proven.

    Returns:
        For each node the index of its choice.

    Raises:
        PlanError: If the solver fails.
    """
    sizes = [len(node.choices) for node in problem.nodes]
    chosen = least_cost(sizes, _cost_tables(problem), _MOST_ENTRIES)
    return tuple(_integer_solution(problem) if chosen is None else chosen)


def _states(problem: Problem, edge: Edge) -> tuple[list[State], list[State]]:
    """An array's state for each choice of its maker, and for each choice of its reader."""
    made = [c[1][edge.result] for c in problem.nodes[edge.source].choices]
    wanted = [c[0][edge.operand] for c in problem.nodes[edge.target].choices]
    return made, wanted


def _cost_tables(problem: Problem) -> Iterator[Table]:
    for i, node in enumerate(problem.nodes):
        yield (i,), np.array([c[2] for c in node.choices])
    for edge in problem.edges:
        made, wanted = _states(problem, edge)
        known = {
            pair: edge.sent_bytes(*pair, problem.num_devices)
            for pair in set(itertools.product(made, wanted))
        }
        costs = np.array([[known[m, w] for w in wanted] for m in made])
        if not costs.any():
            continue
        if edge.source > edge.target:
            yield (edge.target, edge.source), costs.T
        else:
            yield (edge.source, edge.target), costs


def _integer_solution(problem: Problem) -> list[int]:
    nodes, n = problem.nodes, problem.num_devices
    first = np.concatenate([[0], np.cumsum([len(node.choices) for node in nodes])]).astype(int)
    costs = [c[2] for node in nodes for c in node.choices]
    num_choices = len(costs)
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    right: list[float] = []

    def constraint(terms: list[tuple[int, float]], value: float) -> None:
        for column, entry in terms:
            rows.append(len(right))
            columns.append(column)
            entries.append(entry)
        right.append(value)

    for i, node in enumerate(nodes):
        constraint([(first[i] + c, 1.0) for c in range(len(node.choices))], 1.0)
    for edge in problem.edges:
        made: dict[State, list[int]] = {}
        wanted: dict[State, list[int]] = {}
        left, read = _states(problem, edge)
        for column, state in enumerate(left, first[edge.source]):
            made.setdefault(state, []).append(column)
        for column, state in enumerate(read, first[edge.target]):
            wanted.setdefault(state, []).append(column)
        pairs = list(itertools.product(made, wanted))
        weights = [edge.sent_bytes(m, w, n) for m, w in pairs]
        if not any(weights):
            continue
        if len(made) == 1 or len(wanted) == 1:
            for (m, w), weight in zip(pairs, weights, strict=True):
                for column in wanted[w] if len(made) == 1 else made[m]:
                    costs[column] += weight
            continue
        # A flow from made to wanted states: a tight relaxation, so branching is rare.
        start = len(costs)
        costs += weights
        index = {pair: start + k for k, pair in enumerate(pairs)}
        for m, sources in made.items():
            flows = [(index[m, w], 1.0) for w in wanted]
            constraint([*flows, *((s, -1.0) for s in sources)], 0.0)
        for w, targets in wanted.items():
            flows = [(index[m, w], 1.0) for m in made]
            constraint([*flows, *((t, -1.0) for t in targets)], 0.0)
    scale = max(max(costs, default=0.0), 1.0)
    matrix = scipy.sparse.csr_array((entries, (rows, columns)), shape=(len(right), len(costs)))
    objective = np.asarray(costs) / scale
    solved = scipy.optimize.linprog(
        objective, A_eq=matrix, b_eq=right, bounds=(0, 1), method="highs-ds"
    )
    chosen = None if solved.x is None else solved.x[:num_choices]
    if chosen is None or np.abs(chosen - np.rint(chosen)).max(initial=0.0) > _INTEGER_TOLERANCE:
        solved = scipy.optimize.milp(
            objective,
            integrality=np.arange(len(costs)) < num_choices,
            bounds=scipy.optimize.Bounds(0, 1),
            constraints=scipy.optimize.LinearConstraint(matrix, right, right),
            options={"mip_rel_gap": 0.0},
        )
    if solved.x is None:
        raise PlanError(f"no choice of sharding patterns was found: {solved.message}")
    return [int(np.argmax(solved.x[first[i] : first[i + 1]])) for i in range(len(nodes))]
