"""The memory of each device of unlike stages, estimated before compilation.

It was 0.79 to 1.25 of what the compiled programs of small models need.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..cluster.cluster import Cluster
from ..graph.graph import Graph, entries_of
from ..graph.interpreter import AS_THEY_ARE
from ..graph.parts import ChainPart, graph_at
from ..lower.chain_spec import direct_parts, wanted_values
from ..lower.segment_programs import crossing_values, segment_costs
from ..lower.stage import StagePart
from ..lower.stage_routes import BUCKET_BYTES
from ..plan.check import schedule_of
from ..plan.parts import PlannedStage
from ..plan.plan import Plan, stage_ranks
from ..plan.sharding import Sharded
from ..plan.unlike_stages import most_counts, sharded_stages, stage_cuts
from ..profile.segment_times import ResidualEstimator
from ..schedule.stage_peaks import HopBytes, PartBytes, stage_peaks
from .memory_price import OneStage, StageBytes
from .workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Programs:
    """The stages of a pipeline.

    Attributes:
        parts: Those of each stage.
        hops: Between neighbours, see `stage_peaks`.
    """

    parts: Sequence[Sequence[PartBytes]]
    hops: Sequence[tuple[HopBytes, HopBytes]]


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
    def _programs(self) -> list[_Programs]:
        """Those of each form of replica: to trace them is slow."""
        plan, pipeline = self._plan, self._plan.pipeline
        assert pipeline is not None
        ordered, cuts = graph_at(self._work.graph, pipeline.cut_by, pipeline.points)
        trained = self._work.model.trained_places
        parts = programs_of(ordered, direct_parts(ordered, cuts), trained)
        crossing = crossing_values([stage.part for stage in parts])
        ends = _kept_ends(parts)
        whole = Sharded(ordered, {})
        on_one = functools.cache(lambda: _parts_bytes(whole, whole, parts, ends))
        out = []
        for stages in plan.stage_forms:
            wholes = direct_parts(ordered, stage_cuts(cuts, [s.num_parts for s in stages]))
            solved = sharded_stages(self._work.graph, ordered, wholes, stages, plan.parameters)
            # Shards of unlike sizes are gathered between programs, see `ChainSpec.crosses_whole`.
            between = [whole if s.shares else x for x, s in zip(solved, stages, strict=True)]
            each = [
                _parts_bytes(inside, outside, parts, ends) if inside.axes else on_one()
                for inside, outside in zip(solved, between, strict=True)
            ]
            firsts = list(itertools.accumulate((s.num_parts for s in stages), initial=0))
            spans = itertools.pairwise(firsts)
            hops = [
                _hops(early, late, crossing[i], {v for x in parts[i:] for v in x.above_floats})
                for (early, late), i in zip(itertools.pairwise(between), firsts[1:-1], strict=True)
            ]
            of_stages = [own[i:j] for own, (i, j) in zip(each, spans, strict=True)]
            out.append(_Programs(parts=of_stages, hops=hops))
        return out

    def _bytes(self, keeps_inputs: bool) -> Iterator[OneStage]:
        work, plan, pipeline = self._work, self._plan, self._plan.pipeline
        assert pipeline is not None
        trained, shapes = work.model.trained_places, plan.device_shapes
        stored = {plan.parameters[p].name: 4 * math.prod(shapes[p]) for p in trained}
        unlike, counts = plan.unlike_replicas, most_counts(plan)
        for i, ranks_of in enumerate(stage_ranks(plan)):
            form = i if unlike else 0
            stages, programs = plan.stage_forms[form], self._programs[form]
            waiting = activations = [0] * len(stages)
            if count := counts[form]:
                schedule = schedule_of(pipeline.schedule, len(stages), count, 1)
                waiting = list(schedule.peak_stash)
                activations = stage_peaks(
                    schedule, programs.parts, programs.hops, keeps_inputs=keeps_inputs
                )
            moves = _bytes_of_moves(stages, stored, plan.sums.num_parts)
            of_stages = zip(stages, ranks_of, waiting, activations, moves, strict=True)
            for stage, ranks, num, most, moved in of_stages:
                sizes = stage.axis_sizes
                held = StageBytes(
                    slots=sum(layout.device_bytes(sizes) for layout in stage.parameters),
                    summed=_trained_bytes(stage, stored),
                    running=most,
                    inputs=num * work.input_bytes,
                    again_flops=work.graph.flops if keeps_inputs else 0.0,
                    moves=moved,
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


def _bytes_of_moves(
    stages: Sequence[PlannedStage], stored: Mapping[str, int], num_sums: int
) -> list[int]:
    """For each stage the most that a device needs beside its sums while all stages return theirs.

    All devices run the program of a route: one that has nothing to send sends zeros. It picks a
    message, receives one, and adds up what it keeps, each as large as what arrives.

    Args:
        stored: By the name of a trained parameter, the bytes of a device's part of its gradient.
    """
    most = [0] * len(stages)
    left = [_trained_bytes(stage, stored) for stage in stages]
    returned = 0
    for s, stage in enumerate(stages):
        arrived = sum(stored.get(layout.name, 0) for layout in stage.parameters)
        whole = 4 * sum(math.prod(x.shape) for x in stage.parameters if x.name in stored)
        part = min(1.0, BUCKET_BYTES / max(1, num_sums * whole))
        for i in range(len(stages)):
            sent = 0 if i == s else left[s] * part
            gone = left[i] if i < s else 0
            needed = returned + arrived * (1 + 3 * part) + sent - gone
            most[i] = max(most[i], math.ceil(num_sums * needed))
        returned += arrived
    return most


def _trained_bytes(stage: PlannedStage, trained: Collection[str]) -> int:
    """The bytes of a device's gradients of the trained parameters of a stage, as float32."""
    sizes = stage.axis_sizes
    each = (math.prod(x.device_shape(sizes)) for x in stage.parameters if x.name in trained)
    return 4 * sum(each)


