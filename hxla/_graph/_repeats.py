"""Where a traced loss repeats itself: cuts between equal layers, whose programs are the same."""

from collections.abc import Sequence

import numpy as np

from ._graph import Graph
from ._operations import Op, leaves
from ._segments import chain_ops, crossing_bytes, cut_points

_MOST_PERIODS = 4096  # lengths of a layer that are tried
_LEAST_SHARE = 0.5  # of all work, that what repeats must hold


def layer_points(graph: Graph, num: int | None = None) -> tuple[int, ...]:
    """Cuts between equal layers, as `segments_at` takes them.

    The longest run of operations that repeats, by work, is cut into its repetitions, there where
    the fewest bytes cross; what comes before it and after it are segments too. A loss of which less
    than half repeats is cut by work.

    Args:
        graph: Traced; with its scans over layers opened, see `_parts.graph_of`, their iterations
            are layers.
        num: About how many segments are wanted: several layers make one; None: a layer is one.
    """
    ops = chain_ops(graph)
    found = _repetition(ops)
    if found is None or (num is not None and num < 3):
        return cut_points(graph, num or 8)
    first, period, repeats = found
    if num is not None:
        layers = max(1, round(repeats / max(num - 2, 1)))
        period, repeats = period * layers, repeats // layers
    crossing = crossing_bytes(graph, ops)
    end = first + period * repeats
    spare = len(ops) - end
    # Shifted cuts lose no layer where what follows is as the beginning of one more.
    shifts = [s for s in range(period) if s == 0 or s < spare + period]
    cost = {s: _worst(crossing, first + s, period, repeats - (s > 0)) for s in shifts}
    shift = min(shifts, key=lambda s: (cost[s], s))
    num_whole = repeats - (shift > 0)
    points = [first + shift + i * period for i in range(num_whole + 1)]
    return tuple(p for p in points if 0 < p < len(ops))


def _worst(crossing: np.ndarray, first: int, period: int, repeats: int) -> int:
    places = [first + i * period for i in range(repeats + 1)]
    return int(max(crossing[p] for p in places if p < len(crossing)))


def _repetition(ops: Sequence[Op]) -> tuple[int, int, int] | None:
    """The first operation, the length and the number of the repetitions that hold the most work."""
    known: dict[str, int] = {}
    kinds = np.array([known.setdefault(_kind(op), len(known)) for op in ops])
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
            held = float(work[start + period * repeats] - work[start])
            if held > 0 and (best is None or held > best[0] * 1.001):
                best = held, int(start), period, int(repeats)
    return None if best is None or best[0] < _LEAST_SHARE * work[-1] else best[1:]


def _kind(op: Op) -> str:
    """Text that is equal for operations which do the same to arrays of equal shapes."""
    eqn = op.eqn
    avals = [getattr(v, "aval", None) for v in (*eqn.invars, *eqn.outvars)]
    return f"{op.name}{avals}{op.iterations is None}"
