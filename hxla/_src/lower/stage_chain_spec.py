"""Pipelines whose stages are unlike in devices and axes: the inputs of their programs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

from jax.sharding import PartitionSpec as P

from ..graph.graph import Graph
from ..graph.parts import graph_at
from ..model.loss import num_columns
from ..plan.check import schedule_of
from ..plan.layout import check_layers_whole, to_spec
from ..plan.parts import PlannedStage
from ..plan.plan import Plan
from ..plan.unlike_stages import most_counts, sharded_stages, stage_cuts, stage_parts
from ..schedule.schedules import Schedule
from .chain_spec import ChainSpec, check_settings_in_granules, cut_free, direct_parts
from .contribution import Contribution, Tensors, num_terms
from .inputs import Training
from .padding import NOT_PADDED, Padding
from .uneven import Uneven

#: PartitionSpec and padding of each parameter.
Placed = tuple[tuple[P, Padding], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagesSpec:
    """The stages of one pipeline.

    Attributes:
        chains: For each part the whole chain as the devices of its stage shard it.
        axes: For each part the names and sizes of its stage's axes.
        inside: For each part the parameters while its stage runs.
        cut: The number of parts of each stage.
        schedule: From a number of microbatches to their schedule.
        most: Most microbatches of the pipeline in a step.
        recompute: Whether stages keep their inputs only.
    """

    chains: tuple[ChainSpec, ...]
    axes: tuple[tuple[tuple[str, int], ...], ...]
    inside: tuple[Placed, ...]
    cut: tuple[int, ...]
    schedule: Callable[[int], Schedule]
    most: int
    recompute: bool

    @property
    def spans(self) -> list[range]:
        """The parts of each stage."""
        ends = itertools.pairwise(itertools.accumulate(self.cut, initial=0))
        return list(itertools.starmap(range, ends))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageChainSpec:
    """The pipelines that share a replica's state.

    Attributes:
        pipelines: One, or several of unlike form.
        tensors: Without padding.
        stored: The parameters between steps, over all devices.
    """

    pipelines: tuple[StagesSpec, ...]
    tensors: Tensors
    stored: Placed

    @property
    def chain(self) -> ChainSpec:
        """The chain of the first part: what all parts have in common."""
        return self.pipelines[0].chains[0]

    def placed(self, each: Placed, t: int) -> tuple[P, Padding]:
        """PartitionSpec and padding of a float tensor."""
        trained = self.chain.trained
        return each[trained[t]] if t < len(trained) else (P(), NOT_PADDED)


def stage_chain_spec(
    training: Training, graph: Graph, plan: Plan, tensors: Tensors, trained: tuple[int, ...]
) -> StageChainSpec:
    """The `StageChainSpec` of a plan.

    Args:
        tensors: Without padding.
    """
    planned = plan.pipeline
    assert planned is not None
    ordered, cuts = graph_at(graph, planned.cut_by, planned.points)
    if plan.is_cut_free:
        check_settings_in_granules(training)
        ordered = cut_free(ordered, trained)
    check_layers_whole(ordered, plan.parameters)
    return StageChainSpec(
        pipelines=tuple(
            _stages_spec(training, graph, ordered, cuts, plan, stages, num, tensors, trained)
            for stages, num in zip(plan.stage_forms, most_counts(plan), strict=True)
        ),
        tensors=tensors,
        stored=tuple((to_spec(p.spec), Padding(p.sizes)) for p in plan.parameters),
    )


def _stages_spec(
    training: Training,
    graph: Graph,
    ordered: Graph,
    cuts: Sequence[int],
    plan: Plan,
    stages: Sequence[PlannedStage],
    most: int,
    tensors: Tensors,
    trained: tuple[int, ...],
) -> StagesSpec:
    planned, num = plan.pipeline, plan.num_microbatches
    assert planned is not None
    cut = tuple(stage.num_parts for stage in stages)
    parts, wholes = direct_parts(ordered, cuts), direct_parts(ordered, stage_cuts(cuts, cut))
    floats = range(len(tensors.floats))
    solved = sharded_stages(graph, ordered, wholes, stages, plan.parameters)
    chains, inside = [], []
    for whole, stage, sharded in zip(wholes, stages, solved, strict=True):
        known = {x.name: (to_spec(x.spec), Padding(x.sizes)) for x in stage.parameters}
        each = tuple(known.get(layout.name, (P(), NOT_PADDED)) for layout in plan.parameters)
        inside += [each] * stage.num_parts
        units = stage_parts(ordered, whole, stage, sharded, plan.parameters)
        pairs = zip([each[p] for p in trained], tensors.params, strict=True)
        padded = tuple(padding.like(x) for (_, padding), x in pairs)
        of_tensors = [each[p][0] for p in trained]
        chain = ChainSpec(
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
            num_scaled=ordered.num_losses if plan.precision.loss_scale is not None else 0,
        )
        chains += [chain] * stage.num_parts
    return StagesSpec(
        chains=tuple(chains),
        axes=tuple(tuple(s.axis_sizes.items()) for s in stages for _ in range(s.num_parts)),
        inside=tuple(inside),
        cut=cut,
        schedule=functools.cache(
            lambda count: schedule_of(planned.schedule, len(stages), count, 1)
        ),
        most=most,
        recompute=planned.recompute,
    )
