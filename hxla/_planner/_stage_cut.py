"""Where to cut a model into stages, by times measured on the devices that will run them."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._graph._graph import Graph
from .._graph._segments import segments
from .._profile._profile import LayerSize, LayerTime
from .._profile._segment_times import layer_sizes
from ._axes import shard_graph
from ._best_pipeline import best_pipeline
from ._chain import Chain, Group
from ._pipeline_request import PipelineRequest

_UNBOUNDED = 2.0**60


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCut:
    """Stages on devices.

    Attributes:
        order: The devices of the pipelines, in the order of their stages.
        layers: Segments of each stage.
        fractions: Of a microbatch's work, as its own device measures it, on each stage.
        reason: For the plan.
    """

    order: tuple[int, ...]
    layers: tuple[int, ...]
    fractions: tuple[float, ...]
    reason: str


def best_cut(
    graph: Graph,
    request: PipelineRequest,
    times: Mapping[int, Sequence[LayerTime]],
    *,
    memory_bytes: Mapping[int, int | None],
    num_microbatches: int,
    optimizer_bytes: int,
    num_parts: int,
) -> StageCut:
    """The fastest stages for one pipeline over unlike devices, or for several of like ones.

    Args:
        graph: Traced.
        request: How many.
        times: Of the graph's segments on each device.
        memory_bytes: Of each device; None: taken to be enough.
        num_microbatches: Of a global batch.
        optimizer_bytes: Of the optimizer's state for the whole model.
        num_parts: Arrays in which a gradient is summed.

    Raises:
        PlanError: If no cut fits the devices' memory.
    """
    chain = segments(graph, request.most_segments)
    sizes = layer_sizes(graph, chain, shard_graph(graph, (), {}))
    num = request.num
    pipelines = [list(range(i, i + num)) for i in range(0, len(times), num)]
    # Several pipelines share one cut: that of a pipeline whose stages are each the mean of theirs,
    # after each has its larger memories first, for earlier stages keep more.
    if len(pipelines) > 1:
        for own in pipelines:
            own.sort(
                key=lambda d: (
                    -(memory_bytes[d] or 0),
                    sum(t.forward + t.backward for t in times[d]),
                )
            )
    groups = []
    for position in range(num):
        devices = [own[position] for own in pipelines]
        known = [m for d in devices if (m := memory_bytes[d]) is not None]
        groups.append(
            _group(
                str(position),
                np.mean([[t.forward for t in times[d]] for d in devices], axis=0),
                np.mean([[t.backward for t in times[d]] for d in devices], axis=0),
                sizes,
                min(known, default=None),
            )
        )
    param_bytes = sum(s.parameter_bytes for s in sizes)
    problem = Chain(
        groups=tuple(groups),
        num_microbatches=max(1, num_microbatches // len(pipelines)),
        output_bytes=tuple(s.output_bytes for s in sizes),
        # A stage's own parameters and their sums; what is stored is even over all stages.
        state_factor=1.0 + num_parts,
        workspace_bytes=(param_bytes * (1 + num_parts) + optimizer_bytes) / num,
    )
    staging = best_pipeline(problem, num_stages=num)
    (replica,) = staging.replicas
    ends = (*staging.cuts[1:], len(sizes))
    layers = tuple(b - a for a, b in zip(staging.cuts, ends, strict=True))
    pipelines = [[own[g] for g in replica.groups] for own in pipelines]
    busy = [
        sum(
            groups[g].forward_seconds[i] + groups[g].backward_seconds[i]
            for i in range(start, start + n)
        )
        for g, start, n in zip(replica.groups, staging.cuts, layers, strict=True)
    ]
    whole = [sum(groups[g].forward_seconds + groups[g].backward_seconds) for g in replica.groups]
    shown = ", ".join(f"{s * 1e3:.3g}" for s in busy)
    return StageCut(
        order=tuple(itertools.chain(*pipelines)),
        layers=layers,
        fractions=tuple(b / w if w else 0.0 for b, w in zip(busy, whole, strict=True)),
        reason=f"cut by measured times: {shown} ms a microbatch on the stages",
    )


def _group(
    kind: str, forward: Any, backward: Any, sizes: Sequence[LayerSize], memory: int | None
) -> Group:
    return Group(
        kind=f"device {kind}",
        num_devices=1,
        memory_bytes=_UNBOUNDED if memory is None else memory,
        forward_seconds=tuple(map(float, forward)),
        backward_seconds=tuple(map(float, backward)),
        update_seconds=(0.0,) * len(sizes),
        parameter_bytes=tuple(s.parameter_bytes for s in sizes),
        stash_bytes=tuple(s.stash_bytes for s in sizes),
    )
