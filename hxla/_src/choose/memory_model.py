"""The segments of a job, and what its memory forms take of time and memory."""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Literal

from ..cluster.cluster import Cluster
from ..graph.graph import Graph, params_of
from ..graph.interpreter import AS_THEY_ARE
from ..graph.low_params import low_params
from ..graph.operations import bytes_of
from ..graph.parts import graph_at, graph_of
from ..graph.repeats import layer_points, module_points
from ..graph.residuals import ResidualEstimator
from ..graph.segments import Segment, segments_at
from ..job.context import JobContext
from ..launch.member import pinned
from ..lower.chain_spec import direct_parts, wanted_values
from ..lower.inputs import sharded_of
from ..lower.segment_programs import segment_costs
from ..lower.stage import StagePart
from ..plan.parts import HostTier, Prediction
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..schedule.segment_sequence import SegmentCost
from .inner_split import described_speed
from .memory_candidates import (
    ChainBytes,
    CopyDevice,
    MemoryForms,
    ModelBytes,
    Places,
    Recompute,
    Travel,
)
from .offload import FLOPS_OF_FORWARD, PART_ON_DEVICE, device_optimizer_bytes
from .offload_candidates import could_be_chain
from .zero_for_pipelines import tightest
from .zero_placement import travel_of


def segments_of_job(job: JobContext, size: int) -> tuple[tuple[int, ...], tuple[Segment, ...]]:
    """Where the microbatch is cut, and what between.

    Args:
        job: That is planned; `memory.segments` says about how many, or where they begin.
    """
    opened = graph_of(job.graph(size))
    asked = job.settings.memory.segments
    if isinstance(asked, list):
        points = module_points(opened, asked)
    else:
        points = layer_points(opened, asked)
    return points, tuple(segments_at(opened, points))


def param_bytes(job: JobContext, plan: Plan) -> list[int]:
    """Bytes of a device's parts of the parameters that each segment reads, as float32."""
    shapes = plan.device_shapes
    _, read = _read_by_segments(job, plan.microbatch_size)
    return [4 * sum(math.prod(shapes[p]) for p in own) for _, own in read]


def gathered_bytes(job: JobContext, plan: Plan, *, keeps_roundings: bool) -> list[int]:
    """The same as stage 3 of ZeRO gathers them.

    Args:
        keeps_roundings: Whether what is only read in 16 bits travels so, as with exact sums.
    """
    graph, read = _read_by_segments(job, plan.microbatch_size)
    out, shapes = [], plan.device_shapes
    for segment, own in read:
        low = low_params(graph, segment) if keeps_roundings else {}
        dtypes = {p: low.get(p, graph.values[graph.param_values[p]].dtype) for p in own}
        out.append(sum(bytes_of(shapes[p], dtype) for p, dtype in dtypes.items()))
    return out


def _read_by_segments(job: JobContext, size: int) -> tuple[Graph, list[tuple[Segment, set[int]]]]:
    """Each segment, and the numbers of the parameters that it reads."""
    graph = graph_of(job.graph(size))
    param_of = params_of(graph)
    _, segments = segments_of_job(job, size)
    return graph, [(own, {param_of[entry] for entry in own.params}) for own in segments]


def _to_try(
    job: JobContext, plan: Plan, stages: Sequence[int], is_described: bool, places: Places
) -> list[tuple[int, Recompute | None]]:
    """Stages of ZeRO with what is recomputed, as far as the settings leave it open.

    Where the time is the same, the first that fits is taken: that which changes least.
    """
    asked = job.settings.memory.recompute
    if asked is not None:
        return [(stage, asked) for stage in stages]
    found: list[tuple[int, Recompute | None]] = [(s, None) for s in stages if s < 2]
    if places.stash != "device":  # of one program nothing can be moved
        found = [] if is_described else [(s, "boundaries") for s in stages if s < 2]
    is_chain = could_be_chain(job, plan)
    if is_chain and is_described:
        found += [(s, "auto") for s in stages if s < 2]
    words: tuple[Recompute, ...] = ("none", "boundaries") if is_described else ("boundaries",)
    if is_chain or not found:
        found += [(s, word) for word in words for s in stages if s > 1]
    return found


