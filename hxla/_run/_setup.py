"""From the arguments of `hxla.train` to a microbatch size, counts and a plan."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from .._cluster._cluster import Device
from .._core._errors import ConfigError, PlanError
from .._core._format import num_bytes
from .._core._types import PyTree
from .._lower._reduce import Reducer
from .._model._functional import leaf_names
from .._plan._plan import Plan
from .._planner._counts import best_counts, bound_seconds, even_counts, finish_seconds
from .._planner._microbatch import best_size, candidate_sizes
from ._step import Engine

Split = str | Sequence[int]


def check_batch(batch_size: int, microbatch_size: int | None, num_devices: int) -> None:
    """Refuse sizes that do not divide or leave devices without work.

    Raises:
        ConfigError: For sizes below one or a batch that is not a multiple of the microbatch.
        PlanError: For more devices than microbatches.
    """
    if batch_size < 1 or (microbatch_size is not None and microbatch_size < 1):
        raise ConfigError(
            f"batch_size={batch_size} and microbatch_size={microbatch_size} must be at least 1"
        )
    if microbatch_size is None:
        candidate_sizes(batch_size, num_devices)
        return
    if batch_size % microbatch_size:
        divisors = [b for b in range(1, batch_size + 1) if batch_size % b == 0]
        near = min(divisors, key=lambda b: abs(b - microbatch_size))
        raise ConfigError(
            f"batch_size={batch_size} is not divisible by microbatch_size={microbatch_size}: "
            f"the nearest size that fits is {near}"
        )
    if batch_size // microbatch_size < num_devices:
        raise PlanError(
            f"{num_devices} devices but only {batch_size // microbatch_size} microbatches "
            f"(batch_size {batch_size} / microbatch_size {microbatch_size}): use fewer devices "
            f"or microbatch_size <= {batch_size // num_devices}"
        )


def size_of_microbatches(batch_size: int, num: int, microbatch_size: int | None) -> int:
    """The microbatch size that `pipeline.num_micro_batch` means.

    Raises:
        ConfigError: If the batch does not divide, or `microbatch_size` says something else.
    """
    if batch_size % num:
        raise ConfigError(
            f"batch_size={batch_size} is not divisible into pipeline.num_micro_batch={num} "
            "microbatches: use a divisor"
        )
    if microbatch_size is not None and microbatch_size != batch_size // num:
        raise ConfigError(
            f"microbatch_size={microbatch_size} and pipeline.num_micro_batch={num} disagree: "
            f"{batch_size} examples in {num} microbatches are {batch_size // num} each; give one"
        )
    return batch_size // num


def check_groups(num: int, params: PyTree) -> None:
    """Refuse more groups of parameters than there are parameters.

    Raises:
        ConfigError: With both numbers.
    """
    num_params = len(jax.tree.leaves(params))
    if num > max(num_params, 1):
        raise ConfigError(
            f"optimizer.num_apply_groups={num} but the model has {num_params} parameters: use "
            f"{max(num_params, 1)} at most"
        )


def optimizer_bytes(optimizer: optax.GradientTransformation, params: PyTree) -> int:
    """Bytes of the optimizer's state for the whole model."""
    state = jax.eval_shape(optimizer.init, params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def rows_to_send(
    rows_read: Mapping[int, int], params: PyTree, *, num_replicas: int, num_parts: int
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Embeddings whose rows travel one by one, because that is less, and why.

    Args:
        rows_read: Parameter to the most rows that a global batch touches.
        params: The user's own tree.
        num_replicas: That sum their gradients.
        num_parts: Arrays in which a gradient is summed.

    Returns:
        Parameter to the most rows, of those that are worth it; what the plan says of all.
    """
    names, leaves = leaf_names(params), jax.tree.leaves(params)
    rows, reasons = {}, []
    for p, most in rows_read.items():
        size = leaves[p].shape[0]
        most = min(most, size)
        # Gathered from all, against reduce-scattered in parts and gathered as floats.
        if num_replicas * most * num_parts < size * (num_parts + 1):
            rows[p] = most
            reasons.append(f"sparse_embeddings: at most {most} of {size} rows of {names[p]}")
        else:
            reasons.append(
                f"sparse_embeddings: {names[p]} whole, {most} rows from each of {num_replicas} "
                f"would be more than its {size}"
            )
    none = "sparse_embeddings: no parameter is only looked up by rows"
    return rows, tuple(reasons) or (none,)


def own_ids(counts: Sequence[int], reducer: Reducer) -> list[range]:
    """Microbatch ids of each local device: devices take consecutive runs in their order."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    ids = []
    for replica in reducer.local:
        d = replica.index
        ids.append(range(int(starts[d]), int(starts[d + 1])))
    return ids


def shared_seconds(reducer: Reducer, local: Sequence[float]) -> tuple[float, ...]:
    """Every device's seconds, known to every process."""
    row = np.zeros(len(reducer.replicas), np.float32)
    for replica, seconds in zip(reducer.local, local, strict=True):
        if replica.is_led_here:
            row[replica.index] = seconds
    return tuple(float(s) for s in reducer.exchange(row))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """An engine with its microbatch size and how fast each device runs it."""

    engine: Engine
    microbatch_size: int
    seconds: tuple[float, ...] | None
    reasons: tuple[str, ...]


def choose(
    make: Callable[[int], Engine],
    first_batch: Callable[[int], PyTree],
    reducer: Reducer,
    *,
    batch_size: int,
    microbatch_size: int | None,
    measure: bool,
) -> Chosen:
    """Build the engine, measuring sizes and devices where that is asked for.

    Args:
        make: Microbatch size to engine.
        first_batch: Microbatch size to microbatch 0 of step 0.
        reducer: Knows all devices.
        batch_size: Examples of a global batch.
        microbatch_size: The user's, or None to measure some.
        measure: Whether the split follows measured times.
    """
    if microbatch_size is not None:
        engine = make(microbatch_size)
        local = engine.calibrate(first_batch(microbatch_size), repeats=3 if measure else 0)
        seconds = shared_seconds(reducer, local) if measure else None
        return Chosen(engine=engine, microbatch_size=microbatch_size, seconds=seconds, reasons=())
    measured: dict[int, tuple[float, ...]] = {}
    best: Chosen | None = None
    for size in candidate_sizes(batch_size, len(reducer.replicas)):
        engine = make(size)
        measured[size] = shared_seconds(reducer, engine.calibrate(first_batch(size), repeats=3))
        winner, steps = best_size(batch_size, measured)
        reason = f"microbatch_size={winner} chosen: predicted step " + ", ".join(
            f"{s:.3f} s with {b}" for b, s in steps.items()
        )
        if winner == size:
            if best is not None:
                best.engine.close()
            best = Chosen(
                engine=engine, microbatch_size=size, seconds=measured[size], reasons=(reason,)
            )
        else:
            engine.close()
            assert best is not None
            best = dataclasses.replace(best, reasons=(reason,))
    assert best is not None
    note = "pass it as microbatch_size to get the same bits where other sizes would win"
    return dataclasses.replace(best, reasons=(*best.reasons, note))


def smallest_memory(
    devices: Sequence[jax.Device], known: Mapping[jax.Device, Device]
) -> int | None:
    """Bytes of the smallest memory, as described or as this process's devices say."""
    sizes = []
    for device in devices:
        size = known[device].memory_bytes if device in known else None
        if size is None and device.process_index == jax.process_index():
            size = (device.memory_stats() or {}).get("bytes_limit")
        if size is not None:
            sizes.append(size)
    return min(sizes, default=None)


def count_limits(
    engine: Engine, batch: PyTree, reducer: Reducer, described: Mapping[jax.Device, Device]
) -> tuple[int | None, ...]:
    """Most microbatches each device's memory takes.

    Microbatches run one after another, so only their inputs add up: memory is that of the
    programs, plus one microbatch's arrays for each microbatch on the device.

    Raises:
        PlanError: If a device cannot hold a single microbatch, with the missing bytes.
    """
    capacities = [smallest_memory(replica.devices, described) for replica in reducer.replicas]
    # Other processes' cards answer only there: gigabytes as float32 are exact enough to limit.
    known = shared_seconds(reducer, [(capacities[r.index] or 0) / 2**20 for r in reducer.local])
    if not any(known):
        return (None,) * len(known)
    fixed = engine.memory_bytes()
    each = sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch))
    limits: list[int | None] = []
    for d, mebibytes in enumerate(known):
        if not mebibytes:
            limits.append(None)
            continue
        free = int(mebibytes * 2**20) - fixed
        if free < each:
            raise PlanError(
                f"device {d} has {num_bytes(fixed + free)}, a microbatch needs "
                f"{num_bytes(fixed + each)}: {num_bytes(each - free)} are missing; "
                "use a smaller microbatch_size or leave the device out"
            )
        limits.append(free // each)
    return tuple(limits)


def starting_counts(
    split: Split,
    num_microbatches: int,
    seconds: Sequence[float] | None,
    limits: Sequence[int | None],
) -> tuple[int, ...]:
    """Counts of the first step.

    Args:
        split: `measured`, `even`, or the counts themselves.
        num_microbatches: What they sum to.
        seconds: Of one microbatch on each device, when measured.
        limits: Most microbatches each device takes.

    Raises:
        ConfigError: If `split` is none of these or does not fit.
    """
    num_devices = len(limits)
    if split == "measured":
        assert seconds is not None
        return best_counts(num_microbatches, seconds, None, limits)
    if split == "even":
        counts = even_counts(num_microbatches, num_devices)
    elif isinstance(split, str):
        raise ConfigError(f"split={split!r}: use 'measured', 'even' or one count per device")
    else:
        counts = tuple(int(c) for c in split)
        if len(counts) != num_devices or sum(counts) != num_microbatches or min(counts) < 0:
            raise ConfigError(
                f"split={counts} does not hand out {num_microbatches} microbatches to "
                f"{num_devices} devices: give {num_devices} counts that sum to {num_microbatches}"
            )
    over = [d for d, limit in enumerate(limits) if limit is not None and counts[d] > limit]
    if over:
        raise PlanError(
            f"split={counts}: devices {over} have memory for {[limits[d] for d in over]} "
            "microbatches only; use split='measured'"
        )
    return counts


def share_of(num_microbatches: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Counts for another number of microbatches in about the same proportions."""
    # A device that runs c microbatches while the others run theirs takes 1/c of the time for one.
    return best_counts(num_microbatches, [1 / c if c else 1e9 for c in counts])


def make_plan(
    *,
    names: tuple[str, ...],
    batch_size: int,
    microbatch_size: int,
    counts: tuple[int, ...],
    reduction: str,
    seconds: Sequence[float] | None,
    fixed: Sequence[float] | None,
    reasons: tuple[str, ...],
) -> Plan:
    """A plan with its prediction, from measured times where there are any."""
    values: dict[str, Any] = {}
    if seconds is not None and all(seconds):
        offsets = tuple(fixed or (0.0,) * len(seconds))
        values = {
            "microbatch_seconds": tuple(seconds),
            "fixed_seconds": offsets,
            "step_seconds": max(finish_seconds(counts, seconds, offsets)),
            "bound_seconds": bound_seconds(sum(counts), seconds, offsets),
        }
    return Plan(
        device_names=names,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        counts=counts,
        reduction=reduction,
        reasons=reasons,
        **values,
    )
