"""Runs a step of ZeRO 2 and 3: the instructions of `layerwise_order` for all local replicas.

The programs of microbatches are those of a chain, so no bit differs from one.
"""

import dataclasses
import queue
from collections.abc import Sequence
from typing import Any

import jax

from ..core.types import PyTree
from ..plan.parts import Placement
from ..schedule.layerwise_order import (
    ADD,
    GATHER,
    PREFETCH,
    REDUCE,
    RUN,
    StepInstruction,
    layerwise_order,
)
from ..schedule.segment_sequence import RunBytes, layered_peak_bytes
from .chain_runner import ChainRunner, Running, StepInputs
from .contribution import DeviceSums, buckets
from .replica import ReplicaArrays
from .sharded_params import GroupCollectives, ShardedParams
from .sum import Reducer

#: Pairs: what a device begins with, or the clock's seconds at which it begins; and what is there
#: when it is done. None at the end.
Spans = queue.SimpleQueue


@dataclasses.dataclass
class _Step:
    """What the instructions of a step read and leave, each a list over the local replicas.

    Attributes:
        pieces: Shards of the trained parameters.
        begun: What is there when the segment that runs has begun.
        totals: Of the groups that are added up over replicas.
        waiting: The sums of earlier waves, by group.
        marks: What is there when all that runs is done.
    """

    held: Sequence[ReplicaArrays]
    running: list[Running]
    spans: Sequence["Spans[Any]"]
    pieces: list[list[jax.Array]]
    begun: list[Any]
    totals: list[list[jax.Array]]
    waiting: dict[int, Any] = dataclasses.field(default_factory=dict)
    marks: list[jax.Array] = dataclasses.field(default_factory=list)


