"""What must hold between the fields of a plan.

People edit plans as JSON, so every fault is listed with its key and reason.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic

from ..core.errors import PlanError
from ..core.files import listed, parse_json, shown
from ..core.format import plural
from ..core.types import DATA_AXIS, DEVICE_AXIS, OUTER_AXES, STAGE_AXIS, TOKEN_AXIS
from ..schedule.schedules import Schedule, make_schedule, schedule_from_table
from ..schedule.segment_sequence import (
    CUT,
    INPUT,
    Residuals,
    SegmentCost,
    replay_sequence,
    sequence_from_texts,
)
from .parts import (
    Axis,
    Islands,
    Placement,
    PlannedChain,
    PlannedPipeline,
    granule_faults,
    size_faults,
)
from .unlike_stages import unlike_stage_faults


def schedule_of(schedule: Any, num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """The schedule of one replica.

    Args:
        schedule: A name or a table of texts.
        num_microbatches: In one step of the replica.

    Raises:
        PlanError: If a table is for other numbers of stages, microbatches or chunks.
    """
    if isinstance(schedule, str):
        return make_schedule(schedule, num_stages, num_microbatches, num_chunks)
    table = schedule_from_table(schedule)
    made_for = (table.num_stages, table.num_microbatches, table.num_chunks)
    if made_for != (num_stages, num_microbatches, num_chunks):
        raise PlanError(
            f"the table of the pipeline's schedule is for {made_for[0]} stages, {made_for[1]} "
            f"microbatches and {made_for[2]} chunks; this pipeline has {num_stages} stages, "
            f"{num_microbatches} microbatches and {num_chunks} chunks"
        )
    return table


def faults(plan: Any) -> Iterator[str]:
    """All inconsistencies of a plan whose fields have the right types: `key: fault, remedy`."""
    yield from _batch_faults(plan)
    yield from _device_faults(plan)
    yield from _axis_faults(plan)
    yield from _parameter_faults(plan)
    if plan.pipeline is not None:
        yield from _pipeline_faults(plan, plan.pipeline)
        if plan.stage_forms:
            yield from unlike_stage_faults(plan, plan.pipeline)
    if plan.chain is not None:
        yield from _chain_faults(plan, plan.chain)
    yield from _stash_faults(plan)
    if plan.sums.kind == "exact" and plan.sums.dtype != "float32":
        yield f"sums.dtype: {plan.sums.dtype} rounds what exact sums keep, use float32"
    yield from _host_sum_faults(plan)
    yield from _executor_faults(plan)
    yield from _start_faults(plan)
    yield from _call_faults(plan)
    known = {p.name for p in plan.parameters}
    for sparse in plan.sums.sparse:
        if sparse.name not in known:
            yield f"sums.sparse: there is no parameter {sparse.name!r}"
        elif plan.axes:
            yield "sums.sparse: rows travel between replicas of one device only, leave it empty"
            break
    yield from _zero_faults(plan)
    if plan.islands is not None:
        yield from _island_faults(plan, plan.islands)
    yield from _prediction_faults(plan)


def _island_faults(plan: Any, islands: Islands) -> Iterator[str]:
    if sum(islands.replicas) != len(plan.replicas):
        yield (
            f"islands.replicas: {' + '.join(map(str, islands.replicas))} are "
            f"{sum(islands.replicas)}, this plan has {len(plan.replicas)} replicas"
        )
        return
    num = sum(plan.counts)
    if num < len(islands.replicas):
        yield (
            f"islands.replicas: {len(islands.replicas)} islands for {plural(num, 'microbatch')} "
            "of a step: each needs one, use a smaller microbatch_size or fewer islands"
        )
    if plan.stage_forms:
        yield "islands: stages are alike in islands, leave the tables of stages out"
    elif plan.is_uneven:
        yield "islands: shards are even in islands, leave the shares of the axes out"
    for key, refused, remedy in (
        ("placement.zero", plan.placement.zero, "use 0, and no offload of the optimizer's state"),
        ("sums.kind", plan.sums.kind != "exact", "use 'exact'"),
        ("sums.over", plan.sums.over != "device", "use 'device'"),
        ("sums.sparse", plan.sums.sparse, "leave it empty"),
        ("precision.loss_scale", plan.precision.loss_scale is not None, "use bf16"),
    ):
        if refused:
            yield f"{key}: islands update all of their own state by exact sums: {remedy}"


def _host_sum_faults(plan: Any) -> Iterator[str]:
    if plan.sums.over == "device":
        return
    if plan.axes:
        yield (
            "sums.over: only replicas of one device are summed over the host, these have the axes "
            f"{', '.join(axis.name for axis in plan.axes)}: use 'device'"
        )
    if plan.sums.kind != "exact":
        yield (
            f"sums.over: hosts add integers only, and these are {plan.sums.kind} sums: use kind "
            "'exact', or 'device'"
        )


def _executor_faults(plan: Any) -> Iterator[str]:
    if all(replica.executors == 1 for replica in plan.replicas):
        return
    if plan.axes:
        yield (
            "replicas: executors run microbatches on one device, a copy has axes here: use "
            "executors 1"
        )
    if plan.sums.kind != "exact":
        yield (
            "replicas: executors take microbatches in no fixed order, which moves the bits of "
            f"{plan.sums.kind} sums: use executors 1, or sums of kind 'exact'"
        )


def _start_faults(plan: Any) -> Iterator[str]:
    late = [i for i, replica in enumerate(plan.replicas) if replica.start_seconds]
    if not late:
        return
    if plan.pipeline is None:
        why = "only pipelines can start at different times, and these replicas have no stages"
    elif plan.placement.zero > 1:
        why = (
            f"with placement.zero of {plan.placement.zero} all replicas gather and reduce slots at "
            "the same time"
        )
    else:
        return
    yield f"replicas.{late[0]}.start_seconds: {why}: leave it 0"


def _call_faults(plan: Any) -> Iterator[str]:
    if plan.microbatches_per_call > 1 and plan.pipeline is not None:
        yield (
            "microbatches_per_call: one call of a pipeline runs all microbatches of its replica: "
            "use 1"
        )


def _batch_faults(plan: Any) -> Iterator[str]:
    num, rest = divmod(plan.batch_size, plan.microbatch_size)
    counts = [replica.num_microbatches for replica in plan.replicas]
    if rest:
        yield (
            f"microbatch_size: {plan.microbatch_size} does not divide batch_size "
            f"{plan.batch_size}, use a divisor"
        )
    elif sum(counts) != num:
        yield (
            f"replicas: num_microbatches {', '.join(map(str, counts[:9]))} add up to "
            f"{sum(counts)}, a batch of {plan.batch_size} has {num}"
        )


def _device_faults(plan: Any) -> Iterator[str]:
    listed = Counter(device.rank for device in plan.devices)
    used = Counter(rank for replica in plan.replicas for rank in replica.devices)
    for rank in (r for r, n in listed.items() if n > 1):
        yield f"devices: rank {rank} is listed twice"
    for rank in (r for r, n in used.items() if n > 1):
        yield f"replicas: device {rank} is listed twice"
    for rank in sorted(used.keys() - listed.keys()):
        yield f"replicas: device {rank} is not one of `devices`"
    for rank in sorted(listed.keys() - used.keys()):
        yield f"devices: rank {rank} is in no replica, leave it out"
    size = math.prod(axis.size for axis in plan.axes)
    for i, replica in enumerate(plan.replicas):
        if len(replica.devices) != size:
            yield (f"replicas.{i}.devices: {len(replica.devices)} devices, the axes take {size}")


def _axis_faults(plan: Any) -> Iterator[str]:
    names = [axis.name for axis in plan.axes]
    for name in (n for n, times in Counter(names).items() if times > 1):
        yield f"axes: {name!r} is listed twice"
    if DATA_AXIS in names:
        yield f"axes: {DATA_AXIS!r} is the axis of `replicas`, leave it out"
    if STAGE_AXIS in names[1:]:
        yield f"axes: {STAGE_AXIS!r} must be the first"
    if (STAGE_AXIS in names) != (plan.pipeline is not None and not plan.stage_forms):
        yield f"pipeline: needed if and only if {STAGE_AXIS!r} is one of the axes"
    if DEVICE_AXIS in names and not plan.stage_forms:
        yield f"axes: {DEVICE_AXIS!r} is for unlike stages, `pipeline.stages`"
    for axis in plan.axes:
        if not axis.shares:
            continue
        if len(axis.shares) != axis.size:
            yield f"axes.{axis.name}.shares: {len(axis.shares)} for {axis.size} devices"
        if len(plan.axes) > 1:
            instead = ", or use placement.zero instead of fsdp" * ("fsdp" in names)
            yield (
                f"axes.{axis.name}.shares: uneven shards need replicas with one axis, this plan "
                f"has {', '.join(names)}: leave the shares out, or the other axes{instead}"
            )
    yield from _token_faults(plan)
    yield from granule_faults("axes", plan.axes, plan.parameters, "parameters")
    if (axis := plan.granule_axis) is not None:
        yield from _granule_faults(plan, axis)
    roles = {len(axis.roles) for axis in plan.axes if axis.name not in OUTER_AXES}
    if len(roles) > 1:
        yield "axes: `roles` must have one entry for each TaskGraph, these differ in length"


def _granule_faults(plan: Any, axis: Axis) -> Iterator[str]:
    """Sums, dtypes and devices for which no granules are lowered."""
    key = f"axes.{axis.name}.granules"
    if plan.sums.kind != "exact":
        yield f"{key}: {plan.sums.kind} sums depend on the cut, use kind 'exact'"
    if low := plan.precision.low_dtypes:
        yield (
            f"{key}: {' and '.join(sorted(low))} is rounded in a way that depends on how a program "
            "is cut, use precision 'float32'"
        )
    kinds = sorted({d.arithmetic for d in plan.devices} - {"cpu"})
    if kinds:
        yield f"{key}: it was tried on CPUs, and not on {', '.join(kinds)}: leave granules out"


def _token_faults(plan: Any) -> Iterator[str]:
    outer = [axis.name for axis in plan.axes if axis.size > 1 and axis.name in OUTER_AXES]
    for axis in plan.axes:
        if (axis.name == TOKEN_AXIS) != ("tokens" in axis.roles):
            yield f"axes.{axis.name}.roles: {TOKEN_AXIS!r} cuts 'tokens', and no other axis does"
        if axis.name != TOKEN_AXIS or axis.size == 1:
            continue
        if set(axis.roles) != {"tokens"}:
            yield f"axes.{axis.name}.roles: it cuts the 'tokens' of all TaskGraphs"
        if outer:
            yield f"axes.{axis.name}: tokens are not cut inside stages, leave {outer[0]!r} out"


def _parameter_faults(plan: Any) -> Iterator[str]:
    sizes = plan.axis_sizes
    for name, times in Counter(p.name for p in plan.parameters).items():
        if times > 1:
            yield f"parameters: {name!r} is listed twice"
    for p in plan.parameters:
        key = f"parameters.{p.name}.spec"
        if len(p.spec) != len(p.shape):
            yield f"{key}: {len(p.spec)} entries for {len(p.shape)} dimensions"
            continue
        used = Counter(axis for names in p.spec for axis in names)
        for axis in used:
            if axis not in sizes:
                yield f"{key}: there is no axis {axis!r}"
            elif axis == TOKEN_AXIS:
                yield f"{key}: {axis!r} cuts tokens, and no parameters"
            elif used[axis] > 1:
                yield f"{key}: {axis!r} cuts it twice"
        unlike = p.sizes or ((),) * len(p.shape)
        if len(unlike) != len(p.shape):
            yield (
                f"parameters.{p.name}.sizes: {len(unlike)} entries for {len(p.shape)} dimensions"
            )
            continue
        for d, (size, cut) in enumerate(zip(p.shape, p.cuts(sizes), strict=True)):
            if unlike[d]:
                yield from size_faults(f"parameters.{p.name}", p, d, plan.axes)
            elif size % cut:
                yield f"{key}: dimension {d} of size {size} does not divide into {cut}"


def _zero_faults(plan: Any) -> Iterator[str]:
    placement, num = plan.placement, len(plan.replicas)
    if placement.waves > 1 and placement.zero < 2:
        yield "placement.waves: only ZeRO's stages 2 and 3 have waves, use 1 or set placement.zero"
    if placement.parameters != "device" and placement.zero < 3:
        yield (
            "placement.parameters: only ZeRO's stage 3 shards them over replicas, set "
            "placement.zero to 3, or use 'device'"
        )
    if not placement.zero:
        yield from _faults_without_zero(placement)
        return
    known = {p.name for p in plan.parameters}
    for name in placement.whole:
        if name not in known:
            yield f"placement.whole: there is no parameter {name!r}"
    if num == 1 and placement.zero > 1:
        yield "placement.zero: one replica has nobody to share with, use 1 or 0"
    if plan.axes:
        yield from _sharded_replica_faults(plan)
    groups = placement.shard_groups
    if groups > 1:
        yield from _shard_group_faults(plan)
    if placement.shares and num % groups == 0 and len(placement.shares) != num // groups:
        where = f" in each of {groups} groups" if groups > 1 else ""
        yield f"placement.shares: {len(placement.shares)} for {num // groups} replicas{where}"
    if plan.sums.sparse:
        yield (
            "placement.zero: rows of a gradient travel to every replica, leave sums.sparse empty "
            "or use 0"
        )


def _faults_without_zero(placement: Placement) -> Iterator[str]:
    """Settings that only ZeRO's stages have."""
    if placement.shares:
        yield "placement.shares: only ZeRO's stages have shares, set placement.zero to 1, 2 or 3"
    if placement.shard_groups > 1:
        yield (
            "placement.shard_groups: only ZeRO's stages have groups, set placement.zero to 1, 2 or "
            "3"
        )
    if placement.whole:
        yield "placement.whole: only ZeRO's stages have owners, set placement.zero to 1, 2 or 3"
    if placement.optimizer != "device":
        yield (
            f"placement.optimizer: state in {placement.optimizer} memory is updated as in ZeRO's "
            "stages, set placement.zero to 1, 2 or 3"
        )


