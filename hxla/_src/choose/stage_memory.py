"""The memory of each device of unlike stages, estimated before compilation.

It was 0.8 to 1.4 of what the compiled programs of small models need.
"""

import dataclasses
import functools
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
from ..plan.sharding import Sharded
from ..plan.unlike_stages import most_counts, sharded_stages, stage_cuts
from ..profile.segment_times import ResidualEstimator
from ..schedule.segment_sequence import SegmentCost
from .memory_price import OneStage, StageBytes
from .workload import Workload


class UnlikeStages:
    """The stages of a plan of unlike stages.

    Args:
        plan: With the state whole on every replica.
    """

    def __init__(self, work: Workload, plan: Plan):
        self._work, self._plan = work, plan
        #: The bytes of each stage, by whether stages keep their inputs only.
        self.each = functools.cache(lambda keeps_inputs: tuple(self._bytes(keeps_inputs)))

    @functools.cached_property
    def _costs(self) -> list[list[list[SegmentCost]]]:
        """The costs of the parts of each stage, for each form of replica: to trace them is slow."""
        plan, pipeline = self._plan, self._plan.pipeline
        assert pipeline is not None
        ordered, cuts = graph_at(self._work.graph, pipeline.cut_by, pipeline.points)
        trained = self._work.model.trained_places
        parts = programs_of(ordered, direct_parts(ordered, cuts), trained)
        on_one = functools.cache(lambda: segment_costs(Sharded(ordered, {}), parts))
        out = []
        for stages in plan.stage_forms:
            wholes = direct_parts(ordered, stage_cuts(cuts, [s.num_parts for s in stages]))
            solved = sharded_stages(self._work.graph, ordered, wholes, stages, plan.parameters)
            each = [segment_costs(x, parts) if x.axes else on_one() for x in solved]
            ends = itertools.accumulate((s.num_parts for s in stages), initial=0)
            spans = itertools.pairwise(ends)
            out.append([costs[i:j] for costs, (i, j) in zip(each, spans, strict=True)])
        return out

    def _bytes(self, keeps_inputs: bool) -> Iterator[OneStage]:
        work, plan, pipeline = self._work, self._plan, self._plan.pipeline
        assert pipeline is not None
        trained, shapes = work.model.trained_places, plan.device_shapes
        names = {plan.parameters[p].name for p in trained}
        stored = 4 * sum(math.prod(shapes[p]) for p in trained)
        unlike, counts = plan.unlike_replicas, most_counts(plan)
        for i, ranks_of in enumerate(stage_ranks(plan)):
            form = i if unlike else 0
            stages = plan.stage_forms[form]
            kept = (0,) * len(stages)
            if count := counts[form]:
                kept = schedule_of(pipeline.schedule, len(stages), count, 1).peak_stash
            of_stages = zip(stages, self._costs[form], kept, ranks_of, strict=True)
            for stage, costs, num, ranks in of_stages:
                held = _of_stage(stage, costs, num, names, keeps_inputs=keeps_inputs)
                held = dataclasses.replace(
                    held,
                    summed=held.summed + stored,
                    inputs=num * work.input_bytes,
                    again_flops=work.graph.flops if keeps_inputs else 0.0,
                )
                yield OneStage(place=0 if unlike else i, ranks=ranks, held=held)

    def tightest(self, cluster: Cluster) -> list[OneStage]:
        """For each entry of `Plan.replicas` the stage whose devices have least room left."""
        pipeline, num_sums = self._plan.pipeline, self._plan.sums.num_parts

        def left(one: OneStage) -> float:
            room = min(cluster.devices[rank].memory_bytes or math.inf for rank in one.ranks)
            return room - (one.held.slots + one.held.summed * num_sums + one.held.activations)

        keeps_inputs = pipeline is not None and pipeline.recompute
        every = sorted(self.each(keeps_inputs), key=left)
        places = range(len(self._plan.replicas))
        return [next(one for one in every if one.place == i) for i in places]


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
