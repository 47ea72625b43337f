"""The memory of each device of unlike stages, estimated before compilation.

It was 0.8 to 1.4 of what the compiled programs of small models need.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

from ..cluster.cluster import Cluster
from ..graph.graph import Graph, entries_of
from ..graph.interpreter import AS_THEY_ARE
from ..graph.parts import ChainPart, graph_at
from ..lower.chain_spec import direct_parts, wanted_values
from ..lower.segment_programs import segment_costs
from ..lower.stage import StagePart
from ..plan.check import schedule_of
from ..plan.parts import PlannedStage
from ..plan.plan import Plan, stage_ranks
from ..plan.unlike_stages import sharded_stages
from ..profile.segment_times import ResidualEstimator
from ..schedule.segment_sequence import SegmentCost
from .memory_price import StageBytes
from .workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneStage:
    """The devices of a stage, and the bytes of each beside the stored state.

    Attributes:
        place: The entry of `Plan.replicas` that has the devices.
    """

    place: int
    ranks: tuple[int, ...]
    held: StageBytes


def bytes_of_stages(work: Workload, plan: Plan, *, keeps_inputs: bool) -> Iterator[OneStage]:
    """The bytes of each stage of a plan of unlike stages.

    Args:
        keeps_inputs: Whether stages keep their inputs only.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    ordered, points = graph_at(work.graph, pipeline.cut_by, pipeline.points)
    parts = programs_of(ordered, direct_parts(ordered, points), work.model.trained_places)
    names = {plan.parameters[p].name for p in work.model.trained_places}
    shapes = plan.device_shapes
    stored = 4 * sum(math.prod(shapes[p]) for p in work.model.trained_places)
    counts = [replica.num_microbatches for replica in plan.unlike_replicas] or [max(plan.counts)]
    forms: list[list[StageBytes]] = []
    for stages, count in zip(plan.stage_forms, counts, strict=True):
        wholes = direct_parts(ordered, pipeline.points_of(stages))
        solved = sharded_stages(ordered, wholes, stages, plan.parameters)
        kept = (0,) * len(stages)
        if count:
            kept = schedule_of(pipeline.schedule, len(stages), count, 1).peak_stash
        rest = iter(range(len(parts)))
        form = []
        for stage, sharded, num in zip(stages, solved, kept, strict=True):
            costs = segment_costs(sharded, parts)
            own = [costs[i] for i in itertools.islice(rest, stage.num_parts)]
            held = _of_stage(stage, own, num, names, keeps_inputs=keeps_inputs)
            form.append(
                dataclasses.replace(
                    held,
                    summed=held.summed + stored,
                    inputs=num * work.input_bytes,
                    again_flops=work.graph.flops if keeps_inputs else 0.0,
                )
            )
        forms.append(form)
    for i, stages_ranks in enumerate(stage_ranks(plan)):
        form = forms[i] if plan.unlike_replicas else forms[0]
        place = 0 if plan.unlike_replicas else i
        for ranks, held in zip(stages_ranks, form, strict=True):
            yield OneStage(place=place, ranks=ranks, held=held)


def tightest_stages(work: Workload, plan: Plan, cluster: Cluster) -> list[OneStage]:
    """For each entry of `Plan.replicas` the stage whose devices have least room left."""

    def left(one: OneStage) -> float:
        room = min(cluster.devices[rank].memory_bytes or math.inf for rank in one.ranks)
        held = one.held
        sums = held.summed * plan.sums.num_parts
        return room - (held.slots + sums + held.buffers + held.backward + held.inputs)

    keeps = plan.pipeline is not None and plan.pipeline.recompute
    every = sorted(bytes_of_stages(work, plan, keeps_inputs=keeps), key=left)
    return [next(one for one in every if one.place == i) for i in range(len(plan.replicas))]


def programs_of(
    graph: Graph, parts: Sequence[ChainPart], trained: Collection[int]
) -> list[StagePart]:
    """The forwards and backwards of parts, of which nothing is compiled.

    Args:
        graph: In the order in which it is cut.
        trained: Places of the trained parameters.
    """
    entries, wanted = entries_of(graph, set(trained)), wanted_values(graph, trained)
    composer = ResidualEstimator(graph)
    return [
        StagePart(
            graph,
            part,
            AS_THEY_ARE,
            trained=entries,
            on_cpu=False,
            wanted=wanted,
            composer=composer,
        )
        for part in parts
    ]


def _of_stage(
    stage: PlannedStage,
    costs: Sequence[SegmentCost],
    num: int,
    trained: Collection[str],
    *,
    keeps_inputs: bool,
) -> StageBytes:
    """The bytes of a device of a stage that holds so many microbatches at once.

    Args:
        costs: Of its parts.
        trained: The names of the trained parameters.
    """
    sizes = stage.axis_sizes
    residuals = [cost.residuals[0].num_bytes for cost in costs]
    again = residuals if keeps_inputs else [0] * len(costs)
    return StageBytes(
        slots=sum(layout.device_bytes(sizes) for layout in stage.parameters),
        summed=sum(
            4 * math.prod(layout.device_shape(sizes))
            for layout in stage.parameters
            if layout.name in trained
        ),
        buffers=num
        * (sum(cost.input_bytes for cost in costs) + (0 if keeps_inputs else sum(residuals))),
        backward=max(
            more + cost.residuals[0].backward_temporary_bytes + cost.input_gradient_bytes
            for cost, more in zip(costs, again, strict=True)
        ),
        inputs=0,
        again_flops=0.0,
    )
