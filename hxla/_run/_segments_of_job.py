"""The segments of a job's microbatch: where its layers repeat, or about equal work."""

import math

from .._graph._graph import Graph, params_of
from .._graph._low_params import low_params
from .._graph._operations import bytes_of
from .._graph._parts import graph_of
from .._graph._repeats import layer_points, module_points
from .._graph._segments import Segment, segments_at
from .._plan._plan import Plan
from ._traced_job import TracedJob


def segments_of_job(job: TracedJob, size: int) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
    """Where the microbatch is cut, and what between.

    Args:
        job: That is planned; `memory.segments` says about how many, or where they begin.
        size: Examples of a microbatch.
    """
    opened = graph_of(job.graph(size))
    asked = job.settings.memory.segments
    if isinstance(asked, list):
        points = module_points(opened, asked)
    else:
        points = layer_points(opened, asked)
    return points, tuple(segments_at(opened, points))


def param_bytes(job: TracedJob, plan: Plan) -> list[int]:
    """Bytes of a device's parts of the parameters that each segment reads, as float32."""
    shapes = plan.device_shapes
    _, read = _read_by_segments(job, plan.microbatch_size)
    return [4 * sum(math.prod(shapes[p]) for p in own) for _, own in read]


def gathered_bytes(job: TracedJob, plan: Plan, *, keeps_roundings: bool) -> list[int]:
    """The same as stage 3 of ZeRO gathers them.

    Args:
        job: That is planned.
        plan: Of it.
        keeps_roundings: Whether what is only read in 16 bits travels so, as with exact sums.
    """
    graph, read = _read_by_segments(job, plan.microbatch_size)
    out, shapes = [], plan.device_shapes
    for segment, own in read:
        low = low_params(graph, segment) if keeps_roundings else {}
        dtypes = {p: low.get(p, graph.values[graph.param_values[p]].dtype) for p in own}
        out.append(sum(bytes_of(shapes[p], dtype) for p, dtype in dtypes.items()))
    return out


def _read_by_segments(job: TracedJob, size: int) -> tuple[Graph, list[tuple[Segment, set[int]]]]:
    """Each segment, and the numbers of the parameters that it reads."""
    graph = graph_of(job.graph(size))
    param_of = params_of(graph)
    _, segments = segments_of_job(job, size)
    return graph, [(own, {param_of[entry] for entry in own.params}) for own in segments]
