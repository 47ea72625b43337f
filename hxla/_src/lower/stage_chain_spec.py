"""A pipeline whose stages are unlike in devices and axes: the inputs of its programs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jax.sharding import PartitionSpec as P

from ..graph.graph import Graph
from ..graph.parts import graph_at
from ..model.loss import num_columns
from ..plan.check import schedule_of
from ..plan.layout import check_layers_whole, to_spec
from ..plan.plan import Plan
from ..plan.unlike_stages import sharded_stages, stage_parts
from ..schedule.schedules import Schedule
from .chain_spec import ChainSpec, direct_parts
from .contribution import Contribution, Tensors, num_terms
from .inputs import Training
from .padding import NOT_PADDED, Padding
from .uneven import Uneven


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageChainSpec:
    """The inputs of the programs of a pipeline.

    Attributes:
        chains: For each stage the whole chain as its devices shard it.
        axes: For each stage the names and sizes of its axes.
        tensors: Without padding.
        inside: For each stage PartitionSpec and padding of each parameter.
        stored: PartitionSpec and padding of each parameter between steps, over all devices.
        schedule: From a number of microbatches to their schedule.
        most: Most microbatches of a pipeline in a step, as planned.
        recompute: Whether stages keep their inputs only.
    """

    chains: tuple[ChainSpec, ...]
    axes: tuple[tuple[tuple[str, int], ...], ...]
    tensors: Tensors
    inside: tuple[tuple[tuple[P, Padding], ...], ...]
    stored: tuple[tuple[P, Padding], ...]
    schedule: Callable[[int], Schedule]
    most: int
    recompute: bool

    def stored_tensor(self, t: int) -> tuple[P, Padding]:
        """PartitionSpec and padding of a float tensor between steps."""
        return self._of_tensor(self.stored, t)

    def tensor_inside(self, s: int, t: int) -> tuple[P, Padding]:
        """PartitionSpec and padding of a float tensor in a stage."""
        return self._of_tensor(self.inside[s], t)

    def _of_tensor(self, each: Sequence[tuple[P, Padding]], t: int) -> tuple[P, Padding]:
        trained = self.chains[0].trained
        return each[trained[t]] if t < len(trained) else (P(), NOT_PADDED)


def stage_chain_spec(
    training: Training, graph: Graph, plan: Plan, tensors: Tensors, trained: tuple[int, ...]
) -> StageChainSpec:
    """The `StageChainSpec` of a plan.

    Args:
        tensors: Without padding.
    """
    planned, num = plan.pipeline, plan.num_microbatches
    assert planned is not None
    ordered, points = graph_at(graph, planned.cut_by, planned.points)
    check_layers_whole(ordered, plan.parameters)
    parts = direct_parts(ordered, points)
    floats = range(len(tensors.floats))
    solved = sharded_stages(ordered, parts, planned.stages, plan.parameters)
    chains, inside = [], []
    for part, stage, sharded in zip(parts, planned.stages, solved, strict=True):
        known = {x.name: (to_spec(x.spec), Padding(x.sizes)) for x in stage.parameters}
        each = tuple(known.get(layout.name, (P(), NOT_PADDED)) for layout in plan.parameters)
        inside.append(each)
        units = stage_parts(ordered, part, stage, sharded, plan.parameters)
        pairs = zip([each[p] for p in trained], tensors.params, strict=True)
        padded = tuple(padding.like(x) for (_, padding), x in pairs)
        of_tensors = [each[p][0] for p in trained]
        chains.append(
            ChainSpec(
                graph=ordered,
                parts=parts,
                tensors=dataclasses.replace(tensors, params=padded),
                packs=[[t] for t in floats],
                trained=trained,
                contribution=Contribution.of(plan.sums, num_terms(ordered, parts, num)),
                num_microbatches=num,
                num_columns=num_columns(ordered.metrics),
                seed=training.seed,
                specs=(*of_tensors, *(P() for _ in floats[len(trained) :])),
                sharded=sharded,
                uneven=None if units is None else Uneven(sharded, units),
                mean=training.mean,
            )
        )
    return StageChainSpec(
        chains=tuple(chains),
        axes=tuple(tuple(stage.axis_sizes.items()) for stage in planned.stages),
        tensors=tensors,
        inside=tuple(inside),
        stored=tuple((to_spec(p.spec), Padding(p.sizes)) for p in plan.parameters),
        schedule=functools.cache(
            lambda count: schedule_of(planned.schedule, plan.num_stages, count, 1)
        ),
        most=max(plan.counts),
        recompute=planned.recompute,
    )
