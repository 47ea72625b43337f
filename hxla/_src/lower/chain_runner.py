"""Runs the microbatches of a replica as a chain: the programs of its parts, one after another.

Each part has a forward and a backward; the last has both in one program, so a chain of one part is
a microbatch as one program. A list of operations orders them and says which residuals are kept. It
moves no bit, for the programs are the same. Identical parts share their programs.

Legend of shape suffixes: M microbatches of a step, T float tensors.

Several microbatches run at once, on executors with separate sums. Each executor is a thread that
takes the next call as soon as it has done one. Sums are of integers, so no bit depends on which
executor ran a microbatch, or on the order.
"""

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.types import PyTree
from ..graph.segments import low_params
from ..model.functional import tree_bytes
from ..plan.parts import ONE_PROGRAM
from ..schedule.segment_sequence import SegmentCost, SegmentSequence, replay_sequence
from .chain_operations import ChainOperations, MicrobatchArrays, Running
from .chain_spec import ChainSpec
from .contribution import DeviceSums, Tensors, joined_words
from .offload import Stash
from .replica import Replica
from .segment_programs import ChainParts, SegmentPrograms, segment_costs, temporary_bytes

#: For each call its microbatches: consecutive numbers, each with its batch.
Calls = Iterable[Sequence[tuple[int, Any]]]
#: `(sums, calls) -> (sums, tick)`; no tick where there was no call.
RunCalls = Callable[[DeviceSums | None, Calls], tuple[DeviceSums, jax.Array | None]]

_CALLS_OF_EACH = 4  # of an executor in a step: a slow one takes fewer


class Executors:
    """The executors of one device.

    Args:
        like: Shapes and shardings of a replica's sums.
        keeps: Whether the sums of executors stay in memory from step to step.
    """

    def __init__(
        self,
        tensors: Tensors,
        num: int,
        like: DeviceSums,
        keeps: bool,
    ):
        self.num, self._keeps = num, keeps
        self._more: list[DeviceSums | None] = [None] * (num - 1)
        merged = functools.partial(_merged, tensors)
        self._merge = jax.jit(merged, donate_argnums=0).lower(like, like).compile()

    def fair_share(self, num_microbatches: int) -> int:
        """The microbatches of a call, so that no executor waits long for the last one."""
        return -(-num_microbatches // (_CALLS_OF_EACH * self.num))

    def run(
        self, run_calls: RunCalls, sums: DeviceSums | None, calls: Sequence[Any]
    ) -> tuple[DeviceSums, jax.Array]:
        """Run calls on all executors.

        Args:
            sums: The first executor's sums of the step before, whose memory is reused.

        Returns:
            The sums of all executors, and a small array to wait on.
        """
        items, lock = iter(calls), threading.Lock()
        kept = [sums, *self._more][: len(calls)]

        def taken() -> Iterator[Any]:
            while True:
                with lock:
                    item = next(items, None)
                if item is None:
                    return
                yield item

        def execute(sums: DeviceSums | None) -> tuple[DeviceSums, jax.Array | None]:
            return run_calls(sums, taken())

        with concurrent.futures.ThreadPoolExecutor(len(kept)) as pool:
            ended = list(pool.map(execute, kept))
        ended.sort(key=lambda pair: pair[1] is None)  # executors without a call come last
        (total, tick), *others = ended
        assert tick is not None
        for more, is_used in others:
            if is_used is not None:
                total, tick = self._merge(total, more)
        if self._keeps:
            self._more = [more for more, _ in others]
            self._more += [None] * (self.num - 1 - len(others))
        return total, tick


def _merged(tensors: Tensors, a: DeviceSums, b: DeviceSums) -> tuple[DeviceSums, jax.Array]:
    """The sum of two executors' sums, by the rules of the all-reduce, and an array to wait on."""
    small = a.small_MS + b.small_MS
    total = DeviceSums(
        small,
        jnp.maximum(a.peaks_T, b.peaks_T),
        jax.tree.map(jnp.add, a.values, b.values),
        joined_words(tensors, a.words, b.words),
    )
    return total, small[0, 0]


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
        self._parts, self._batch_specs = parts.each, spec.batch_specs()
        self._programs = programs = SegmentPrograms(spec, parts, replica, by_part)
        self.names, self.lower, self.adopt = programs.names, programs.lower, programs.adopt
        stash = Stash(replica) if sequence.offloads else None
        self._operations = ChainOperations(spec, self._parts, programs, stash)
        self.run_each, self.wait = self._operations.run_each, self._operations.wait
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
