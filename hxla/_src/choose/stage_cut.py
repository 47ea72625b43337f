"""Where to cut a model into stages, by times measured on their devices."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping

import numpy as np

from ..graph.graph import Graph
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..plan.axis_assignment import shard_graph
from ..profile.segment_times import layer_sizes
from .best_pipeline import best_pipeline
from .chain import UNBOUNDED, Chain, Group
from .pipeline_request import PipelineRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCut:
    """Stages on devices.

    Attributes:
        order: The devices of the pipelines, in the order of their stages.
        fractions: Each stage's part of a microbatch's time on its device.
    """

    order: tuple[int, ...]
    layers: tuple[int, ...]
    fractions: tuple[float, ...]
    reason: str


def best_cut(
    graph: Graph,
    request: PipelineRequest,
    times: Mapping[int, np.ndarray],
    *,
    memory_bytes: Mapping[int, int | None],
    num_microbatches: int,
    optimizer_bytes: int,
    num_parts: int,
    trained: Collection[int] | None = None,
) -> StageCut:
    """The fastest stages for one pipeline over unlike devices, or for several equal pipelines.

    Args:
        times: [2, L] Seconds of the segments' forward and backward on each device.
        memory_bytes: Of each device; None: taken to be enough.
        optimizer_bytes: Of the optimizer's state for the whole model.
        num_parts: Arrays in which a gradient is summed.
        trained: Places of the parameters that have a gradient; None: all.

    Raises:
        PlanError: If no cut fits the devices' memory.
    """
    opened = graph_of(graph)
    chain = segments(opened, request.most_segments)
    sizes = layer_sizes(opened, chain, shard_graph(opened, (), {}), trained=trained)
    num = request.num
    seconds = {d: rows[:2].T for d, rows in times.items()}
    pipelines = [list(range(i, i + num)) for i in range(0, len(times), num)]
    # Several pipelines share the cut of their mean pipeline. Each has its larger memories first,
    # because earlier stages keep more.
    if len(pipelines) > 1:
        for ranks in pipelines:
            ranks.sort(key=lambda d: (-(memory_bytes[d] or 0), float(seconds[d].sum())))
    means = [np.mean([seconds[ranks[i]] for ranks in pipelines], axis=0) for i in range(num)]
    known = [[m for ranks in pipelines if (m := memory_bytes[ranks[i]])] for i in range(num)]
    groups = tuple(
        Group(
            kind=f"device {i}",
            num_devices=1,
            memory_bytes=min(known[i], default=UNBOUNDED),
            forward_seconds=tuple(means[i][:, 0].tolist()),
            backward_seconds=tuple(means[i][:, 1].tolist()),
            update_seconds=(0.0,) * len(sizes),
            parameter_bytes=tuple(s.parameter_bytes for s in sizes),
            stash_bytes=tuple(s.stash_bytes for s in sizes),
        )
        for i in range(num)
    )
    param_bytes = sum(s.parameter_bytes for s in sizes)
    problem = Chain(
        groups=groups,
        num_microbatches=max(1, num_microbatches // len(pipelines)),
        output_bytes=tuple(s.output_bytes for s in sizes),
        # A stage's parameters and their sums; stored state is even over all stages.
        state_factor=1.0 + num_parts,
        workspace_bytes=(param_bytes * (1 + num_parts) + optimizer_bytes) / num,
    )
    staging = best_pipeline(problem, num_stages=num)
    (replica,) = staging.replicas
    ends = (*staging.cuts[1:], len(sizes))
    layers = tuple(b - a for a, b in zip(staging.cuts, ends, strict=True))
    pipelines = [[ranks[g] for g in replica.groups] for ranks in pipelines]
    spans = zip(replica.groups, staging.cuts, ends, strict=True)
    busy = [float(means[g][a:b].sum()) for g, a, b in spans]
    whole = [float(means[g].sum()) for g in replica.groups]
    shown = ", ".join(f"{s * 1e3:.3g}" for s in busy)
    return StageCut(
        order=tuple(itertools.chain(*pipelines)),
        layers=layers,
        fractions=tuple(b / w if w else 0.0 for b, w in zip(busy, whole, strict=True)),
        reason=f"cut by measured times: {shown} ms a microbatch on the stages",
    )
