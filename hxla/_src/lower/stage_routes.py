"""What moves between unlike stages of a pipeline.

Parameters go from all devices of the replica, which store them between steps, to a stage; its sums
come back. Values go from a stage to the next, and their gradients to the one before.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ..graph.graph import Graph, bytes_of, shapes_of
from ..model.plain_arrays import in_bytes
from ..schedule.schedules import BACKWARD, FORWARD
from .chain_spec import ChainSpec
from .contribution import buckets, pack_shapes
from .padding import NOT_PADDED, Padding
from .replica import Replica
from .route import Route, RouteEnd
from .segment_part import SegmentPart
from .segment_programs import SegmentPrograms
from .stage_chain_spec import Placed, StageChainSpec

#: Arrays of about so many bytes take a route together.
BUCKET_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the model on the devices of its stage.

    Attributes:
        name: Of the routes that begin or end here.
        part: Its part of the chain.
        programs: None where this process has none of its devices.
        params: Places of the parameters that it reads, each once.
        inside: All parameters while the stage runs.
    """

    index: int
    name: str
    chain: ChainSpec
    replica: Replica
    part: SegmentPart
    programs: SegmentPrograms | None
    params: tuple[int, ...]
    inside: Placed


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRoute:
    """A route, and the places of the arrays that take it.

    Attributes:
        items: Values of the graph, places of parameters, or packs.
    """

    items: tuple[int, ...]
    route: Route
    name: str


def fill_routes(spec: StageChainSpec, replica: Replica, stage: Stage) -> Iterator[StageRoute]:
    """The routes of the parameters of a stage, from where they are between steps.

    Args:
        replica: All devices of the pipeline.
    """
    graph = stage.chain.graph
    for params in _buckets(stage.params, lambda p: _param_bytes(graph, p)):
        sources, targets = [], []
        for p in params:
            [shape] = shapes_of(graph, [graph.param_values[p]])
            stored, padding = spec.stored[p]
            inside, own_padding = stage.inside[p]
            sources.append(_end(replica, padding.like(shape), stored, padding))
            targets.append(_end(stage.replica, own_padding.like(shape), inside, own_padding))
        route = Route(replica.devices, sources, targets)
        yield StageRoute(items=params, route=route, name=f"the parameters of {stage.name}")


def return_routes(spec: StageChainSpec, replica: Replica, stage: Stage) -> Iterator[StageRoute]:
    """The routes of the sums of a stage, to where they are between steps.

    Args:
        replica: All devices of the pipeline.
    """
    chain, packs = stage.chain, stage.part.packs
    shapes, num = pack_shapes(spec.tensors, chain.packs), chain.contribution.form.num_parts
    for some in _buckets(packs, lambda k: 4 * num * math.prod(shapes[k])):
        sources, targets = [], []
        for k in some:
            whole = jax.ShapeDtypeStruct(shapes[k], chain.contribution.dtype)
            stored, padding = spec.placed(spec.stored, k)
            inside, own_padding = spec.placed(stage.inside, k)
            sources += [_end(stage.replica, own_padding.like(whole), inside, own_padding)] * num
            targets += [_end(replica, padding.like(whole), stored, padding)] * num
        route = Route(replica.devices, sources, targets)
        yield StageRoute(items=some, route=route, name=f"the sums of {stage.name}")


def hop(stages: Sequence[Stage], crossing: Sequence[int], s: int, kind: str) -> StageRoute:
    """The route between a part and the one before: of values, or of their gradients.

    Args:
        crossing: The values that cross into the part.
        kind: `FORWARD` or `BACKWARD`.
    """
    early, late = stages[s - 1], stages[s]
    values = tuple(crossing)
    if kind == BACKWARD:
        floats = {v for stage in stages[s:] for v in stage.part.floats}
        values = tuple(v for v in values if v in floats)

    def ends(stage: Stage) -> list[RouteEnd]:
        chain = stage.chain
        specs = chain.waiting_specs(values) if kind == FORWARD else chain.specs_of(values)
        pairs = zip(specs, in_bytes(shapes_of(chain.graph, values)), strict=True)
        return [_end(stage.replica, x, spec) for spec, x in pairs]

    source, target = (early, late) if kind == FORWARD else (late, early)
    route = Route((*early.replica.devices, *late.replica.devices), ends(source), ends(target))
    what = "values" if kind == FORWARD else "gradients"
    name = f"the {what} from {source.name} to {target.name}"
    return StageRoute(items=values, route=route, name=name)


def _end(replica: Replica, x: Any, spec: P, padding: Padding = NOT_PADDED) -> RouteEnd:
    return RouteEnd(
        shape=tuple(x.shape), dtype=x.dtype, sharding=replica.sharding(spec), padding=padding
    )


def _param_bytes(graph: Graph, p: int) -> int:
    value = graph.values[graph.param_values[p]]
    return bytes_of(value.shape, value.dtype)


def _buckets(items: Sequence[int], num_bytes: Callable[[int], int]) -> list[tuple[int, ...]]:
    """Consecutive items that take a route together."""
    groups = buckets(list(map(num_bytes, items)), BUCKET_BYTES)
    return [tuple(items[i] for i in group) for group in groups]