def forms_to_try(
    job: JobContext,
    plan: Plan,
    stages: Sequence[int],
    places: Places,
    *,
    is_described: bool = True,
) -> list[tuple[int, Recompute | None]]:
    """Stages of ZeRO with what is recomputed, those that may have what waits in some places.

    Args:
        stages: Of ZeRO, with everything on the devices.
        is_described: Whether any device is, with its memory.
    """
    own = [max(stage, int(places.optimizer != "device")) for stage in stages]
    if job.settings.memory.waves is not None:
        own = [stage for stage in own if stage > 1]
    if places.parameters != "device":
        own = [stage for stage in own if stage > 2]
    own = list(dict.fromkeys(own))
    return _as_before(_to_try(job, plan, own, is_described, places)) if own else []


def _as_before(
    forms: list[tuple[int, Recompute | None]],
) -> list[tuple[int, Recompute | None]]:
    """Those whose bits are the ones of an elastic job's first generation, if there was one."""
    is_chain = pinned().is_chain
    same = [form for form in forms if is_chain in (None, form[1] is not None)]
    return same or forms[:1]  # what the settings ask for is the same in all


def model_bytes(job: JobContext, plan: Plan, stash: HostTier) -> ModelBytes:
    """What a copy takes, with the optimizer's state on the device.

    Args:
        plan: Of it, with the state whole on every copy.
        stash: Where what waits for backwards is.
    """
    size = plan.microbatch_size
    model, graph = job.functional(size), job.graph(size)
    sharded = sharded_of(graph, plan) or Sharded(graph, {})
    opened = graph_of(graph)
    cut = sharded.over(opened)

    @functools.cache
    def chain() -> ChainBytes:
        points, _ = segments_of_job(job, size)
        away = stash != "device"
        costs, fused = costs_of(graph, points, model.trained_places, offloads=away, sharded=sharded)
        is_exact = plan.sums.kind == "exact"
        return ChainBytes(
            costs=costs,
            fused=fused,
            parameter_bytes=tuple(param_bytes(job, plan)),
            gathered_bytes=tuple(gathered_bytes(job, plan, keeps_roundings=is_exact)),
        )

    shapes = plan.device_shapes
    own = sum(math.prod(shapes[p]) for p in model.trained_places)
    return ModelBytes(
        parameters=plan.device_parameter_bytes,
        trained=4 * own,
        num_sums=plan.sums.num_parts,
        optimizer=device_optimizer_bytes(job, plan),
        bucket=plan.sums.bucket_mib << 20,
        keeps_sums=plan.placement.sums == "kept",
        inputs=sum(map(cut.device_bytes, opened.batch_values)),
        values=sum(map(cut.device_bytes, range(len(opened.values)))),
        chain=chain,
    )


def memory_forms(
    job: JobContext, plan: Plan, cluster: Cluster, model: ModelBytes, places: Places, groups: int
) -> MemoryForms:
    """The forms of a plan on its devices.

    Args:
        plan: Of it, with the state whole on every copy.
        groups: Of copies that share the state out.
    """
    shares = job.settings.memory.shares
    speeds = speeds_of(job, plan, cluster)
    ranks = [tightest(cluster, replica) for replica in plan.replicas]
    devices = [cluster.devices[rank] for rank in ranks]
    return forms_on(
        model,
        [
            CopyDevice(
                name=f"device {rank} ({device.label})",
                num_microbatches=replica.num_microbatches,
                memory_bytes=device.memory_bytes,
                speed=speed,
            )
            for replica, rank, device, speed in zip(
                plan.replicas, ranks, devices, speeds.of_copies, strict=True
            )
        ],
        places,
        shares=shares if isinstance(shares, str) else tuple(shares),
        travel=travel_of(plan, cluster, groups) if speeds.are_known else None,
        groups=groups,
        waves=job.settings.memory.waves,
    )


