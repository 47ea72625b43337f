"""Microbatch counts of replicas, by measured times and memory, and their prediction."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from ..cluster.cluster import Cluster
from ..cluster.job_devices import Devices
from ..core.config import ClusterConfig
from ..core.errors import ConfigError, PlanError
from ..core.format import num_bytes
from ..core.keywords import as_whole_number
from ..core.types import PyTree
from ..jax.devices import is_here
from ..lower.sum import Reducer
from ..plan.parts import DevicePrediction, Prediction, are_free
from ..plan.plan import Plan
from .apportionment import best_counts, bound_seconds, even_counts, finish_seconds

#: `measured`, `even`, or the microbatches of each replica in a step.
Counts = Literal["measured", "even"] | Sequence[int]


def share_one_process(replica_size: int, devices: Devices) -> bool:
    """Whether replicas of several devices share the CPU cores of this process.

    They run one after another, so a time shows the place in the queue, not the speed.

    Args:
        devices: By rank.
    """
    local = [device for device in devices if device is not None and is_here(device)]
    return len(local) > replica_size and local[0].platform == "cpu"


def counts_can_move(plan: Plan, devices: Devices) -> bool:
    """Whether the counts of a plan can follow measured times.

    Args:
        devices: By rank.
    """
    if plan.pipeline is not None and plan.pipeline.needs_even_counts:
        return False
    if plan.unlike_replicas:
        return are_free(plan.unlike_replicas) and not share_one_process(1, devices)
    return not (plan.inner_axes and share_one_process(len(plan.replicas[0].devices), devices))


def own_ids(plan: Plan, reducer: Reducer, num: int | None = None) -> list[range]:
    """Ids of each local replica's microbatches: replicas take consecutive runs in their order.

    Args:
        num: Of all replicas, in about the proportions of a step; None: those of a step.
    """
    counts: Sequence[int] = [replica.num_microbatches for replica in plan.replicas]
    starts = np.cumsum([0, *(counts if num is None else share_of(num, counts))])
    return [range(int(starts[r.index]), int(starts[r.index + 1])) for r in reducer.local]


def shared_numbers(reducer: Reducer, local: Sequence[float]) -> tuple[float, ...]:
    """The number of every replica, gathered over processes."""
    if jax.process_count() == 1:
        return tuple(map(float, local))
    row = np.zeros(len(reducer.replicas), np.float32)
    for replica, number in zip(reducer.local, local, strict=True):
        if replica.is_led_here:
            row[replica.index] = number
    return tuple(float(s) for s in reducer.host.exchange(row))


def pooled(seconds: Sequence[float], plan: Plan) -> tuple[float, ...]:
    """Seconds of each replica, averaged over replicas of the same kinds.

    A few measured microbatches differ by chance, so equal devices start equal; their first steps
    show a real difference.

    Args:
        seconds: Of a microbatch on each replica.
    """
    kinds = {device.rank: device.kind for device in plan.devices}
    replica_kinds = [tuple(kinds[rank] for rank in replica.devices) for replica in plan.replicas]
    alike = {
        kind: [s for s, k in zip(seconds, replica_kinds, strict=True) if k == kind]
        for kind in replica_kinds
    }
    return tuple(statistics.mean(alike[kind]) for kind in replica_kinds)


def count_limits(
    plan: Plan,
    cluster: Cluster,
    memory_bytes: Sequence[float],
    batch: PyTree,
    at_once: int = 1,
) -> tuple[int | None, ...]:
    """The most microbatches that each replica's memory takes.

    Microbatches run one after another, so only their inputs add up: the memory of the programs,
    plus the inputs of each microbatch on the device. A pipeline reserves the inputs of the most
    microbatches that it may run.

    Args:
        memory_bytes: Of a device of each replica, without inputs.
        at_once: Microbatches whose inputs a device holds, whatever its count, if more than one.

    Raises:
        PlanError: If a device cannot hold a single microbatch, with the missing bytes.
    """
    each = at_once * sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    what = "a microbatch needs" if at_once == 1 else f"a pipeline of {at_once} microbatches needs"
    limits: list[int | None] = []
    for replica, used in zip(plan.replicas, map(int, memory_bytes), strict=True):
        known = {r: m for r in replica.devices if (m := cluster.devices[r].memory_bytes)}
        if not known:
            limits.append(None)
            continue
        rank = min(known, key=known.__getitem__)
        free = known[rank] - used
        if free < each:
            raise PlanError(
                f"device {rank} has {num_bytes(known[rank])}, {what} {num_bytes(used + each)}: "
                f"{num_bytes(each - free)} are missing; "
                "use a smaller microbatch_size or leave the device out"
            )
        limits.append(free // each if at_once == 1 else at_once)
    return tuple(limits)


def lack(devices: Devices, cluster: Cluster, num: int) -> bool:
    """Whether a device of this process is known to have less than `num` bytes."""
    known = [x.memory_bytes for x, d in zip(cluster.devices, devices, strict=True) if d]
    return any(memory_bytes is not None and memory_bytes < num for memory_bytes in known)


def asked_counts(counts: Counts, num_microbatches: int, num_replicas: int) -> tuple[int, ...]:
    """The counts asked for; `measured` ones begin even.

    Raises:
        ConfigError: If they are no valid counts.
    """
    if isinstance(counts, str):
        if counts not in ("measured", "even"):
            raise ConfigError(f"counts={counts!r}: use 'measured', 'even' or one count per device")
        return even_counts(num_microbatches, num_replicas)
    numbers = tuple(map(as_whole_number, counts))
    is_whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    fits = is_whole and len(numbers) == num_replicas and sum(numbers) == num_microbatches
    if not fits or min(numbers) < 0:
        raise ConfigError(
            f"counts={numbers} does not hand out {num_microbatches} microbatches to "
            f"{num_replicas} replicas: give {num_replicas} whole numbers that sum to "
            f"{num_microbatches}"
        )
    return numbers


def check_limits(counts: Sequence[int], limits: Sequence[int | None]) -> None:
    """Refuse counts that some device's memory does not take.

    Raises:
        PlanError: With the devices and their limits.
    """
    over = [d for d, limit in enumerate(limits) if limit is not None and counts[d] > limit]
    if over:
        raise PlanError(
            f"counts={tuple(counts)}: devices {over} have memory for {[limits[d] for d in over]} "
            "microbatches only; use counts='measured'"
        )


def share_of(num_microbatches: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Counts for another number of microbatches in about the same proportions."""
    # A device that runs c microbatches while the others run theirs takes 1/c of the time for one.
    return best_counts(num_microbatches, [1 / c if c else 1e9 for c in counts])