def _sharded_replica_faults(plan: Any) -> Iterator[str]:
    placement, num = plan.placement, len(plan.replicas)
    axes = ", ".join(axis.name for axis in plan.axes)
    cut = f"replicas are sharded over {axes}"
    if num == 1:
        yield f"placement.zero: {cut}, and one replica has nobody to share with: use 0"
    if plan.pipeline is not None and placement.waves > 1:
        yield f"placement.waves: {cut}, and stages run all microbatches in one wave: use 1"


def _shard_group_faults(plan: Any) -> Iterator[str]:
    num, groups = len(plan.replicas), plan.placement.shard_groups
    if num % groups or num == groups:
        yield (
            f"placement.shard_groups: {num} replicas do not make {groups} groups of equal size, of "
            "two or more: use another number"
        )
        return
    if plan.sums.over == "host":
        yield (
            "placement.shard_groups: sums over the host need all replicas of a process in one "
            "group: use 1, or sums.over 'device'"
        )
    arithmetic = {device.rank: device.arithmetic for device in plan.devices}
    kinds = [tuple(arithmetic.get(rank, "") for rank in r.devices) for r in plan.replicas]
    size = num // groups
    for member in range(size):
        same = kinds[member::size]
        if len(set(same)) > 1:
            replicas = ", ".join(map(str, range(member, num, size)))
            unlike = " and ".join(sorted({kind for devices in same for kind in devices}))
            yield (
                f"placement.shard_groups: replicas {replicas} update the same parameters on unlike "
                f"kinds ({unlike}): they would drift apart. Use 1, or groups with the same kinds "
                "in the same order"
            )


