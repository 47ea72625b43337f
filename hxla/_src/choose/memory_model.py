"""Inputs of the memory estimate of a plan: bytes of its model, speeds of its devices."""

import functools
import math
from collections.abc import Collection, Iterable, Sequence

import jax

from ..cluster.cluster import Cluster, ring_transfers, transfer_seconds
from ..graph.graph import Graph, bytes_of, params_of
from ..graph.parts import graph_at, graph_of, parts_of
from ..graph.segments import Segment, layer_points, low_params, module_points, segments_at
from ..jax.jaxpr import is_cheap, is_fused
from ..lower import actions
from ..lower.chain_spec import direct_parts
from ..lower.inputs import sharded_of
from ..lower.pipeline_program import assign_buffers
from ..lower.runners import slots_of
from ..lower.segment_programs import segment_costs
from ..plan.check import schedule_of
from ..plan.parts import Prediction
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..schedule.segment_sequence import SegmentCost
from .device_times import flops_per_second
from .memory_layout import Recompute, is_estimated
from .memory_price import ChainBytes, ModelBytes, ReplicaDevice, StageBytes, StepMemory, Travel
from .stage_memory import UnlikeStages, programs_of
from .workload import Workload


def segments_of(work: Workload) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
    """Cut points of a microbatch by `memory.segments`, and the segments between."""
    opened = graph_of(work.graph)
    asked = work.settings.memory.segments
    if isinstance(asked, list):
        points = module_points(opened, asked)
    else:
        points = layer_points(opened, asked)
    return points, tuple(segments_at(opened, points))


def tightest(cluster: Cluster, ranks: Sequence[int]) -> int:
    """The rank of the device of least memory."""
    return min(ranks, key=lambda rank: cluster.devices[rank].memory_bytes or math.inf)


def with_open_calls(work: Workload, plan: Plan) -> Plan:
    """The plan with one microbatch a call, unless the settings have a number: see `with_calls`."""
    is_open = work.settings.cluster.microbatches_per_call == "auto"
    return plan.replaced(microbatches_per_call=1) if is_open else plan


def step_memory(work: Workload, plan: Plan, cluster: Cluster) -> StepMemory:
    """The inputs of the price of a layout.

    Args:
        plan: With the state whole on every replica.
    """
    shares, (speeds, are_known) = work.settings.memory.shares, speeds_of(work, plan, cluster)
    unlike = UnlikeStages(work, plan) if plan.stage_forms else None
    groups = [replica.devices for replica in plan.replicas]
    if unlike is not None:
        groups = [stage.ranks for stage in unlike.tightest(cluster)]
    devices = []
    for replica, ranks, speed in zip(plan.replicas, groups, speeds, strict=True):
        rank = tightest(cluster, ranks)
        device = cluster.devices[rank]
        devices.append(
            ReplicaDevice(
                name=f"device {rank} ({device.label})",
                num_microbatches=replica.num_microbatches,
                memory_bytes=device.memory_bytes,
                speed=speed,
                host_memory_bytes=device.host_memory_bytes,
                host_bytes_per_second=device.host_bytes_per_second,
                disk_bytes_per_second=device.disk_bytes_per_second,
            )
        )
    travel = functools.cache(functools.partial(travel_of, plan, cluster))
    return StepMemory(
        model=model_bytes(work, plan, unlike, groups[0][0]),
        devices=tuple(devices),
        shares=shares if isinstance(shares, str) else tuple(shares),
        waves=work.settings.memory.waves,
        travel=travel if are_known else lambda _: Travel(),
        is_timed=are_known,
        is_estimated=is_estimated(plan),
    )


