"""The gradient of a chain of segments as a sequence of programs, with its seconds and bytes.

Each segment has a program for its forward and one for its backward. Recomputation, checkpointing
and offload of activations are choices of the residuals that a forward leaves, and of the forwards
that run again.

A step of ZeRO 2 and 3 as instructions: segment by segment, all microbatches of a wave in each.
Sharded state is then gathered and reduced once for a segment, whatever the number of microbatches
and however unequal their counts. The instructions are the same on every process, so all run the
same collectives in the same order; operations run for the replica's number of microbatches.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
    Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism", 2021, section 3.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

from ..core.errors import PlanError
from ..core.files import listed, shown
from .schedules import BACKWARD, FORWARD

OFFLOAD, FETCH = "offload", "fetch"
#: The residuals of a plan's chain: the fewest bytes; for the last segment its input.
CUT, INPUT = "cut", "input"

_LETTERS = {"F": FORWARD, "B": BACKWARD, "O": OFFLOAD, "I": FETCH}
_TEXT = re.compile(r"([FBOI])([0-9]{1,7})(\+?)(?::([\w.-]+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentOperation:
    """One program, or one copy of a segment's input or residuals to or from host memory.

    A forward frees its segment's input unless it keeps it or its residuals need it. Its outputs
    become the next segment's input, or are dropped if that segment has residuals or has run its
    backward. A backward frees residuals, input and the gradient of the outputs. Offloading takes
    the segment's input, or residuals together with a kept input, and frees the device's copy; the
    host's copy stays until the segment's backward.

    Attributes:
        kind: The kind: `forward`, `backward`, `offload` or `fetch`.
        segment: The segment of the chain, from 0.
        residuals: The name of the residuals that a forward keeps, empty for none, that a backward
            reads, or that are copied; empty if the input is copied alone.
        keeps_input: Whether a forward keeps its input, besides what its residuals need.
    """

    kind: str
    segment: int
    residuals: str = ""
    keeps_input: bool = False

    def __str__(self) -> str:
        """As written: `F0`, `F0+` if it keeps its input, `F3:dots`, `B3:dots`, `O1`, `I3:dots`."""
        letter = next(letter for letter, kind in _LETTERS.items() if kind == self.kind)
        kept = f":{self.residuals}" if self.residuals else ""
        return f"{letter}{self.segment}{'+' * self.keeps_input}{kept}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentSequence:
    """The operations of one microbatch's gradient.

    Attributes:
        num_segments: The length of the chain.
        operations: In their order; `replay_sequence` checks that they can run.
    """

    num_segments: int
    operations: tuple[SegmentOperation, ...]

    @property
    def written(self) -> tuple[str, ...]:
        """The operations as `sequence_from_texts` reads them."""
        return tuple(map(str, self.operations))

    @property
    def offloads(self) -> bool:
        """Whether anything goes to host memory."""
        return any(op.kind == OFFLOAD for op in self.operations)

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """How often each segment's forward runs, without forwards inside backwards."""
        runs = [op.segment for op in self.operations if op.kind == FORWARD]
        return tuple(map(runs.count, range(self.num_segments)))


