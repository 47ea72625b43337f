"""Where to cut a model into stages, by times measured on the devices that will run them."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._core._types import PyTree
from .._graph._graph import Graph
from .._graph._segments import segments
from .._lower._replicate import Reduction, compiler_options, num_parts
from .._model._functional import Functional
from .._planner._best_pipeline import best_pipeline
from .._planner._chain import Chain, Group
from .._planner._partition import shard_graph
from .._profile._profile import LayerSize, LayerTime
from .._profile._segment_times import layer_sizes, measure
from ._stages import Stages

_UNBOUNDED = 2.0**60


def measure_segments(
    graph: Graph,
    stages: Stages,
    model: Functional,
    batch: PyTree,
    devices: Sequence[jax.Device],
    reduction: Reduction,
) -> str:
    """The segments' times on this process's devices, as text for the other processes."""
    chain = segments(graph, stages.num_segments)
    host = jax.tree.map(np.asarray, batch)
    found = {}
    for i, device in enumerate(devices):
        if device.process_index != jax.process_index():
            continue
        times = measure(
            graph,
            chain,
            params=model.params,
            aux=model.aux,
            batch=host,
            device=device,
            options=compiler_options(device.platform, reduction),
        )
        found[i] = [(t.forward, t.backward) for t in times]
    return json.dumps(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
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
    stages: Stages,
    texts: Sequence[str],
    *,
    memory_bytes: Mapping[int, int | None],
    num_microbatches: int,
    optimizer_bytes: int,
    reduction: Reduction,
) -> Cut:
    """The fastest stages for one pipeline over unlike devices, or for several of like ones.

    Args:
        graph: Traced.
        stages: How many.
        texts: `measure_segments` of all processes.
        memory_bytes: Of each device; None: taken to be enough.
        num_microbatches: Of a global batch.
        optimizer_bytes: Of the optimizer's state for the whole model.
        reduction: `exact` or `float`.

    Raises:
        PlanError: If no cut fits the devices' memory.
    """
    times: dict[int, list[LayerTime]] = {}
    for text in texts:
        for device, rows in json.loads(text).items():
            times[int(device)] = [LayerTime(forward=f, backward=b, update=0.0) for f, b in rows]
    chain = segments(graph, stages.num_segments)
    sizes = layer_sizes(graph, chain, shard_graph(graph, (), {}, None))
    num = stages.num
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
        state_factor=1.0 + num_parts(reduction),
        workspace_bytes=(param_bytes * (1 + num_parts(reduction)) + optimizer_bytes) / num,
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
    return Cut(
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
