"""Runs the microbatches of a device as a chain: the programs of its parts, one after another.

Each part has a forward and a backward of its own, but for the last, which has both in one. In which
order they run, and what waits in memory meanwhile, is a list of operations: it moves no bit, for
the programs are the same. Parts that compute the same share their programs.

Legend of shape suffixes: M microbatches of a step, T float tensors.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.types import PyTree
from ..graph.low_params import low_params
from ..schedule.schedules import FORWARD
from ..schedule.segment_sequence import (
    FETCH,
    OFFLOAD,
    SegmentCost,
    SegmentOperation,
    SegmentSequence,
    replay_sequence,
)
from .contribution import DeviceSums
from .offload import Known, Stash, nothing_known
from .replica import Replica
from .segment_part import SegmentedSpec
from .segment_programs import ChainParts, SegmentPrograms, crossing_values, segment_costs


@dataclasses.dataclass
class _Microbatch:
    """What the operations of a microbatch read and leave.

    Attributes:
        given: For each part what it reads of other variables and of the batch, and the numbers of
            step and microbatch.
        top: The last part whose backward has not run.
        inputs: What crosses into a part, where it is kept.
        saved: The residuals of a part.
        away_inputs: What crosses into a part, where it is in host memory.
        away_saved: The residuals of a part, likewise.
        on_host: What of its values is in host memory.
        fetched: What of them came back.
        grads: Of values, as far as later parts have made them.
    """

    given: list[Any]
    top: int
    inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=lambda: {0: {}})
    saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    away_inputs: dict[int, dict[int, jax.Array]] = dataclasses.field(default_factory=dict)
    away_saved: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    on_host: Known = dataclasses.field(default_factory=nothing_known)
    fetched: Known = dataclasses.field(default_factory=nothing_known)
    grads: dict[int, jax.Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Running:
    """What the operations of a step read and leave.

    Attributes:
        own: For each part its parameters, and the first rows of those of which it reads rows.
        scales: For each part those of its sums.
        values: The parts of the sums of each pack; None where there are none.
        peaks: For each part the largest magnitudes.
        small_MS: See `DeviceSums`.
    """

    own: list[Any]
    scales: list[jax.Array]
    values: list[Any]
    peaks: list[jax.Array]
    small_MS: jax.Array
    words: list[jax.Array]
    microbatches: list[_Microbatch]


class Segmented:
    """See the module; it is used as `Microbatches` is.

    Args:
        parts: Made of it for the platform of the device.
        sequence: What runs for a microbatch.
        by_part: Whether sums are there only while their part runs; see `LayerwiseStep`.
    """

    unit = 1  # it takes any number of microbatches
    kept_bytes = 0  # between steps
    text = ""  # processes have alike programs

    def __init__(
        self,
        spec: SegmentedSpec,
        parts: ChainParts,
        sequence: SegmentSequence,
        replica: Replica,
        by_part: bool = False,
    ):
        self._spec, self.sequence, self._replica = spec, sequence, replica
        self._stash = Stash(replica) if sequence.offloads else None
        self._parts = parts.each
        self._crossing = crossing_values([part.stage.part for part in self._parts])
        self._batch_specs = spec.lie(spec.graph.batch_values)
        self._programs = programs = SegmentPrograms(spec, parts, replica, by_part)
        self.names, self.lower, self.adopt = programs.names, programs.lower, programs.adopt
        self._peaks: list[jax.Array] = []

    # -- running ---------------------------------------------------------------------------------

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        sums, self._peaks = self._programs.zeros()
        return sums  # type: ignore[no-any-return]

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
        running = self.begin(params, aux, sums, exponents, step, ids, batches)
        del sums  # what is donated is no one else's
        for n in range(len(ids)):
            for op in self.sequence.operations:
                self.operate(running, n, op)
        return self.end(running)

    def begin(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        sums: DeviceSums | None,
        exponents: jax.Array,
        step: int,
        ids: Sequence[int],
        batches: Sequence[PyTree],
    ) -> Running:
        """What the operations of a step begin with; see `run`."""
        sums = sums or self.empty()
        values: list[Any] = list(sums.values) or [None] * len(self._spec.packs)
        shared = self._programs.shared
        scales, zeros = self._programs.begin(exponents, [values[k] for k in shared])
        for k, x in zip(shared, zeros, strict=True):
            values[k] = x
        of_aux = [[aux[k] for k in part.aux] for part in self._parts]
        microbatches = []
        for n, (index, batch) in enumerate(zip(ids, batches, strict=True)):
            where = np.array([step, index, n > 0], np.int32)
            leaves = jax.tree.leaves(batch)
            # A program of one device takes host arrays itself.
            if self._replica.axes:
                leaves = self._replica.put_tree(leaves, self._batch_specs)
            given = [
                (x, [leaves[k] for k in part.batch], where)
                for part, x in zip(self._parts, of_aux, strict=True)
            ]
            microbatches.append(_Microbatch(given, len(self._parts) - 1))
        return Running(
            own=[([params[p] for p in part.params], part.starts) for part in self._parts],
            scales=scales,
            values=values,
            peaks=self._peaks,
            small_MS=sums.small_MS,
            words=sums.words,
            microbatches=microbatches,
        )

    def end(self, running: Running) -> tuple[DeviceSums, jax.Array]:
        """What `run` returns, when all operations of all microbatches have run."""
        assert not any({**m.inputs, **m.saved, **m.grads} for m in running.microbatches)
        assert not any({**m.away_inputs, **m.away_saved} for m in running.microbatches)
        self.wait()
        self._peaks = running.peaks
        peaks_T = self._programs.end(self._peaks)
        values = [x for x in running.values if x is not None]
        return DeviceSums(running.small_MS, peaks_T, values, running.words), peaks_T

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

    def mark(self, running: Running, i: int, is_backward: bool, last: int) -> jax.Array | None:
        """A small array that is there when all that was asked of a part has run; None: nothing.

        Args:
            is_backward: Whether backwards ran.
            last: Place of the last microbatch of which the part ran.
        """
        if is_backward:
            return running.peaks[i]
        inputs = running.microbatches[last].inputs.get(i + 1, {})
        return next(iter(inputs.values()), None)

    def wait(self) -> None:
        """Until no copy to or from the host is under way."""
        if self._stash is not None:
            self._stash.wait()

    # -- an operation ----------------------------------------------------------------------------

    def operate(self, running: Running, n: int, op: SegmentOperation) -> None:
        """Run an operation of a microbatch; waits for nothing but copies of another."""
        own = running.microbatches[n]
        if op.kind in (OFFLOAD, FETCH):
            (self._offload if op.kind == OFFLOAD else self._fetch)(own, op)
            return
        run = self._forward if op.kind == FORWARD else self._backward
        run(running, own, op)

    def _offload(self, own: _Microbatch, op: SegmentOperation) -> None:
        assert self._stash is not None
        i = op.segment
        if i in own.inputs:
            values, arrays = list(own.inputs[i]), list(own.inputs.pop(i).values())
            found = self._stash.offload(values, arrays, own.on_host)
            own.away_inputs[i] = dict(zip(values, found, strict=True))
        if op.residuals:
            of_values = self._parts[i].stage.residual_values
            own.away_saved[i] = self._stash.offload(of_values, own.saved.pop(i), own.on_host)

    def _fetch(self, own: _Microbatch, op: SegmentOperation) -> None:
        assert self._stash is not None
        i = op.segment
        if i in own.away_inputs:
            values, arrays = list(own.away_inputs[i]), list(own.away_inputs[i].values())
            found = self._stash.fetch(values, arrays, own.fetched)
            own.inputs[i] = dict(zip(values, found, strict=True))
        if op.residuals:
            of_values = self._parts[i].stage.residual_values
            own.saved[i] = self._stash.fetch(of_values, own.away_saved[i], own.fetched)

    def _forward(self, running: Running, own: _Microbatch, op: SegmentOperation) -> None:
        i, part, inputs = op.segment, self._parts[op.segment], own.inputs
        before = inputs[i] if op.keeps_input else inputs.pop(i)
        read = [before[v] for v in part.stage.part.inputs]
        program = self._programs.of(i)["forward"]
        made, kept = program(*running.own[i], read, *own.given[i])
        if op.residuals:
            own.saved[i] = part.stage.all_residuals(read, made, kept)
        if i < own.top and i + 1 not in {*own.saved, *own.away_saved}:
            after = before | dict(zip(part.stage.part.outputs, made, strict=True))
            inputs[i + 1] = {v: after[v] for v in self._crossing[i + 1]}

    def _backward(self, running: Running, own: _Microbatch, op: SegmentOperation) -> None:
        i, part = op.segment, self._parts[op.segment]
        own.top = i - 1
        programs, values = self._programs.of(i), running.values
        before = own.inputs.pop(i, {})
        own.away_inputs.pop(i, None)
        own.away_saved.pop(i, None)
        joined = [values[k] for k in part.packs], running.peaks[i], running.scales[i]
        if part.is_last:
            read = [before[v] for v in part.stage.part.inputs]
            small = running.small_MS, running.words
            found, added, running.peaks[i], running.small_MS, running.words = programs["loss"](
                *running.own[i], read, *own.given[i], *small, *joined
            )
        else:
            grads = [own.grads.pop(v) for v in part.stage.below_floats]
            late = [own.grads.pop(v) for v in part.pending]
            saved = own.saved.pop(i)
            found, added, running.peaks[i] = programs["backward"](
                *running.own[i], saved, *own.given[i], grads, late, *joined
            )
        own.grads.update(zip(part.floats, found, strict=True))
        for k, x in zip(part.packs, added, strict=True):
            values[k] = x

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state while it runs microbatches."""
        return sums_bytes + replay_sequence(self.sequence, self.costs()).copying_peak_bytes

    def costs(self) -> list[SegmentCost]:
        """What the programs of each part take, once they are compiled."""
        places = range(self.num_parts)
        return segment_costs(
            self._spec.sharded,
            [part.stage for part in self._parts],
            list(map(self._programs.temporary_bytes, places)),
            offloads=self._stash is not None,
            residuals=list(map(self._programs.residual_bytes, places)),
        )

    def sums_bytes(self) -> list[int]:
        """For each part the bytes of the sums that begin with its backward, if made by part."""
        return self._programs.sums_bytes()
