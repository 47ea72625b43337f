"""The plan: which device holds and computes what.

A plan is made by annotations, rules, a mesh, a number of stages or the search. With the traced loss
it is lowered to programs; nothing else decides anything. It can be written to a file, read, edited
by hand, and compared.
"""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from ..core.errors import PlanError
from ..core.files import MOST_JSON_BYTES, named, read_bytes
from ..core.format import plural, si, span
from ..core.types import OUTER_AXES, STAGE_AXIS
from .check import faults, faults_of, from_json, refusal
from .description import (
    chain_in_words,
    device_rows,
    differences,
    draw_devices,
    held_in_words,
    islands_in_words,
    parts_in_words,
    pipelines_in_words,
    runners_up_in_words,
)
from .layout import Layout, PlanValue, whole
from .parts import (
    Axis,
    Islands,
    Placement,
    PlannedChain,
    PlannedDevice,
    PlannedPipeline,
    PlannedReplica,
    PlannedStage,
    Prediction,
    ReplicaWork,
    RunnerUp,
    SumsForm,
    Versions,
    decided_by_stages,
    deciding_stage,
)
from .precision import Precision


def deciding(plan: "Plan") -> dict[str, Any]:
    """The fields that decide bits: what `Plan.numerics` hashes."""
    found: dict[str, Any] = {
        "made_with": plan.made_with.model_dump(),
        "batch_size": plan.batch_size,
        "microbatch_size": plan.microbatch_size,
        "precision": plan.precision.model_dump(),
        "excess_precision": plan.sums.kind != "exact",
        "sums": plan.sums.model_dump(include={"kind", "limbs"}),
        "parameters": [[p.name, p.shape, p.dtype] for p in plan.parameters],
    }
    arithmetic = {device.rank: device.arithmetic for device in plan.devices}
    kinds = set(arithmetic.values())
    found["kinds"] = sorted(kinds)
    if len(kinds) > 1:  # which microbatch is computed where
        found["kinds"] = [
            [[arithmetic[rank] for rank in r.devices], r.num_microbatches] for r in plan.replicas
        ]
        if plan.unlike_replicas:
            found["forms"] = [
                [r.num_microbatches, [[s.num_devices, s.num_parts] for s in r.stages]]
                for r in plan.unlike_replicas
            ]
    if plan.sums.kind == "exact" and kinds != {"cpu"}:
        # Else they are as the loss was traced.
        found["scatters"], found["activations"] = "in order, or selected", "recomputed"
    if (free := plan.granule_axis) is not None:
        inside = {x.name: x for f in plan.stage_forms for stage in f for x in stage.parameters}
        layouts = [inside.get(layout.name, layout) for layout in plan.parameters]
        # What is stored where between the steps of a pipeline may depend on an axis' size.
        found["axes"], found["specs"] = [free.deciding], _specs_over([free.name], layouts)
    elif plan.axes:
        found["axes"] = [axis.deciding for axis in plan.axes]
        found["specs"] = _specs_over(plan.axis_sizes, plan.parameters)
        if plan.is_uneven:
            found["shares"] = [axis.shares for axis in plan.axes]
            found["sizes"] = [layout.sizes for layout in plan.parameters]
        if plan.unlike_replicas:
            found["stages"] = decided_by_stages(plan.unlike_replicas)
        elif plan.stage_forms:
            found["stages"] = [deciding_stage(stage) for stage in plan.stage_forms[0]]
    found |= _deciding_cut(plan)
    # Each that devices of a copy put together is compiled apart from what else the copy owns, and
    # copies of several devices update in parts in every stage.
    is_whole = plan.placement.whole and not plan.axes
    decides = is_whole or len(kinds) > 1
    is_exact = plan.sums.kind == "exact"
    in_parts = plan.axes and (plan.placement.zero or is_exact or plan.is_uneven)
    if in_parts or (plan.placement.zero and (decides or not is_exact)):
        # Sums over a whole tensor depend on the program around them.
        own: Any = ()
        if decides:
            own = plan.granules if plan.placement.zero else "each"
        tier = plan.placement.tier_of_whole if is_whole else ()
        found["zero"] = [plan.placement.whole, own, *tier]
        if plan.placement.shard_groups > 1 and (decides or plan.sums.kind == "float"):
            found["shard_groups"] = plan.placement.shard_groups
    if plan.islands is not None:
        islands = plan.islands.model_dump(exclude={"replicas"})
        found["islands"] = [islands, plan.islands.counts(plan.counts)]
    if plan.sums.kind == "float":
        found["sums"] = [plan.sums.model_dump(), plan.counts, plan.placement.waves]
    return found


