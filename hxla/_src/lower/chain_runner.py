"""Runs the microbatches of a replica as a chain: the programs of its parts, one after another.

Each part has a forward and a backward of its own, but for the last, which has both in one: a chain
of one part is a microbatch as one program. In which order they run, and what waits in memory
meanwhile, is a list of operations: it moves no bit, for the programs are the same. Parts that
compute the same share their programs.

Legend of shape suffixes: M microbatches of a step, T float tensors.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from .executors import Executors, Work
from .offload import Known, Stash, nothing_known
from .replica import Replica
from .segment_programs import ChainParts, SegmentPrograms, crossing_values, segment_costs


@dataclasses.dataclass(slots=True)
class _OnHost:
    """What of a microbatch is in host memory.

    Attributes:
        inputs: What crosses into a part.
        saved: The residuals of a part.
        known: Of its values, what is there.
        fetched: What of them came back.
    """

    inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=dict)
    saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    known: Known = dataclasses.field(default_factory=nothing_known)
    fetched: Known = dataclasses.field(default_factory=nothing_known)


@dataclasses.dataclass(slots=True)
class _Microbatch:
    """What the operations of a microbatch read and leave; of several where a call runs them.

    Attributes:
        given: For each part what it reads of other variables, the numbers of step and microbatch,
            and what it reads of the batch.
        top: The last part whose backward has not run.
        on_host: None where a chain offloads nothing.
        inputs: What crosses into a part, where it is kept.
        saved: The residuals of a part.
        grads: Of values, as far as later parts have made them.
    """

    given: list[Any]
    top: int
    on_host: _OnHost | None
    inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=lambda: {0: {}})
    saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    grads: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether anything waits for an operation."""
        away = self.on_host is not None and bool(self.on_host.inputs or self.on_host.saved)
        return away or bool(self.inputs or self.saved or self.grads)

    def has_residuals(self, i: int) -> bool:
        """Whether those of a part wait anywhere."""
        return i in self.saved or (self.on_host is not None and i in self.on_host.saved)


@dataclasses.dataclass
class Running:
    """What the operations of a step read and leave.

    Attributes:
        own: For each part its parameters, and the first rows of those of which it reads rows.
        aux: For each part what it reads of other variables.
        scales: For each part those of its sums.
        values: The limbs of the sums of each pack; None where there are none.
        peaks: For each part the largest magnitudes.
        small_MS: See `DeviceSums`.
        tick: An array that is there when the last microbatch's loss is; None: there was none.
        microbatches: Those that begin together; see `LayerwiseStep`.
    """

    step: int
    own: list[Any]
    aux: list[list[jax.Array]]
    scales: list[jax.Array]
    values: list[Any]
    peaks: list[jax.Array]
    small_MS: jax.Array
    words: list[jax.Array]
    tick: jax.Array | None = None
    microbatches: list[_Microbatch] = dataclasses.field(default_factory=list)


class StepInputs(NamedTuple):
    """What the programs of a step read beside its microbatches; `exponents` are int32[T]."""

    params: Sequence[jax.Array]
    aux: Sequence[jax.Array]
    exponents: jax.Array
    step: int


