"""Runs the microbatches of a replica as a chain: the programs of its parts, one after another.

Each part has a forward and a backward; the last has both in one program, so a chain of one part is
a microbatch as one program. A list of operations orders them and says which residuals are kept. It
moves no bit, for the programs are the same. Identical parts share their programs.

Legend of shape suffixes: M microbatches of a step, T float tensors.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.types import PyTree
from ..graph.segments import low_params
from ..model.functional import tree_bytes
from ..plan.parts import ONE_PROGRAM
from ..schedule.schedules import BACKWARD
from ..schedule.segment_sequence import (
    SegmentCost,
    SegmentOperation,
    SegmentSequence,
    replay_sequence,
)
from .chain_operations import ChainOperations, MicrobatchArrays, Running
from .chain_spec import ChainSpec, first_packs
from .contribution import DeviceSums
from .executors import Calls, Executors, PartExecutors, fair_share
from .offload import Stash
from .program_text import ProgramText
from .replica import Replica
from .segment_programs import ChainParts, SegmentPrograms, segment_costs, temporary_bytes


class _SumsOfPart(NamedTuple):
    """Where a step has the sums to which a part adds: see `PartExecutors`."""

    part: int
    packs: tuple[int, ...]

    def take(self, running: Running) -> DeviceSums:
        """The sums."""
        values = [running.values[k] for k in self.packs]
        return DeviceSums(running.small_MS, running.peaks[self.part], values, running.words)

    def put(self, running: Running, sums: DeviceSums) -> None:
        """Replace the sums."""
        running.small_MS, running.peaks[self.part], values, running.words = sums
        for k, x in zip(self.packs, values, strict=True):
            running.values[k] = x

    def with_sums(self, running: Running, sums: DeviceSums) -> Running:
        """The same step with other sums."""
        values, peaks = list(running.values), list(running.peaks)
        other = dataclasses.replace(running, values=values, peaks=peaks)
        self.put(other, sums)
        return other


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
    most_inputs = 1

    def __init__(
        self,
        spec: ChainSpec,
        parts: ChainParts,
        sequence: SegmentSequence,
        replica: Replica,
        by_part: bool = False,
    ):
        self._spec, self.sequence, self._replica = spec, sequence, replica
        self._parts, self._batch_specs = parts.each, spec.batch_specs()
        self._programs = programs = SegmentPrograms(
            spec, parts, replica, first_packs(spec) if by_part else ()
        )
        self.names, self.lower, self.adopt = programs.names, programs.lower, programs.adopt
        stash = Stash(replica) if sequence.offloads else None
        self._operations = ChainOperations(spec, self._parts, programs, stash)
        self.wait = self._operations.wait
        self._by_part = by_part
        self._executors: Executors | None = None
        self._part_executors: PartExecutors | None = None

    @property
    def text(self) -> str:
        """The traced loss, compared where processes compile unlike programs; else empty."""
        uneven = self._spec.uneven
        if uneven is None or self._replica.only_place is None:
            return ""
        return str(self._spec.graph.program)

    def texts(self) -> Iterator[ProgramText]:
        """The optimized programs of a microbatch in the order of parts, each before its backward.

        Parts that share a program have an entry each, for they read other parameters.
        """
        known: dict[int, str] = {}
        for i, part in enumerate(self._parts):
            for kind, program in self._programs.of(i).items():
                text = known.get(id(program))
                if text is None:
                    text = known[id(program)] = program.as_text() or ""
                yield ProgramText(
                    text=text,
                    params={f"params[{k}]": (p,) for k, p in enumerate(part.params)},
                    saved=part.stage.saved_results if kind == "backward" else {},
                )

    # -- inside a program of a whole step --------------------------------------------------------

    @property
    def is_one_program(self) -> bool:
        """Whether one program is the whole sequence of a microbatch."""
        return self._spec.is_whole and self.sequence.written == ONE_PROGRAM

    def traced(self, params: Any, aux: Any, sums: DeviceSums, *more: Any) -> DeviceSums:
        """The sums that this program returns; see `microbatch.whole_program`."""
        [part] = self._parts
        read = [params[p] for p in part.params]
        sums, _, _ = self._programs.whole(read, part.starts, [], aux, sums, *more)
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
        if self.num_executors > 1:
            num = max(min(num, fair_share(self.num_executors, len(work))), 1)
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
                self._operations.run(running, microbatch, op)
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
        params = [inputs.params[p] for p in part.params]
        read: list[Any] = [params, part.starts, [], inputs.aux]
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
    ) -> MicrobatchArrays:
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
        return self._operations.microbatch(arguments)

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
        self, running: Running, i: int, is_backward: bool, last: MicrobatchArrays
    ) -> jax.Array | None:
        """A small array that is ready when the last run of a part is done; None: it did not run.

        Args:
            last: The last microbatch of the part's run.
        """
        if is_backward:
            return running.peaks[i]
        return next(iter(last.inputs.get(i + 1, {}).values()), None)

    def run_each(
        self,
        running: Running,
        microbatches: Sequence[MicrobatchArrays],
        operations: Sequence[SegmentOperation],
    ) -> None:
        """`ChainOperations.run_each`, on executors where there are several."""
        if self._part_executors is None or len(microbatches) < 2:
            self._operations.run_each(running, microbatches, operations)
            return
        i, is_backward = operations[-1].segment, any(op.kind == BACKWARD for op in operations)

        def run(state: Running, microbatch: MicrobatchArrays) -> Any:
            for op in operations:
                self._operations.run(state, microbatch, op)
            return state.peaks[i] if is_backward else (microbatch.inputs, microbatch.saved)

        sums = _SumsOfPart(i, self._parts[i].packs) if is_backward else None
        self._part_executors.run(i, running, microbatches, run, sums)

    # -- several at once -------------------------------------------------------------------------

    def use_executors(self, num: int, *, keeps: bool) -> None:
        """Run so many microbatches at once from now on.

        Args:
            num: Executors; 1: one microbatch after another.
            keeps: Whether each one's sums stay from step to step.
        """
        tensors, like = self._spec.tensors, self._programs.sums_shapes
        self._executors = self._part_executors = None
        if num > 1 and self._by_part:
            each = list(map(self._sums_shapes_of, range(self.num_parts)))
            self._part_executors = PartExecutors(tensors, num, each, self._programs.same)
        elif num > 1:
            self._executors = Executors(tensors, num, like, keeps)

    def _sums_shapes_of(self, i: int) -> DeviceSums:
        """Shapes of the sums to which a part adds."""
        like, part = self._programs.sums_shapes, self._parts[i]
        shape = jax.ShapeDtypeStruct((len(part.tensors),), np.int32)
        peaks: Any = self._replica.like(shape)
        return like._replace(values=[like.values[k] for k in part.packs], peaks_T=peaks)

    @property
    def per_call(self) -> int:
        """The most microbatches of a call."""
        return self._spec.per_call

    @property
    def num_executors(self) -> int:
        """How many microbatches run at once."""
        executors = self._executors or self._part_executors
        return 1 if executors is None else executors.num

    # -- bytes -----------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes of a device's further executors between steps, beside the sums."""
        if self._executors is None:
            return 0
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
            per_call=self._spec.per_call,
        )

    def executor_bytes(self) -> int:
        """Bytes of each further executor while a part runs, if `by_part`."""
        sums = (tree_bytes(self._sums_shapes_of(i)) for i in range(self.num_parts))
        needs = map(self._programs.temporary_bytes, range(self.num_parts))
        return max(s + max(temporary) for s, temporary in zip(sums, needs, strict=True))

    def sums_bytes(self) -> list[int]:
        """For each part the bytes of the sums that begin with its backward, if `by_part`."""
        return self._programs.sums_bytes()