def model_bytes(work: Workload, plan: Plan, unlike: UnlikeStages | None, rank: int) -> ModelBytes:
    """Bytes of a replica on one of its devices, with the state whole.

    Args:
        plan: With the state whole on every replica.
        unlike: None: stages are alike, or there are none.
        rank: The device that stands for all where stages are unlike.
    """
    cut_by = sharded_of(work.graph, plan) if is_estimated(plan) else None
    sharded = cut_by or Sharded(work.graph, {})
    opened = graph_of(work.graph)
    cut, shapes = sharded.over(opened), plan.device_shapes

    def of_stages(word: Recompute) -> StageBytes:
        if unlike is not None:
            every = unlike.each(word != "none")
            return next(one.held for one in every if rank in one.ranks)
        return stage_bytes(work, plan, keeps_inputs=word != "none")

    trained = 4 * sum(math.prod(shapes[p]) for p in work.model.trained_places)
    islands = work.settings.islands
    # The parameters of the last meeting, and their momentum.
    meetings = 0 if islands.every is None else 1 + bool(islands.momentum)
    return ModelBytes(
        parameters=plan.device_parameter_bytes,
        trained=trained,
        num_sums=plan.sums.num_parts,
        optimizer=work.device_optimizer_bytes(plan) + meetings * trained,
        bucket=plan.sums.bucket_mib << 20,
        keeps_sums=plan.placement.sums == "kept",
        inputs=plan.microbatches_per_call * sum(map(cut.device_bytes, opened.batch_values)),
        values=sum(map(cut.device_bytes, range(len(opened.values)))),
        chain=functools.cache(lambda: chain_bytes(work, plan, sharded)),
        stages=None if plan.pipeline is None else functools.cache(of_stages),
        unlike=None if unlike is None else unlike.each,
    )


def chain_bytes(work: Workload, plan: Plan, sharded: Sharded) -> ChainBytes:
    """Costs of the segments of a microbatch; `sharded` is the graph inside a replica."""
    graph, shapes = graph_of(work.graph), plan.device_shapes
    points, segments = segments_of(work)
    clips = work.settings.communication.microbatch_clip_norm is not None
    costs, fused = costs_of(
        work.graph,
        points,
        work.model.trained_places,
        sharded=sharded,
        keeps_gradients=clips,
        per_call=plan.microbatches_per_call,
    )
    param_of = params_of(graph)
    parameter_bytes, gathered_bytes = [], []
    for segment in segments:
        read = {param_of[entry] for entry in segment.params}
        # Parameters that are only read in 16 bits are gathered so, with exact sums.
        low = low_params(graph, segment) if plan.sums.kind == "exact" else {}
        dtypes = {p: low.get(p, graph.values[graph.param_values[p]].dtype) for p in read}
        parameter_bytes.append(4 * sum(math.prod(shapes[p]) for p in read))
        gathered_bytes.append(sum(bytes_of(shapes[p], dtype) for p, dtype in dtypes.items()))
    return ChainBytes(
        costs=costs,
        fused=fused,
        parameter_bytes=tuple(parameter_bytes),
        gathered_bytes=tuple(gathered_bytes),
        per_call=plan.microbatches_per_call,
    )


def stage_bytes(work: Workload, plan: Plan, *, keeps_inputs: bool) -> StageBytes:
    """Bytes of every device of a pipeline, which has the slots and buffers of all stages."""
    pipeline = plan.pipeline
    assert pipeline is not None
    graph, points = graph_at(work.graph, pipeline.cut_by, pipeline.points)
    parts, trained = parts_of(graph, points), work.model.trained_places
    slots = slots_of(graph, parts, plan, trained)
    stages = programs_of(graph, parts, trained)
    count = max(plan.counts)
    table = schedule_of(pipeline.schedule, plan.num_stages, count, pipeline.num_chunks)
    num = actions.lower(table, recompute=keeps_inputs, programs=range(len(parts)))
    # A forward and a backward in one program keep what no compiler makes again.
    repeats = is_fused if keeps_inputs else is_cheap
    residuals = [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
        for stage in stages
        for part in [stage.part]
        for variables in [stage.composed.kept(part.inputs, repeats, is_last=part.is_last)]
    ]
    kept = 0 if keeps_inputs else assign_buffers(residuals).num_bytes
    down = 4 * max(stage.above.words.size for stage in stages)
    up = 4 * max(stage.above.float_words.size for stage in stages)
    grads = [
        sum(graph.values[graph.param_values[stage.params[i]]].num_bytes for i in stage.trained)
        for stage in stages
    ]
    backwards = [
        # The backward's own arrays are about as large as what it reads.
        2 * assign_buffers([arrays]).num_bytes + num_bytes
        for arrays, num_bytes in zip(residuals, grads, strict=True)
    ]
    waiting = num.num_residuals * kept + (num.num_inputs + 1) * down + (num.num_grads + 1) * up
    return StageBytes(
        slots=sum(slot.num_bytes for slot in slots.slots),
        summed=4 * sum(math.prod(slots.slots[i].piece) for i in slots.summed),
        running=waiting + max(backwards),
        inputs=count * work.input_bytes,
        again_flops=work.graph.flops if keeps_inputs else 0.0,
    )