def _specs_over(axes: Collection[str], layouts: Sequence[Layout]) -> list[list[list[str]]]:
    """For each dimension of each layout the axes, of these, that cut it."""
    return [[[name for name in names if name in axes] for names in x.spec] for x in layouts]


def _deciding_cut(plan: "Plan") -> dict[str, Any]:
    """How a microbatch is cut into programs, where that decides bits."""
    found: dict[str, Any] = {}
    pipeline = plan.pipeline
    if plan.is_cut_free:
        if pipeline is not None and pipeline.cut_by != "work":
            found["order"] = pipeline.cut_by  # in which terms of a gradient add up
        return found
    if pipeline is not None:
        segments = pipeline.segments
        found["cut"] = [pipeline.points, pipeline.num_chunks, pipeline.cut_by]
        each = [[s.first, s.keep] for s in segments]
        found["keep"] = each if len({s.keep for s in segments}) > 1 else segments[0].keep
        found["has_weight"] = pipeline.has_weight
    # Whatever is recomputed, the programs are the same.
    if plan.chain is not None and plan.num_segments > 1:
        found["chain"] = plan.chain.points
        if plan.is_uneven:  # all segments are one program
            found["sequence"] = plan.chain.sequence
    if plan.microbatches_per_call > 1:
        found["microbatches_per_call"] = plan.microbatches_per_call
    return found


_MOST_LINES = 24  # of differences, and of devices in words


