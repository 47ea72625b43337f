"""From how devices share a model to a complete plan: layouts of parameters, counts, stages."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec as P

from ..cluster.cluster import Cluster, Device
from ..cluster.kinds import slow_cards
from ..cluster.mesh_file import dump_cluster
from ..core.errors import PlanError
from ..core.types import OUTER_AXES, STAGE_AXIS
from ..graph.graph import Graph, params_of
from ..graph.parts import ChainPart, graph_at, parts_of, uncut_scans
from ..lower.chain_spec import direct_parts
from ..plan.layout import (
    Layout,
    check_layers_whole,
    device_layout,
    storage_specs,
    to_spec,
)
from ..plan.parts import (
    Axis,
    Placement,
    PlannedDevice,
    PlannedPipeline,
    PlannedReplica,
    Prediction,
    ReplicaWork,
    RunnerUp,
    SumsForm,
    Versions,
    versions_here,
)
from ..plan.plan import Plan
from ..plan.precision import Precision
from ..plan.unlike_stages import stage_cuts
from ..profile.profile import Profile
from .apportionment import even_counts
from .device_times import microbatch_seconds
from .inner_split import inner_split, layouts, lines_of, state_factor
from .stage_forms import planned_stages
from .structures import ReplicaGroups
from .uneven_sizes import Sizes

_MOST_NAMES = 3


def keeps_order(graph: Graph) -> bool:
    """Whether the loss has ordered callbacks, which jax runs in programs of one device only."""
    return any(type(effect).__name__.startswith("Ordered") for effect in graph.program.effects)


def _refuse_order(graph: Graph) -> None:
    if keeps_order(graph):
        raise PlanError(
            "the model has a callback with ordered=True, and jax keeps its order on one device "
            "only, while a replica of this plan has several: leave ordered=True out of "
            "jax.debug.print, jax.debug.callback or io_callback, or plan without such an axis"
        )


def complete(
    graph: Graph,
    structure: ReplicaGroups,
    *,
    cluster: Cluster,
    batch_size: int,
    microbatch_size: int,
    sums: SumsForm,
    optimizer_bytes: float = 0.0,
    counts: Sequence[int] | None = None,
    starts: Sequence[float] | None = None,
    prediction: Prediction | None = None,
    runners_up: Sequence[RunnerUp] = (),
    reasons: Sequence[str] = (),
    profile: Profile | None = None,
) -> Plan:
    """The plan of a structure.

    Args:
        graph: Of the loss, traced for one microbatch.
        batch_size: Examples of a global batch.
        optimizer_bytes: Of the optimizer's state for the whole model.
        counts: Microbatches of each replica; None: as even as possible.
        starts: Seconds of a step after which each replica begins; None: all at once.
        reasons: Lines besides those of the structure.
        profile: Times of the model on each kind of device alone, for the sizes of a split.

    Raises:
        AnnotationError: If a parameter cannot be sharded by its annotation or rule.
        PlanError: If the plan cannot run, with every fault.
    """
    precision = graph.precision if isinstance(graph.precision, Precision) else Precision()
    kinds = [cluster.devices[r].kind for ranks in structure.replicas for r in ranks]
    specs: list[P] = [P()] * len(graph.param_names)
    lines = [
        f"axis {name!r} of the model has one member, the microbatch: what it averages or gathers "
        f"over {name!r}, as BatchNorm does, is of {microbatch_size} examples"
        for name in graph.bound_axes
    ]
    if graph.normalizes and not graph.bound_axes and microbatch_size < batch_size:
        lines.append(
            f"BatchNorm takes its statistics over a microbatch, {microbatch_size} examples, and "
            f"not over the batch of {batch_size}"
        )
    lines += [
        f"variable {name!r} depends on the batch: it changes by the mean of what the microbatches "
        f"make of it; merge={{{name!r}: ...}} says otherwise"
        for name in graph.averaged
    ]
    lines += _narrow_sums(graph, sums)
    lines += structure.reasons
    for dtype in precision.low_dtypes:
        slow = slow_cards(dtype, kinds)
        if slow:
            lines.append(f"{', '.join(slow)} multiplies slower in {dtype} than in float32")
    shares: tuple[int, ...] = ()
    sizes: Sequence[Sizes] = ((),) * len(specs)
    if structure.inner:
        _refuse_order(graph)
        factor = state_factor(graph, optimizer_bytes, sums)
        split = inner_split(graph, structure, cluster, factor, profile)
        sharded, shares, sizes = split.sharded, split.shares, split.sizes
        specs = sharded.param_specs()
        lines += lines_of(split)
        lines += sharded.gathered_params().values()
        sent = sum(axis.sent_bytes for axis in sharded.axes.values())
        prediction = (prediction or Prediction()).model_copy(update={"sent_bytes": float(sent)})
    if structure.granules is not None:
        lines.append(
            f"numerics.cut 'any': products are computed in {structure.granules} granules and sums "
            "in a fixed order, which took small GPTs on a CPU 1.7 to 2.1 times as long"
        )
    pipeline: PlannedPipeline | None = None
    if structure.pipeline is not None and structure.pipeline.has_forms:
        _refuse_order(graph)
        pipeline, notes, sent = _unlike_pipeline(graph, structure)
        lines += notes
        prediction = (prediction or Prediction()).model_copy(update={"sent_bytes": sent})
        [(_, num_devices)] = structure.axes
        cuts = [device_layout(shape, num_devices) for shape in graph.param_shapes]
        specs, sizes = [to_spec(spec) for spec, _ in cuts], [size for _, size in cuts]
        shares = (1,) * num_devices if any(sizes) else ()
    elif structure.pipeline is not None:
        pipeline = structure.pipeline.planned(graph)
        specs = storage_specs(
            graph.param_shapes, specs, dict(structure.inner), structure.pipeline.num
        )
        ordered, points = graph_at(graph, pipeline.cut_by, pipeline.points)
        check_layers_whole(ordered, layouts(graph, specs, sizes))
        if pipeline.cut_by == "work":
            lines += uncut_scans(graph)
        lines.append(_shares_of_work(parts_of(ordered, points), structure.pipeline.num))
    parameters = layouts(graph, specs, sizes)
    if profile is not None and structure.pipeline is None and len(structure.inner) == 1:
        seconds = microbatch_seconds(
            graph, sharded, parameters, structure.replicas, cluster, profile, shares
        )
        if seconds:
            num_replicas = len(structure.replicas)
            known = {
                "microbatch_seconds": (seconds,) * num_replicas,
                "fixed_seconds": (0.0,) * num_replicas,
            }
            prediction = (prediction or Prediction()).model_copy(update=known)
    num = batch_size // microbatch_size
    used = sorted({rank for ranks in structure.replicas for rank in ranks})
    fields = {
        "made_with": versions_for(cluster),
        "cluster": cluster.name,
        "mesh_file": cluster.file,
        "mesh": dump_cluster(cluster) if cluster.name else "",
        "batch_size": batch_size,
        "microbatch_size": microbatch_size,
        "devices": tuple(
            PlannedDevice(rank=rank, kind=cluster.devices[rank].label) for rank in used
        ),
        "axes": tuple(
            Axis(
                name=name,
                size=size,
                roles=tuple(structure.roles.get(name, ())),
                shares=shares if name != STAGE_AXIS else (),
                granules=structure.granules if name not in OUTER_AXES else None,
            )
            for name, size in structure.axes
        ),
        "replicas": tuple(
            ReplicaWork(devices=ranks, num_microbatches=int(count), start_seconds=start)
            for ranks, count, start in zip(
                structure.replicas,
                counts or even_counts(num, len(structure.replicas)),
                starts or [0.0] * len(structure.replicas),
                strict=True,
            )
        ),
        "pipeline": pipeline,
        "parameters": parameters,
        "sums": sums,
        "precision": precision,
        "placement": placement_for(
            parameters,
            dict(structure.axes),
            sums,
            optimizer_bytes,
            [cluster.devices[r] for r in used],
        ),
        "prediction": prediction,
        "runners_up": tuple(runners_up),
        "reasons": (*lines, *reasons),
    }
    return Plan.checked(fields)


def _unlike_pipeline(
    graph: Graph, structure: ReplicaGroups
) -> tuple[PlannedPipeline, list[str], float]:
    """The pipeline of unlike stages, lines for the plan, and bytes sent."""
    request = structure.pipeline
    assert request is not None
    pipeline = request.planned(graph)
    ordered, points = graph_at(graph, pipeline.cut_by, pipeline.points)
    lines = list(uncut_scans(graph)) if pipeline.cut_by == "work" else []
    how = structure.rules, structure.granules
    if not request.replicas:
        parts = direct_parts(ordered, points)
        stages, notes, sent = planned_stages(graph, ordered, parts, request.forms, *how)
        lines = [*notes, *lines, _shares_of_work(parts, request.num)]
        return pipeline.model_copy(update={"stages": stages}), lines, sent
    replicas, most = [], 0.0
    for i, replica in enumerate(request.replicas):
        parts = direct_parts(ordered, stage_cuts(points, replica.cut))
        stages, notes, sent = planned_stages(graph, ordered, parts, replica.forms, *how)
        lines += [f"replica {i}: {note}" for note in notes]
        lines.append(f"replica {i}: {_shares_of_work(parts, len(parts))}")
        most = max(most, sent)
        replicas.append(
            PlannedReplica(
                num_microbatches=replica.num_microbatches,
                stages=tuple(
                    stage.model_copy(update={"num_parts": num})
                    for stage, num in zip(stages, replica.cut, strict=True)
                ),
            )
        )
    return pipeline.model_copy(update={"replicas": tuple(replicas)}), lines, most


def placement_for(
    parameters: Sequence[Layout],
    axes: Mapping[str, int],
    sums: SumsForm,
    optimizer_bytes: float,
    devices: Sequence[Device],
) -> Placement:
    """The placement; sums are released between steps if they do not fit some device.

    They stand beside the state, the gradients of a microbatch, and on a CPU the state once more:
    the snapshot of a checkpoint is in the same memory.
    """
    known = [device.memory_bytes for device in devices if device.memory_bytes is not None]
    whole = sum(p.num_bytes for p in parameters)
    device_bytes = sum(p.device_bytes(axes) for p in parameters)
    state = device_bytes * (1 + optimizer_bytes / max(whole, 1))
    times_state = 2 if any(device.kind == "cpu" for device in devices) else 1
    needed = times_state * state + (sums.num_parts + 1) * device_bytes
    return Placement(sums="released" if known and needed > min(known) else "kept")


def versions_for(cluster: Cluster) -> Versions:
    """The library versions here that decide bits besides a plan."""
    return versions_here(on_cpu=any(device.kind == "cpu" for device in cluster.devices))


def _narrow_sums(graph: Graph, sums: SumsForm) -> list[str]:
    """The line about trained parameters that are wider than the sums of their gradients."""
    trained = [
        (graph.param_names[p], graph.values[v])
        for p, v in zip(params_of(graph), graph.param_values, strict=True)
    ]
    wide = ("float64", "complex128")
    names = list(dict.fromkeys(n for n, v in trained if v.differentiable and str(v.dtype) in wide))
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return [
        f"{', '.join(names[:_MOST_NAMES])}{more}: float64, and the gradients are rounded to "
        f"{sums.dtype} where they are summed, about 6e-8 of each"
    ]


def _shares_of_work(parts: Sequence[ChainPart], num_stages: int) -> str:
    total = sum(part.segment.flops for part in parts) or 1.0
    flops = [sum(part.segment.flops for part in parts[s::num_stages]) for s in range(num_stages)]
    return f"work of the stages: {', '.join(f'{part / total:.0%}' for part in flops)}"