def predicted(
    plan: Plan,
    seconds: Sequence[float],
    fixed: Sequence[float],
    *,
    memory_bytes: Mapping[int, float],
    cluster: Cluster,
) -> Prediction:
    """The prediction of a plan's step, from measured times if all are known.

    Args:
        seconds: Of one microbatch on each replica (0: not measured).
        fixed: Seconds of each replica's step outside its microbatches.
        memory_bytes: Of each device that is known, by rank.
    """
    before = plan.prediction.devices if plan.prediction is not None else ()
    held_bytes = {device.rank: device.held for device in before}
    devices = tuple(
        DevicePrediction(
            rank=d.rank,
            memory_bytes=float(memory_bytes.get(d.rank, 0)),
            capacity_bytes=float(cluster.devices[d.rank].memory_bytes or 0),
            held=held_bytes.get(d.rank),
        )
        for d in plan.devices
    )
    known = Prediction(
        stage_fractions=plan.prediction.stage_fractions if plan.prediction else (),
        sent_bytes=plan.prediction.sent_bytes if plan.prediction else 0.0,
        devices=devices,
    )
    if not all(seconds):
        return known
    finish = finish_seconds(plan.counts, seconds, fixed)
    starts = [0.0] * len(finish)
    if not plan.unlike_replicas:
        starts = [r.start_seconds * bool(r.num_microbatches) for r in plan.replicas]
    return known.model_copy(
        update={
            "step_seconds": max(map(sum, zip(starts, finish, strict=True))),
            # A single replica has no other counts.
            "bound_seconds": bound_seconds(sum(plan.counts), seconds, fixed)
            if len(plan.counts) > 1
            else 0.0,
            "bound_over": "counts",
            "microbatch_seconds": tuple(seconds),
            "fixed_seconds": tuple(fixed),
        }
    )


def with_executors(plan: Plan, executors: tuple[int, ...]) -> Plan:
    """The plan with other numbers of executors on its replicas.

    Raises:
        PlanError: If its replicas cannot have several.
    """
    pairs = zip(plan.replicas, executors, strict=True)
    replicas = tuple(r.model_copy(update={"executors": int(num)}) for r, num in pairs)
    return plan.replaced(replicas=replicas)


def with_asked_calls(settings: ClusterConfig, plan: Plan) -> Plan:
    """The plan with the settings of calls: executors, and microbatches of each call.

    Raises:
        PlanError: If its replicas cannot have several executors, or calls several microbatches.
    """
    asked, num = settings.executors, settings.microbatches_per_call
    if plan.pipeline is not None and num not in ("auto", 1):
        why = "one call of a pipeline runs all microbatches of its replica"
        reason = f"cluster.microbatches_per_call={num} changes nothing: {why}"
        plan = plan.replaced(reasons=(*plan.reasons, reason))
    elif num != "auto":
        plan = plan.replaced(microbatches_per_call=num)
    return plan if asked == "auto" else with_executors(plan, (asked,) * len(plan.replicas))