class Plan(PlanValue):
    r"""Which device holds and computes what, why, and how far from the best it can be.

    The same traced loss and the same plan are lowered to the same programs; nothing else decides
    anything. A plan is frozen and hashable. Its JSON file can be edited by hand and is checked when
    it is read.

    Attributes:
        format: The version of the file's format.
        made_with: The versions and settings that decide bits.
        cluster: The name of the mesh file; empty for the devices of this machine or job.
        mesh_file: The path of a mesh file that is not built in, where the plan was made.
        mesh: The contents of the mesh file, so that `hxla run --plan` needs the plan only.
        batch_size: The examples of a global batch.
        microbatch_size: The examples of a microbatch.
        devices: The devices that take part.
        axes: The mesh axes inside a replica; none where a replica has one device.
        replicas: The replicas of the model, with their devices and their work.
        pipeline: The stages and their schedule, where `stage` is the first of the axes.
        chain: The segments of a microbatch that are programs of their own; None: it is one
            program, as a chain of one segment is.
        microbatches_per_call: The microbatches that one call of a program runs, at most.
        parameters: The layout of each parameter over its replica's devices between steps.
        sums: The arithmetic and the place of the gradients' all-reduce.
        precision: The dtypes of the computation.
        placement: Where the state and the stash are, and how they are sharded over replicas.
        islands: Groups of replicas that train apart and meet every few steps; None: every step
            sums over all replicas.
        prediction: The time and memory of a step; None where nothing is known.
        runners_up: The next best plans of a search, the fastest first.
        reasons: Why, and what is estimated, in words.

    Example:
        >>> import hxla, jax
        >>> from flax import nnx
        >>> model = nnx.eval_shape(lambda: nnx.Linear(1024, 4096, rngs=nnx.Rngs(0)))
        >>> batch = {"x": jax.ShapeDtypeStruct((4, 1024), "float32")}
        >>> graph = hxla.trace(model, lambda model, batch: model(batch["x"]).mean(), batch)
        >>> plan = hxla.make_plan(graph, 2, batch_size=32)
        >>> plan.write("plan.json")
        >>> other = hxla.Plan.read("plan.json").with_counts((5, 3))
        >>> print(*plan.diff(other), sep="\n")
        replicas.0.num_microbatches: 4 here, 5 there
        replicas.1.num_microbatches: 4 here, 3 there
        >>> plan.numerics == other.numerics
        True
    """

    format: Literal[1] = 1
    made_with: Versions
    cluster: str = ""
    mesh_file: str = ""
    mesh: str = ""
    batch_size: Annotated[int, pydantic.Field(ge=1, le=2**48)]
    microbatch_size: Annotated[int, pydantic.Field(ge=1, le=2**48)]
    devices: tuple[PlannedDevice, ...] = pydantic.Field(min_length=1)
    axes: tuple[Axis, ...] = ()
    replicas: tuple[ReplicaWork, ...] = pydantic.Field(min_length=1)
    pipeline: PlannedPipeline | None = None
    chain: PlannedChain | None = None
    microbatches_per_call: Annotated[int, pydantic.Field(ge=1, le=4096)] = 1
    parameters: tuple[Layout, ...]
    sums: SumsForm = SumsForm()
    precision: Precision = Precision()
    placement: Placement = Placement()
    islands: Islands | None = None
    prediction: Prediction | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    reasons: Annotated[tuple[str, ...], pydantic.Field()] = ()

    @pydantic.field_validator("chain")
    @classmethod
    def _without_one_program(cls, chain: PlannedChain | None) -> PlannedChain | None:
        return None if chain is not None and chain.is_one_program else chain

    @pydantic.model_validator(mode="after")
    def _is_consistent(self) -> "Plan":
        lines = tuple(faults(self))
        if lines:
            raise ValueError("\n".join(lines))
        return self

    # -- facts -----------------------------------------------------------------------------------

    @property
    def counts(self) -> tuple[int, ...]:
        """The microbatches of each replica in a step."""
        return tuple(r.num_microbatches for r in self.unlike_replicas or self.replicas)

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a global batch."""
        return self.batch_size // self.microbatch_size

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The sizes of the mesh axes inside a replica, by name."""
        return {axis.name: axis.size for axis in self.axes}

    @property
    def inner_axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the mesh axes inside a replica, or inside each of its stages."""
        return tuple((axis.name, axis.size) for axis in self.axes if axis.name not in OUTER_AXES)

    @property
    def mesh_in_words(self) -> str:
        """The replicas and the axes inside one: `data x tensor = 2 x 4`."""
        sizes = (len(self.replicas), *self.axis_sizes.values())
        return f"{' x '.join(('data', *self.axis_sizes))} = {' x '.join(map(str, sizes))}"

    @property
    def num_stages(self) -> int:
        """The stages of each replica; 1 without a pipeline."""
        return max(map(len, self.stage_forms), default=self.axis_sizes.get(STAGE_AXIS, 1))

    @property
    def granule_axis(self) -> Axis | None:
        """The axis of the replicas, or of their stages, on whose size no bit depends, if any."""
        of_stages = [axis for form in self.stage_forms for stage in form for axis in stage.axes]
        return next((x for x in (*self.axes, *of_stages) if x.granules is not None), None)

    @property
    def is_cut_free(self) -> bool:
        """Whether bits depend on no cut: `numerics.cut` of `any`."""
        return self.granule_axis is not None

    @property
    def stage_forms(self) -> tuple[tuple[PlannedStage, ...], ...]:
        """The stages of each form of replica, where they are unlike; none where all are alike."""
        if self.unlike_replicas:
            return tuple(replica.stages for replica in self.unlike_replicas)
        return (self.pipeline.stages,) if self.pipeline and self.pipeline.stages else ()

    @property
    def unlike_replicas(self) -> tuple[PlannedReplica, ...]:
        """The replicas where they are unlike in depth or devices; none where all are alike."""
        return () if self.pipeline is None else self.pipeline.replicas

    @property
    def num_segments(self) -> int:
        """The segments of a microbatch that are programs of their own; 1: it is one program."""
        return 1 if self.chain is None else len(self.chain.segments)

    @property
    def is_uneven(self) -> bool:
        """Whether devices of a replica may have shards of unlike sizes."""
        return any(axis.shares for axis in self.axes)

    @property
    def granules(self) -> tuple[int, ...]:
        """With ZeRO, the granules of the optimizer's state on each replica of a group."""
        return self.placement.shares or (1,) * (len(self.replicas) // self.placement.shard_groups)

    @property
    def owned_parts(self) -> tuple[float, ...]:
        """With ZeRO, the fraction of the optimizer's state on each replica."""
        parts = tuple(granules / sum(self.granules) for granules in self.granules)
        return parts * self.placement.shard_groups

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(layout.num_bytes for layout in self.parameters)

    @property
    def device_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of one device's shard of each parameter, padded to the largest."""
        sizes = self.axis_sizes
        return tuple(p.device_shape(sizes) for p in self.parameters)

    @property
    def device_parameter_bytes(self) -> int:
        """The bytes of one device's shard of the parameters, padded to the largest."""
        sizes = self.axis_sizes
        return sum(p.device_bytes(sizes) for p in self.parameters)

    @property
    def memory_form(self) -> str:
        """The memory layout in words; a profile stores it, so that no cost is counted twice."""
        place = self.placement
        runs = "one program" if self.chain is None else "a chain"
        return f"zero {place.zero}, {runs}, {place.optimizer}, {place.stash}, {place.parameters}"

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Short unique names of the replicas, such as `RTX 4090 #1 + RTX 3090 #0`."""
        kinds = {device.rank: device.kind for device in self.devices}
        return tuple(
            name_of_devices([*itertools.chain(*stages)], kinds) for stages in stage_ranks(self)
        )

    @property
    def stage_names(self) -> tuple[tuple[str, ...], ...]:
        """Short names of the stages of each replica: their devices' kinds and ranks."""
        kinds = {device.rank: device.kind for device in self.devices}
        return tuple(
            tuple(name_of_devices(ranks, kinds) for ranks in stages) for stages in stage_ranks(self)
        )

    @property
    def numerics(self) -> str:
        """Fingerprint of the fields that decide bits: equal numerics, equal bits.

        Two runs of one model, loss, optimizer, data and seed whose plans have equal numerics end
        with the same parameters to the last bit. Counts, the number of copies, schedules and where
        devices are do not enter, unless the sums are of floats or the devices are of unlike kinds.
        Of islands the microbatches of each enter, and when and how they meet.
        That the optimizer's state is shared out (`placement.zero`), and whose share is where, enter
        only if a parameter of copies of one device has an owner, the sums are of floats or the
        devices of unlike kinds; of copies of several devices only which parameters have an owner.
        Of a schedule only this enters: whether weight gradients are operations of their own, as in
        `zb-h1`. Compiled apart from the gradients of the inputs they are rounded elsewhere.

        A plan does not say which CPU devices share a process, and XLA's arithmetic depends on it.
        Long contractions are split by the threads of a process. More than two devices of a replica
        add floats in another order inside a process than between processes. Uneven shards inside a
        process are branches of one program. So the law is for processes of one form: those of
        `hxla run` have one device and one thread.
        """
        text = json.dumps(deciding(self), sort_keys=True).encode()
        return hashlib.sha256(text).hexdigest()[:16]

    @property
    def decisions(self) -> "Plan":
        """The plan without its prediction, runners-up, reasons, and mesh file with its path."""
        without: dict[str, Any] = {"prediction": None, "runners_up": (), "reasons": ()}
        without |= {"mesh_file": "", "mesh": ""}
        return self.model_copy(update=without)

    # -- other plans -----------------------------------------------------------------------------

    def with_counts(self, counts: tuple[int, ...]) -> "Plan":
        """Give the replicas other microbatch counts; the prediction is dropped.

        Args:
            counts: The microbatches of each replica in a step.

        Returns:
            Another plan, of equal `numerics` where the sums are exact and the devices alike.

        Raises:
            PlanError: If they do not add up to `num_microbatches`.
        """
        before = self.unlike_replicas or self.replicas
        if not isinstance(counts, Sequence) or isinstance(counts, str):
            raise PlanError(f"counts={counts!r}: give one for each of {len(before)} replicas")
        if len(counts) != len(before):
            raise PlanError(f"{len(counts)} counts for {len(before)} replicas: give one each")
        try:
            replicas = tuple(
                type(replica)(**dict(replica) | {"num_microbatches": whole(count)})
                for replica, count in zip(before, counts, strict=True)
            )
        except pydantic.ValidationError as error:
            raise refusal(faults_of(error)) from None
        if self.pipeline is None or not self.unlike_replicas:
            return self.replaced(replicas=replicas, prediction=None)
        pipeline = self.pipeline.model_copy(update={"replicas": replicas})
        return self.replaced(pipeline=pipeline, prediction=None)

    def replaced(self, **fields: Any) -> "Plan":
        """Make a plan with other values of some fields, and check it.

        Args:
            fields: The fields by their names.

        Returns:
            Another plan.

        Raises:
            PlanError: If the fields contradict each other, with every fault.
        """
        return self.checked(
            {name: getattr(self, name) for name in type(self).model_fields} | fields
        )

    @classmethod
    def checked(cls, fields: Mapping[str, Any]) -> "Plan":
        """Make a plan of its fields, and check it.

        Args:
            fields: All fields without a default, by their names.

        Returns:
            The plan.

        Raises:
            PlanError: If they contradict each other, with every fault.
        """
        try:
            return cls(**fields)
        except pydantic.ValidationError as error:
            raise refusal(faults_of(error)) from None

    # -- files -----------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write the plan as JSON, complete."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan from JSON, as `to_json` writes it or edited by hand.

        Args:
            text: The JSON.

        Returns:
            The plan.

        Raises:
            PlanError: If the text is no plan, with every fault, its key and the reason.
        """
        return from_json(cls, text)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file.

        Args:
            path: The path of the file; an existing file is replaced.

        Raises:
            PlanError: If the file cannot be written.
        """
        try:
            with open(path, "w") as file:
                file.write(self.to_json())
        except OSError as error:
            raise PlanError(f"plan {path} cannot be written: {error.strerror}") from None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan from a file.

        Args:
            path: The path of the file.

        Returns:
            The plan.

        Raises:
            PlanError: If the file cannot be read, or is no plan.
        """
        text = read_bytes(path, MOST_JSON_BYTES, named("plan", path, PlanError))
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    # -- words and pictures ----------------------------------------------------------------------

    def __repr__(self) -> str:
        num = sum(len(replica.devices) for replica in self.replicas)
        return (
            f"Plan({self.batch_size} examples in {plural(self.num_microbatches, 'microbatch')} on "
            f"{plural(num, 'device')}, numerics='{self.numerics}')"
        )

    def __str__(self) -> str:
        return self.explain()

    def diff(self, other: "Plan") -> tuple[str, ...]:
        """List the decisions in which two plans differ, a line for each key; no predictions.

        Args:
            other: The other plan.

        Returns:
            Lines such as `replicas.0.num_microbatches: 9 here, 8 there`; none if all decisions are
            equal.
        """
        return tuple(differences(self.decisions.model_dump(), other.decisions.model_dump()))

    def explain(self) -> str:
        """Describe the plan: the work of each replica and device, time, memory and reasons."""
        return "\n".join(_lines(self))

    def compare(self, other: "Plan") -> str:
        """Set both plans side by side, in words.

        Args:
            other: The plan of the second column.

        Returns:
            Some lines of text.
        """
        return "\n".join(_side_by_side(self, other))

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write a picture: replica, stage, work, time and memory of each device.

        Args:
            path: A `.png`, `.svg` or `.pdf` file; its folder is created.
        """
        title = self.explain().split("\n")[0]
        draw_devices(
            device_rows(self, stage_ranks(self)), path, num_stages=self.num_stages, title=title
        )


def stage_ranks(plan: Plan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The devices of each stage of each replica."""
    if plan.unlike_replicas:
        devices = iter(plan.replicas[0].devices)
        return tuple(
            tuple(tuple(itertools.islice(devices, stage.num_devices)) for stage in form)
            for form in plan.stage_forms
        )
    size = math.prod(axis.size for axis in plan.axes) // plan.num_stages
    sizes = [stage.num_devices for form in plan.stage_forms for stage in form]
    ends = itertools.accumulate(sizes or [size] * plan.num_stages, initial=0)
    spans = list(itertools.pairwise(ends))
    return tuple(tuple(r.devices[a:b] for a, b in spans) for r in plan.replicas)


_VENDORS = re.compile(r"^(NVIDIA |GeForce |AMD |Instinct )+")


def name_of_devices(ranks: Sequence[int], kinds: Mapping[int, str]) -> str:
    """Devices as the terminal names them: RTX 4090 #0-1 + RTX 3090 #2."""
    parts = []
    for kind, group in itertools.groupby(ranks, kinds.__getitem__):
        numbers = tuple(group)
        is_range = len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]}-{numbers[-1]}" if is_range else "+".join(map(str, numbers))
        parts.append(f"{_VENDORS.sub('', kind)} #{listed}")
    return " + ".join(parts)


