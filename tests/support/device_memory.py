"""What a step needs of each device's memory, whatever the runtime keeps besides.

A reference for runs of other runtimes: plans count state, stash and workspace (`_staging.py`).
"""

import dataclasses
from collections.abc import Sequence

from hxla import LayerSize, PlanError, Schedule
from support.inside.schedule import BACKWARD, FORWARD, WEIGHT


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRule:
    """What a runtime keeps besides the parameters and the stash.

    The factors are bytes per byte of parameters.

    Attributes:
        gradient_factor: The sum of the gradients.
        optimizer_factor: State of the optimizer: Adam keeps 2 moments, SGD with momentum 1
            (Kingma and Ba, "Adam", ICLR 2015).
        buffer_factor: Flat buffers and further copies, such as the one that gradients are reduced
            in.
        workspace_layers: Temporaries of a layer's forward and backward, in units of the largest
            stash of one layer and microbatch. At least 1: a layer's backward makes a gradient of
            everything that its forward kept.
        context_bytes: What the driver shows and the allocator does not hold: its context, the
            loaded kernels, the communicators.
        allocator_share: What the allocator holds beyond what it has handed out, rounding and
            fragments, as a share of the latter.
        margin: Share by which memory may exceed the prediction.
    """

    gradient_factor: float = 1.0
    optimizer_factor: float = 2.0
    buffer_factor: float = 0.0
    workspace_layers: float = 1.0
    context_bytes: float = 0.0
    allocator_share: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        wrong = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if not 0 <= value < float("inf")
        }
        if wrong:
            raise PlanError(f"a memory rule needs finite figures of at least 0, not {wrong}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Predicted peak of one device; the fields in bytes add up to the total.

    Attributes:
        parameter_bytes: The stage's own parameters.
        gradient_bytes: Their gradients.
        optimizer_bytes: Of the optimizer's state.
        buffer_bytes: Flat buffers and copies.
        stash_bytes: Activations of the microbatches in flight.
        workspace_bytes: Temporaries.
        allocator_bytes: Rounding and fragments of all the above.
        context_bytes: Of the driver, kernels and communicators.
        margin: Share by which memory may exceed the total.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    buffer_bytes: float
    stash_bytes: float
    workspace_bytes: float
    allocator_bytes: float
    context_bytes: float
    margin: float

    @property
    def total_bytes(self) -> float:
        """The predicted peak."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.buffer_bytes
            + self.stash_bytes
            + self.workspace_bytes
            + self.allocator_bytes
            + self.context_bytes
        )

    def missing_from(self, capacity_bytes: float) -> float:
        """Bytes that a device of some capacity lacks to hold this for sure; 0 if none."""
        return max(0.0, self.total_bytes * (1 + self.margin) - capacity_bytes)

    def fits(self, capacity_bytes: float) -> bool:
        """Whether it fits for sure: the margin counts as used."""
        return self.missing_from(capacity_bytes) == 0.0


def stash_bytes(schedule: Schedule, stash_bytes_P: Sequence[float]) -> tuple[float, ...]:
    """Per stage, the most that the activations in flight take at once.

    Args:
        schedule: Which forward is kept until when.
        stash_bytes_P: Of one microbatch, per part of the chain (chunk times stages plus stage).

    References:
        Under 1F1B stage s of S keeps min(M, S - s) microbatches: Narayanan et al., "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, 2.2.1.
    """
    last = WEIGHT if schedule.has_weight else BACKWARD
    peaks = []
    for stage, row in enumerate(schedule.rows):
        kept = peak = 0.0
        for op in row:
            own = stash_bytes_P[op.chunk * schedule.num_stages + stage]
            if op.kind == FORWARD:
                kept += own
            elif op.kind == last:
                kept -= own
            peak = max(peak, kept)
        peaks.append(peak)
    return tuple(peaks)


def pipeline_memory(
    parts: Sequence[Sequence[LayerSize]],
    schedule: Schedule,
    rule: MemoryRule,
) -> tuple[DeviceMemory, ...]:
    """Peak memory of one device of each stage.

    Args:
        parts: Sizes of the layers of each part of the chain (chunk times stages plus stage).
        schedule: How many microbatches are in flight where.
        rule: What the runtime keeps besides.

    Returns:
        One prediction per stage.

    References:
        Rajbhandari et al., "ZeRO", SC 2020, section 3: parameters, gradients, optimizer state,
        activations, temporary buffers, fragments.
    """
    num_stages = schedule.num_stages
    if len(parts) != num_stages * schedule.num_chunks:
        raise PlanError(
            f"{len(parts)} parts for {num_stages} stages of {schedule.num_chunks} chunks: give "
            f"{num_stages * schedule.num_chunks}"
        )
    own = [
        sum(size.parameter_bytes for part in parts[stage::num_stages] for size in part)
        for stage in range(num_stages)
    ]
    stash = stash_bytes(schedule, [sum(size.stash_bytes for size in part) for part in parts])
    predictions = []
    for stage in range(num_stages):
        held = own[stage]
        largest = max(
            (size.stash_bytes for part in parts[stage::num_stages] for size in part), default=0.0
        )
        allocated = {
            "parameter_bytes": held,
            "gradient_bytes": held * rule.gradient_factor,
            "optimizer_bytes": held * rule.optimizer_factor,
            "buffer_bytes": held * rule.buffer_factor,
            "stash_bytes": stash[stage],
            "workspace_bytes": largest * rule.workspace_layers,
        }
        predictions.append(
            DeviceMemory(
                **allocated,
                allocator_bytes=rule.allocator_share * sum(allocated.values()),
                context_bytes=rule.context_bytes,
                margin=rule.margin,
            )
        )
    return tuple(predictions)