def _pipeline_faults(plan: Any, pipeline: PlannedPipeline) -> Iterator[str]:
    num_stages = plan.num_stages
    if num_stages < 2 and not plan.unlike_replicas:
        yield f"axes: {STAGE_AXIS!r} has size {num_stages}, a pipeline has at least two stages"
    parts = [segment.part for segment in pipeline.segments]
    each = [sum(stage.num_parts for stage in form) for form in plan.stage_forms]
    wanted = list(range(each[0] if each else num_stages * pipeline.num_chunks))
    if sorted(set(parts)) != wanted or parts != sorted(parts):
        yield (
            f"pipeline.segments: their parts are {_brief(parts)}, they must go from 0 to "
            f"{wanted[-1]} in order, each at least once"
        )
    firsts = [segment.first for segment in pipeline.segments]
    if firsts[0] != 0 or any(b <= a for a, b in itertools.pairwise(firsts)):
        yield f"pipeline.segments: their first equations {_brief(firsts)} must grow from 0"
    if len({segment.keep for segment in pipeline.segments}) > 1:
        yield "pipeline.segments: all must `keep` the same"
    inner = math.prod(axis.size for axis in plan.axes) // max(num_stages, 1)
    in_granules = plan.is_cut_free
    if (inner > 1 or in_granules) and not pipeline.recompute and not plan.stage_forms:
        yield (
            f"pipeline.segments: stages of {inner} devices{' in granules' * in_granules} keep "
            "`inputs`, residuals are for stages of one"
        )
    for count in sorted({count for count in plan.counts if count}):
        try:
            schedule = schedule_of(pipeline.schedule, num_stages, count, pipeline.num_chunks)
        except PlanError as error:
            yield f"pipeline.schedule: {error}"
            return
        if schedule.has_weight and pipeline.recompute:
            yield (
                "pipeline.segments: separate weight gradients need `residuals`; with `inputs` each "
                "forward would run three times, use schedule '1f1b'"
            )
            return


