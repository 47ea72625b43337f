"""Which segments of a graph are alike: what is found of one is true of the others."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ._graph import Graph, params_of
from ._operations import Input, Op
from ._segments import Segment


def trained_params(graph: Graph, segment: Segment, trained: Collection[int] | None) -> list[int]:
    """Places among a segment's parameters of those that have a gradient.

    Args:
        graph: Traced.
        segment: Of it.
        trained: Places of the model's parameters that are trained; None: all.
    """
    of = params_of(graph)
    return [
        i
        for i, p in enumerate(segment.params)
        if graph.values[graph.param_values[p]].differentiable
        and (trained is None or of[p] in trained)
    ]


def segment_kind(graph: Graph, segment: Segment, trained: Collection[int] | None) -> Any:
    """Equal for segments which compute the same from arrays of the same shapes.

    Args:
        graph: Traced.
        segment: Of it.
        trained: Places of the model's parameters that are trained; None: all.
    """
    number: dict[int, int] = {}
    places = functools.partial(_places, graph, number)
    return (
        tuple(_of(op, places) for op in segment.ops),
        places(segment.inputs),
        places(segment.outputs),
        tuple(trained_params(graph, segment, trained)),
    )


def op_kind(graph: Graph, op: Op) -> Any:
    """Likewise of one operation."""
    return _of(op, functools.partial(_places, graph, {}))


def _places(graph: Graph, number: dict[int, int], inputs: Iterable[Input]) -> tuple[Any, ...]:
    """What values are, each with a number by which it is known again; literals are themselves."""
    out: list[Any] = []
    for v in inputs:
        if not isinstance(v, int):
            out.append(str(v))
            continue
        value = graph.values[v]
        own = number.setdefault(v, len(number))
        out.append((own, value.shape, str(value.dtype), value.differentiable))
    return tuple(out)


def _of(op: Op, places: Callable[[Iterable[Input]], tuple[Any, ...]]) -> Any:
    # Rules of a user's own for gradients are not in the body: their place in the code is.
    others = op.source if op.kind == "custom" else ""
    if not op.body:
        others = str(sorted(op.eqn.params.items()))
    return (
        *(op.name, others, op.iterations and op.iterations[1] - op.iterations[0]),
        places(op.inputs),
        places(op.body_inputs),
        tuple(_of(own, places) for own in op.body),
        places(op.body_outputs),
        places(op.outputs),
    )
