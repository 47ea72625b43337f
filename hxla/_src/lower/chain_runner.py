"""Runs the microbatches of a replica as a chain: the programs of its parts, one after another.

Each part has a forward and a backward; the last has both in one program, so a chain of one part is
a microbatch as one program. A list of operations orders them and says which residuals are kept. It
moves no bit, for the programs are the same. Identical parts share their programs.

Legend of shape suffixes: M microbatches of a step, T float tensors.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.types import PyTree
from ..graph.low_params import low_params
from ..model.functional import tree_bytes
from ..plan.parts import ONE_PROGRAM
from ..schedule.schedules import FORWARD
from ..schedule.segment_sequence import (
    FETCH,
    OFFLOAD,
    SegmentCost,
    SegmentOperation,
    SegmentSequence,
    replay_sequence,
)
from .chain_spec import ChainSpec
from .contribution import DeviceSums
from .executors import Calls, Executors
from .offload import Known, Stash, nothing_known
from .replica import Replica
from .segment_programs import (
    ChainParts,
    SegmentPrograms,
    crossing_values,
    segment_costs,
    temporary_bytes,
)


@dataclasses.dataclass(slots=True)
class _OnHost:
    """The offloaded arrays of a microbatch.

    Attributes:
        inputs: By part, the values that cross into it.
        saved: By part, its residuals.
        known: Values that are in host memory.
        fetched: Values that are back on the device.
    """

    inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=dict)
    saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    known: Known = dataclasses.field(default_factory=nothing_known)
    fetched: Known = dataclasses.field(default_factory=nothing_known)


@dataclasses.dataclass(slots=True)
class _Microbatch:
    """The arrays of a microbatch between operations; of several where one call runs them.

    Attributes:
        arguments: For each part its other variables, the numbers of step and microbatch, and its
            arrays of the batch.
        top: The last part whose backward has not run.
        on_host: None where a chain offloads nothing.
        inputs: By part, the values that cross into it, where they are kept.
        saved: By part, its residuals.
        grads: By value, the gradient so far.
        waiting: By part, its parameters' gradients, where all parts are clipped together; the last
            part's with the changes of other variables.
    """

    arguments: list[Any]
    top: int
    on_host: _OnHost | None
    inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=lambda: {0: {}})
    saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    grads: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    waiting: dict[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether any array still waits for an operation."""
        away = self.on_host is not None and bool(self.on_host.inputs or self.on_host.saved)
        return away or bool(self.inputs or self.saved or self.grads or self.waiting)

    def has_residuals(self, i: int) -> bool:
        """Whether a part's residuals are kept, on the device or on the host."""
        return i in self.saved or (self.on_host is not None and i in self.on_host.saved)


@dataclasses.dataclass
class Running:
    """The arrays of a step between operations.

    Attributes:
        params: For each part its parameters, and the first rows of the stacked ones.
        aux: For each part its other variables.
        scales: For each part the scales of its sums.
        values: The limbs of the sums of each pack; None where there are none.
        peaks: For each part the largest magnitudes.
        small_MS: See `DeviceSums`.
        tick: An array that is ready with the last microbatch's loss; None: there was no microbatch.
        microbatches: The microbatches that begin together; see `LayerwiseStep`.
    """

    step: int
    params: list[Any]
    aux: list[list[jax.Array]]
    scales: list[jax.Array]
    values: list[Any]
    peaks: list[jax.Array]
    small_MS: jax.Array
    words: list[jax.Array]
    tick: jax.Array | None = None
    microbatches: list[_Microbatch] = dataclasses.field(default_factory=list)


class StepInputs(NamedTuple):
    """Inputs of a step's programs beside its microbatches; `exponents` are int32[T]."""

    params: Sequence[jax.Array]
    aux: Sequence[jax.Array]
    exponents: jax.Array
    step: int