def sequence_from_texts(num_segments: int, texts: Sequence[str]) -> SegmentSequence:
    """The sequence that `SegmentSequence.written` wrote.

    Args:
        num_segments: The length of the chain.
        texts: One per operation: `F2` is the forward of segment 2, `F2+` keeps its input, `F2:dots`
            the residuals of that name, `B2:dots` is the backward that reads them, `O2` takes the
            input of segment 2 to host memory and `I2` back, `O2:dots` and `I2:dots` its residuals.

    Raises:
        PlanError: With every text that is no operation of such a chain.
    """
    operations, faults = [], []
    for place, text in enumerate(texts):
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        kind = _LETTERS[match[1]] if match else ""
        if match is None or int(match[2]) >= num_segments:
            faults.append(
                f"operation {place}: {shown(text)} is none of a chain of {num_segments} segments, "
                'counted from 0; write "F2", "F2+", "F2:dots", "B2:dots", "O2" or "I2"'
            )
        elif match[3] and kind != FORWARD:
            faults.append(
                f"operation {place}: {shown(text)}: a {kind} keeps no input; only a forward has '+'"
            )
        else:
            operations.append(SegmentOperation(kind, int(match[2]), match[4] or "", bool(match[3])))
    if faults:
        raise PlanError(f"the sequence of segments cannot be read:{listed(faults)}")
    return SegmentSequence(num_segments=num_segments, operations=tuple(operations))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residuals:
    """One choice of the residuals of a segment.

    Attributes:
        name: The name of the choice, such as `all`, `cut`, `dots` or `input`.
        num_bytes: The bytes that are kept besides the segment's input.
        reads_input: Whether the backward reads the segment's input too.
        forward_seconds: The seconds of the forward that makes them.
        backward_seconds: The seconds of the backward that reads them.
        forward_temporary_bytes: The bytes of that forward beyond its input, outputs and residuals.
        backward_temporary_bytes: The bytes of that backward beyond what it reads, the gradients of
            inputs that it makes, and those of parameters that it leaves.
    """

    name: str
    num_bytes: int
    reads_input: bool = True
    forward_seconds: float
    backward_seconds: float
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0

    @property
    def is_input(self) -> bool:
        """Whether the backward starts from the input alone, and runs the forward itself."""
        return self.reads_input and not self.num_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentCost:
    """Seconds and bytes of one segment's programs for one microbatch.

    Arrays that stay on the device (parameters, the batch, sums) are not counted.

    Attributes:
        input_bytes: The bytes of its inputs, which are the outputs of the segment before.
        input_gradient_bytes: The bytes of the gradients of those inputs that are floating.
        forward_seconds: The seconds of the forward that leaves nothing.
        forward_temporary_bytes: The bytes of that forward beyond its inputs and outputs.
        residuals: The choices of residuals for its backward.
        parameter_gradient_bytes: The bytes that its backward leaves until the end of the
            microbatch.
    """

    name: str
    input_bytes: int
    input_gradient_bytes: int
    forward_seconds: float
    residuals: tuple[Residuals, ...]
    forward_temporary_bytes: int = 0
    parameter_gradient_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceReplay:
    """A replayed sequence.

    Attributes:
        seconds: The seconds of all forwards and backwards; copies to a host run beside them.
        bytes_O: The bytes on the device during each of its operations.
        offloaded_O: The bytes that each operation takes to host memory.
        fetched_O: The bytes that each operation brings back.
        host_bytes: The most bytes in host memory.
    """

    sequence: SegmentSequence
    seconds: float
    bytes_O: tuple[int, ...]
    offloaded_O: tuple[int, ...]
    fetched_O: tuple[int, ...]
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device."""
        return max(self.bytes_O)

    @property
    def copying_peak_bytes(self) -> int:
        """The same if offloaded bytes stay on the device until the next operation has run."""
        going = (0, *self.offloaded_O[:-1])
        return max(now + late for now, late in zip(self.bytes_O, going, strict=True))

    @property
    def moved_bytes(self) -> int:
        """The bytes of all copies to and from host memory."""
        return sum(self.offloaded_O) + sum(self.fetched_O)

    @property
    def peak_operation(self) -> SegmentOperation:
        """The first operation at the peak."""
        return self.sequence.operations[self.bytes_O.index(self.peak_bytes)]


def replay_sequence(sequence: SegmentSequence, costs: Sequence[SegmentCost]) -> SequenceReplay:
    """Simulate a sequence.

    Args:
        costs: The cost of each segment of the chain.

    Returns:
        Its seconds and bytes. The last segment's outputs, a loss and metrics, and their gradients,
        which are constants, count as zero bytes.

    Raises:
        PlanError: With all faults of the first operation that cannot run, or every missing
            backward.
    """
    check_costs(costs)
    if sequence.num_segments != len(costs):
        raise PlanError(
            f"costs of {len(costs)} segments for a sequence over {sequence.num_segments}: give one "
            "for each"
        )
    memory = _Memory(costs)
    bytes_O, seconds, host_bytes = [], [], 0
    offloaded_O, fetched_O = [], []
    for place, op in enumerate(sequence.operations):
        faults = [f"operation {place}, {op}: {fault}" for fault in memory.faults(op)]
        _raise(faults)
        before = memory.device_bytes
        during, took = memory.run(op)
        offloaded_O.append(before - memory.device_bytes if op.kind == OFFLOAD else 0)
        fetched_O.append(memory.device_bytes - before if op.kind == FETCH else 0)
        bytes_O.append(during)
        seconds.append(took)
        host_bytes = max(host_bytes, memory.host_bytes)
    missing = range(memory.top + 1)
    _raise([f"the backward of segment {i} ({costs[i].name}) never runs; add it" for i in missing])
    return SequenceReplay(
        sequence=sequence,
        seconds=math.fsum(seconds),
        bytes_O=tuple(bytes_O),
        offloaded_O=tuple(offloaded_O),
        fetched_O=tuple(fetched_O),
        host_bytes=host_bytes,
    )


def runs_by_segment(
    sequence: SegmentSequence,
) -> list[tuple[int, tuple[SegmentOperation, ...]]]:
    """The operations in their order, grouped by consecutive operations of one segment."""
    runs = itertools.groupby(sequence.operations, key=lambda op: op.segment)
    return [(segment, tuple(operations)) for segment, operations in runs]


@dataclasses.dataclass(frozen=True)
class RunBytes:
    """Bytes on a device beside its microbatches' values, in one of `runs_by_segment`.

    Attributes:
        gathering: During the all-gather of the segment's parameters.
        reducing: During the reduction of its gradients over replicas.
    """

    gathering: int
    running: int
    reducing: int


def while_running(sequence: SegmentSequence, bytes_of_segment: Sequence[int]) -> list[RunBytes]:
    """`RunBytes` of bytes that are present only while a segment runs."""
    return [RunBytes(0, bytes_of_segment[segment], 0) for segment, _ in runs_by_segment(sequence)]


def layered_peak_bytes(
    sequence: SegmentSequence, costs: Sequence[SegmentCost], num: int, beside: Sequence[RunBytes]
) -> int:
    """The most bytes if a device runs each of `runs_by_segment` for several microbatches.

    While one microbatch runs, the one before is still being offloaded, and the next is being
    fetched.

    Args:
        sequence: The operations of a microbatch.
        costs: The cost of each segment of the chain.
        num: Microbatches, at least one.
        beside: Bytes beside their values, run by run.
    """
    memory, peak = _Memory(costs), 0
    for (_, operations), extra in zip(runs_by_segment(sequence), beside, strict=True):
        before, during, moving = memory.device_bytes, 0, 0
        for op in operations:
            there = memory.device_bytes
            during = max(during, memory.run(op)[0])
            if op.kind in (OFFLOAD, FETCH) and num > 1:
                moving = max(moving, abs(memory.device_bytes - there))
        during, after = during + moving, memory.device_bytes
        # During the first microbatch all others wait; during the last all others are done.
        others = (num - 1) * max(before, after)
        phases = extra.gathering + num * before, extra.running + during + others
        peak = max(peak, *phases, extra.reducing + num * after)
    return peak


def check_costs(costs: Sequence[SegmentCost]) -> None:
    """Refuse invalid costs.

    Raises:
        PlanError: With every fault.
    """
    faults = [] if costs else ["there are no segments: give the cost of one or more"]
    for i, cost in enumerate(costs):
        where = f"segment {i} ({cost.name})"
        names = [r.name for r in cost.residuals]
        if not names or len(set(names)) < len(names) or not all(names):
            faults.append(f"{where}: its residuals are named {names}: name one or more apart")
        values: list[SegmentCost | Residuals] = [cost, *cost.residuals]
        for value in values:
            of = f"{where}, residuals {value.name}" if isinstance(value, Residuals) else where
            faults += [f"{of}: {fault}" for fault in _faults(value)]
    if faults:
        raise PlanError(f"the costs of the segments cannot be:{listed(faults)}")


def _raise(faults: Sequence[str]) -> None:
    if faults:
        raise PlanError(f"the sequence of segments cannot run:{listed(faults)}")


def _faults(value: SegmentCost | Residuals) -> Iterator[str]:
    for field in dataclasses.fields(value):
        number = getattr(value, field.name)
        if field.name.endswith("_bytes") and (type(number) is not int or number < 0):
            yield f"{field.name} is {number!r}: give a whole number, 0 or more"
        if field.name.endswith("_seconds") and number is not None and not 0 <= number < math.inf:
            yield f"{field.name} is {number!r}: give a finite number, 0 or more"


class _Memory:
    """The inputs and residuals on the device and on the host between two operations."""

    def __init__(self, costs: Sequence[SegmentCost]) -> None:
        self._costs = costs
        self._inputs = {0}
        self._residuals: dict[int, Residuals] = {}
        self._host: set[int] = set()
        self._host_residuals: dict[int, Residuals] = {}
        self.top = len(costs) - 1  # the last segment whose backward has not run

    @property
    def host_bytes(self) -> int:
        """Bytes of the inputs and residuals on the host."""
        inputs = sum(self._costs[i].input_bytes for i in self._host)
        return inputs + sum(r.num_bytes for r in self._host_residuals.values())

    def faults(self, op: SegmentOperation) -> Iterator[str]:
        """The faults of an operation: what it needs and does not have."""
        if op.segment >= len(self._costs):
            yield f"the chain has {len(self._costs)} segments, counted from 0; remove it"
            return
        cost = self._costs[op.segment]
        choice = _choice(cost, op.residuals)
        if op.segment > self.top:
            yield "the backward of its segment has run; remove it"
        elif op.kind == FETCH:
            if op.residuals and self._host_residuals.get(op.segment) != choice:
                yield f"its residuals {op.residuals!r} are not in host memory; offload them before"
            elif not op.residuals and op.segment not in self._host:
                yield "the input is not in host memory; offload it before"
        elif op.segment not in self._inputs and (
            choice is None or op.kind == FORWARD or choice.reads_input
        ):
            yield "the input is not on the device; run the forward before it, or fetch it"
        if op.kind == OFFLOAD:
            yield from self._faults_of_offload(op, choice)
        if choice is None and (op.residuals or op.kind == BACKWARD):
            known = ", ".join(r.name for r in cost.residuals)
            yield f"the segment has no residuals {op.residuals!r}; choose of {known}"
        elif op.kind == BACKWARD:
            if op.segment < self.top:
                yield f"the backward of segment {self.top} has not run; run it before"
            elif choice != self._residuals.get(op.segment) and not (choice and choice.is_input):
                yield f"no forward has left {op.residuals!r}; run F{op.segment}:{op.residuals}"
        elif (
            op.kind == FORWARD
            and op.residuals
            and op.segment in {*self._residuals, *self._host_residuals}
        ):
            yield "its residuals are there already; remove one of the forwards"

    def _faults_of_offload(self, op: SegmentOperation, choice: Residuals | None) -> Iterator[str]:
        there = self._residuals.get(op.segment)
        if op.residuals and choice is not None and there != choice:
            yield f"no forward has left {op.residuals!r}; run F{op.segment}:{op.residuals}"
        elif not op.residuals and there is not None and there.reads_input:
            yield (
                f"its residuals are there and need the input; offload both, O{op.segment}:"
                f"{there.name}"
            )

    def run(self, op: SegmentOperation) -> tuple[int, float]:
        """Bytes on the device during an operation, and its seconds."""
        i, cost = op.segment, self._costs[op.segment]
        choice = _choice(cost, op.residuals)
        before = self.device_bytes
        if op.kind == OFFLOAD:
            self._offload(i, choice)
            return before, 0.0
        if op.kind == FETCH:
            if choice is not None:
                self._residuals[i] = choice
            if i in self._host:
                self._inputs.add(i)
            return self.device_bytes, 0.0
        if op.kind == BACKWARD:
            assert choice is not None
            for inputs in (self._inputs, self._host):
                inputs.discard(i)
            for kept in (self._residuals, self._host_residuals):
                kept.pop(i, None)
            self.top = i - 1
            made = cost.input_gradient_bytes + cost.parameter_gradient_bytes
            return before + made + choice.backward_temporary_bytes, choice.backward_seconds
        if not (op.keeps_input or (choice and choice.reads_input)):
            self._inputs.discard(i)
        during = before
        if i + 1 < len(self._costs):
            during += self._costs[i + 1].input_bytes
        if i < self.top and i + 1 not in {*self._residuals, *self._host_residuals}:
            self._inputs.add(i + 1)
        if choice is None:
            return during + cost.forward_temporary_bytes, cost.forward_seconds
        if not choice.is_input:
            self._residuals[i] = choice
        during += choice.num_bytes + choice.forward_temporary_bytes
        return during, choice.forward_seconds

    def _offload(self, i: int, choice: Residuals | None) -> None:
        """Take the input of a segment, or its residuals with it, to the host."""
        if i in self._inputs:
            self._inputs.discard(i)
            self._host.add(i)
        if choice is not None:
            self._host_residuals[i] = self._residuals.pop(i)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        above = self._costs[self.top + 1 :]
        gradients = above[0].input_gradient_bytes if above else 0
        gradients += sum(c.parameter_gradient_bytes for c in above)
        inputs = sum(self._costs[i].input_bytes for i in self._inputs)
        return gradients + inputs + sum(r.num_bytes for r in self._residuals.values())


def _choice(cost: SegmentCost, name: str) -> Residuals | None:
    return next((r for r in cost.residuals if r.name == name), None)


GATHER, PREFETCH, RUN, ADD, REDUCE = "gather", "prefetch", "run", "add", "reduce"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepInstruction:
    """A collective of all replicas, or the work of each for its microbatches of a wave.

    Attributes:
        kind: `gather`: all-gather of the segment's parameters; `prefetch`: those of another begin
            to come from host memory; `run`: operations run, and gathered parameters are freed;
            `add`: the group's sums join those of earlier waves; `reduce`: reduction over replicas.
        segment: Of the chain, from 0.
        wave: Of the step, from 0.
        operations: Of `run`, for each microbatch.
        group: The group of sums of `add` and `reduce`.
    """

    kind: str
    segment: int
    wave: int
    operations: tuple[SegmentOperation, ...] = ()
    group: int = 0

    @property
    def is_backward(self) -> bool:
        """Whether a backward is among its operations."""
        return any(op.kind == BACKWARD for op in self.operations)


def layerwise_order(
    sequence: SegmentSequence, group_segments: Sequence[int], num_waves: int
) -> tuple[StepInstruction, ...]:
    """The instructions of a step.

    Args:
        sequence: The operations of a microbatch.
        group_segments: For each group of sums the segment whose backward completes it.
    """
    runs = [(wave, *run) for wave in range(num_waves) for run in runs_by_segment(sequence)]
    out = []
    for k, (wave, segment, operations) in enumerate(runs):
        out.append(StepInstruction(kind=GATHER, segment=segment, wave=wave))
        if k + 1 < len(runs):
            out.append(StepInstruction(kind=PREFETCH, segment=runs[k + 1][1], wave=wave))
        run = StepInstruction(kind=RUN, segment=segment, wave=wave, operations=operations)
        out.append(run)
        kind = REDUCE if wave + 1 == num_waves else ADD
        groups = [g for g, last in enumerate(group_segments) if last == segment]
        for group in groups if run.is_backward else ():
            out.append(StepInstruction(kind=kind, segment=segment, wave=wave, group=group))
    return tuple(out)