def _kept_ends(parts: Sequence[StagePart]) -> list[tuple[list[int], list[int]]]:
    """For each part its inputs and its results that its backward reads; none for the loss."""
    known: dict[Any, tuple[list[int], list[int]]] = {}
    out = []
    for stage in parts:
        part, kind = stage.part, stage.kind
        if kind not in known:
            program = stage.composed
            kept = () if part.is_last else program.kept(part.inputs)
            of_inputs = [program.arguments[v] for v in part.inputs]
            of_results = program.results[: len(part.outputs)]
            places = ([k for k, x in enumerate(xs) if x in kept] for xs in (of_inputs, of_results))
            read, written = places
            known[kind] = read, written
        read, written = known[kind]
        out.append(([part.inputs[k] for k in read], [part.outputs[k] for k in written]))
    return out


def _parts_bytes(
    sharded: Sharded,
    between: Sharded,
    parts: Sequence[StagePart],
    ends: Sequence[tuple[list[int], list[int]]],
) -> list[PartBytes]:
    """The bytes of each part where its devices shard it so.

    Args:
        between: How they shard values between programs.
    """
    crossing, out = crossing_values([stage.part for stage in parts]), []
    costs = segment_costs(sharded, parts)
    for i, (cost, stage, (read, written)) in enumerate(zip(costs, parts, ends, strict=True)):
        floats = {v for later in parts[i:] for v in later.above_floats}
        inputs = sum(map(between.waiting_bytes, crossing[i]))
        [kept] = cost.residuals
        inner, backward = kept.num_bytes, kept.backward_temporary_bytes
        if (
            sharded.axes and not between.axes
        ):  # the inputs wait, and the backward runs the forward again
            read, written = list(crossing[i]), []
            inner, backward = 0, inner + backward
        out.append(
            PartBytes(
                inputs=inputs,
                read=sum(map(between.waiting_bytes, read)),
                kept=inner,
                written=sum(map(between.waiting_bytes, written)),
                gradients=sum(between.device_bytes(v) for v in crossing[i] if v in floats),
                backward=backward,
                is_loss=stage.part.is_last,
            )
        )
    return out


def _hops(
    early: Sharded, late: Sharded, crossing: Sequence[int], floats: Collection[int]
) -> tuple[HopBytes, HopBytes]:
    """The moves between two stages: of the values, and of the gradients that come back.

    Args:
        crossing: Values that cross.
        floats: Values that have a gradient.
    """
    back = [v for v in crossing if v in floats]
    return (
        _hop(*(sum(map(end.waiting_bytes, crossing)) for end in (early, late))),
        _hop(*(sum(map(end.device_bytes, back)) for end in (late, early))),
    )


def _hop(sent: int, received: int) -> HopBytes:
    """A move: it picks a message, which the other side receives and copies to its place."""
    extra = received + 2 * min(sent, received)
    return HopBytes(sent=sent, received=received, at_sender=extra, at_receiver=sent + extra)
