"""A step segment by segment: in each, all microbatches of a device one after another.

What copies of the model share out then travels once for a segment, however many microbatches there
are, and however unequal their counts: the parameters before the segment runs, if each copy has a
share of them, and the sums of its gradients as soon as they are whole. The programs of microbatches
are those of a chain, so no bit differs from one.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
    Lamy-Poirier, "Layered gradient accumulation and modular pipeline parallelism", 2021, section 3.
"""

import queue
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from .._core._types import PyTree
from .._schedule._schedules import BACKWARD
from .._schedule._segment_sequence import SegmentSequence
from .._schedule._sequence_replay import layered_peak_bytes, runs_by_segment
from ._contribution import DeviceSums
from ._segmented import Running, Segmented
from ._sharded_params import ShardedParams
from ._store import Held
from ._sum import Reducer

#: Pairs of arrays: what a device begins with, and what is there when it is done; None at the end.
Spans = queue.SimpleQueue


class Layered:
    """Runs the microbatches of all local copies.

    Args:
        sequence: What runs for a microbatch.
        runners: Of the local copies.
        reducer: The sums over all copies, one group of packs for each of `groups`.
        groups: For each part the packs whose sums are whole after its backward.
        trained: Places of the parameters that are trained.
        sharded: Gathers the parameters of each part; None: all copies have them.
    """

    def __init__(
        self,
        sequence: SegmentSequence,
        runners: Sequence[Segmented],
        reducer: Reducer,
        groups: Sequence[Sequence[int]],
        trained: Sequence[int],
        sharded: ShardedParams | None,
    ):
        self._runs = runs_by_segment(sequence)
        self._sequence, self._runners, self._reducer = sequence, list(runners), reducer
        self._groups, self._trained, self._sharded = groups, tuple(trained), sharded
        order = [i for i in reversed(range(len(groups))) if groups[i]]
        self._number = {part: k for k, part in enumerate(order)}
        self._under_way: Any = None
        self._marks: list[jax.Array] = []  # of what runs

    def run(
        self,
        held: Sequence[Held],
        exponents: Sequence[jax.Array],
        step: int,
        ids: Sequence[Sequence[int]],
        batches: Sequence[Sequence[PyTree]],
        spans: Sequence["Spans[Any]"],
    ) -> tuple[list[DeviceSums], list[list[jax.Array]]]:
        """Run a step's microbatches; every process calls this, also where it has none.

        Args:
            held: Arrays of each local copy.
            exponents: Scales on each.
            step: Number of the step.
            ids: Numbers of its microbatches.
            batches: Their arrays.
            spans: What each copy works on is put there.

        Returns:
            For each local copy its sums without those of groups, and the totals of these.
        """
        running = [
            runner.begin(own.params, own.aux, None, scales, step, numbers, arrays)
            for runner, own, scales, numbers, arrays in zip(
                self._runners, held, exponents, ids, batches, strict=True
            )
        ]
        self._marks = []
        pieces = [[own.params[p] for p in self._trained] for own in held]
        totals: list[list[jax.Array]] = [[] for _ in held]
        for part, operations in self._runs:
            is_backward = any(op.kind == BACKWARD for op in operations)
            begun = self._give(part, held, running, pieces)
            for runner, own, begins, told in zip(self._runners, running, begun, spans, strict=True):
                if is_backward:
                    runner.make_sums(own, part)
                for n in range(len(own.microbatches)):
                    for op in operations:
                        runner.operate(own, n, op)
                mark = runner.mark(own, part, is_backward)
                if mark is not None:
                    told.put((begins, mark))
                    self._marks.append(mark)
                if self._sharded is not None:
                    runner.hold(own, part, {})
            if is_backward and part in self._number:
                for own_totals, new in zip(totals, self._summed(part, running), strict=True):
                    own_totals += new
        ends = [runner.end(own) for runner, own in zip(self._runners, running, strict=True)]
        return [sums for sums, _ in ends], totals

    def _give(
        self,
        part: int,
        held: Sequence[Held],
        running: Sequence[Running],
        pieces: Sequence[Sequence[jax.Array]],
    ) -> list[Any]:
        """Gather the parameters of a part; returns what each local copy waits for."""
        # Programs wait in a queue with their arguments: no more than one part's may be whole.
        jax.block_until_ready(self._marks)
        self._marks = []
        if self._sharded is None:
            return [self._under_way] * len(held)
        self.wait()
        gathered = self._sharded.gather(part, pieces)
        for runner, own, arrays, found in zip(self._runners, running, held, gathered, strict=True):
            whole = {p: arrays.params[p] for p in runner.params_of(part)}
            whole |= {self._trained[t]: x for t, x in found.items()}
            runner.hold(own, part, whole)
        self._under_way = [_smallest(found.values()) for found in gathered]
        return self._under_way

    def _summed(self, part: int, running: Sequence[Running]) -> list[list[jax.Array]]:
        """The totals of a part's sums, which are given up."""
        self.wait()
        packs = self._groups[part]
        values = [[own.values[k] for k in packs] for own in running]
        for own in running:
            for k in packs:
                own.values[k] = None
        self._under_way = totals = self._reducer.sum_group(self._number[part], values)
        return totals

    def wait(self) -> None:
        """Until the last collective is done: Gloo mixes up those that wait for nothing."""
        if self._reducer.arrays.is_ring:
            jax.block_until_ready(self._under_way)

    def whole(self, held: Sequence[Held]) -> list[list[jax.Array]]:
        """All parameters whole on each local copy; every process calls this."""
        found = [list(own.params) for own in held]
        if self._sharded is None:
            return found
        pieces = [[own.params[p] for p in self._trained] for own in held]
        for g in range(self._sharded.num_groups):
            self.wait()
            gathered = self._sharded.gather(g, pieces)
            self._under_way = [_smallest(own.values()) for own in gathered]
            for params, own in zip(found, gathered, strict=True):
                for t, x in own.items():
                    params[self._trained[t]] = x
        return found

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state and totals while it runs microbatches.

        Args:
            num: Microbatches of a step.
        """
        runner, summing = self._runners[0], self._reducer.memory_bytes()
        gathered = [0] * len(self._groups)
        if self._sharded is not None:
            gathered = [self._sharded.num_bytes(i) for i in range(len(self._groups))]
        # What was gathered is let go before the sums over all copies.
        own = [runner.sums_bytes(i) + max(n, summing) for i, n in enumerate(gathered)]
        return layered_peak_bytes(self._sequence, runner.costs(), max(num, 1), own)


def _smallest(arrays: Iterable[jax.Array]) -> jax.Array | None:
    """One of what a program makes, all of which is there at once; whoever holds it holds little."""
    return min(arrays, key=lambda x: x.size, default=None)


def group_packs(last_packs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The groups of a reducer: the packs of each part that has some, the last part first."""
    return [list(packs) for packs in reversed(last_packs) if packs]
