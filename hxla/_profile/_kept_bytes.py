"""What the backward of a segment keeps from its forward."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from .._graph._graph import Graph, shapes_of
from .._graph._interpreter import Env
from .._graph._operations import bytes_of
from .._graph._segment_kind import segment_kind, trained_params
from .._graph._segments import Segment, run_segment
from .._jax._min_cut import halve


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
    known: dict[Any, int] = {}
    out = []
    for segment in chain:
        key = segment_kind(graph, segment, trained)
        if key not in known:
            known[key] = _kept(graph, segment, trained)
        out.append(known[key])
    return tuple(out)


def _kept(graph: Graph, segment: Segment, trained: Collection[int] | None) -> int:
    run = run_segment(graph, segment)
    values = graph.values
    own = trained_params(graph, segment, trained)
    floats = [v for v in segment.inputs if values[v].differentiable]
    given_back = [i for i, v in enumerate(segment.outputs) if values[v].differentiable]
    param_values = [graph.param_values[p] for p in segment.params]

    def both(params: Any, inputs: Any, given: Any, grads: Any) -> Any:
        arrays: Env = dict(zip(segment.inputs, inputs, strict=True))
        rest: Env = dict(zip(segment.given, given, strict=True))

        def made(weights: Any, crossing: Any) -> Any:
            every = list(params)
            for i, x in zip(own, weights, strict=True):
                every[i] = x
            found = run(every, arrays | dict(zip(floats, crossing, strict=True)), rest)
            return [found[i] for i in given_back], found

        weights, crossing = [params[i] for i in own], [arrays[v] for v in floats]
        _, back, found = jax.vjp(made, weights, crossing, has_aux=True)
        return found, back(list(grads))

    numbers = (
        *(param_values, segment.inputs, segment.given),
        [segment.outputs[i] for i in given_back],
    )
    closed = jax.make_jaxpr(both)(*(shapes_of(graph, v) for v in numbers))
    ends = np.cumsum([len(v) for v in numbers])
    halves = halve(
        closed,
        len(segment.outputs),
        only_early=range(ends[0], ends[1]),
        only_late=range(ends[2], ends[3]),
    )
    return sum(bytes_of(x.shape, x.dtype) for x in halves.kept)