class LayerwiseStep:
    """Runs the microbatches of all local replicas.

    Args:
        reducer: The sums over all replicas, with these groups.
        groups: See `sum_groups`.
        trained: Places of the parameters that are trained.
        sharded: Gathers the parameters of each segment; None: all replicas have them.
        placement: Of the plan: in how many waves each replica runs its microbatches, the same for
            each process whatever its counts, and where its shard of the parameters waits.
    """

    def __init__(
        self,
        runners: Sequence[ChainRunner],
        reducer: Reducer,
        groups: Sequence[tuple[int, Sequence[int]]],
        trained: Sequence[int],
        sharded: ShardedParams | None,
        placement: Placement,
    ):
        self._runners, self._reducer, self._sharded = list(runners), reducer, sharded
        self._groups = groups
        self._collectives = GroupCollectives(reducer, sharded, trained)
        self.wait, self.whole = self._collectives.wait, self._collectives.whole
        self._num_waves, self._is_away = placement.waves, placement.parameters == "host"
        self._instructions = self._order(placement.waves)
        self._run_kind = {
            GATHER: self._gather,
            PREFETCH: self._prefetch,
            RUN: self._run_segment,
            ADD: self._add,
            REDUCE: self._reduce,
        }

    def _order(self, num_waves: int) -> tuple[StepInstruction, ...]:
        segments = [segment for segment, _ in self._groups]
        return layerwise_order(self._runners[0].sequence, segments, num_waves)

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
            held: Arrays of each local replica.
            spans: What each replica works on is put there.

        Returns:
            For each local replica its sums without those of groups, and the totals of these.
        """
        running = [
            runner.begin(StepInputs(own.params, own.aux, scales, step))
            for runner, own, scales in zip(self._runners, held, exponents, strict=True)
        ]
        for runner, own, numbers, arrays in zip(self._runners, running, ids, batches, strict=True):
            runner.give(own, numbers, arrays)
        pieces = self._collectives.pieces(held)
        empty: list[list[jax.Array]] = [[] for _ in held]
        state = _Step(held, running, spans, pieces, [None] * len(running), empty)
        for instruction in self._instructions:
            self._run_kind[instruction.kind](state, instruction)
        ends = [runner.end(own) for runner, own in zip(self._runners, running, strict=True)]
        return [sums for sums, _ in ends], state.totals

    # -- instructions ----------------------------------------------------------------------------

    def _gather(self, state: _Step, instruction: StepInstruction) -> None:
        # Programs wait in a queue with their arguments: no more than one segment's may be whole.
        jax.block_until_ready(state.marks)
        state.marks = []
        for runner in self._runners:
            runner.wait()
        if self._sharded is None:
            state.begun = [self._collectives.under_way] * len(state.held)
            return
        segment = instruction.segment
        gathered = self._collectives.gather(segment, state.pieces)
        each = zip(self._runners, state.running, state.held, gathered, strict=True)
        for runner, own, arrays, params in each:
            stored = {p: arrays.params[p] for p in runner.params_of(segment)}
            runner.hold(own, segment, stored | params)
        state.begun = self._collectives.under_way

    def _prefetch(self, state: _Step, instruction: StepInstruction) -> None:
        if self._sharded is not None:
            self._sharded.fetch(instruction.segment, state.pieces)

    def _run_segment(self, state: _Step, instruction: StepInstruction) -> None:
        segment, is_backward = instruction.segment, instruction.is_backward
        each = zip(self._runners, state.running, state.begun, state.spans, strict=True)
        for runner, own, begun, spans in each:
            if is_backward:
                runner.make_sums(own, segment)
            num = len(own.microbatches)
            first = num * instruction.wave // self._num_waves
            some = own.microbatches[first : num * (instruction.wave + 1) // self._num_waves]
            runner.run_each(own, some, instruction.operations)
            mark = runner.mark(own, segment, is_backward, some[-1]) if some else None
            if mark is not None:
                spans.put((begun, mark))
                state.marks.append(mark)
            if self._sharded is not None:
                runner.hold(own, segment, {})

    def _add(self, state: _Step, instruction: StepInstruction) -> None:
        # No name may hold what is taken: it would be there while the next segment runs.
        group, before = instruction.group, state.waiting.pop(instruction.group, None)
        added = self._collectives.add_group(group, self._taken(state, group), before)
        state.waiting[group] = added

    def _reduce(self, state: _Step, instruction: StepInstruction) -> None:
        group, before = instruction.group, state.waiting.pop(instruction.group, None)
        self._collectives.sum_group(group, self._taken(state, group), state.totals, before)

    def _taken(self, state: _Step, group: int) -> list[list[Any]]:
        """The sums of a group, which are given up."""
        _, packs = self._groups[group]
        values = [[own.values[k] for k in packs] for own in state.running]
        for own in state.running:
            for k in packs:
                own.values[k] = None
        return values

    # -- bytes -----------------------------------------------------------------------------------

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state until it has all totals.

        Args:
            num: Its microbatches of a step.
        """
        runner, num = self._runners[0], max(-(-num // self._num_waves), 1)
        sequence, costs = runner.sequence, runner.costs()
        num_waves = min(self._num_waves, 3)  # those in the midst are alike
        beside = self._bytes_beside(self._order(num_waves))
        num_runs = len(beside) // num_waves
        waves = [beside[i : i + num_runs] for i in range(0, len(beside), num_runs)]
        return max(layered_peak_bytes(sequence, costs, num, own) for own in waves)

    def _bytes_beside(self, instructions: Sequence[StepInstruction]) -> list[RunBytes]:
        """What is there beside the values of microbatches, run by run."""
        sums, sharded = self._runners[0].sums_bytes(), self._sharded
        out: list[RunBytes] = []
        kept = gathering = coming = 0
        for instruction in instructions:
            segment = instruction.segment
            if instruction.kind == GATHER:
                gathering, coming = kept, 0
                if sharded is not None:
                    pieces = sharded.piece_bytes(segment) * self._is_away
                    gathering += sharded.gather_bytes(segment) + pieces
            elif instruction.kind == PREFETCH and sharded is not None:
                # Of parameters on the host, the pieces of the segment that is next are here.
                coming = sharded.piece_bytes(segment) * self._is_away
            elif instruction.kind == RUN:
                kept += sums[segment] if instruction.is_backward else 0
                whole = 0 if sharded is None else sharded.num_bytes(segment)
                out.append(RunBytes(gathering, kept + whole + coming, 0))
            elif instruction.kind in (ADD, REDUCE):
                own = self._reducer.group_bytes(instruction.group)
                reducing = max(out[-1].reducing, kept + coming + own.adding)
                out[-1] = dataclasses.replace(out[-1], reducing=reducing)
                kept += (own.waiting if instruction.kind == ADD else own.totals) - own.sums
                kept -= own.waiting if instruction.wave else 0
        return out


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
