"""The parts of a plan, each a value of its own."""

import math
from typing import Literal

import pydantic

from ._layout import PlanValue

Role = Literal["replicate", "split", "rules"]
Kept = Literal["residuals", "inputs"]
Count = pydantic.NonNegativeInt
Seconds = pydantic.NonNegativeFloat


class Versions(PlanValue):
    """What made a plan, as far as it decides bits.

    Attributes:
        hxla: Version of hxla.
        jax: Version of jax.
        jaxlib: Version of jaxlib.
        processor: Instruction set of the CPU that computes, `x86-64 avx2`; empty where
            accelerators do.
    """

    hxla: str
    jax: str
    jaxlib: str
    processor: str = ""


class PlannedDevice(PlanValue):
    """A device that takes part.

    Attributes:
        rank: Its number in the cluster.
        kind: As the mesh file and profiles call it, `cpu@0.5`.
    """

    rank: Count
    kind: str

    @property
    def arithmetic(self) -> str:
        """The kind without what decides its speed only."""
        return self.kind.split("@")[0]


class Axis(PlanValue):
    """A mesh axis inside a copy of the model.

    Attributes:
        name: `stage`, `tensor`, ...
        size: Devices along it.
        roles: For each TaskGraph whether the axis carries its batch (`replicate`), its parameters
            (`split`), or what rules say (`rules`); empty for `stage`.
    """

    name: str
    size: pydantic.PositiveInt
    roles: tuple[Role, ...] = ()


class ReplicaWork(PlanValue):
    """A copy of the model and its work.

    Attributes:
        devices: Their ranks, in the order of the axes, the last axis running fastest.
        num_microbatches: That it runs in a step.
    """

    devices: tuple[Count, ...] = pydantic.Field(min_length=1)
    num_microbatches: Count


class PlannedSegment(PlanValue):
    """Consecutive equations of the loss: what can be moved from one stage to another.

    Attributes:
        name: First and last module in it.
        first: Number of its first equation; those that only recast parameters are not counted.
        part: Part of the pipeline that it belongs to: chunk c of stage s of S is part `c * S + s`.
        keep: What waits for its backward: `residuals`, the fewest bytes that the backward needs,
            or `inputs`, from which the forward runs again.
    """

    name: str
    first: Count
    part: Count
    keep: Kept = "residuals"


class PlannedPipeline(PlanValue):
    """Stages, and in which order they work.

    Attributes:
        cut_by: `work`, or `annotations`: the TaskGraphs' operations together and in their order.
        segments: The whole chain.
        schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, or a table of ticks and stages as
            `hxla.schedule_from_table` reads it.
        num_chunks: Parts of the model on each stage.
    """

    cut_by: Literal["work", "annotations"] = "work"
    segments: tuple[PlannedSegment, ...] = pydantic.Field(min_length=1)
    schedule: str | tuple[tuple[str, ...], ...] = "1f1b"
    num_chunks: pydantic.PositiveInt = 1

    @property
    def points(self) -> tuple[int, ...]:
        """Equations at which a new part begins."""
        pairs = zip(self.segments, self.segments[1:], strict=False)
        return tuple(b.first for a, b in pairs if a.part != b.part)

    @property
    def has_weight(self) -> bool:
        """Whether weight gradients are operations of their own."""
        if isinstance(self.schedule, str):
            return self.schedule == "zb-h1"
        return any(op.startswith("W") for tick in self.schedule for op in tick)

    @property
    def recompute(self) -> bool:
        """Whether forwards run again from their inputs."""
        return any(segment.keep == "inputs" for segment in self.segments)


class SparseRows(PlanValue):
    """A parameter of whose gradient only the rows that a step touched travel.

    Attributes:
        name: Path of the parameter.
        most_rows: That a global batch touches.
    """

    name: str
    most_rows: pydantic.PositiveInt


