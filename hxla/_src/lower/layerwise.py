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

import itertools
import queue
from collections.abc import Sequence
from typing import Any

import jax

from ..core.types import PyTree
from ..plan.parts import Placement
from ..schedule.schedules import BACKWARD
from ..schedule.segment_sequence import (
    FETCH,
    RunBytes,
    SegmentOperation,
    SegmentSequence,
    layered_peak_bytes,
    runs_by_segment,
)
from .contribution import DeviceSums, buckets
from .replica import ReplicaArrays
from .segmented import Running, Segmented
from .sharded_params import GroupCollectives, ShardedParams
from .sum import Reducer

#: Pairs: what a device begins with, or the clock's seconds at which it begins; and what is there
#: when it is done. None at the end.
Spans = queue.SimpleQueue


class LayerwiseStep:
    """Runs the microbatches of all local copies.

    Args:
        sequence: What runs for a microbatch.
        reducer: The sums over all copies, with these groups.
        groups: See `sum_groups`.
        trained: Places of the parameters that are trained.
        sharded: Gathers the parameters of each part; None: all copies have them.
        placement: Of the plan: in how many waves each copy runs its microbatches, the same for each
            process whatever its counts, and where its own part of the parameters waits.
    """

    def __init__(
        self,
        sequence: SegmentSequence,
        runners: Sequence[Segmented],
        reducer: Reducer,
        groups: Sequence[tuple[int, Sequence[int]]],
        trained: Sequence[int],
        sharded: ShardedParams | None,
        placement: Placement,
    ):
        self._runs = runs_by_segment(sequence)
        self._sequence, self._runners, self._reducer = sequence, list(runners), reducer
        self._groups, self._sharded = groups, sharded
        self._collectives = GroupCollectives(reducer, sharded, trained)
        self.wait, self.whole = self._collectives.wait, self._collectives.whole
        parts = {part for part, _ in groups}
        #: For each part the numbers of the groups whose sums are whole after its backward.
        self._numbers = {p: [k for k, (i, _) in enumerate(groups) if i == p] for p in parts}
        self._num_waves, self._is_away = placement.waves, placement.parameters == "host"
        self._marks: list[jax.Array] = []  # of what runs

    def run(
        self,
        held: Sequence[ReplicaArrays],
        exponents: Sequence[jax.Array],
        step: int,
        ids: Sequence[Sequence[int]],
        batches: Sequence[Sequence[PyTree]],
        spans: Sequence["Spans[Any]"],
    ) -> tuple[list[DeviceSums], list[list[jax.Array]]]:
        """Run a step's microbatches; every process calls this, also where it has none.

        Args:
            held: Arrays of each local copy.
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
        pieces = self._collectives.pieces(held)
        totals: list[list[jax.Array]] = [[] for _ in held]
        waiting: dict[int, Any] = {}  # the sums of earlier waves
        runs = list(itertools.product(range(self._num_waves), self._runs))
        for k, (wave, (part, operations)) in enumerate(runs):
            is_backward = any(op.kind == BACKWARD for op in operations)
            begun = self._give(part, held, running, pieces)
            if self._sharded is not None and k + 1 < len(runs):
                self._sharded.fetch(runs[k + 1][1][0], pieces)
            for runner, own, begins, told in zip(self._runners, running, begun, spans, strict=True):
                if is_backward:
                    runner.make_sums(own, part)
                microbatches = self._of_wave(wave, len(own.microbatches))
                _operate(runner, own, microbatches, operations)
                mark = None
                if microbatches:
                    mark = runner.mark(own, part, is_backward, microbatches[-1])
                if mark is not None:
                    told.put((begins, mark))
                    self._marks.append(mark)
                if self._sharded is not None:
                    runner.hold(own, part, {})
            for g in self._numbers.get(part, ()) if is_backward else ():
                # No name may hold what is taken: it would be there while the next part runs.
                before = waiting.pop(g, None)
                if wave + 1 < self._num_waves:
                    waiting[g] = self._collectives.add_group(g, self._taken(g, running), before)
                else:
                    self._collectives.sum_group(g, self._taken(g, running), totals, before)
        ends = [runner.end(own) for runner, own in zip(self._runners, running, strict=True)]
        return [sums for sums, _ in ends], totals

    def _give(
        self,
        part: int,
        held: Sequence[ReplicaArrays],
        running: Sequence[Running],
        pieces: Sequence[Sequence[jax.Array]],
    ) -> list[Any]:
        """Gather the parameters of a part; returns what each local copy waits for."""
        # Programs wait in a queue with their arguments: no more than one part's may be whole.
        jax.block_until_ready(self._marks)
        self._marks = []
        for runner in self._runners:
            runner.wait()
        if self._sharded is None:
            return [self._collectives.under_way] * len(held)
        gathered = self._collectives.gather(part, pieces)
        for runner, own, arrays, found in zip(self._runners, running, held, gathered, strict=True):
            whole = {p: arrays.params[p] for p in runner.params_of(part)}
            runner.hold(own, part, whole | found)
        return self._collectives.under_way  # type: ignore[no-any-return]

    def _of_wave(self, wave: int, num: int) -> range:
        """Places of the microbatches of a wave, of so many of a copy."""
        return range(num * wave // self._num_waves, num * (wave + 1) // self._num_waves)

    def _taken(self, k: int, running: Sequence[Running]) -> list[list[Any]]:
        """The sums of a group, which are given up."""
        _, packs = self._groups[k]
        values = [[own.values[k] for k in packs] for own in running]
        for own in running:
            for k in packs:
                own.values[k] = None
        return values

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state until it has all totals.

        Args:
            num: Its microbatches of a step.
        """
        costs, num = self._runners[0].costs(), max(-(-num // self._num_waves), 1)
        waves = {0, min(1, self._num_waves - 1), self._num_waves - 1}  # the others are alike
        return max(
            layered_peak_bytes(self._sequence, costs, num, self._bytes_beside(wave))
            for wave in waves
        )

    def _bytes_beside(self, wave: int) -> list[RunBytes]:
        """What is there beside the values of microbatches, run by run of a wave."""
        begun, num = self._runners[0].sums_bytes(), self._runners[0].num_parts
        whole, gathers, pieces = [0] * num, [0] * num, [0] * num
        if self._sharded is not None:
            # Of parameters on the host, the pieces of the part that is next are here.
            pieces = [self._sharded.piece_bytes(i) * self._is_away for i in range(num)]
            whole = [self._sharded.num_bytes(i) for i in range(num)]
            gathers = [self._sharded.gather_bytes(i) + pieces[i] for i in range(num)]
        groups = [self._reducer.group_bytes(k) for k in range(len(self._groups))]
        kept, is_last = (
            sum(own.waiting for own in groups) if wave else 0,
            wave + 1 == self._num_waves,
        )
        out = []
        behind = [part for part, _ in self._runs[1:]]
        behind += [self._runs[0][0]] * (not is_last)
        for (part, operations), after in itertools.zip_longest(self._runs, behind):
            coming = 0 if after is None else pieces[after]
            is_backward = any(op.kind == BACKWARD for op in operations)
            gathering, reducing = kept + gathers[part], 0
            kept += begun[part] if is_backward else 0
            running = kept + whole[part] + coming
            for k in self._numbers.get(part, ()) if is_backward else ():
                own = groups[k]
                reducing = max(reducing, kept + coming + own.adding)
                kept += (own.totals if is_last else own.waiting) - own.sums
                kept -= own.waiting if wave else 0
            out.append(RunBytes(gathering, running, reducing))
        return out


def _operate(
    runner: Segmented,
    running: Running,
    microbatches: Sequence[int],
    operations: Sequence[SegmentOperation],
) -> None:
    """Run some operations for each microbatch; what one fetches comes while that before runs."""
    rest = list(itertools.dropwhile(lambda op: op.kind == FETCH, operations))
    fetches = operations[: len(operations) - len(rest)]

    def fetch(microbatches: Sequence[int]) -> None:
        for n in microbatches:
            for op in fetches:
                runner.operate(running, n, op)

    fetch(microbatches[:1])
    for k, n in enumerate(microbatches):
        fetch(microbatches[k + 1 : k + 2])
        for op in rest:
            runner.operate(running, n, op)


def sum_groups(
    last_packs: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """The packs that are summed together: each pair is a part and packs whose sums end with it.

    The last part is the first. What travels together is no more than the largest pack of its part,
    for it takes as much memory again.

    Args:
        last_packs: For each part the packs whose sums are whole after its backward.
    """
    out: list[tuple[int, tuple[int, ...]]] = []
    for part, packs in reversed(list(enumerate(last_packs))):
        own = [sizes[k] for k in packs]
        found = buckets(own, max(own, default=0))
        out += [(part, tuple(packs[i] for i in bucket)) for bucket in found]
    return out
