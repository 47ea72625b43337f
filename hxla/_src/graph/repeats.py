"""Cuts between equal layers of a traced loss, which can share a program."""

import itertools
import re
from collections.abc import Sequence

import numpy as np

from ..core.errors import PlanError
from .graph import Graph
from .operations import Op, leaves
from .segments import chain_ops, crossing_bytes, cut_points

_MOST_PERIODS = 4096  # lengths of a layer that are tried
_LEAST_SHARE = 0.5  # of all work, in the repeated layers


def layer_points(graph: Graph, num: int | None = None) -> tuple[int, ...]:
    """Cuts between equal layers, as `segments_at` takes them.

    The repeated run of operations with the most work is cut between its repetitions, where the
    fewest bytes cross; the operations before and after it are segments too. If the repetitions have
    less than half of the work, the loss is cut by work.

    Args:
        graph: A trace; after `parts.graph_of` iterations of scans over layers are layers.
        num: The approximate number of segments, each several layers or an equal part of a layer;
            None: a segment for each layer.
    """
    ops = chain_ops(graph)
    repetition = _repetition(ops)
    if repetition is None or (num is not None and num < 3):
        return cut_points(graph, num or 8)
    first, period, repeats = repetition
    pieces = 1
    if num is not None:
        layers = max(1, round(repeats / max(num - 2, 1)))
        pieces = max(1, round((num - 2) / repeats))
        period, repeats = period * layers, repeats // layers
    crossing = crossing_bytes(graph, ops)
    end = first + period * repeats
    spare = len(ops) - end
    # A shift loses no layer if the operations behind the last look like the start of another.
    shifts = [s for s in range(period) if s == 0 or s < spare + period]
    cost = {s: _most_crossing_bytes(crossing, first + s, period, repeats - (s > 0)) for s in shifts}
    shift = min(shifts, key=lambda s: (cost[s], s))
    num_whole = repeats - (shift > 0)
    start = first + shift
    inner = _layer_cuts(crossing[start : start + period + 1], ops[start : start + period], pieces)
    points = [start + i * period + k for i in range(num_whole) for k in (0, *inner)]
    points.append(start + num_whole * period)
    return tuple(p for p in points if 0 < p < len(ops))


def _layer_cuts(crossing: np.ndarray, ops: Sequence[Op], num: int) -> tuple[int, ...]:
    """Cuts of a layer into pieces of about equal work, where the fewest bytes cross."""
    done = np.cumsum([sum(leaf.flops * leaf.times for leaf in leaves((op,))) for op in ops])
    cuts = set()
    for k in range(1, num):
        distance = np.abs(done / done[-1] - k / num)
        places = [i + 1 for i in range(len(ops) - 1) if distance[i] <= 0.5 / num]
        cuts |= {min(places, key=lambda i: (crossing[i], distance[i - 1]))} if places else set()
    return tuple(sorted(cuts))


def module_points(graph: Graph, patterns: Sequence[str]) -> tuple[int, ...]:
    """Cuts between modules, as `segments_at` takes them: a wrap policy of FSDP.

    A module is a common prefix of parameter paths. The cut is between the last operation that
    reads parameters of one module and the first for the next, where the fewest bytes cross.

    Args:
        graph: See `layer_points`.
        patterns: Regular expressions, each for the whole path of a module, such as
            `blocks/[0-9]+`.

    Raises:
        PlanError: If a pattern matches no module; the message names some modules.
    """
    modules = {_module(name, patterns): None for name in graph.param_names}
    for pattern in patterns:
        if not any(m is not None and re.fullmatch(pattern, m) for m in modules):
            some = sorted({name.rsplit("/", 1)[0] for name in graph.param_names})[:6]
            raise PlanError(
                f"memory.segments: {pattern!r} matches the path of no module; there are "
                f"{', '.join(some)} and those around them"
            )
    ops = chain_ops(graph)
    crossing = crossing_bytes(graph, ops)
    reads: list[tuple[int, str]] = []
    for i, op in enumerate(ops):
        params = [graph.values[v].param for v in op.inputs if isinstance(v, int)]
        matched = {_module(graph.param_names[p], patterns) for p in params if p is not None}
        reads += [(i, module) for module in sorted(m for m in matched if m is not None)]
    points = []
    for (i, one), (j, other) in itertools.pairwise(reads):
        if one != other and i < j:
            points.append(min(range(i + 1, j + 1), key=lambda p: (crossing[p], p)))
    return tuple(points)


def _module(name: str, patterns: Sequence[str]) -> str | None:
    """The shortest prefix of a parameter's path that a pattern matches."""
    parts = name.split("/")
    starts = ("/".join(parts[:n]) for n in range(1, len(parts)))
    return next((s for s in starts if any(re.fullmatch(p, s) for p in patterns)), None)


def _most_crossing_bytes(crossing: np.ndarray, first: int, period: int, repeats: int) -> int:
    """The most bytes that cross at one of the cuts."""
    places = [first + i * period for i in range(repeats + 1)]
    return int(max(crossing[p] for p in places if p < len(crossing)))


def _repetition(ops: Sequence[Op]) -> tuple[int, int, int] | None:
    """The first operation, length and number of the repetitions with the most work."""
    numbers: dict[str, int] = {}
    kinds = np.array([numbers.setdefault(_kind(op), len(numbers)) for op in ops])
    work = np.array([0.0, *(sum(leaf.flops * leaf.times for leaf in leaves((op,))) for op in ops)])
    work = np.cumsum(work)
    best: tuple[float, int, int, int] | None = None
    for period in range(1, min(len(ops) // 2, _MOST_PERIODS) + 1):
        equal = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            repeats = (stop - start) // period + 1
            if repeats < 2:
                continue
            repeated = float(work[start + period * repeats] - work[start])
            if repeated > 0 and (best is None or repeated > best[0] * 1.001):
                best = repeated, int(start), period, int(repeats)
    return None if best is None or best[0] < _LEAST_SHARE * work[-1] else best[1:]


def _kind(op: Op) -> str:
    """A text that is equal for equal operations on arrays of equal shapes."""
    eqn = op.eqn
    avals = [getattr(v, "aval", None) for v in (*eqn.invars, *eqn.outvars)]
    return f"{op.name}{avals}{op.iterations is None}"