def _chain_faults(plan: Any, chain: PlannedChain) -> Iterator[str]:
    cut = f"replicas are sharded over {', '.join(axis.name for axis in plan.axes)}"
    if plan.pipeline is not None:
        yield f"chain: {cut}, and stages have segments already: leave it out"
    firsts = [segment.first for segment in chain.segments]
    if firsts[0] != 0 or any(b <= a for a, b in itertools.pairwise(firsts)):
        yield f"chain.segments: their first equations {_brief(firsts)} must grow from 0"
    try:
        sequence = sequence_from_texts(len(firsts), chain.sequence)
        replay_sequence(sequence, _no_costs(len(firsts)))
    except PlanError as error:
        yield f"chain.sequence: {error}"
        return
    last = len(firsts) - 1
    if sequence.num_forwards[last]:
        yield (
            f"chain.sequence: segment {last} is the last, whose forward and backward are one "
            f"program, 'B{last}:{INPUT}': leave its 'F{last}' out"
        )
    if sequence.offloads and plan.is_uneven:
        yield (
            f"chain.sequence: {cut} in uneven shards, whose one program offloads nothing: leave "
            "its 'O' and 'I' out"
        )
    elif sequence.offloads and plan.placement.stash == "device":
        yield "placement.stash: `chain.sequence` offloads to host memory, set 'host'"