def travel_of(plan: Plan, cluster: Cluster, groups: int) -> Travel:
    """Seconds of collectives between the replicas; 0 where no link is described.

    Args:
        groups: The number of groups of replicas, each of which shards the state.
    """
    num = len(plan.replicas)
    members = num // groups
    inside = [range(first, first + members) for first in range(0, num, members)]
    across = [range(first, num, members) for first in range(members)]
    whole = float(plan.parameter_bytes)
    return Travel(
        gather=_rings(plan, cluster, inside, whole),
        all_copies=_rings(plan, cluster, [range(num)], whole),
        across=_rings(plan, cluster, across, whole / members),
    )


def _rings(plan: Plan, cluster: Cluster, rings: Sequence[Iterable[int]], num_bytes: float) -> float:
    """Seconds of simultaneous rings of replicas, each an all-gather or a reduce-scatter.

    The rings of all places of a replica are simultaneous, too, and share the network cards.
    """
    transfers, hops = [], 0
    for ring in rings:
        replicas = [plan.replicas[i].devices for i in ring]
        hops = max(hops, len(replicas) - 1)
        size = num_bytes / len(replicas) / len(replicas[0])
        for ranks in zip(*replicas, strict=True):
            transfers += ring_transfers(cluster, ranks, size)
    times = transfer_seconds(cluster, transfers)
    return hops * max((seconds for seconds in times if seconds is not None), default=0.0)


def speeds_of(work: Workload, plan: Plan, cluster: Cluster) -> tuple[tuple[float, ...], bool]:
    """The speed of each replica, and whether it is in operations per second.

    By the measured or predicted times of a microbatch, else by the devices' rates.
    """
    arithmetic = work.arithmetic
    if known := microbatch_seconds(plan):
        return tuple(work.microbatch_flops / seconds for seconds in known), True
    replicas = [[cluster.devices[rank] for rank in replica.devices] for replica in plan.replicas]
    # The devices of a replica work at the pace of the slowest.
    speeds = [len(x) * min(flops_per_second(d, arithmetic) for d in x) for x in replicas]
    are_known = all(cluster.devices[d.rank].product_rate(arithmetic) for d in plan.devices)
    return tuple(speeds) if all(speeds) else (1.0,) * len(replicas), are_known


def microbatch_seconds(plan: Plan) -> tuple[float, ...]:
    """Seconds of a microbatch on each replica, measured or predicted; empty: not known.

    Replicas of unlike form are one here, which has all devices.
    """
    if plan.prediction is None:
        return ()
    if plan.unlike_replicas:
        step = plan.prediction.step_seconds
        return (step / plan.num_microbatches,) if step else ()
    known = plan.prediction.microbatch_seconds or predicted_microbatches(plan, plan.prediction)
    return known if all(known) else ()


def predicted_microbatches(plan: Plan, known: Prediction) -> tuple[float, ...]:
    """Seconds of a microbatch on each replica, by its devices' times (0: not in `known`)."""
    spent = {device.rank: device.compute_seconds for device in known.devices}
    return tuple(
        max(spent.get(rank, 0.0) for rank in replica.devices) / max(replica.num_microbatches, 1)
        for replica in plan.replicas
    )


def costs_of(
    graph: Graph,
    points: tuple[int, ...],
    trained: Collection[int],
    *,
    sharded: Sharded | None = None,
    keeps_gradients: bool = False,
    per_call: int = 1,
) -> tuple[tuple[SegmentCost, ...], tuple[SegmentCost, ...]]:
    """Estimated cost of each segment, as separate programs and as a part of one.

    Args:
        trained: Places of the trained parameters.
        sharded: The graph inside a replica; None: one device.
        keeps_gradients: Whether separate programs leave them until the end of a microbatch.
        per_call: The microbatches of a call.
    """
    ordered, segments = graph_at(graph, "work", points)
    stages = programs_of(ordered, direct_parts(ordered, segments), trained)
    cut = (sharded or Sharded(graph, {})).over(ordered)
    alone = segment_costs(cut, stages, keeps_gradients=keeps_gradients, per_call=per_call)
    fused = segment_costs(cut, stages, fused=True)
    return tuple(alone), tuple(fused)