def _lines(plan: Plan) -> Iterator[str]:
    """The lines of `Plan.explain`."""
    sums = plan.sums.words + " over the host" * (plan.sums.over == "host")
    names, counts = plan.replica_names, plan.counts
    of = "microbatch of" if plan.num_microbatches == 1 else "microbatches of"
    on = f" on {names[0]}{_way_in_words(plan, 0)}" if len(names) == 1 else ""
    yield (
        f"{plan.batch_size} examples a step in {plan.num_microbatches} {of} "
        f"{plan.microbatch_size}{on}, {sums}" + (f"; {plan.mesh_in_words}" if plan.axes else "")
    )
    width = max(map(len, names))
    for i, (name, count) in enumerate(zip(names, counts, strict=True) if not on else ()):
        if i == _MOST_LINES:
            yield f"  and {len(counts) - i} more"
            break
        noun = "microbatch" if count == 1 else "microbatches"
        yield f"  {name:<{width}}  {count:>4} {noun}{_work_in_words(plan, i)}"
    if plan.axes:
        on_device = f"{plan.device_parameter_bytes:,} on a device"
        yield f"  parameters {plan.parameter_bytes:,} bytes, {on_device}"
    if plan.is_uneven:
        [axis] = plan.axes
        yield from parts_in_words(plan.parameters, axis.name, axis.size)
    yield from pipelines_in_words(plan)
    if plan.chain is not None:
        yield from chain_in_words(plan.chain)
    if plan.islands is not None:
        yield from islands_in_words(plan.islands, plan.counts)
    yield from plan.precision.in_words()
    yield from (f"  under {setting}" for setting in plan.made_with.settings)
    yield from _prediction_in_words(plan, plan.prediction or Prediction())
    yield from (f"  {reason}" for reason in plan.reasons)
    yield from runners_up_in_words(plan.runners_up)
    yield from held_in_words(plan.prediction, plan.runners_up)