def _stash_faults(plan: Any) -> Iterator[str]:
    if plan.placement.stash == "device":
        return
    if plan.chain is None:
        yield "placement.stash: only segments have a stash to offload, set `chain`, or use 'device'"
    elif not any(str(text).startswith("O") for text in plan.chain.sequence):
        yield "placement.stash: no operation of `chain.sequence` offloads anything, use 'device'"


def _no_costs(num: int) -> list[SegmentCost]:
    """Placeholder costs, for a replay that only checks that a sequence can run."""
    return [
        SegmentCost(
            name=str(i),
            input_bytes=1,
            input_gradient_bytes=1,
            forward_seconds=0.0,
            residuals=(
                Residuals(
                    name=INPUT if i == num - 1 else CUT,
                    num_bytes=int(i < num - 1),
                    reads_input=i == num - 1,
                    forward_seconds=0.0,
                    backward_seconds=0.0,
                ),
            ),
        )
        for i in range(num)
    ]


def _prediction_faults(plan: Any) -> Iterator[str]:
    known = plan.prediction
    if known is None:
        return
    for name in ("microbatch_seconds", "fixed_seconds"):
        num = len(getattr(known, name))
        if num not in (0, len(plan.counts)):
            yield f"prediction.{name}: {num} values for {len(plan.counts)} replicas"
    if bool(known.microbatch_seconds) != bool(known.fixed_seconds):
        yield "prediction: microbatch_seconds and fixed_seconds come together"
    unknown = {d.rank for d in known.devices} - {d.rank for d in plan.devices}
    if unknown:
        yield f"prediction.devices: {sorted(unknown)} are not in `devices`"


