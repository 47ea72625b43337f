"""A pipeline whose stages are unlike in devices and axes: the inputs of its programs."""

import dataclasses
import functools
from collections.abc import Callable

from jax.sharding import PartitionSpec as P

from ..graph.graph import Graph
from ..graph.parts import graph_at
from ..model.loss import num_columns
from ..plan.check import schedule_of
from ..plan.layout import check_layers_whole, to_spec
from ..plan.plan import Plan
from ..plan.unlike_stages import sharded_stages
from ..schedule.schedules import Schedule
from .chain_spec import ChainSpec, direct_parts
from .contribution import Contribution, Tensors, num_terms
from .inputs import Training
from .padding import NOT_PADDED, Padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageChainSpec:
    """The inputs of the programs of a pipeline.

    Attributes:
        chains: For each stage the whole chain as its devices shard it.
        axes: For each stage the names and sizes of its axes.
        param_specs: For each stage the PartitionSpec of each parameter inside it.
        stored: PartitionSpec and padding of each parameter between steps, over all devices.
        schedule: From a number of microbatches to their schedule.
        most: Most microbatches of a pipeline in a step, as planned.
        recompute: Whether stages keep their inputs only.
    """

    chains: tuple[ChainSpec, ...]
    axes: tuple[tuple[tuple[str, int], ...], ...]
    param_specs: tuple[tuple[P, ...], ...]
    stored: tuple[tuple[P, Padding], ...]
    schedule: Callable[[int], Schedule]
    most: int
    recompute: bool

    def stored_tensor(self, t: int) -> tuple[P, Padding]:
        """PartitionSpec and padding of a float tensor between steps."""
        trained = self.chains[0].trained
        return self.stored[trained[t]] if t < len(trained) else (P(), NOT_PADDED)


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
    chains, param_specs = [], []
    for stage, sharded in zip(
        planned.stages, sharded_stages(ordered, parts, planned.stages, plan.parameters), strict=True
    ):
        inside = {layout.name: to_spec(layout.spec) for layout in stage.parameters}
        specs = tuple(inside.get(layout.name, P()) for layout in plan.parameters)
        param_specs.append(specs)
        of_tensors = [specs[p] for p in trained]
        chains.append(
            ChainSpec(
                graph=ordered,
                parts=parts,
                tensors=tensors,
                packs=[[t] for t in floats],
                trained=trained,
                contribution=Contribution.of(plan.sums, num_terms(ordered, parts, num)),
                num_microbatches=num,
                num_columns=num_columns(ordered.metrics),
                seed=training.seed,
                specs=(*of_tensors, *(P() for _ in floats[len(trained) :])),
                sharded=sharded,
                mean=training.mean,
            )
        )
    return StageChainSpec(
        chains=tuple(chains),
        axes=tuple(tuple(stage.axis_sizes.items()) for stage in planned.stages),
        param_specs=tuple(param_specs),
        stored=tuple((to_spec(p.spec), Padding(p.sizes)) for p in plan.parameters),
        schedule=functools.cache(
            lambda count: schedule_of(planned.schedule, plan.num_stages, count, 1)
        ),
        most=max(plan.counts),
        recompute=planned.recompute,
    )