def forms_on(
    model: ModelBytes,
    devices: Sequence[CopyDevice],
    places: Places,
    *,
    shares: Literal["auto", "even"] | Sequence[int],
    travel: Travel | None,
    groups: int,
    waves: int | None,
) -> MemoryForms:
    """Forms with what waits in some places, the optimizer's state streamed unless on the devices.

    Args:
        shares: As for `MemoryForms`, like what follows.
        groups: Of copies that share the state out.
        waves: Of stages 2 and 3.
    """
    on_device = 1 if places.optimizer == "device" else PART_ON_DEVICE
    return MemoryForms(
        dataclasses.replace(model, optimizer=model.optimizer * on_device),
        devices,
        shares=shares,
        travel=travel,
        shard_groups=groups,
        tier=places.optimizer,
        stash=places.stash,
        parameters=places.parameters,
        waves=waves,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Operations of each copy of a plan per second.

    Attributes:
        of_copies: In a unit that all share.
        are_known: Whether that is one operation.
    """

    of_copies: tuple[float, ...]
    are_known: bool


def speeds_of(job: JobContext, plan: Plan, cluster: Cluster) -> Speeds:
    """By what a microbatch was found to take, else by the rates that describe the devices."""
    arithmetic = job.precision.arithmetic
    if known := microbatch_seconds(plan):
        work = FLOPS_OF_FORWARD * job.graph(plan.microbatch_size).flops
        return Speeds(of_copies=tuple(work / own for own in known), are_known=True)
    copies = [[cluster.devices[rank] for rank in replica.devices] for replica in plan.replicas]
    # Those of a copy work at the pace of the slowest.
    speeds = [len(own) * min(described_speed(d, arithmetic) for d in own) for own in copies]
    return Speeds(
        of_copies=tuple(speeds) if all(speeds) else (1.0,) * len(copies),
        are_known=all(cluster.devices[d.rank].product_rate(arithmetic) for d in plan.devices),
    )


def microbatch_seconds(plan: Plan) -> tuple[float, ...]:
    """Of each copy of the model, measured or predicted; empty where it is not known."""
    if plan.prediction is None:
        return ()
    known = plan.prediction.microbatch_seconds or predicted_microbatches(plan, plan.prediction)
    return known if all(known) else ()


def predicted_microbatches(plan: Plan, known: Prediction) -> tuple[float, ...]:
    """Seconds of a microbatch on each copy of the model, as its devices' times say.

    Args:
        known: Of the plan; what it does not say of a device is 0.
    """
    spent = {device.rank: device.compute_seconds for device in known.devices}
    return tuple(
        max(spent.get(rank, 0.0) for rank in own.devices) / max(own.num_microbatches, 1)
        for own in plan.replicas
    )


def costs_of(
    graph: Graph,
    points: tuple[int, ...],
    trained: Collection[int],
    *,
    offloads: bool = False,
    sharded: Sharded | None = None,
) -> tuple[tuple[SegmentCost, ...], tuple[SegmentCost, ...]]:
    """What each segment takes before it is compiled, as programs of its own and as a part of one.

    Args:
        trained: Places of the parameters that are trained.
        offloads: Whether what waits may go to host memory.
        sharded: How the devices of a copy cut it; None: it has one device.
    """
    ordered, own = graph_at(graph, "work", points)
    wanted = wanted_values(ordered, trained)
    entries = [i for i, p in enumerate(params_of(ordered)) if p in trained]
    composer = ResidualEstimator(ordered)
    stages = [
        StagePart(
            ordered,
            part,
            AS_THEY_ARE,
            trained=entries,
            on_cpu=False,
            wanted=wanted,
            composer=composer,
        )
        for part in direct_parts(ordered, own)
    ]
    cut = (sharded or Sharded(graph, {})).over(ordered)
    alone, fused = (
        segment_costs(cut, stages, fused=one, offloads=offloads) for one in (False, True)
    )
    return tuple(alone), tuple(fused)
