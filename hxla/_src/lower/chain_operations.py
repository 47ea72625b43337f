"""The operations of a chain: forwards, backwards and transfers of its parts, for a microbatch.

Legend of shape suffixes: M microbatches of a step, T float tensors.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from ..schedule.schedules import FORWARD
from ..schedule.segment_sequence import FETCH, OFFLOAD, SegmentOperation
from .chain_spec import ChainSpec
from .contribution import DeviceSums
from .offload import Known, Stash, nothing_known
from .segment_part import SegmentPart
from .segment_programs import crossing_values


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
class MicrobatchArrays:
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
    microbatches: list[MicrobatchArrays] = dataclasses.field(default_factory=list)


class PartPrograms(Protocol):
    """The compiled programs of the parts of a chain."""

    @property
    def clip(self) -> Any:
        """Clips the gradients of all parts and adds them to the sums."""

    def of(self, i: int) -> dict[str, Any]:
        """The compiled programs of a part: `forward` and `backward`, or `loss`."""


class ChainOperations:
    """Runs operations on the devices of a replica; dispatches, and waits only for transfers.

    Args:
        parts: The parts of `spec` for the platform of the devices.
        stash: Moves residuals to and from the host; None: none move.
    """

    def __init__(
        self,
        spec: ChainSpec,
        parts: Sequence[SegmentPart],
        programs: PartPrograms,
        stash: Stash | None,
    ):
        self._spec, self._parts, self._programs, self._stash = spec, parts, programs, stash
        self._crossing = crossing_values([part.stage.part for part in parts])

    def microbatch(self, arguments: list[Any]) -> MicrobatchArrays:
        """A microbatch before its first operation.

        Args:
            arguments: See `MicrobatchArrays`.
        """
        on_host = None if self._stash is None else _OnHost()
        return MicrobatchArrays(arguments, len(self._parts) - 1, on_host)

    def wait(self) -> None:
        """Wait until no transfer to or from the host is under way."""
        if self._stash is not None:
            self._stash.wait()

    def run_each(
        self,
        running: Running,
        microbatches: Sequence[MicrobatchArrays],
        operations: Sequence[SegmentOperation],
    ) -> None:
        """Operations for one microbatch after another.

        The leading fetches of a microbatch overlap with the microbatch before.
        """
        rest = list(itertools.dropwhile(lambda op: op.kind == FETCH, operations))
        fetches = operations[: len(operations) - len(rest)]
        for op in fetches if microbatches else ():
            self.run(running, microbatches[0], op)
        for k, microbatch in enumerate(microbatches):
            for coming in microbatches[k + 1 : k + 2]:
                for op in fetches:
                    self.run(running, coming, op)
            for op in rest:
                self.run(running, microbatch, op)

    def run(self, running: Running, microbatch: MicrobatchArrays, op: SegmentOperation) -> None:
        """Run an operation of a microbatch; waits only for another microbatch's transfers."""
        if op.kind in (OFFLOAD, FETCH):
            (self._offload if op.kind == OFFLOAD else self._fetch)(microbatch, op)
            return
        run = self._forward if op.kind == FORWARD else self._backward
        run(running, microbatch, op)

    def _offload(self, microbatch: MicrobatchArrays, op: SegmentOperation) -> None:
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

    def _fetch(self, microbatch: MicrobatchArrays, op: SegmentOperation) -> None:
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

    def _forward(
        self, running: Running, microbatch: MicrobatchArrays, op: SegmentOperation
    ) -> None:
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

    def _backward(
        self, running: Running, microbatch: MicrobatchArrays, op: SegmentOperation
    ) -> None:
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
        self,
        running: Running,
        microbatch: MicrobatchArrays,
        i: int,
        before: Mapping[int, jax.Array],
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
