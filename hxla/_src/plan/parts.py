"""The parts of a plan, each a value of its own."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import pydantic

from ..core.files import shown
from ..core.types import DATA_AXIS, OUTER_AXES, STAGE_AXIS, TOKEN_AXIS
from ..core.version import __version__
from ..jax.settings import bit_settings, jax_versions, processor
from ..schedule.schedules import needs_even_counts
from .layout import Layout, PlanValue

#: What a mesh axis shards of a TaskGraph: the batch, the parameters, what rules say, or tokens.
Role = Literal["replicate", "split", "rules", "tokens"]


ZERO_STAGES = (0, 1, 2, 3)


class Versions(PlanValue):
    """The versions and settings that decide bits, where a plan was made.

    Attributes:
        hxla: The version of hxla.
        jax: The version of jax.
        jaxlib: The version of jaxlib.
        processor: The instruction set of the CPU that computes, `x86_64 avx2`; empty where
            accelerators compute.
        settings: The settings of JAX and XLA that may move bits and differ from their defaults, as
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
    """The versions and settings of this process."""
    jax, jaxlib = jax_versions()
    return Versions(
        hxla=__version__,
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
        """The kind without its speed: `cpu` of `cpu@0.5`."""
        return self.kind.split("@")[0]


class Axis(PlanValue):
    """A mesh axis inside a replica.

    Attributes:
        name: The name: `stage`, `tensor`, ...
        size: The number of devices along it.
        roles: For each TaskGraph whether the axis shards its batch (`replicate`), its parameters
            (`split`), what rules say (`rules`), or its tokens (`tokens`); empty for `stage`.
        shares: The ratio of the devices' shards, rounded to whole units. The sizes of parameters
            are in their layouts; the sizes of other arrays follow from this ratio. Empty: all
            shards are alike.
        granules: The granules of each dimension that the axis cuts. Bits depend on this number, and
            not on the size of the axis. None: bits depend on the size.
    """

    name: str
    size: pydantic.PositiveInt
    roles: tuple[Role, ...] = ()
    shares: tuple[pydantic.PositiveInt, ...] = ()
    granules: Annotated[int, pydantic.Field(ge=2)] | None = None

    @property
    def ratio(self) -> tuple[int, ...]:
        """The ratio of the devices' shards, that of even ones too."""
        return self.shares or (1,) * self.size

    @property
    def deciding(self) -> dict[str, Any]:
        """The fields that decide bits, but for uneven shares."""
        return self.model_dump(exclude={"shares", "granules" if self.granules is None else "size"})


def are_cut_free(axes: Sequence[Axis]) -> bool:
    """Whether bits depend on no cut: `numerics.cut` of `any`."""
    return any(axis.granules is not None for axis in axes)


def size_faults(key: str, layout: Layout, dim: int, axes: Sequence[Axis]) -> Iterator[str]:
    """Faults of a dimension with shards of unlike sizes.

    Args:
        key: The key of the parameter in the plan.
        axes: The axes that may cut it.
    """
    key, parts, names = f"{key}.sizes.{dim}", layout.sizes[dim], layout.spec[dim]
    if len(names) != 1:
        cut = f"{len(names)} axes cut" if names else "no axis cuts"
        yield f"{key}: {cut} this dimension, shards of unlike sizes need exactly one axis"
        return
    axis = next((axis for axis in axes if axis.name == names[0]), None)
    if axis is not None and len(parts) != axis.size:
        yield f"{key}: {len(parts)} sizes for the {axis.size} devices of {axis.name!r}"
    elif axis is not None and not axis.shares:
        yield f"{key}: sizes are unlike only over an axis with `shares`, {axis.name!r} has none"
    if sum(parts) != layout.shape[dim]:
        yield f"{key}: {' + '.join(map(str, parts))} is {sum(parts)}, not {layout.shape[dim]}"


def granule_faults(
    key: str, axes: Sequence[Axis], layouts: Sequence[Layout], key_of_layouts: str
) -> Iterator[str]:
    """Axes and shapes for which no granules are lowered.

    Args:
        key: The key of the axes in the plan.
        axes: Those inside a replica, or inside one of its stages.
        layouts: Of the parameters that they may cut.
        key_of_layouts: The key of the layouts in the plan.
    """
    for axis, num in ((axis, axis.granules) for axis in axes if axis.granules is not None):
        where = f"{key}.{axis.name}.granules"
        if num & (num - 1) or num % axis.size:
            yield (
                f"{where}: {num} granules for {axis.size} devices: use a power of two that the "
                "size of the axis divides"
            )
        if axis.shares:
            yield f"{where}: granules are of one size, leave the shares out"
        others = [a.name for a in axes if a is not axis and a.name != STAGE_AXIS]
        if others or axis.name in (*OUTER_AXES, DATA_AXIS, TOKEN_AXIS):
            yield (
                f"{where}: bits are free of the cut only over a tensor axis without "
                f"{' and '.join(others) or axis.name}: leave these axes or the granules out"
            )
        for p in layouts:
            for d, names in enumerate(p.spec[: len(p.shape)]):
                if axis.name in names and p.shape[d] % num:
                    yield (
                        f"{key_of_layouts}.{p.name}.spec: dimension {d} of size {p.shape[d]} does "
                        f"not divide into {num} granules, use another size or number"
                    )


class ReplicaWork(PlanValue):
    """A replica and its work.

    Attributes:
        devices: The ranks of its devices, in the order of the axes, the last axis running fastest.
        num_microbatches: The microbatches that it runs in a step.
        executors: The number of microbatches that run at once, each executor with separate sums.
            It moves no bit.
        start_seconds: The delay in seconds of this replica's step behind the first ones, so that
            replicas behind one network card send one after another. It moves no bit.
    """

    devices: tuple[pydantic.NonNegativeInt, ...] = pydantic.Field(min_length=1)
    num_microbatches: pydantic.NonNegativeInt
    executors: pydantic.PositiveInt = 1
    start_seconds: pydantic.NonNegativeFloat = 0.0


class ChainSegment(PlanValue):
    """Consecutive equations of the loss.

    Attributes:
        name: The first and last module in it.
        first: The number of its first equation. Casts of parameters are not counted, and each
            iteration of a scan over layers, such as `layers[3]`, counts as one.
    """

    name: str
    first: pydantic.NonNegativeInt


class PlannedSegment(ChainSegment):
    """Consecutive equations of the loss that move from stage to stage together.

    Attributes:
        name: The first and last module in it.
        first: The number of its first equation, as in `ChainSegment`.
        part: The part of the pipeline that it belongs to: chunk c of stage s of S is part `c * S +
            s`.
        keep: The stash for its backward: `residuals`, the fewest bytes that the backward needs, or
            `inputs`, from which the forward runs again.
    """

    part: pydantic.NonNegativeInt
    keep: Literal["residuals", "inputs"] = "residuals"


class PlannedStage(PlanValue):
    """A stage that may be unlike the others in devices and mesh axes.

    Attributes:
        axes: The mesh axes inside the stage, the last running fastest; none for one device.
        parameters: The layouts inside the stage of the parameters that it reads, while a step runs.
        num_parts: The parts of the pipeline that it runs, one after another, each as programs of
            its own.
    """

    axes: tuple[Axis, ...] = ()
    parameters: tuple[Layout, ...]
    num_parts: pydantic.PositiveInt = 1

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the mesh axes inside the stage, by name."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def shares(self) -> tuple[int, ...]:
        """The ratio of its devices' shards, where these are unlike; else none."""
        return next((axis.shares for axis in self.axes if axis.shares), ())

    @property
    def num_devices(self) -> int:
        """The number of devices of the stage."""
        return math.prod(axis.size for axis in self.axes)


class PlannedReplica(PlanValue):
    """A replica beside replicas of another form.

    Attributes:
        num_microbatches: Its microbatches of each step.
        stages: Its stages in order; a single one runs the whole model.
    """

    num_microbatches: pydantic.NonNegativeInt
    stages: tuple[PlannedStage, ...] = pydantic.Field(min_length=1)

    @property
    def num_devices(self) -> int:
        """The number of devices of the replica."""
        return sum(stage.num_devices for stage in self.stages)


def deciding_stage(stage: PlannedStage) -> list[Any]:
    """The fields of an unlike stage that decide bits."""
    layouts = [
        [layout.name, layout.spec, *[layout.sizes] * bool(layout.sizes)]
        for layout in stage.parameters
    ]
    return [[axis.model_dump() for axis in stage.axes], layouts]


def decided_by_stages(replicas: Sequence[PlannedReplica]) -> list[Any]:
    """What decides the bits of replicas of unlike form.

    The programs of a stage of one device are those of its parts, and so are the bits of a stage in
    granules. Where all stages are so, bits depend on the parts only, and not on which replica runs
    a microbatch.
    """

    def parts_of(stage: PlannedStage) -> list[Any]:
        if not stage.axes or are_cut_free(stage.axes):
            return [()] * stage.num_parts
        return [[stage.num_parts, *deciding_stage(stage)]]

    forms = [[*itertools.chain.from_iterable(map(parts_of, r.stages))] for r in replicas]
    if all(form == forms[0] for form in forms):
        return [forms[0]]
    return [[r.num_microbatches, form] for r, form in zip(replicas, forms, strict=True)]


def are_free(replicas: Sequence[PlannedReplica]) -> bool:
    """Whether it decides no bit which replica of unlike form runs a microbatch."""
    return len(decided_by_stages(replicas)) == 1


class PlannedPipeline(PlanValue):
    """The stages of a pipeline and their schedule.

    Attributes:
        cut_by: The chain that is cut into stages: `work`, the operations in the order of the trace,
            or `annotations`, the operations TaskGraph by TaskGraph.
        segments: The segments of the whole chain.
        schedule: The schedule: `gpipe`, `1f1b`, `interleaved`, `zb-h1`, or a table of ticks and
            stages as `hxla.schedule_from_table` reads it.
        num_chunks: The parts of the model on each stage.
        stages: The stages in order, where they are unlike. The devices of each follow those of
            the stage before in `ReplicaWork.devices`. Empty: all stages have the axes of the plan.
        replicas: The replicas, where they are unlike in depth or devices. The one entry of
            `Plan.replicas` has the devices of all, one replica after another, and the state is
            sharded over them. Empty: all replicas are alike.
    """

    cut_by: Literal["work", "annotations"] = "work"
    segments: tuple[PlannedSegment, ...] = pydantic.Field(min_length=1)
    schedule: str | tuple[tuple[str, ...], ...] = "1f1b"
    num_chunks: pydantic.PositiveInt = 1
    stages: tuple[PlannedStage, ...] = ()
    replicas: tuple[PlannedReplica, ...] = ()

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
        """Whether weight gradients are separate operations."""
        if isinstance(self.schedule, str):
            return self.schedule == "zb-h1"
        return any(op.startswith("W") for tick in self.schedule for op in tick)

    @property
    def needs_even_counts(self) -> bool:
        """Whether the schedule only exists for some microbatch counts."""
        return needs_even_counts(self.schedule)

    @property
    def recompute(self) -> bool:
        """Whether forwards are recomputed from their inputs."""
        return any(segment.keep == "inputs" for segment in self.segments)

    def keeping(self, keep: Literal["residuals", "inputs"]) -> "PlannedPipeline":
        """The pipeline with another choice of what stages keep for their backwards.

        Args:
            keep: The residuals of each part, or only its inputs.
        """
        segments = tuple(x.model_copy(update={"keep": keep}) for x in self.segments)
        return self.model_copy(update={"segments": segments})


#: What runs of a chain of one segment: its forward and backward are one program.
ONE_PROGRAM = ("B0:input",)


class PlannedChain(PlanValue):
    """A microbatch as programs that run one after another: a forward and a backward per segment.

    Attributes:
        segments: The segments; the last has one program for its forward and backward.
        sequence: The operations of a microbatch. `F2` is the forward of segment 2; `F2+` keeps its
            input, and `F2:cut` the fewest residuals, which its backward `B2:cut` reads. `B3:input`
            is the backward of the last segment. A forward that is listed twice is recomputed. `O2`
            offloads the input of segment 2 to host memory and `I2` fetches it; `O2:cut` and
            `I2:cut` do the same with its residuals.
    """

    segments: tuple[ChainSegment, ...] = pydantic.Field(min_length=1)
    sequence: tuple[str, ...]

    @property
    def points(self) -> tuple[int, ...]:
        """The numbers of the equations at which a segment begins, but for the first."""
        return tuple(segment.first for segment in self.segments[1:])

    @property
    def recomputes(self) -> bool:
        """Whether any forward is recomputed."""
        return sum(text.startswith("F") for text in self.sequence) >= len(self.segments)

    @property
    def is_one_program(self) -> bool:
        """Whether it is what a plan without a chain has."""
        return len(self.segments) == 1 and self.sequence == ONE_PROGRAM


class SparseRows(PlanValue):
    """A parameter whose gradient is reduced as sparse rows: only those that a step touched.

    Attributes:
        name: The path of the parameter.
        most_rows: The most rows that a global batch touches.
    """

    name: str
    most_rows: pydantic.PositiveInt


class SumsForm(PlanValue):
    """The accumulation and all-reduce of gradients.

    Attributes:
        kind: The arithmetic: `exact`, as integers, so that no spread of the work changes a bit, or
            `float`.
        limbs: The 32-bit integers of an exact sum's element. Two keep every element to float32
            precision. One takes half the bytes, and all elements of a tensor have the absolute
            error of its largest.
        dtype: The dtype of the all-reduce of `float` sums.
        bucket_mib: The size in MiB up to which small tensors are summed together.
        sparse: The parameters whose gradients are reduced as sparse rows.
        over: Where replicas are summed: `device`, by collectives of their devices; `host`, in host
            memory by collectives of the hosts, so that unlike devices need no common library.
    """

    kind: Literal["exact", "float"] = "exact"
    limbs: Literal[1, 2] = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    bucket_mib: pydantic.PositiveInt = 256
    sparse: tuple[SparseRows, ...] = ()
    over: Literal["device", "host"] = "device"

    @property
    def num_parts(self) -> int:
        """The arrays per summed tensor: its limbs, or one of floats."""
        return self.limbs if self.kind == "exact" else 1

    @property
    def words(self) -> str:
        """The arithmetic in words."""
        return f"{self.kind} sums" + " of one limb" * (self.kind == "exact" and self.limbs == 1)

    @property
    def travel_factor(self) -> float:
        """The bytes of an all-reduce relative to float32: parts are scattered, floats gathered."""
        return (self.num_parts + 1) / 2


#: Where state is between its uses: in the memory of the device or of its host, or on a disk.
Tier = Literal["device", "host", "disk"]
#: The tiers in memory.
HostTier = Literal["device", "host"]


class Placement(PlanValue):
    """Where state and stash are, and how state is sharded over replicas.

    Attributes:
        optimizer: Where the optimizer's state is between updates: in the memory of the `device` or
            of its `host`, or on its `disk`. From host or disk it is streamed to the device in
            groups, each while the group before is updated and written back.
        parameters: Where each replica's shard of the parameters is, with `zero` of 3, between the
            gathers of segments and updates: in the memory of the `device` or of its `host`.
        stash: Where residuals that `chain.sequence` offloads are between forward and backward: in
            the memory of the `host`; `device`: nothing is offloaded.
        zero: The stage of ZeRO. 0: every replica has the whole optimizer state and updates
            everything. 1: each replica has a shard of the state, updates this shard of the
            parameters, and gathers the others; a single replica uses the same arithmetic. 2: sums
            of gradients are reduce-scattered when a segment of `chain` is complete, or piece by
            piece after the last tick of a pipeline. 3: parameters are sharded too, and gathered for
            each segment, or into the slots of the stages.
        shares: With `zero`, the granules of every parameter and its state on each replica of a
            group; empty: one each.
        shard_groups: With `zero`, the number of groups of consecutive replicas. The state is
            sharded inside each group, and every group has all of it.
        whole: With `zero`, the parameters that the optimizer treats as a whole; one replica of a
            group owns each.
        waves: With `zero` of 2 or 3, the number of waves of a replica's microbatches in a step. One
            wave runs through all segments before the next. The stash is that of one wave; gathers
            and reductions run once in each.
        sums: Whether the buffers of sums are `kept` between steps, which saves time, or `released`
            before the update, which saves memory in updates, evaluations and checkpoints. On a CPU,
            steps then wait until a checkpoint is written.
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
        """The tier of offloaded state, if some parameters are updated as a whole."""
        return (self.optimizer,) if self.whole and self.optimizer != "device" else ()


class Islands(PlanValue):
    """Groups of replicas that train apart and meet every few steps.

    Between two meetings an island sums gradients over its own replicas only, and its parameters
    and optimizer state are its own. At a meeting, with parameters x_i of island i after its m_i
    microbatches of a step, and x those after the last meeting::

        g = sum(m_i * (x - x_i)) / sum(m_i)        v = momentum * v + g
        x = x - learning_rate * (g + momentum * v)

    The optimizer's state becomes its average with the same weights. Islands are added in their
    order. With a learning rate of 1 and no momentum, x is the average of the parameters.

    Attributes:
        every: The steps between two meetings.
        replicas: The number of consecutive replicas of each island.
        learning_rate: The learning rate of the outer step.
        momentum: Its Nesterov momentum.

    References:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
        algorithm 1; Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    every: pydantic.PositiveInt
    replicas: tuple[pydantic.PositiveInt, ...] = pydantic.Field(min_length=2)
    learning_rate: pydantic.PositiveFloat = 1.0
    momentum: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0

    def meets(self, step: int) -> bool:
        """Tell whether the islands meet after a step.

        Args:
            step: The number of steps done.

        Returns:
            Whether it is a multiple of `every`.
        """
        return step % self.every == 0

    def members(self) -> tuple[range, ...]:
        """List the replicas of each island.

        Returns:
            Their numbers in the plan.
        """
        ends = itertools.accumulate(self.replicas, initial=0)
        return tuple(range(a, b) for a, b in itertools.pairwise(ends))

    def counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Add up the microbatches of each island.

        Args:
            counts: The microbatches of each replica in a step.

        Returns:
            Those of each island in a step.
        """
        return tuple(sum(counts[r] for r in members) for members in self.members())


class HeldBytes(PlanValue):
    """The bytes on a device at the peak of a step, by their owner.

    Attributes:
        parameters: The parameters, whole or a shard, and those that are gathered for a segment.
        sums: The buffers in which gradients are summed.
        optimizer: The optimizer's state, as far as it is on the device.
        gradients: The gradients of a microbatch before they are added to the sums.
        activations: The inputs, the stash and temporaries.
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
    """The time and memory of a step on one device.

    Attributes:
        rank: The number of the device in the cluster.
        memory_bytes: The peak of its memory in bytes (0: not known).
        capacity_bytes: The bytes of its memory (0: not described).
        held: The bytes by owner, as estimated before compilation; None without an estimate.
        compute_seconds: The seconds of forwards and backwards; with the next three the whole step.
        wait_seconds: The seconds of bubbles, of transfers, and of waiting for other devices.
        reduction_seconds: The seconds of the gradients' all-reduce that no computation hides.
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
    """The predicted time and memory of a step, from measured or estimated times.

    Attributes:
        step_seconds: The seconds of a step, by replay of the schedule (0: nothing was measured).
        bound_seconds: The lower bound of a step (0: not known).
        bound_over: What the bound is over: all plans (a step at the summed speeds of all devices),
            other counts, or other cuts.
        microbatch_seconds: The seconds of one microbatch on each replica; empty if not measured.
        fixed_seconds: The seconds of each replica's step outside its microbatches (the update);
            empty if not measured.
        stage_fractions: The fraction of the whole work on each stage, by the times of its device.
        sent_bytes: The bytes that each device sends inside its replica for one microbatch, forward
            and backward; the all-reduce of gradients comes on top.
        devices: The predictions for the devices that take part, or none.
    """

    step_seconds: pydantic.NonNegativeFloat = 0.0
    bound_seconds: pydantic.NonNegativeFloat = 0.0
    bound_over: Literal["plans", "counts", "cuts"] = "plans"
    microbatch_seconds: tuple[pydantic.NonNegativeFloat, ...] = ()
    fixed_seconds: tuple[pydantic.NonNegativeFloat, ...] = ()
    stage_fractions: tuple[pydantic.NonNegativeFloat, ...] = ()
    sent_bytes: pydantic.NonNegativeFloat = 0.0
    devices: tuple[DevicePrediction, ...] = ()

    @property
    def gap(self) -> float:
        """The step over its bound, minus one; NaN without a bound."""
        return self.step_seconds / self.bound_seconds - 1 if self.bound_seconds else math.nan


class RunnerUp(PlanValue):
    """Another plan that was considered.

    Attributes:
        description: The plan in words.
        step_seconds: The predicted seconds of a step (0: not known).
        held: The bytes by owner on its fullest device; None if only its time was predicted.
        lack_bytes: The bytes that this device lacks (0: it fits).
    """

    description: str
    step_seconds: pydantic.NonNegativeFloat = 0.0
    held: HeldBytes | None = None
    lack_bytes: pydantic.NonNegativeFloat = 0.0