def _way_in_words(plan: Plan, i: int) -> str:
    if plan.unlike_replicas:
        return ""
    work = plan.replicas[i]
    how = f", {work.executors} at once" if work.executors > 1 else ""
    return how + (f", starts {span(work.start_seconds)} later" if work.start_seconds else "")


def _work_in_words(plan: Plan, i: int) -> str:
    known, how = plan.prediction, _way_in_words(plan, i)
    if known is None or not known.microbatch_seconds:
        return how
    micro, fixed = known.microbatch_seconds[i], known.fixed_seconds[i]
    return f" of {span(micro)}, busy {span(fixed + plan.counts[i] * micro)}{how}"


def _prediction_in_words(plan: Plan, known: Prediction) -> Iterator[str]:
    if known.step_seconds:
        bound = ""
        if known.bound_seconds and len(plan.devices) > 1:
            if known.bound_over == "plans":
                part = min(1.0, known.bound_seconds / known.step_seconds)
                bound = f", {part:.2f} of the summed speeds of all devices"
            else:
                other = {"counts": "other counts", "cuts": "any cut"}[known.bound_over]
                bound = f", at most {max(known.gap, 0.0):.1%} above {other}"
        rate = plan.batch_size / known.step_seconds
        yield f"  predicted step {span(known.step_seconds)}, {si(rate)} examples/s{bound}"
    if known.sent_bytes:
        yield f"  sent by a device for a microbatch: {known.sent_bytes:,.0f} bytes"
    kinds = {device.rank: device.kind for device in plan.devices}
    timed = any(d.compute_seconds for d in known.devices)
    shown = [d for d in known.devices if timed or d.capacity_bytes]
    for i, d in enumerate(shown):
        if i == _MOST_LINES:
            yield f"  and {len(shown) - i} more devices"
            return
        of = f" of {d.capacity_bytes / 2**30:.2f} GiB" if d.capacity_bytes else ""
        spent = ""
        if timed:
            parts = {
                "compute": d.compute_seconds,
                "wait": d.wait_seconds,
                "reduce": d.reduction_seconds,
                "update": d.update_seconds,
            }
            # Float sums that should cancel leave far less than a microsecond.
            spent = "  " + ", ".join(f"{k} {round(s, 6):.3g} s" for k, s in parts.items())
        yield f"  {d.rank:>4} {kinds[d.rank]}  {d.memory_bytes / 2**30:.2f} GiB{of}{spent}"


