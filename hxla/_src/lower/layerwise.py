"""Runs a step of ZeRO 2 and 3, for all local replicas: of chains, or of pipelines.

A chain follows the instructions of `layerwise_order`. The programs of microbatches are the same as
of a plain chain, so no bit differs.

In a pipeline replicas shard the sums, or the parameters too. A stage needs its parameters and its
sums from its first forward to its last backward. So shards travel once in a step, one group of
slots after another: parameters are gathered before the first tick, whole in the slots only, and
sums are reduced after the last. The programs are those of a pipeline, so no bit differs.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    SC 2020, sections 5.2 and 5.3 (stages 2 and 3).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..core.timing import Spans
from ..core.types import PyTree
from ..plan.parts import Placement
from ..schedule.segment_sequence import (
    ADD,
    GATHER,
    PREFETCH,
    REDUCE,
    RUN,
    RunBytes,
    StepInstruction,
    layered_peak_bytes,
    layerwise_order,
)
from .chain_operations import Running
from .chain_runner import ChainRunner, StepInputs
from .compile import extra_bytes
from .contribution import DeviceSums, buckets
from .pipeline import Pipeline
from .replica import ReplicaArrays
from .sharded_params import GroupCollectives, ShardedParams, smallest
from .sum import Reducer


@dataclasses.dataclass
class _Step:
    """The arrays of a step between instructions, each a list over the local replicas.

    Attributes:
        pieces: Shards of the trained parameters.
        begun: Arrays that are ready when the running segment has begun.
        totals: Totals over all replicas, of the groups reduced so far.
        waiting: The sums of earlier waves, by group.
    """

    replicas: Sequence[ReplicaArrays]
    running: list[Running]
    spans: Sequence[Spans[Any]]
    pieces: list[list[jax.Array]]
    begun: list[Any]
    totals: list[list[jax.Array]]
    waiting: dict[int, Any] = dataclasses.field(default_factory=dict)


class LayerwiseStep:
    """Runs the microbatches of all local replicas.

    Args:
        reducer: The sums over all replicas, with these groups.
        sharded: Gathers the parameters of each segment; None: all replicas have them.
        placement: The plan's number of waves, the same for each process whatever its counts, and
            where shards of the parameters are kept between uses.
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
        replicas: Sequence[ReplicaArrays],
        exponents: Sequence[jax.Array],
        step: int,
        ids: Sequence[Sequence[int]],
        batches: Sequence[Sequence[PyTree]],
        spans: Sequence[Spans[Any]],
    ) -> tuple[list[DeviceSums], list[list[jax.Array]]]:
        """Run a step's microbatches; every process calls this, also where it has none.

        Args:
            spans: Where the busy spans of each replica are put.

        Returns:
            For each local replica its sums without those of groups, and the groups' totals.
        """
        running = [
            runner.begin(StepInputs(arrays.params, arrays.aux, scales, step))
            for runner, arrays, scales in zip(self._runners, replicas, exponents, strict=True)
        ]
        for runner, run, numbers, inputs in zip(self._runners, running, ids, batches, strict=True):
            runner.begin_microbatches(run, numbers, inputs)
        pieces = self._collectives.pieces(replicas)
        empty: list[list[jax.Array]] = [[] for _ in replicas]
        state = _Step(replicas, running, spans, pieces, [None] * len(running), empty)
        for instruction in self._instructions:
            self._run_kind[instruction.kind](state, instruction)
        ends = [runner.end(run) for runner, run in zip(self._runners, running, strict=True)]
        return [sums for sums, _ in ends], state.totals

    # -- instructions ----------------------------------------------------------------------------

    def _gather(self, state: _Step, instruction: StepInstruction) -> None:
        # Programs wait in a queue with their arguments: no more than one segment's may be whole.
        # The watchers wait, not this thread: a later wave donates the arrays they wait for.
        for spans in state.spans:
            spans.join()
        for runner in self._runners:
            runner.wait()
        if self._sharded is None:
            state.begun = [self._collectives.under_way] * len(state.replicas)
            return
        segment = instruction.segment
        gathered = self._collectives.gather(segment, state.pieces)
        each = zip(self._runners, state.running, state.replicas, gathered, strict=True)
        for runner, run, arrays, params in each:
            stored = {p: arrays.params[p] for p in runner.params_of(segment)}
            runner.set_params(run, segment, stored | params)
        state.begun = self._collectives.under_way

    def _prefetch(self, state: _Step, instruction: StepInstruction) -> None:
        if self._sharded is not None:
            self._sharded.fetch(instruction.segment, state.pieces)

    def _run_segment(self, state: _Step, instruction: StepInstruction) -> None:
        segment, is_backward = instruction.segment, instruction.is_backward
        each = zip(self._runners, state.running, state.begun, state.spans, strict=True)
        for runner, run, begun, spans in each:
            if is_backward:
                runner.make_sums(run, segment)
            num = len(run.microbatches)
            first = num * instruction.wave // self._num_waves
            some = run.microbatches[first : num * (instruction.wave + 1) // self._num_waves]
            runner.run_each(run, some, instruction.operations)
            mark = runner.mark(run, segment, is_backward, some[-1]) if some else None
            if mark is not None:
                spans.put((begun, mark))
            if self._sharded is not None:
                runner.set_params(run, segment, {})

    def _add(self, state: _Step, instruction: StepInstruction) -> None:
        # No name may refer to the sums: they would stay in memory while the next segment runs.
        group, before = instruction.group, state.waiting.pop(instruction.group, None)
        added = self._collectives.add_group(group, self._take_sums(state, group), before)
        state.waiting[group] = added

    def _reduce(self, state: _Step, instruction: StepInstruction) -> None:
        group, before = instruction.group, state.waiting.pop(instruction.group, None)
        self._collectives.sum_group(group, self._take_sums(state, group), state.totals, before)

    def _take_sums(self, state: _Step, group: int) -> list[list[Any]]:
        """Take the sums of a group out of the step's state."""
        _, packs = self._groups[group]
        values = [[run.values[k] for k in packs] for run in state.running]
        for run in state.running:
            for k in packs:
                run.values[k] = None
        return values

    # -- bytes -----------------------------------------------------------------------------------

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state until it has all totals.

        Args:
            num: Microbatches of its replica in a step.
        """
        runner = self._runners[0]
        num = max(-(-num // (runner.per_call * self._num_waves)), 1)
        sequence, costs = runner.sequence, runner.costs()
        num_waves = min(self._num_waves, 3)  # waves between the first and the last are alike
        beside = self._bytes_beside(self._order(num_waves))
        num_runs = len(beside) // num_waves
        waves = [beside[i : i + num_runs] for i in range(0, len(beside), num_runs)]
        further = runner.num_executors - 1
        more = further * runner.executor_bytes() if further else 0
        return more + max(layered_peak_bytes(sequence, costs, num, wave) for wave in waves)

    def _bytes_beside(self, instructions: Sequence[StepInstruction]) -> list[RunBytes]:
        """Bytes beside the values of microbatches, for each run of a segment."""
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
                # Of parameters on the host, the next segment's pieces are on the device.
                coming = sharded.piece_bytes(segment) * self._is_away
            elif instruction.kind == RUN:
                kept += sums[segment] if instruction.is_backward else 0
                whole = 0 if sharded is None else sharded.num_bytes(segment)
                out.append(RunBytes(gathering, kept + whole + coming, 0))
            elif instruction.kind in (ADD, REDUCE):
                group = self._reducer.group_bytes(instruction.group)
                reducing = max(out[-1].reducing, kept + coming + group.adding)
                out[-1] = dataclasses.replace(out[-1], reducing=reducing)
                kept += (group.waiting if instruction.kind == ADD else group.totals) - group.sums
                kept -= group.waiting if instruction.wave else 0
        return out


def sum_groups(
    last_packs: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Packs that are reduced together: pairs of a part and packs whole after its backward.

    The last part comes first. A group is no larger than its part's largest pack, for a reduction
    takes as much memory again.

    Args:
        last_packs: For each part the packs whose sums are whole after its backward.
    """
    out: list[tuple[int, tuple[int, ...]]] = []
    for part, packs in reversed(list(enumerate(last_packs))):
        elements = [sizes[k] for k in packs]
        grouped = buckets(elements, max(elements, default=0))
        out += [(part, tuple(packs[i] for i in bucket)) for bucket in grouped]
    return out


class ZeroPipeline:
    """Runs the microbatches of all local replicas; it is used as `LayerwiseStep` is.

    Args:
        reducer: The sums over all replicas, with these groups.
        sharded: Gathers the parameters of each group of slots; None: all replicas have them.
        placement: Where shards of the parameters are stored between steps.
    """

    def __init__(
        self,
        runners: Sequence[Pipeline],
        reducer: Reducer,
        groups: Sequence[Sequence[int]],
        trained: Sequence[int],
        sharded: ShardedParams | None,
        placement: Placement,
    ):
        self._runners, self._reducer, self._groups = list(runners), reducer, groups
        self._sharded, self._is_away = sharded, placement.parameters == "host"
        self._collectives = GroupCollectives(reducer, sharded, trained)
        self.wait, self.whole = self._collectives.wait, self._collectives.whole

    def run(
        self,
        replicas: Sequence[ReplicaArrays],
        exponents: Sequence[jax.Array],
        step: int,
        ids: Sequence[Sequence[int]],
        batches: Sequence[Sequence[PyTree]],
        spans: Sequence[Spans[Any]],
    ) -> tuple[list[DeviceSums], list[list[jax.Array]]]:
        """Run a step's microbatches; see `LayerwiseStep.run`."""
        slots = self.filled(replicas)
        begins = [smallest(arrays) for arrays in slots]
        self.wait()
        added = []
        for i, runner in enumerate(self._runners):
            acc, tick = runner.ticks(
                slots[i], replicas[i].aux, exponents[i], step, ids[i], batches[i]
            )
            slots[i] = []  # free the whole parameters
            if tick is not None:
                spans[i].put((begins[i], tick))
            added.append(acc)
        self._collectives.under_way = [acc.peaks_NT for acc in added]
        totals: list[list[jax.Array]] = [[] for _ in replicas]
        small: list[DeviceSums] = []
        for g in range(len(self._runners[0].groups)):
            self.wait()
            collected = [
                runner.collect(g, acc) for runner, acc in zip(self._runners, added, strict=True)
            ]
            values = [sums for sums, _ in collected]
            small += [sums for _, sums in collected if sums is not None]
            del collected
            self._collectives.under_way = values
            self._collectives.sum_group(g, values, totals)
            del values  # else they stay in memory while the next group is collected
        if len(self._groups) > len(self._runners[0].groups):
            others = [list(sums.values) for sums in small]
            self._collectives.sum_group(len(self._groups) - 1, others, totals)
        return [sums._replace(values=[]) for sums in small], totals

    def filled(self, replicas: Sequence[ReplicaArrays]) -> list[list[jax.Array]]:
        """The slots of each local replica; every process calls this."""
        pieces = self._collectives.pieces(replicas)
        filled: list[list[list[jax.Array]]] = [[] for _ in replicas]
        for g in range(len(self._runners[0].groups)):
            stored = [dict(enumerate(arrays.params)) for arrays in replicas]
            if self._sharded is not None:
                gathered = self._collectives.gather(g, pieces)
                if g + 1 < len(self._runners[0].groups):
                    self._sharded.fetch(g + 1, pieces)
                stored = [params | whole for params, whole in zip(stored, gathered, strict=True)]
                del gathered
            self.wait()
            new = [
                runner.fill(g, params) for runner, params in zip(self._runners, stored, strict=True)
            ]
            del stored  # the last name of the gathered parameters
            for groups, slots in zip(filled, new, strict=True):
                groups.append(slots)
            del new
            self._collectives.under_way = [smallest(groups[-1]) for groups in filled]
            if self._sharded is not None:
                # Queued programs keep their arguments: one group may be in memory twice.
                jax.block_until_ready(self._collectives.under_way)
        return [runner.in_order(slots) for runner, slots in zip(self._runners, filled, strict=True)]

    def memory_bytes(self, num: int) -> int:
        """Bytes that one device needs beside the state and the pipelines' buffers.

        Args:
            num: Not used: any number of microbatches takes the same.
        """
        del num
        runner = self._runners[0]
        each = range(len(runner.groups))
        most = slots = 0
        for g in each:
            filling = extra_bytes(runner.programs.fills[g])
            if self._sharded is not None:
                filling = max(self._sharded.gather_bytes(g), self._sharded.num_bytes(g) + filling)
                # Of parameters on the host, pieces of this group and the next are on the device.
                coming = each[g : g + 2] if self._is_away else []
                filling += sum(map(self._sharded.piece_bytes, coming))
            most = max(most, slots + filling)
            slots += runner.slots_bytes(g)
        sums = sum(map(runner.sums_bytes, each))
        most = max(most, slots + sums + extra_bytes(runner.programs.ticks))
        totals = 0
        for k in range(len(self._groups)):
            reduced = self._reducer.group_bytes(k)
            if k in each:
                most = max(most, sums + totals + extra_bytes(runner.programs.collects[k]))
                sums -= runner.sums_bytes(k)
            most = max(most, sums + totals + reduced.sums + reduced.adding)
            totals += reduced.totals
        return most


def stage_groups(
    of_slots: Sequence[Sequence[int]], trained: Sequence[int], num_tensors: int
) -> list[tuple[int, ...]]:
    """Tensors that are reduced together: for each group of slots, and last the other variables.

    Args:
        of_slots: For each group the trained parameters in its slots, by their places.
        trained: Places of all trained parameters, in the order of their tensors.
        num_tensors: Trained parameters and other float variables.
    """
    number = {p: t for t, p in enumerate(trained)}
    groups = [tuple(number[p] for p in params) for params in of_slots]
    others = tuple(range(len(trained), num_tensors))
    return [*groups, others] if others else groups
