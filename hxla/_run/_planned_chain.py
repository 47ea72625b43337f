"""A microbatch as a chain of segments, and what of it is recomputed, as the settings ask."""

import math
from collections.abc import Collection, Sequence

from .._cluster._cluster import Cluster
from .._core._errors import PlanError
from .._graph._graph import Graph, params_of
from .._graph._interpreter import AS_THEY_ARE
from .._graph._parts import graph_at, graph_of
from .._graph._repeats import layer_points
from .._graph._segments import Segment, segments_at
from .._lower._segment_costs import segment_costs
from .._lower._segment_part import direct_parts, wanted_values
from .._lower._stage import StagePart
from .._plan._plan import Plan
from .._plan._plan_parts import ChainSegment, PlannedChain
from .._planner._recompute import best_sequence
from .._schedule._segment_sequence import CUT, INPUT, sequence_from_texts
from .._schedule._sequence_replay import SegmentCost, layered_peak_bytes
from ._traced_job import TracedJob


def with_chain(job: TracedJob, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the segments and the recomputation that `memory.recompute` asks for.

    Args:
        job: That is planned.
        plan: Of it.
        cluster: Its devices.

    Raises:
        PlanError: If copies of the model are cut, so that a microbatch is no chain; or if nothing
            that is recomputed makes it fit.
    """
    memory = job.settings.memory
    stage = memory.zero or 0
    recompute = memory.recompute or ("boundaries" if stage > 1 else None)
    if recompute is None:
        if memory.segments is not None:
            raise PlanError(
                "memory.segments needs memory.recompute: set it to 'none', 'boundaries' or 'auto'"
            )
        return plan
    if plan.axes:
        axes = ", ".join(axis.name for axis in plan.axes)
        raise PlanError(
            f"memory.recompute: copies of the model are cut by {axes}; there, pipeline.recompute "
            "is the setting of stages, and XLA decides else: leave memory.recompute out"
        )
    graph = job.graph(plan.microbatch_size)
    opened = graph_of(graph)
    points = layer_points(opened, memory.segments)
    segments = segments_at(opened, points)
    firsts = (0, *points)
    said: list[str] = []
    if recompute == "none":
        sequence = _keep_all(len(segments))
    elif recompute == "boundaries":
        sequence = _boundaries(len(segments))
    else:
        limit = _limit(job, plan, cluster)
        is_trained = job.functional(plan.microbatch_size).is_trained
        costs = costs_of(graph, points, [i for i, own in enumerate(is_trained) if own])
        if stage > 1:
            factor = plan.sums.num_parts + (stage > 2)
            own_bytes = [factor * n for n in param_bytes(opened, segments)]
            sequence, peak = _layered_sequence(costs, max(plan.counts), limit, own_bytes)
        else:
            found = best_sequence(costs, limit)
            sequence, peak = found.sequence.written, found.peak_bytes
        said.append(
            f"recomputation: {'its microbatches keep' if stage > 1 else 'a microbatch keeps'} "
            f"{peak / 2**20:,.1f} MiB of the {limit / 2**20:,.1f} MiB that are left (estimated "
            "before compilation)"
        )
    chain = PlannedChain(
        segments=tuple(
            ChainSegment(name=segment.name, first=first)
            for segment, first in zip(segments, firsts, strict=True)
        ),
        sequence=sequence,
    )
    placement = plan.placement
    if stage > 1:
        placement = placement.model_copy(update={"zero": stage})
    return plan.replaced(chain=chain, placement=placement, reasons=(*plan.reasons, *said))


def param_bytes(graph: Graph, segments: Sequence[Segment]) -> list[int]:
    """Bytes of the parameters that each segment reads, as float32."""
    param_of = params_of(graph)
    each = [{param_of[entry] for entry in segment.params} for segment in segments]
    return [4 * sum(math.prod(graph.param_shapes[p]) for p in own) for own in each]


def costs_of(graph: Graph, points: tuple[int, ...], trained: Collection[int]) -> list[SegmentCost]:
    """What each segment takes, before it is compiled.

    Args:
        graph: Traced.
        points: Where it is cut.
        trained: Places of the parameters that are trained.
    """
    ordered, own = graph_at(graph, "work", points)
    wanted = wanted_values(ordered, trained)
    entries = [i for i, p in enumerate(params_of(ordered)) if p in trained]
    stages = [
        StagePart(ordered, part, AS_THEY_ARE, trained=entries, on_cpu=False, wanted=wanted)
        for part in direct_parts(ordered, own)
    ]
    return segment_costs(ordered, stages)


def _keep_all(num: int) -> tuple[str, ...]:
    forwards = [f"F{i}:{CUT}" for i in range(num - 1)]
    return (*forwards, *_backwards(num, {}))


def _boundaries(num: int) -> tuple[str, ...]:
    forwards = [f"F{i}+" for i in range(num - 1)]
    again = {i: f"F{i}:{CUT}" for i in range(num - 1)}
    return (*forwards, *_backwards(num, again))


def _layered_sequence(
    costs: Sequence[SegmentCost], num: int, limit: int, own_bytes: Sequence[int]
) -> tuple[tuple[str, ...], int]:
    """What all microbatches of a device together have memory for: all residuals, or boundaries."""
    peak = 0
    for texts in (_keep_all(len(costs)), _boundaries(len(costs))):
        sequence = sequence_from_texts(len(costs), texts)
        peak = layered_peak_bytes(sequence, costs, num, own_bytes)
        if peak <= limit:
            return texts, peak
    raise PlanError(
        f"memory.recompute: the boundaries of {num} microbatches, which wait from forward to "
        f"backward, need {peak:,} bytes of {limit:,}: use fewer microbatches on a device, a "
        "smaller microbatch_size, or memory.zero = 1"
    )


def _backwards(num: int, again: dict[int, str]) -> list[str]:
    out = [f"B{num - 1}:{INPUT}"]
    for i in reversed(range(num - 1)):
        out += [again[i]] if i in again else []
        out.append(f"B{i}:{CUT}")
    return out


def _limit(job: TracedJob, plan: Plan, cluster: Cluster) -> int:
    """Bytes beside the state on the smallest device."""
    known = [cluster.devices[d.rank].memory_bytes for d in plan.devices]
    sizes = [own for own in known if own is not None]
    if not sizes:
        raise PlanError(
            "memory.recompute is 'auto', but no device is described with its memory: give it in "
            "the mesh file, or set 'none' or 'boundaries'"
        )
    optimizer = job.optimizer_bytes(plan.microbatch_size)
    if plan.placement.zero:
        optimizer = optimizer * max(plan.granules) // sum(plan.granules)
    stage, share = job.settings.memory.zero or 0, max(plan.granules) / sum(plan.granules)
    whole = float(1 + plan.sums.num_parts)  # parameters and sums
    if stage > 1:  # of sums a share of the totals; those of a segment are counted where it runs
        whole = share + (1 if stage == 2 else share)
    state = int(plan.parameter_bytes * whole) + optimizer
    left = min(sizes) - state
    if left <= 0:
        raise PlanError(
            f"memory.recompute: parameters, sums and optimizer state take {state:,} bytes of the "
            f"{min(sizes):,} of the smallest device before a microbatch begins: share the state "
            "out with memory.zero, or take larger devices"
        )
    return left