class ChainRunner:
    """See the module.

    Args:
        parts: Made of it for the platform of the device.
        sequence: What runs for a microbatch.
        by_part: Whether sums are there only while their part runs; see `LayerwiseStep`.
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
        """What stands for the programs where processes have unlike ones: the loss; else empty."""
        uneven = self._spec.uneven
        if uneven is None or self._replica.only_place is None:
            return ""
        return str(self._spec.graph.program)

    @property
    def whole_text(self) -> str:
        """The optimized program of a microbatch; empty where it is several."""
        if not self._spec.is_whole:
            return ""
        return self._programs.of(0)["loss"].as_text() or ""

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
            sums: Those of the step before, whose memory is used again; None: there are none.
            exponents: Scales, int32[T].
            ids: Numbers of the microbatches, at least one.

        Returns:
            The sums of these microbatches, and a small array to wait on.
        """
        inputs = StepInputs(params, aux, exponents, step)
        work = zip(ids, batches, strict=True)
        if self._executors is not None:
            one_by_one = functools.partial(self._one_by_one, inputs, waits=True)
            return self._executors.run(one_by_one, sums, work, len(ids))
        sums, tick = self._one_by_one(inputs, sums, work, waits=False)
        assert tick is not None
        return sums, tick

    def _one_by_one(
        self, inputs: StepInputs, sums: DeviceSums | None, work: Work, *, waits: bool
    ) -> tuple[DeviceSums, jax.Array | None]:
        """One microbatch after another, or one call's after another's.

        Args:
            waits: Whether for each before the next begins.
        """
        work = iter(work)
        if self.sequence.written == ONE_PROGRAM:
            return self._one_program(inputs, sums, work, waits=waits)
        running = self.begin(inputs, sums)
        while some := list(itertools.islice(work, self._spec.per_call)):
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
        work: Iterator[tuple[int, PyTree]],
        *,
        waits: bool,
    ) -> tuple[DeviceSums, jax.Array | None]:
        """`_one_by_one` of the only operation, of which nothing waits: a call costs little more."""
        program, [part] = self._programs.of(0)["loss"], self._parts
        read: list[Any] = [inputs.params, part.starts, [], inputs.aux]
        sums, tick = sums or self.empty(), None
        while some := list(itertools.islice(work, self._spec.per_call)):
            where, batch = self._numbers_and_batch(inputs.step, some, goes_on=tick is not None)
            sums, tick, _ = program(*read, sums, inputs.exponents, where, batch)
            if waits:
                jax.block_until_ready(tick)
        return sums, tick

    def begin(self, inputs: StepInputs, sums: DeviceSums | None = None) -> Running:
        """What the operations of a step begin with; see `run`."""
        params, aux, exponents, step = inputs
        sums = sums or self.empty()
        values: list[Any] = list(sums.values) or [None] * len(self._spec.packs)
        shared = self._programs.shared
        scales, peaks, zeros = self._programs.begin(exponents, sums, [values[k] for k in shared])
        for k, x in zip(shared, zeros, strict=True):
            values[k] = x
        return Running(
            step=step,
            own=[([params[p] for p in part.params], part.starts) for part in self._parts],
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
        """A microbatch that begins, or those of a call.

        Args:
            some: Their numbers, which follow each other, and their batches.
            goes_on: Whether sums go on, or begin anew.
        """
        numbers, leaves = self._numbers_and_batch(running.step, some, goes_on=goes_on)
        given = [
            (aux, numbers, [leaves[k] for k in part.batch])
            for part, aux in zip(self._parts, running.aux, strict=True)
        ]
        on_host = None if self._stash is None else _OnHost()
        return _Microbatch(given, len(self._parts) - 1, on_host)

    def _numbers_and_batch(
        self, step: int, some: Sequence[tuple[int, PyTree]], *, goes_on: bool
    ) -> tuple[np.ndarray, list[Any]]:
        """What a call is told of its microbatches, and their arrays."""
        index, batch = some[0]
        where, leaves = [step, index, int(goes_on)], jax.tree.leaves(batch)
        if self._spec.per_call > 1:
            where.append(len(some))
            leaves = _stacked([batch for _, batch in some], self._spec.per_call)
        if self._replica.axes:  # a program of one device takes host arrays itself
            leaves = self._replica.put_tree(leaves, self._batch_specs)
        return np.array(where, np.int32), leaves

    def end(self, running: Running) -> tuple[DeviceSums, jax.Array | None]:
        """What `run` returns, when all operations of all microbatches have run."""
        assert not any(microbatch.waits for microbatch in running.microbatches)
        self.wait()
        peaks_T = self._programs.end(running.peaks)
        values = [x for x in running.values if x is not None]
        sums = DeviceSums(running.small_MS, peaks_T, values, running.words)
        # Of several parts the last to run is no part that makes the loss.
        last = running.tick if self._spec.is_whole else peaks_T
        return sums, None if running.tick is None else last

    # -- part by part ----------------------------------------------------------------------------

    @property
    def num_parts(self) -> int:
        """Of the chain."""
        return len(self._parts)

    def params_of(self, i: int) -> tuple[int, ...]:
        """Places of the parameters that a part reads."""
        return self._parts[i].params

    def low_params_of(self, i: int) -> dict[int, str]:
        """Those of them that it reads in a dtype of 16 bits only, with the dtype."""
        return low_params(self._spec.graph, self._spec.parts[i].segment)

    def give(self, running: Running, ids: Sequence[int], batches: Sequence[PyTree]) -> None:
        """All microbatches of a step, which begin together."""
        work = enumerate(zip(ids, batches, strict=True))
        running.microbatches = [self.microbatch(running, [one], goes_on=n > 0) for n, one in work]

    def hold(self, running: Running, i: int, params: Mapping[int, jax.Array]) -> None:
        """Give a part its parameters, by their places; none: take them away."""
        own = [params.get(p) for p in self._parts[i].params]
        running.own[i] = own, self._parts[i].starts

    def make_sums(self, running: Running, i: int) -> None:
        """Zeros for the sums that begin with a part."""
        packs = self._programs.first_packs[i]
        if packs:
            for k, x in zip(packs, self._programs.fresh(i), strict=True):
                running.values[k] = x

    def mark(
        self, running: Running, i: int, is_backward: bool, last: _Microbatch
    ) -> jax.Array | None:
        """A small array that is there when all that was asked of a part has run; None: nothing.

        Args:
            is_backward: Whether backwards ran.
            last: The last microbatch of which the part ran.
        """
        if is_backward:
            return running.peaks[i]
        return next(iter(last.inputs.get(i + 1, {}).values()), None)

    def wait(self) -> None:
        """Until no copy to or from the host is under way."""
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

        What the first of them fetch for one microbatch comes while the one before runs.
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
        """Run an operation of a microbatch; waits for nothing but copies of another."""
        if op.kind in (OFFLOAD, FETCH):
            (self._offload if op.kind == OFFLOAD else self._fetch)(microbatch, op)
            return
        run = self._forward if op.kind == FORWARD else self._backward
        run(running, microbatch, op)

    def _offload(self, own: _Microbatch, op: SegmentOperation) -> None:
        assert self._stash is not None
        assert own.on_host is not None
        i, there = op.segment, own.on_host
        if i in own.inputs:
            values, arrays = list(own.inputs[i]), list(own.inputs.pop(i).values())
            moved = self._stash.offload(values, arrays, there.known)
            there.inputs[i] = dict(zip(values, moved, strict=True))
        if op.residuals:
            of_values = self._parts[i].stage.residual_values
            there.saved[i] = self._stash.offload(of_values, own.saved.pop(i), there.known)

    def _fetch(self, own: _Microbatch, op: SegmentOperation) -> None:
        assert self._stash is not None
        assert own.on_host is not None
        i, there = op.segment, own.on_host
        if i in there.inputs:
            values, arrays = list(there.inputs[i]), list(there.inputs[i].values())
            moved = self._stash.fetch(values, arrays, there.fetched)
            own.inputs[i] = dict(zip(values, moved, strict=True))
        if op.residuals:
            of_values = self._parts[i].stage.residual_values
            own.saved[i] = self._stash.fetch(of_values, there.saved[i], there.fetched)

    def _forward(self, running: Running, own: _Microbatch, op: SegmentOperation) -> None:
        i, part, inputs = op.segment, self._parts[op.segment], own.inputs
        before = inputs[i] if op.keeps_input else inputs.pop(i)
        read = [before[v] for v in part.stage.part.inputs]
        program = self._programs.of(i)["forward"]
        made, kept = program(*running.own[i], read, *own.given[i])
        if op.residuals:
            own.saved[i] = part.stage.all_residuals(read, made, kept)
        if i < own.top and not own.has_residuals(i + 1):
            after = before | dict(zip(part.stage.part.outputs, made, strict=True))
            inputs[i + 1] = {v: after[v] for v in self._crossing[i + 1]}

    def _backward(self, running: Running, own: _Microbatch, op: SegmentOperation) -> None:
        i, part = op.segment, self._parts[op.segment]
        own.top = i - 1
        before = own.inputs.pop(i, {})
        if own.on_host is not None:
            own.on_host.inputs.pop(i, None)
            own.on_host.saved.pop(i, None)
        aux, where, batch = own.given[i]
        limbs = [running.values[k] for k in part.packs]
        peaks, scales = running.peaks[i], running.scales[i]
        if part.is_last:
            read = [before[v] for v in part.stage.part.inputs]
            sums = DeviceSums(running.small_MS, peaks, limbs, running.words)
            sums, running.tick, found = self._programs.of(i)["loss"](
                *running.own[i], read, aux, sums, scales, where, batch
            )
            running.small_MS, running.peaks[i], limbs, running.words = sums
        else:
            grads = [own.grads.pop(v) for v in part.stage.below_floats]
            late = [own.grads.pop(v) for v in part.pending]
            saved = own.saved.pop(i)
            limbs, running.peaks[i], found = self._programs.of(i)["backward"](
                *running.own[i], saved, aux, limbs, peaks, scales, where, batch, grads, late
            )
        own.grads.update(zip(part.floats, found, strict=True))
        for k, x in zip(part.packs, limbs, strict=True):
            running.values[k] = x

    # -- several at once -------------------------------------------------------------------------

    def use_executors(self, num: int, *, keeps: bool) -> None:
        """Run so many microbatches at once from now on.

        Args:
            num: Executors; 1: one microbatch after another.
            keeps: Whether the sums of each stay from step to step.
        """
        like = self._programs.sums_shapes
        own = None if num == 1 else Executors(self._spec.tensors, num, like, keeps)
        self._executors = own

    @property
    def num_together(self) -> int:
        """Microbatches whose time together says how fast one is."""
        return max(self.num_executors, self._spec.per_call)

    @property
    def num_executors(self) -> int:
        """How many microbatches run at once."""
        return 1 if self._executors is None else self._executors.num

    # -- bytes -----------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Of a device between steps, beside the sums: those of its other executors."""
        return (self.num_executors - 1) * tree_bytes(self._programs.sums_shapes)

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches."""
        waiting = tree_bytes(self._programs.batch_shapes()) if self._spec.per_call > 1 else 0
        each = replay_sequence(self.sequence, self.costs()).copying_peak_bytes
        return sums_bytes + self.num_executors * each + waiting

    def costs(self) -> list[SegmentCost]:
        """What the programs of each part take, once they are compiled."""
        places = range(self.num_parts)
        return segment_costs(
            self._spec.sharded,
            [part.stage for part in self._parts],
            list(map(self._programs.temporary_bytes, places)),
            residuals=list(map(self._programs.residual_bytes, places)),
        )

    def sums_bytes(self) -> list[int]:
        """For each part the bytes of the sums that begin with its backward, if made by part."""
        return self._programs.sums_bytes()


def _stacked(batches: Sequence[PyTree], num: int) -> list[np.ndarray]:
    """The arrays of some microbatches as those of `num`, the last of them as often as need be."""
    leaves = [jax.tree.leaves(batch) for batch in batches]
    leaves += [leaves[-1]] * (num - len(leaves))
    return [np.stack([np.asarray(x) for x in own]) for own in zip(*leaves, strict=True)]