def _side_by_side(plan: Plan, other: Plan) -> Iterator[str]:
    a, b = dict(_facts(plan)), dict(_facts(other))
    width = max(map(len, a.values()))
    yield from (f"{name:<17} {a[name]:>{width}}  {b[name]}" for name in a if name in b)
    steps = [p.prediction.step_seconds if p.prediction else 0.0 for p in (plan, other)]
    if all(steps):
        yield f"the second is {steps[0] / steps[1]:.2f}x as fast as the first"


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """The rows of `Plan.compare`."""
    known, counts = plan.prediction, plan.counts
    yield "cluster", plan.cluster or "here"
    yield "devices in use", str(len(plan.devices))
    sizes = ["unlike"] if plan.unlike_replicas else plan.axis_sizes.values()
    yield "data x inner axes", " x ".join(map(str, (len(counts), *sizes)))
    yield "microbatch size", str(plan.microbatch_size)
    many = len(counts) > 16
    yield "microbatches", f"{len(counts)} replicas" if many else ", ".join(map(str, counts))
    if known is not None and known.step_seconds:
        yield "predicted step", f"{known.step_seconds:.4g} s"
        yield "examples/s", f"{plan.batch_size / known.step_seconds:.4g}"
        yield "gap", f"{known.gap:.1%}" if known.bound_seconds else "not known"
        fullest = max((d.memory_bytes for d in known.devices), default=0.0)
        yield "fullest device", f"{fullest / 2**30:.2f} GiB"
