"""A chain of segments as parts of a pipeline, with the values that cross between them.

A value that a later part reads crosses every boundary on its way, so a part exchanges data with its
neighbours only. The gradient of a value that several parts read adds up on its way back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .graph import Graph
from .interpreter import AS_THEY_ARE, ArrayPlacement, Env, read, run_ops
from .operations import leaves
from .scans import opened, ranged
from .segments import Segment, in_task_order, segments_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainPart:
    """Consecutive segments.

    Attributes:
        inputs: Values that cross into the part, in order, also those that only pass through.
        outputs: Values that cross to the next part; the last part has none.
        is_last: Whether the part computes the program's results.
    """

    segment: Segment
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_last: bool


def values_by_shape(graph: Graph, part: ChainPart) -> dict[tuple[int, ...], list[int]]:
    """The results of a part's equations, also inside bodies, by shape."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for v in (v for op in leaves(part.segment.ops) for v in op.outputs):
        by_shape.setdefault(graph.values[v].shape, []).append(v)
    return by_shape


def parts_of(graph: Graph, points: Sequence[int]) -> tuple[ChainPart, ...]:
    """Cut a graph into parts.

    Args:
        points: Cuts, see `segments.cut_points`.

    Returns:
        One part more than there are points.
    """
    chain = segments_at(graph, points)
    last = len(chain) - 1
    last_reader: dict[int, int] = {v: i for i, s in enumerate(chain) for v in s.inputs}
    made = {v: i for i, s in enumerate(chain) for op in s.ops for v in op.outputs}
    last_reader |= {v: last for v in graph.result_values if isinstance(v, int) and v in made}
    out = []
    inputs: tuple[int, ...] = ()
    for i, segment in enumerate(chain):
        candidates = dict.fromkeys((*inputs, *segment.outputs))
        outputs = tuple(v for v in candidates if last_reader.get(v, -1) > i)
        out.append(ChainPart(segment=segment, inputs=inputs, outputs=outputs, is_last=i == last))
        inputs = outputs
    return tuple(out)


def graph_of(graph: Graph, cut_by: str = "work") -> Graph:
    """The graph in the form that a chain is cut from.

    Args:
        cut_by: `work`: in traced order, each iteration of a scan over layers is an equation;
            `annotations`: see `in_task_order`.
    """
    return in_task_order(graph) if cut_by == "annotations" else opened(graph)


def graph_at(graph: Graph, cut_by: str, points: Sequence[int]) -> tuple[Graph, tuple[int, ...]]:
    """`graph_of`, but each part runs its iterations of a scan in one equation.

    Args:
        cut_by: See `graph_of`.
        points: Cuts of `graph_of`.

    Returns:
        The graph, and the cuts of this graph.
    """
    if cut_by == "annotations":
        return in_task_order(graph), tuple(points)
    return ranged(graph, points)


def run_part(
    graph: Graph, part: ChainPart, place: ArrayPlacement = AS_THEY_ARE
) -> Callable[[Sequence[Any], Sequence[Any], Env], list[Any]]:
    """`(params, inputs, given) -> outputs`, for the last part the program's results.

    `params` are the arrays of `part.segment.params`, `inputs` those of `part.inputs`; `given` has
    the batch, other variables and the random key by number. `place` is that of `run_ops`.
    """

    def run(params: Sequence[Any], inputs: Sequence[Any], given: Env) -> list[Any]:
        env: Env = dict(graph.consts)
        numbers = [graph.param_values[p] for p in part.segment.params]
        for values, arrays in ((given, given.values()), (part.inputs, inputs), (numbers, params)):
            env.update(zip(values, place.carry(tuple(values), list(arrays)), strict=True))
        run_ops(part.segment.ops, env, place)
        if part.is_last:
            return [read(env, v) for v in graph.result_values]
        return place.carry(part.outputs, [env[v] for v in part.outputs])

    return run
