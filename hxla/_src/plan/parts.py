"""The parts of a plan, each a value of its own."""

import math
from typing import Literal

import pydantic

from ..core.files import shown
from ..core.versions import hxla_version, jax_versions, processor
from ..jax.settings import bit_settings
from .layout import PlanValue

#: What a mesh axis does with a TaskGraph: carry its batch, cut its parameters, or follow rules.
Role = Literal["replicate", "split", "rules"]


ZERO_STAGES = (0, 1, 2, 3)


class Versions(PlanValue):
    """The versions and settings that made a plan, as far as they decide bits.

    Attributes:
        hxla: The version of hxla.
        jax: The version of jax.
        jaxlib: The version of jaxlib.
        processor: The instruction set of the CPU that computes, `x86_64 avx2`; empty where
            accelerators do.
        settings: The settings of JAX and XLA that may move bits and are not as usual, as
            `jax_enable_x64=True`, in the order of their names.
    """

    hxla: str
    jax: str
    jaxlib: str
    processor: str = ""
    settings: tuple[str, ...] = ()

    @pydantic.field_validator("settings")
    @classmethod
    def _are_settings(cls, settings: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [text for text in settings if not text.partition("=")[1]]:
            raise ValueError(f"{', '.join(map(shown, wrong))}: write name=value")
        return tuple(sorted(settings))


def versions_here(*, on_cpu: bool) -> Versions:
    """What decides bits besides a plan, as it is here.

    Args:
        on_cpu: Whether a CPU computes.
    """
    jax, jaxlib = jax_versions()
    return Versions(
        hxla=hxla_version(),
        jax=jax,
        jaxlib=jaxlib,
        processor=processor() if on_cpu else "",
        settings=bit_settings(),
    )


class PlannedDevice(PlanValue):
    """A device that takes part.

    Attributes:
        rank: The number of the device in the cluster.
        kind: The kind, as `Device.label` says: `cpu@0.5`.
    """

    rank: pydantic.NonNegativeInt
    kind: str

    @property
    def arithmetic(self) -> str:
        """The kind without what decides its speed only."""
        return self.kind.split("@")[0]


class Axis(PlanValue):
    """A mesh axis inside a copy of the model.

    Attributes:
        name: The name: `stage`, `tensor`, ...
        size: The number of devices along it.
        roles: For each TaskGraph whether the axis carries its batch (`replicate`), its parameters
            (`split`), or what rules say (`rules`); empty for `stage`.
        shares: The ratio in which its devices share what they cut, as far as units are whole: the
            sizes of parameters are in their layouts, those of what no parameter decides follow from
            it. Empty: all parts are alike.
    """

    name: str
    size: pydantic.PositiveInt
    roles: tuple[Role, ...] = ()
    shares: tuple[pydantic.PositiveInt, ...] = ()


class ReplicaWork(PlanValue):
    """A copy of the model and its work.

    Attributes:
        devices: The ranks of its devices, in the order of the axes, the last axis running fastest.
        num_microbatches: The microbatches that it runs in a step.
        executors: The microbatches of these that it runs at once, each executor with sums of its
            own. Between one and many no bit moves.
        start_seconds: The seconds after the first copies from which this copy begins a step, so
            that copies that share a network card send one after another. It moves no bit.
    """

    devices: tuple[pydantic.NonNegativeInt, ...] = pydantic.Field(min_length=1)
    num_microbatches: pydantic.NonNegativeInt
    executors: pydantic.PositiveInt = 1
    start_seconds: pydantic.NonNegativeFloat = 0.0


class ChainSegment(PlanValue):
    """Consecutive equations of the loss.

    Attributes:
        name: The first and last module in it.
        first: The number of its first equation; those that only recast parameters are not counted,
            and each iteration of a scan over layers counts as one, such as `layers[3]`.
    """

    name: str
    first: pydantic.NonNegativeInt


class PlannedSegment(ChainSegment):
    """Consecutive equations of the loss: what can be moved from one stage to another.

    Attributes:
        name: See `ChainSegment`.
        first: Likewise.
        part: The part of the pipeline that it belongs to: chunk c of stage s of S is part `c * S +
            s`.
        keep: What waits for its backward: `residuals`, the fewest bytes that the backward needs, or
            `inputs`, from which the forward runs again.
    """

    part: pydantic.NonNegativeInt
    keep: Literal["residuals", "inputs"] = "residuals"


class PlannedPipeline(PlanValue):
    """The stages of a pipeline, and in which order they work.

    Attributes:
        cut_by: The chain that is cut: `work`, the operations in the order of the trace, or
            `annotations`, the TaskGraphs' operations together and in their order.
        segments: The segments of the whole chain.
        schedule: The schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, or a table of ticks and
            stages as `hxla.schedule_from_table` reads it.
        num_chunks: The parts of the model on each stage.
    """

    cut_by: Literal["work", "annotations"] = "work"
    segments: tuple[PlannedSegment, ...] = pydantic.Field(min_length=1)
    schedule: str | tuple[tuple[str, ...], ...] = "1f1b"
    num_chunks: pydantic.PositiveInt = 1

    @property
    def points(self) -> tuple[int, ...]:
        """The numbers of the equations at which a new part begins."""
        pairs = zip(self.segments, self.segments[1:], strict=False)
        return tuple(b.first for a, b in pairs if a.part != b.part)

    @property
    def cut(self) -> tuple[int, ...]:
        """The number of segments of each part."""
        parts = [segment.part for segment in self.segments]
        return tuple(map(parts.count, range(max(parts) + 1)))

    @property
    def has_weight(self) -> bool:
        """Whether weight gradients are operations of their own."""
        if isinstance(self.schedule, str):
            return self.schedule == "zb-h1"
        return any(op.startswith("W") for tick in self.schedule for op in tick)

    @property
    def needs_even_counts(self) -> bool:
        """Whether the schedule is made for some numbers of microbatches only."""
        return self.schedule == "interleaved" or not isinstance(self.schedule, str)

    @property
    def recompute(self) -> bool:
        """Whether forwards run again from their inputs."""
        return any(segment.keep == "inputs" for segment in self.segments)


#: What runs of a chain of one segment: its forward and backward are one program.
ONE_PROGRAM = ("B0:input",)


class PlannedChain(PlanValue):
    """A microbatch as programs that run one after another: a forward and a backward per segment.

    Attributes:
        segments: The segments; the last has one program for its forward and backward.
        sequence: What runs for a microbatch: `F2` is the forward of segment 2, `F2+` keeps its
            input, `F2:cut` what its backward `B2:cut` reads, the fewest bytes; `B3:input` is the
            backward of the last segment. A forward that is there twice is recomputed. `O2` takes
            the input of segment 2 to host memory and `I2` back, `O2:cut` and `I2:cut` its
            residuals.
    """

    segments: tuple[ChainSegment, ...] = pydantic.Field(min_length=1)
    sequence: tuple[str, ...]

    @property
    def points(self) -> tuple[int, ...]:
        """The numbers of the equations at which a segment begins, but for the first."""
        return tuple(segment.first for segment in self.segments[1:])

    @property
    def is_one_program(self) -> bool:
        """Whether it is what a plan without a chain has."""
        return len(self.segments) == 1 and self.sequence == ONE_PROGRAM


class SparseRows(PlanValue):
    """A parameter of whose gradient only the rows that a step touched travel.

    Attributes:
        name: The path of the parameter.
        most_rows: The most rows that a global batch touches.
    """

    name: str
    most_rows: pydantic.PositiveInt


class SumsForm(PlanValue):
    """How the gradients of microbatches are added up.

    Attributes:
        kind: The arithmetic: `exact`, as integers, so that no spread of the work changes a bit, or
            `float`.
        limbs: The 32-bit integers of an exact sum's element: two, which keep every element to
            float32 precision; or one, of half the bytes, with which all elements of a tensor have
            the absolute error of its largest.
        dtype: The dtype in which `float` sums travel between copies of the model.
        bucket_mib: The size in MiB up to which small tensors are summed together.
        sparse: The parameters of whose gradients only some rows travel.
        over: Where copies of the model meet: `device`, in collectives of their devices; `host`, in
            host memory, added by collectives of the hosts, so that no two devices need a library in
            common.
    """

    kind: Literal["exact", "float"] = "exact"
    limbs: Literal[1, 2] = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    bucket_mib: pydantic.PositiveInt = 256
    sparse: tuple[SparseRows, ...] = ()
    over: Literal["device", "host"] = "device"

    @property
    def num_parts(self) -> int:
        """The arrays in which a tensor is summed: the limbs, or the floats themselves."""
        return self.limbs if self.kind == "exact" else 1

    @property
    def words(self) -> str:
        """The arithmetic in words."""
        return f"{self.kind} sums" + " of one limb" * (self.kind == "exact" and self.limbs == 1)

    @property
    def travel_factor(self) -> float:
        """Bytes of an all-reduce to those of float32: parts are scattered, floats gathered."""
        return (self.num_parts + 1) / 2


#: Where state waits: in the device's own memory, in that of its host, or on a disk.
Tier = Literal["device", "host", "disk"]
#: The same without a disk.
HostTier = Literal["device", "host"]


class Placement(PlanValue):
    """The kinds of memory, and what stays in it.

    Attributes:
        optimizer: Where the optimizer's state is between updates: in the memory of the `device`, in
            that of its `host`, or on its `disk`. From the two latter it comes to the device group
            by group, while the group before is updated and goes back.
        parameters: Where each copy's own share of the parameters is, with `zero` of 3, between the
            gathers of segments and updates: in the memory of the `device` or of its `host`.
        stash: Where that waits which `chain.sequence` offloads between forward and backward: in the
            memory of the `host`; `device`: it offloads nothing.
        zero: The stage of ZeRO: 0, every copy of the model has the whole of the optimizer's state
            and updates everything; 1, each copy has a share of the state, updates that part of the
            parameters, and gathers the rest (one copy alone updates all by this arithmetic, as its
            state may then be anywhere); 2, sums of gradients are shared out as soon as a
            segment of `chain` has all of its own, or after the last tick of a pipeline, some at a
            time; 3, parameters are shared out too, and gathered for each segment, or into the
            slots of the stages.
        shares: With `zero`, the granules that each copy of a group owns of every parameter and its
            state; empty: one each.
        shard_groups: With `zero`, the number of groups of copies that follow each other: those of a
            group share out the state among themselves, and every group has all of it.
        whole: With `zero`, the parameters that the optimizer treats as a whole, each of which one
            copy of a group owns.
        waves: With `zero` of 2 or 3, in how many waves each copy runs its microbatches of a step,
            one through all segments before the next: what waits for backwards is of one wave,
            and what is gathered and summed travels once in each.
        sums: Whether what a device adds up is `kept` between steps, which saves the time to make it
            anew, or `released` before the update, which saves its memory there, in evaluations and
            for checkpoints. On a CPU, steps then wait until a checkpoint is written.
    """

    optimizer: Literal["device", "host", "disk"] = "device"
    parameters: Literal["device", "host"] = "device"
    stash: Literal["device", "host"] = "device"
    zero: Literal[0, 1, 2, 3] = 0
    shares: tuple[pydantic.PositiveInt, ...] = ()
    shard_groups: pydantic.PositiveInt = 1
    whole: tuple[str, ...] = ()
    waves: pydantic.PositiveInt = 1
    sums: Literal["kept", "released"] = "kept"

    @property
    def tier_of_whole(self) -> tuple[str, ...]:
        """Where the state waits, if some parameters are updated as a whole and it is elsewhere."""
        return (self.optimizer,) if self.whole and self.optimizer != "device" else ()


class HeldBytes(PlanValue):
    """The bytes on a device at the peak of a step, by their owner.

    Attributes:
        parameters: The parameters, whole or a share, and those that are gathered for a segment.
        sums: What gradients are summed in.
        optimizer: The optimizer's state, as far as it is on the device.
        gradients: The gradients of a microbatch that wait for each other.
        activations: The inputs, and what waits between forward and backward, with temporaries.
    """

    parameters: pydantic.NonNegativeFloat = 0.0
    sums: pydantic.NonNegativeFloat = 0.0
    optimizer: pydantic.NonNegativeFloat = 0.0
    gradients: pydantic.NonNegativeFloat = 0.0
    activations: pydantic.NonNegativeFloat = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return math.fsum(self.by_owner.values())

    @property
    def by_owner(self) -> dict[str, float]:
        """The bytes of each owner, by its name."""
        return {name: float(getattr(self, name)) for name in type(self).model_fields}


class DevicePrediction(PlanValue):
    """What a step takes of one device.

    Attributes:
        rank: The number of the device in the cluster.
        memory_bytes: The peak of its memory in bytes (0: not known).
        capacity_bytes: The bytes that it has (0: not described).
        held: The bytes by owner, as estimated before compilation; None if that was not done.
        compute_seconds: The seconds of forwards and backwards; with the next three the whole step.
        wait_seconds: The seconds of bubbles, of transfers, and of waiting for other devices.
        reduction_seconds: The seconds of the gradients' reduction, as far as nothing hides it.
        update_seconds: The seconds of the optimizer's update.
    """

    rank: pydantic.NonNegativeInt
    memory_bytes: pydantic.NonNegativeFloat = 0.0
    capacity_bytes: pydantic.NonNegativeFloat = 0.0
    held: HeldBytes | None = None
    compute_seconds: pydantic.NonNegativeFloat = 0.0
    wait_seconds: pydantic.NonNegativeFloat = 0.0
    reduction_seconds: pydantic.NonNegativeFloat = 0.0
    update_seconds: pydantic.NonNegativeFloat = 0.0


class Prediction(PlanValue):
    """What a step should take, from measured or estimated times.

    Attributes:
        step_seconds: The seconds of a step, by replay of the schedule (0: nothing was measured).
        bound_seconds: The bound: no plan of the kind that was searched is faster (0: not known).
        closed_form_seconds: The seconds of the plan by the formula that the bound is of (0: those
            of the step itself).
        microbatch_seconds: The seconds of one microbatch on each copy of the model; empty if not
            measured.
        fixed_seconds: The seconds of each copy's step outside its microbatches (the update); empty
            likewise.
        stage_fractions: The share of the whole work on each stage, by the times of its own device.
        sent_bytes: The bytes that each device sends inside its copy for one microbatch, forward and
            backward; sums between copies come on top.
        devices: What the step takes of each device that takes part, or nothing.
    """

    step_seconds: pydantic.NonNegativeFloat = 0.0
    bound_seconds: pydantic.NonNegativeFloat = 0.0
    closed_form_seconds: pydantic.NonNegativeFloat = 0.0
    microbatch_seconds: tuple[pydantic.NonNegativeFloat, ...] = ()
    fixed_seconds: tuple[pydantic.NonNegativeFloat, ...] = ()
    stage_fractions: tuple[pydantic.NonNegativeFloat, ...] = ()
    sent_bytes: pydantic.NonNegativeFloat = 0.0
    devices: tuple[DevicePrediction, ...] = ()

    @property
    def gap(self) -> float:
        """The certified distance from the optimum: the step over its bound, minus one."""
        if not self.bound_seconds:
            return math.nan
        return (self.closed_form_seconds or self.step_seconds) / self.bound_seconds - 1


class RunnerUp(PlanValue):
    """Another plan that was looked at.

    Attributes:
        description: The plan in words.
        step_seconds: The predicted seconds of a step (0: not known).
        held: The bytes by owner on its fullest device; None if only its time was looked at.
        lack_bytes: The bytes that this device lacks (0: it fits).
    """

    description: str
    step_seconds: pydantic.NonNegativeFloat = 0.0
    held: HeldBytes | None = None
    lack_bytes: pydantic.NonNegativeFloat = 0.0