def _brief(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


Value = TypeVar("Value", bound=pydantic.BaseModel)


def from_json(cls: type[Value], text: str | bytes) -> Value:
    """Parse a value and validate it.

    Raises:
        PlanError: With every fault.
    """
    table, faults = parse_json(text, lambda words: refusal([f"the file {words}"]))
    reported: set[tuple[int | str, ...]] = set()
    while True:
        try:
            value = cls.model_validate_json(json.dumps(table))
        except pydantic.ValidationError as error:
            faults += faults_of(error, reported)
            new = {failure["loc"] for failure in error.errors()} - reported
        else:
            new = set()
        if not new:
            break
        reported |= new
        # Contradictions between fields are only checked once each field is valid or gone.
        for path in new:
            _drop(table, path)
    if faults:
        raise refusal(faults)
    return value


def refusal(faults: Iterable[str]) -> PlanError:
    """The error that lists all faults."""
    return PlanError("this is no plan that can be run:" + listed(list(faults)))


def faults_of(
    error: pydantic.ValidationError, reported: Iterable[tuple[int | str, ...]] = ()
) -> list[str]:
    """Each fault as `key: what`.

    Args:
        reported: Keys whose faults are left out.
    """
    failures = error.errors()
    paths = [failure["loc"] for failure in failures]
    return [
        line
        for failure in failures
        if failure["loc"] not in reported and not _follows_from_items(failure, paths)
        for line in _lines(failure)
    ]


def _follows_from_items(failure: Mapping[str, Any], paths: Sequence[tuple[int | str, ...]]) -> bool:
    """Whether a tuple is too short only because its faulty items were dropped."""
    key = failure["loc"]
    return failure["type"] == "too_short" and any(
        len(path) > len(key) and path[: len(key)] == key for path in paths
    )


def _lines(failure: Mapping[str, Any]) -> list[str]:
    if failure["type"] == "value_error":  # of a model validator, a line for each fault
        return str(failure["ctx"]["error"]).splitlines()
    key = ".".join(str(part)[:80] for part in failure["loc"]) or "the file"
    if failure["type"] == "extra_forbidden":
        return [f"{key}: there is no such key"]
    value = "" if failure["type"] == "missing" else f", not {shown(failure['input'])}"
    return [f"{key}: {failure['msg']}{value}"]


def _drop(tree: Any, path: Sequence[int | str]) -> None:
    try:
        for key in path[:-1]:
            tree = tree[key]
    except (KeyError, IndexError, TypeError):
        return  # a parent was dropped already, or has another type
    if path and isinstance(tree, dict):
        tree.pop(path[-1], None)
