"""What the backward of a segment keeps from its forward."""

from collections.abc import Collection, Sequence
from typing import Any

from .._graph._composed import Composer
from .._graph._graph import Graph
from .._graph._operations import bytes_of
from .._graph._segment_kind import segment_kind, trained_params
from .._graph._segments import Segment


def kept_bytes(
    graph: Graph, chain: Sequence[Segment], trained: Collection[int] | None = None
) -> tuple[int, ...]:
    """For each segment the fewest bytes that have to wait for its backward.

    A stage of a pipeline keeps a minimum cut between its forward and its backward, in which
    element-wise work may be done again. Of several segments in a row the cuts together are one of
    the stage that holds them, so that their sum is never less than what the stage keeps: an array
    that two neighbours keep counts twice. Parameters, batch and constants are there anyway.

    Args:
        graph: Traced.
        chain: Its segments; equal ones are looked at once.
        trained: Places of the parameters that have a gradient; None: all.
    """
    composer = Composer(graph)
    known: dict[Any, int] = {}
    out = []
    for segment in chain:
        key = segment_kind(graph, segment, trained)
        if key not in known:
            known[key] = _kept(composer, graph, segment, trained)
        out.append(known[key])
    return tuple(out)


def _kept(
    composer: Composer, graph: Graph, segment: Segment, trained: Collection[int] | None
) -> int:
    values = graph.values
    params = [graph.param_values[p] for p in segment.params]
    own = [params[i] for i in trained_params(graph, segment, trained)]
    floats = [v for v in segment.inputs if values[v].differentiable]
    given_back = [v for v in segment.outputs if values[v].differentiable]
    arguments = (*params, *segment.inputs, *segment.given)
    made = composer.program(segment.ops, arguments, segment.outputs, given_back, [*own, *floats])
    return sum(bytes_of(v.aval.shape, v.aval.dtype) for v in made.kept(segment.inputs))