class ChainRunner:
    """Runs the operations of a chain on the devices of a replica.

    Args:
        parts: The parts of `spec` for the platform of the devices.
        by_part: Whether sums exist only while their part runs; see `LayerwiseStep`.
    """

    unit = 1  # it takes any number of microbatches

    def __init__(
        self,
        spec: ChainSpec,
        parts: ChainParts,
        sequence: SegmentSequence,
        replica: Replica,
        by_part: bool = False,
    ):
        self._spec, self.sequence, self._replica = spec, sequence, replica
        self._stash = Stash(replica) if sequence.offloads else None
        self._parts = parts.each
        self._crossing = crossing_values([part.stage.part for part in self._parts])
        self._batch_specs = spec.batch_specs()
        self._programs = programs = SegmentPrograms(spec, parts, replica, by_part)
        self.names, self.lower, self.adopt = programs.names, programs.lower, programs.adopt
        self._executors: Executors | None = None

    @property
    def text(self) -> str:
        """The traced loss, compared where processes compile unlike programs; else empty."""
        uneven = self._spec.uneven
        if uneven is None or self._replica.only_place is None:
            return ""
        return str(self._spec.graph.program)

    @property
    def whole_text(self) -> str:
        """The optimized program of a microbatch; empty where there are several."""
        if not self._spec.is_whole:
            return ""
        return self._programs.of(0)["loss"].as_text() or ""

    # -- inside a program of a whole step --------------------------------------------------------

    @property
    def is_one_program(self) -> bool:
        """Whether one program is the whole sequence of a microbatch."""
        return self._spec.is_whole and self.sequence.written == ONE_PROGRAM

    def traced(self, params: Any, aux: Any, sums: DeviceSums, *more: Any) -> DeviceSums:
        """The sums that this program returns; see `microbatch.whole_program`."""
        [part] = self._parts
        sums, _, _ = self._programs.whole(params, part.starts, [], aux, sums, *more)
        return sums

    @property
    def sums_shapes(self) -> DeviceSums:
        """Shapes of the sums."""
        return self._programs.sums_shapes

    def numbers_and_batch_shapes(self) -> tuple[np.ndarray, list[Any]]:
        """Shapes of `numbers_and_batch`."""
        spec = self._spec
        batch = map(self._replica.like, spec.batch_shapes(), spec.batch_specs())
        return np.zeros(3 if spec.per_call == 1 else 4, np.int32), list(batch)

    def numbers_and_batch(
        self, step: int, ids: range, batches: Sequence[PyTree]
    ) -> tuple[np.ndarray, list[Any]]:
        """The numbers and arrays of a step's only call, whose sums begin anew."""
        work = list(zip(ids, batches, strict=True))
        return self._numbers_and_batch(step, work, goes_on=False)

    # -- running ---------------------------------------------------------------------------------

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        return self._programs.zeros()  # type: ignore[no-any-return]

    def run(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        sums: DeviceSums | None,
        exponents: jax.Array,
        step: int,
        ids: range,
        batches: Sequence[PyTree],
    ) -> tuple[DeviceSums, jax.Array]:
        """Run a step's microbatches.

        Args:
            sums: Sums of the step before, whose memory is reused; None: the first step.
            exponents: Scales, int32[T].
            ids: Numbers of the microbatches, at least one.

        Returns:
            The sums of these microbatches, and a small array to wait on.
        """
        inputs = StepInputs(params, aux, exponents, step)
        calls = self._calls(ids, batches)
        if self._executors is not None:
            in_turn = functools.partial(self._in_turn, inputs, waits=True)
            return self._executors.run(in_turn, sums, calls)
        sums, tick = self._in_turn(inputs, sums, calls, waits=False)
        assert tick is not None
        return sums, tick

    def _calls(self, ids: Sequence[int], batches: Sequence[PyTree]) -> list[Any]:
        """The microbatches of each call."""
        work, num = list(zip(ids, batches, strict=True)), self._spec.per_call
        if self._executors is not None:
            num = min(num, self._executors.fair_share(len(work)))
        return [work[k : k + num] for k in range(0, len(work), num)]

    def _in_turn(
        self, inputs: StepInputs, sums: DeviceSums | None, calls: Calls, *, waits: bool
    ) -> tuple[DeviceSums, jax.Array | None]:
        """One call after another.

        Args:
            waits: Whether each call ends before the next begins.
        """
        if self.sequence.written == ONE_PROGRAM:
            return self._one_program(inputs, sums, calls, waits=waits)
        running = self.begin(inputs, sums)
        for some in calls:
            microbatch = self.microbatch(running, some, goes_on=running.tick is not None)
            for op in self.sequence.operations:
                self._operate(running, microbatch, op)
            assert not microbatch.waits
            if waits:
                jax.block_until_ready(running.peaks)
        return self.end(running)

    def _one_program(
        self,
        inputs: StepInputs,
        sums: DeviceSums | None,
        calls: Calls,
        *,
        waits: bool,
    ) -> tuple[DeviceSums, jax.Array | None]:
        """`_in_turn` where one program is the whole sequence, perhaps of several microbatches."""
        program, [part] = self._programs.of(0)["loss"], self._parts
        read: list[Any] = [inputs.params, part.starts, [], inputs.aux]
        sums, tick = sums or self.empty(), None
        for some in calls:
            where, batch = self._numbers_and_batch(inputs.step, some, goes_on=tick is not None)
            sums, tick, _ = program(*read, sums, inputs.exponents, where, batch)
            if waits:
                jax.block_until_ready(tick)
        return sums, tick

    def begin(self, inputs: StepInputs, sums: DeviceSums | None = None) -> Running:
        """The arrays with which a step begins; see `run`."""
        params, aux, exponents, step = inputs
        sums = sums or self.empty()
        values: list[Any] = list(sums.values) or [None] * len(self._spec.packs)
        shared = self._programs.shared
        scales, peaks, zeros = self._programs.begin(exponents, sums, [values[k] for k in shared])
        for k, x in zip(shared, zeros, strict=True):
            values[k] = x
        return Running(
            step=step,
            params=[([params[p] for p in part.params], part.starts) for part in self._parts],
            aux=[[aux[k] for k in part.aux] for part in self._parts],
            scales=scales,
            values=values,
            peaks=peaks,
            small_MS=sums.small_MS,
            words=sums.words,
        )

    def microbatch(
        self, running: Running, some: Sequence[tuple[int, PyTree]], *, goes_on: bool
    ) -> _Microbatch:
        """The microbatch, or microbatches, of one call.

        Args:
            some: Consecutive numbers, each with its batch.
            goes_on: Whether sums go on, or begin anew.
        """
        numbers, leaves = self._numbers_and_batch(running.step, some, goes_on=goes_on)
        is_whole = self._spec.is_whole
        arguments = [
            (aux, numbers, leaves if is_whole else [leaves[k] for k in part.batch])
            for part, aux in zip(self._parts, running.aux, strict=True)
        ]
        on_host = None if self._stash is None else _OnHost()
        return _Microbatch(arguments, len(self._parts) - 1, on_host)

    def _numbers_and_batch(
        self, step: int, some: Sequence[tuple[int, PyTree]], *, goes_on: bool
    ) -> tuple[np.ndarray, list[Any]]:
        """The numbers that a call reads (step, microbatch, ...), and its arrays of the batch."""
        where = [step, some[0][0], int(goes_on)]
        if self._spec.per_call > 1:
            where.append(len(some))
        leaves = self._spec.batch_of([batch for _, batch in some])
        if self._replica.axes:  # a program of one device takes host arrays itself
            leaves = self._replica.put_tree(leaves, self._batch_specs)
        return np.array(where, np.int32), leaves

    def end(self, running: Running) -> tuple[DeviceSums, jax.Array | None]:
        """The results of `run`, after all operations of all microbatches."""
        assert not any(microbatch.waits for microbatch in running.microbatches)
        self.wait()
        peaks_T = self._programs.end(running.peaks)
        values = [x for x in running.values if x is not None]
        sums = DeviceSums(running.small_MS, peaks_T, values, running.words)
        # In a chain of several parts the first one's backward is the last to run.
        last = running.tick if self._spec.is_whole else peaks_T
        return sums, None if running.tick is None else last

    # -- part by part ----------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Parts of the chain."""
        return len(self._parts)

    def params_of(self, i: int) -> tuple[int, ...]:
        """Places of the parameters that a part reads."""
        return self._parts[i].params

    def low_params_of(self, i: int) -> dict[int, str]:
        """Those read in a dtype of 16 bits only, with the dtype."""
        return low_params(self._spec.graph, self._spec.parts[i].segment)

    def begin_microbatches(
        self, running: Running, ids: Sequence[int], batches: Sequence[PyTree]
    ) -> None:
        """All microbatches of a step, which begin together."""
        calls = enumerate(self._calls(ids, batches))
        running.microbatches = [self.microbatch(running, some, goes_on=n > 0) for n, some in calls]

    def set_params(self, running: Running, i: int, params: Mapping[int, jax.Array]) -> None:
        """Replace the parameters of a part, by their places; an empty mapping frees them."""
        arrays = [params.get(p) for p in self._parts[i].params]
        running.params[i] = arrays, self._parts[i].starts

    def make_sums(self, running: Running, i: int) -> None:
        """Zeros for the sums that begin with a part."""
        packs = self._programs.first_packs[i]
        if packs:
            for k, x in zip(packs, self._programs.fresh(i), strict=True):
                running.values[k] = x

    def mark(
        self, running: Running, i: int, is_backward: bool, last: _Microbatch
    ) -> jax.Array | None:
        """A small array that is ready when the last run of a part is done; None: it did not run.

        Args:
            last: The last microbatch of the part's run.
        """
        if is_backward:
            return running.peaks[i]
        return next(iter(last.inputs.get(i + 1, {}).values()), None)

    def wait(self) -> None:
        """Wait until no transfer to or from the host is under way."""
        if self._stash is not None:
            self._stash.wait()

    # -- an operation ----------------------------------------------------------------------------

    def run_each(
        self,
        running: Running,
        microbatches: Sequence[_Microbatch],
        operations: Sequence[SegmentOperation],
    ) -> None:
        """Operations for one microbatch after another.

        The leading fetches of a microbatch overlap with the microbatch before.
        """
        rest = list(itertools.dropwhile(lambda op: op.kind == FETCH, operations))
        fetches = operations[: len(operations) - len(rest)]
        for op in fetches if microbatches else ():
            self._operate(running, microbatches[0], op)
        for k, microbatch in enumerate(microbatches):
            for coming in microbatches[k + 1 : k + 2]:
                for op in fetches:
                    self._operate(running, coming, op)
            for op in rest:
                self._operate(running, microbatch, op)

    def _operate(self, running: Running, microbatch: _Microbatch, op: SegmentOperation) -> None:
        """Run an operation of a microbatch; waits only for another microbatch's transfers."""
        if op.kind in (OFFLOAD, FETCH):
            (self._offload if op.kind == OFFLOAD else self._fetch)(microbatch, op)
            return
        run = self._forward if op.kind == FORWARD else self._backward
        run(running, microbatch, op)

    def _offload(self, microbatch: _Microbatch, op: SegmentOperation) -> None:
        assert self._stash is not None
        assert microbatch.on_host is not None
        i, host = op.segment, microbatch.on_host
        if i in microbatch.inputs:
            values, arrays = list(microbatch.inputs[i]), list(microbatch.inputs.pop(i).values())
            moved = self._stash.offload(values, arrays, host.known)
            host.inputs[i] = dict(zip(values, moved, strict=True))
        if op.residuals:
            of_values = self._parts[i].stage.residual_values
            host.saved[i] = self._stash.offload(of_values, microbatch.saved.pop(i), host.known)

    def _fetch(self, microbatch: _Microbatch, op: SegmentOperation) -> None:
        assert self._stash is not None
        assert microbatch.on_host is not None
        i, host = op.segment, microbatch.on_host
        if i in host.inputs:
            values, arrays = list(host.inputs[i]), list(host.inputs[i].values())
            moved = self._stash.fetch(values, arrays, host.fetched)
            microbatch.inputs[i] = dict(zip(values, moved, strict=True))
        if op.residuals:
            of_values = self._parts[i].stage.residual_values
            microbatch.saved[i] = self._stash.fetch(of_values, host.saved[i], host.fetched)

    def _forward(self, running: Running, microbatch: _Microbatch, op: SegmentOperation) -> None:
        i, part, inputs = op.segment, self._parts[op.segment], microbatch.inputs
        before = inputs[i] if op.keeps_input else inputs.pop(i)
        read = [before[v] for v in part.stage.part.inputs]
        program = self._programs.of(i)["forward"]
        made, kept = program(*running.params[i], read, *microbatch.arguments[i])
        if op.residuals:
            microbatch.saved[i] = part.stage.all_residuals(read, made, kept)
        if i < microbatch.top and not microbatch.has_residuals(i + 1):
            after = before | dict(zip(part.stage.part.outputs, made, strict=True))
            inputs[i + 1] = {v: after[v] for v in self._crossing[i + 1]}

    def _backward(self, running: Running, microbatch: _Microbatch, op: SegmentOperation) -> None:
        i, part = op.segment, self._parts[op.segment]
        microbatch.top = i - 1
        before = microbatch.inputs.pop(i, {})
        if microbatch.on_host is not None:
            microbatch.on_host.inputs.pop(i, None)
            microbatch.on_host.saved.pop(i, None)
        if self._spec.joins_at_end:
            self._keep_gradients(running, microbatch, i, before)
            return
        aux, where, batch = microbatch.arguments[i]
        limbs = [running.values[k] for k in part.packs]
        peaks, scales = running.peaks[i], running.scales[i]
        if part.is_last:
            read = [before[v] for v in part.stage.part.inputs]
            sums = DeviceSums(running.small_MS, peaks, limbs, running.words)
            sums, running.tick, input_grads = self._programs.of(i)["loss"](
                *running.params[i], read, aux, sums, scales, where, batch
            )
            running.small_MS, running.peaks[i], limbs, running.words = sums
        else:
            grads = [microbatch.grads.pop(v) for v in part.stage.below_floats]
            late = [microbatch.grads.pop(v) for v in part.pending]
            saved = microbatch.saved.pop(i)
            limbs, running.peaks[i], input_grads = self._programs.of(i)["backward"](
                *running.params[i], saved, aux, limbs, peaks, scales, where, batch, grads, late
            )
        microbatch.grads.update(zip(part.floats, input_grads, strict=True))
        for k, x in zip(part.packs, limbs, strict=True):
            running.values[k] = x

    def _keep_gradients(
        self, running: Running, microbatch: _Microbatch, i: int, before: Mapping[int, jax.Array]
    ) -> None:
        """`_backward` whose gradients wait; after that of the first part all join the sums."""
        part, (aux, where, batch) = self._parts[i], microbatch.arguments[i]
        if part.is_last:
            read = [before[v] for v in part.stage.part.inputs]
            small = DeviceSums(running.small_MS, running.peaks[0], [], running.words)
            small, running.tick, input_grads, grads, deltas = self._programs.of(i)["loss"](
                *running.params[i], read, aux, small, where, batch
            )
            running.small_MS, running.peaks[0], _, running.words = small
            microbatch.waiting[i] = grads, deltas
        else:
            below = [microbatch.grads.pop(v) for v in part.stage.below_floats]
            late = [microbatch.grads.pop(v) for v in part.pending]
            saved = microbatch.saved.pop(i)
            grads, input_grads = self._programs.of(i)["backward"](
                *running.params[i], saved, aux, where, batch, below, late
            )
            microbatch.waiting[i] = grads, []
        microbatch.grads.update(zip(part.floats, input_grads, strict=True))
        if i == 0:
            each = [microbatch.waiting.pop(k) for k in range(len(self._parts))]
            running.values, running.peaks[0] = self._programs.clip(
                running.values,
                running.peaks[0],
                running.scales[0],
                where,
                running.tick,
                [grads for grads, _ in each],
                each[-1][1],
            )

    # -- several at once -------------------------------------------------------------------------

    def use_executors(self, num: int, *, keeps: bool) -> None:
        """Run so many microbatches at once from now on.

        Args:
            num: Executors; 1: one microbatch after another.
            keeps: Whether each one's sums stay from step to step.
        """
        like = self._programs.sums_shapes
        executors = None if num == 1 else Executors(self._spec.tensors, num, like, keeps)
        self._executors = executors

    @property
    def per_call(self) -> int:
        """The most microbatches of a call."""
        return self._spec.per_call

    @property
    def num_executors(self) -> int:
        """How many microbatches run at once."""
        return 1 if self._executors is None else self._executors.num

    # -- bytes -----------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes of a device's further executors between steps, beside the sums."""
        return (self.num_executors - 1) * tree_bytes(self._programs.sums_shapes)

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches."""
        waiting = tree_bytes(self._spec.batch_shapes()) if self._spec.per_call > 1 else 0
        costs = self.costs()
        each = replay_sequence(self.sequence, costs).copying_peak_bytes
        if self._spec.joins_at_end:
            gradients = sum(cost.parameter_gradient_bytes for cost in costs)
            each = max(each, gradients + temporary_bytes(self._programs.clip))
        return sums_bytes + self.num_executors * each + waiting

    def costs(self) -> list[SegmentCost]:
        """Memory and time of each part's programs, once they are compiled."""
        places = range(self.num_parts)
        return segment_costs(
            self._spec.sharded,
            [part.stage for part in self._parts],
            list(map(self._programs.temporary_bytes, places)),
            residuals=list(map(self._programs.residual_bytes, places)),
            keeps_gradients=self._spec.joins_at_end,
        )

    def sums_bytes(self) -> list[int]:
        """For each part the bytes of the sums that begin with its backward, if `by_part`."""
        return self._programs.sums_bytes()