class SumsForm(PlanValue):
    """How the gradients of microbatches are added up.

    Attributes:
        kind: `exact`: as integers, so that no spread of the work changes a bit; or `float`.
        limbs: 32-bit integers of an exact sum's element.
        dtype: In which `float` sums travel between copies of the model.
        bucket_mib: Size up to which small tensors are summed together.
        sparse: Parameters of whose gradients only some rows travel.
    """

    kind: Literal["exact", "float"] = "exact"
    limbs: Literal[2] = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    bucket_mib: pydantic.PositiveInt = 256
    sparse: tuple[SparseRows, ...] = ()

    @property
    def num_parts(self) -> int:
        """Arrays of its size in which a tensor is summed: the limbs, or the floats themselves."""
        return self.limbs if self.kind == "exact" else 1


class Precision(PlanValue):
    """Dtypes of the computation.

    Attributes:
        parameters: Of the parameters: as the model has them.
        compute: Of its operations: as the model has them.
    """

    parameters: Literal["model"] = "model"
    compute: Literal["model"] = "model"


class Placement(PlanValue):
    """Kinds of memory, and what stays in it.

    Attributes:
        optimizer: Holds the optimizer's state.
        stash: Holds what waits between forward and backward.
        sums: Whether what a device adds up is `kept` between steps, which saves the time to make
            it anew, or `released` before the update, which saves its memory there, in evaluations
            and for checkpoints. On a CPU, steps then wait until a checkpoint is written.
    """

    optimizer: Literal["device"] = "device"
    stash: Literal["device"] = "device"
    sums: Literal["kept", "released"] = "kept"


class DevicePrediction(PlanValue):
    """What a step takes of one device.

    Attributes:
        rank: Its number in the cluster.
        memory_bytes: Peak (0: not known).
        capacity_bytes: Of its memory (0: not described).
        compute_seconds: Forwards and backwards; with the next three the whole step.
        wait_seconds: Bubbles, transfers and other devices.
        reduction_seconds: Of gradients, as far as exposed.
        update_seconds: Of the optimizer.
    """

    rank: Count
    memory_bytes: pydantic.NonNegativeFloat = 0.0
    capacity_bytes: pydantic.NonNegativeFloat = 0.0
    compute_seconds: Seconds = 0.0
    wait_seconds: Seconds = 0.0
    reduction_seconds: Seconds = 0.0
    update_seconds: Seconds = 0.0


class Prediction(PlanValue):
    """What a step should take, from measured or estimated times.

    Attributes:
        step_seconds: By replay of the schedule (0: nothing was measured).
        bound_seconds: No plan of the kind that was searched is faster (0: not known).
        closed_form_seconds: Of the plan by the formula that the bound is of (0: the step itself).
        microbatch_seconds: Of one microbatch on each copy of the model; empty: not measured.
        fixed_seconds: Of each copy's step outside its microbatches (the update); empty likewise.
        stage_fractions: Of the whole work on each stage, by the times of its own device.
        sent_bytes: That each device sends inside its copy for one microbatch, forward and backward;
            sums between copies come on top.
        devices: One for each device that takes part, or none.
    """

    step_seconds: Seconds = 0.0
    bound_seconds: Seconds = 0.0
    closed_form_seconds: Seconds = 0.0
    microbatch_seconds: tuple[Seconds, ...] = ()
    fixed_seconds: tuple[Seconds, ...] = ()
    stage_fractions: tuple[Seconds, ...] = ()
    sent_bytes: pydantic.NonNegativeFloat = 0.0
    devices: tuple[DevicePrediction, ...] = ()

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: the step over its bound, minus one."""
        if not self.bound_seconds:
            return math.nan
        return (self.closed_form_seconds or self.step_seconds) / self.bound_seconds - 1


class RunnerUp(PlanValue):
    """Another plan.

    Attributes:
        description: In words.
        step_seconds: Predicted.
    """

    description: str
    step_seconds: Seconds
