"""Which segments of a graph are alike: what is found of one is true of the others."""

from collections.abc import Collection
from typing import Any

from ._graph import Graph, params_of
from ._operations import Op
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

    def place(v: Any) -> Any:
        if not isinstance(v, int):
            return str(v)
        if v not in number:
            number[v] = len(number)
        value = graph.values[v]
        return number[v], value.shape, str(value.dtype), value.differentiable

    def of(op: Op) -> Any:
        # Rules of a user's own for gradients are not in the body: their place in the code is.
        others = op.source if op.kind == "custom" else ""
        if not op.body:
            others = str(sorted(op.eqn.params.items()))
        return (
            *(op.name, others, op.iterations and op.iterations[1] - op.iterations[0]),
            tuple(map(place, op.inputs)),
            tuple(map(place, op.body_inputs)),
            tuple(map(of, op.body)),
            tuple(map(place, op.body_outputs)),
            tuple(map(place, op.outputs)),
        )

    return (
        tuple(map(of, segment.ops)),
        tuple(map(place, segment.inputs)),
        tuple(map(place, segment.outputs)),
        tuple(trained_params(graph, segment, trained)),
    )
