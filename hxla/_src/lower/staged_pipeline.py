"""Runs the microbatches of one pipeline whose stages are unlike in devices and axes.

A stage is one part of a chain, or several, with the programs of a chain over its devices. Between
stages the values that cross take a route, and so do the gradients that come back: the processes of
both stages call it, in the order of the schedule.

Legend of shape suffixes: M microbatches of a step, S sums of a microbatch, T float tensors.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.types import PyTree
from ..graph.graph import params_of, shapes_of
from ..jax.devices import is_here
from ..schedule.schedules import BACKWARD, FORWARD
from ..schedule.segment_sequence import CUT, INPUT, SegmentOperation
from ..schedule.stage_peaks import HopBytes, PartBytes, stage_peaks
from .chain_operations import ChainOperations, MicrobatchArrays, Running
from .program_text import ProgramText
from .replica import Replica, device_bytes
from .segment_programs import ChainParts, SegmentPrograms, crossing_values, some_parts
from .stage_chain_spec import StagesSpec
from .stage_routes import Stage, StageRoute, hop


class StagedPipeline:
    """The stages of one pipeline on its devices.

    Args:
        devices: In the order of the stages.
        label: What goes before the names of its stages; empty: it is the only pipeline.
        in_turn: Whether each program is waited for before the next begins.

    Attributes:
        stages: A `Stage` for each part; those of one stage have the same devices.
        last: The first device of the last stage.
    """

    def __init__(
        self,
        spec: StagesSpec,
        devices: Sequence[jax.Device],
        *,
        index: int,
        label: str,
        in_turn: bool,
    ):
        self._spec, self._in_turn = spec, in_turn
        rest = iter(devices)
        self.stages: list[Stage] = []
        for s, span in enumerate(spec.spans):
            num = math.prod(size for _, size in spec.axes[span.start])
            own = tuple(itertools.islice(rest, num))
            for i in span:
                suffix = f", part {i - span.start}" * (len(span) > 1)
                self.stages.append(self._stage(i, f"{label}stage {s}{suffix}", index, own))
        self.local = [stage for stage in self.stages if stage.replica.is_local]
        self.last = self.stages[-1].replica.devices[0]
        #: For each part the most microbatches that wait for their backwards.
        stash = spec.schedule(spec.most).peak_stash if spec.most else (0,) * len(spec.cut)
        self.stash = [num for num, span in zip(stash, spec.spans, strict=True) for _ in span]
        parts = [stage.part for stage in self.stages]
        self._crossing = crossing_values([part.stage.part for part in parts])
        self._operations = ChainOperations(spec.chains[0], parts, _ProgramsOf(self.stages), None)
        self._hops = {
            (span.start - (kind == FORWARD), kind): hop(
                self.stages, self._crossing[span.start], span.start, kind
            )
            for span in spec.spans[1:]
            for kind in (FORWARD, BACKWARD)
        }

    def _stage(self, i: int, name: str, index: int, devices: tuple[jax.Device, ...]) -> Stage:
        chain = self._spec.chains[i]
        replica = Replica(index, devices, self._spec.axes[i])
        [part] = some_parts(chain, replica, [i])
        param_of = params_of(chain.graph)
        return Stage(
            index=i,
            name=name,
            chain=chain,
            replica=replica,
            part=part,
            programs=SegmentPrograms(
                chain, ChainParts((part,), (0,), replica), replica, [part.packs]
            )
            if replica.is_local
            else None,
            params=tuple(sorted({param_of[entry] for entry in part.stage.params})),
            inside=self._spec.inside[i],
        )

    @property
    def hops(self) -> list[StageRoute]:
        """The routes between its stages."""
        return list(self._hops.values())

    @property
    def names(self) -> list[str]:
        """The names of the programs of `lower`."""
        return [name for s in self.local if s.programs for name in s.programs.names]

    # -- compilation -----------------------------------------------------------------------------

    def lower(self, aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs of the local stages before compilation, in the order of `names`."""
        out = []
        for stage in self.local:
            assert stage.programs is not None
            like, graph = stage.replica.like, stage.chain.graph
            params = self._params_inside(stage, range(len(graph.param_shapes)))
            out += stage.programs.lower(params, list(map(like, aux)), like(exponents))
        return out

    def _params_inside(self, stage: Stage, places: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """Shapes of parameters inside a stage."""
        graph = stage.chain.graph
        values = [graph.param_values[p] for p in places]
        pairs = zip(shapes_of(graph, values), [stage.inside[p] for p in places], strict=True)
        return [stage.replica.like(padding.like(x), spec) for x, (spec, padding) in pairs]

    def adopt(self, compiled: Iterator[Any]) -> None:
        """Take over the programs of `lower`, compiled."""
        for stage in self.local:
            assert stage.programs is not None
            stage.programs.adopt(list(itertools.islice(compiled, len(stage.programs.names))))

    def texts(self) -> Iterator[ProgramText]:
        """The optimized programs of the local stages, each forward before its backward."""
        for stage in self.local:
            assert stage.programs is not None
            for kind, program in stage.programs.of(0).items():
                yield ProgramText(
                    text=program.as_text() or "",
                    params={f"params[{k}]": (p,) for k, p in enumerate(stage.part.params)},
                    saved=stage.part.stage.saved_results if kind == "backward" else {},
                )

    # -- running ---------------------------------------------------------------------------------

    def begin(
        self,
        params: Mapping[int, Mapping[int, jax.Array]],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        step: int,
    ) -> dict[int, Running]:
        """The arrays of a step for each local part.

        Args:
            params: For each local part its parameters, by their places.
        """
        return {
            stage.index: self._begin(stage, params[stage.index], aux, exponents, step)
            for stage in self.local
        }

    def _begin(
        self,
        stage: Stage,
        params: Mapping[int, jax.Array],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        step: int,
    ) -> Running:
        part, programs, num = stage.part, stage.programs, len(self.stages)
        assert programs is not None
        sums = programs.zeros()
        [scales], [peaks], _ = programs.begin(_moved_to(stage.replica, exponents), sums, [])
        values: list[Any] = [None] * len(stage.chain.packs)
        if part.packs:
            for k, x in zip(part.packs, programs.fresh(0), strict=True):
                values[k] = x

        def of_stage(x: Any) -> list[Any]:
            return [x if s == stage.index else None for s in range(num)]

        return Running(
            step=step,
            params=of_stage(([params[p] for p in part.params], part.starts)),
            aux=of_stage([_moved_to(stage.replica, aux[k]) for k in part.aux]),
            scales=of_stage(scales),
            values=values,
            peaks=of_stage(peaks),
            small_MS=sums.small_MS,
            words=sums.words,
        )

    def ticks(
        self, running: Mapping[int, Running], step: int, ids: range, batches: Sequence[PyTree]
    ) -> Iterator[None]:
        """Run microbatches tick by tick.

        Args:
            running: The arrays of the local parts; they change.
            ids: Numbers of the microbatches.
        """
        begun: dict[int, MicrobatchArrays] = {}
        table = self._spec.schedule(len(ids)).table_TS if ids and running else ()
        for tick in table:
            actions = [(s, action) for s, action in enumerate(tick) if action is not None]
            for s, action in actions:
                m = action.microbatch
                if m not in begun:
                    begun[m] = self._microbatch(running, step, ids[m], batches[m])
                self._run(running, begun[m], s, action.kind)
            for s, action in actions:
                span = self._spec.spans[s]
                place = span.start if action.kind == BACKWARD else span.stop - 1
                self._send(begun[action.microbatch], place, action.kind)
                if (s, action.kind) == (0, BACKWARD):
                    ended = begun.pop(action.microbatch)
                    assert not ended.waits
            yield

    def _microbatch(
        self, running: Mapping[int, Running], step: int, index: int, batch: PyTree
    ) -> MicrobatchArrays:
        leaves = jax.tree.leaves(batch)
        where = np.array([step, index, 1], np.int32)  # all sums begin at zero
        arguments: list[Any] = [None] * len(self.stages)
        for stage in self.local:
            graph, aux = stage.chain.graph, running[stage.index].aux[stage.index]
            specs = stage.chain.specs_of([graph.batch_values[k] for k in stage.part.batch])
            arrays = [leaves[k] for k in stage.part.batch]
            placed = [stage.replica.put(x, s) for x, s in zip(arrays, specs, strict=True)]
            arguments[stage.index] = aux, where, placed
        microbatch = self._operations.microbatch(arguments)
        if 0 not in running:
            microbatch.inputs.clear()  # those of the first stage
        return microbatch

    def _operations_of(self, s: int, kind: str) -> Iterator[SegmentOperation]:
        """What a stage runs of a microbatch in an action of the schedule."""
        span, end = self._spec.spans[s], len(self.stages) - 1
        # What crosses whole is all that is kept, and the backward itself runs the forward again.
        again = self._spec.recompute and not self._spec.chains[span.start].crosses_whole
        if (kind == FORWARD) == (end not in span):
            for i in span:
                if i != end:
                    yield SegmentOperation(FORWARD, i, "" if again else CUT, again)
        if kind == BACKWARD:
            for i in reversed(span):
                if again and i != end:
                    yield SegmentOperation(FORWARD, i, CUT)
                yield SegmentOperation(BACKWARD, i, INPUT if i == end else CUT)

    def _run(
        self, running: Mapping[int, Running], microbatch: MicrobatchArrays, s: int, kind: str
    ) -> None:
        """Run an action of the schedule, if this process has its stage."""
        first = self._spec.spans[s].start
        if first in running:
            operations = list(self._operations_of(s, kind))
            for operation in operations:
                self._operations.run(running[operation.segment], microbatch, operation)
            if operations and self._in_turn:
                done = [running[operation.segment].peaks for operation in operations]
                jax.block_until_ready([microbatch.inputs, microbatch.grads, done])
        elif kind == BACKWARD:
            microbatch.top = first - 1

    def _send(self, microbatch: MicrobatchArrays, i: int, kind: str) -> None:
        """Send what an action made to the next stage, or to the one before.

        Args:
            i: The last part of the stage, or its first one where gradients are sent.
        """
        hop = self._hops.get((i, kind))
        if hop is None or not hop.route.is_local:
            return
        if not hop.items:
            if kind == FORWARD:
                microbatch.inputs[i + 1] = {}
            return
        given = microbatch.inputs.pop(i + 1, {}) if kind == FORWARD else microbatch.grads
        arrays = [given.pop(v, None) for v in hop.items]
        made = hop.route.run(arrays)
        if self._in_turn:
            jax.block_until_ready(made)
        known = present(hop.items, made)
        if kind == BACKWARD:
            microbatch.grads.update(known)
        elif known:
            microbatch.inputs[i + 1] = known

    # -- bytes -----------------------------------------------------------------------------------

    def kept_bytes(self) -> dict[jax.Device, int]:
        """Bytes of each local device's parameters and sums inside its stage."""
        kept: dict[jax.Device, int] = {}
        for stage in self.local:
            assert stage.programs is not None
            limbs = stage.programs.sums_shapes.values
            arrays: list[Any] = [
                *self._params_inside(stage, stage.params),
                *(x for k in stage.part.packs for x in limbs[k]),
            ]
            for device in filter(is_here, stage.replica.devices):
                kept[device] = kept.get(device, 0) + sum(map(device_bytes, arrays))
        return kept

    def activation_bytes(self) -> dict[jax.Device, int]:
        """The most bytes of each local device beside `kept_bytes` while it runs microbatches."""
        if not self._spec.most:
            return {}
        schedule = self._spec.schedule(self._spec.most)
        moves = [
            (self._hop_bytes(a, b, FORWARD), self._hop_bytes(b, a, BACKWARD))
            for a, b in itertools.pairwise(self._spec.spans)
        ]
        parts = [[self._part_bytes(self.stages[i]) for i in span] for span in self._spec.spans]
        peaks = stage_peaks(schedule, parts, moves, keeps_inputs=self._spec.recompute)
        return {
            device: peak
            for peak, span in zip(peaks, self._spec.spans, strict=True)
            for device in filter(is_here, self.stages[span.start].replica.devices)
        }

    def _hop_bytes(self, source: range, target: range, kind: str) -> HopBytes:
        """The bytes of a hop; 0 where it does not run."""
        hop = self._hops[source.stop - 1 if kind == FORWARD else source.start, kind]
        if not hop.items or not hop.route.is_local:
            return HopBytes()
        a = self.stages[source.start].replica.devices[0]
        b = self.stages[target.start].replica.devices[0]
        return HopBytes(
            sent=hop.route.source_bytes(a),
            received=hop.route.target_bytes(b),
            at_sender=hop.route.extra_bytes(a),
            at_receiver=hop.route.extra_bytes(b),
        )

    def _part_bytes(self, stage: Stage) -> PartBytes:
        """The arrays of a part, from its compiled programs; a part of another process has none."""
        programs, part, chain = stage.programs, stage.part, stage.chain
        if programs is None:
            return PartBytes()
        values = () if part.is_last else set(part.stage.residual_values)
        read, written = (
            chain.waiting_bytes([v for v in ends if v in values])
            for ends in (part.stage.part.inputs, part.stage.part.outputs)
        )
        shapes = shapes_of(chain.graph, part.floats)
        specs = chain.specs_of(part.floats)
        gradients: list[Any] = list(map(stage.replica.like, shapes, specs))
        temporary = programs.temporary_bytes(0)
        return PartBytes(
            inputs=chain.waiting_bytes(self._crossing[stage.index]),
            read=read,
            kept=programs.residual_bytes(0),
            written=written,
            gradients=sum(map(device_bytes, gradients)),
            forward=temporary[0],
            backward=temporary[-1],
            is_loss=part.is_last,
        )


class _ProgramsOf:
    """The programs of all stages, as `ChainOperations` asks for them."""

    clip = None

    def __init__(self, stages: Sequence[Stage]):
        self._stages = stages

    def of(self, i: int) -> dict[str, Any]:
        """The compiled programs of a part."""
        programs = self._stages[i].programs
        assert programs is not None
        return programs.of(0)


def present(items: Sequence[int], arrays: Sequence[jax.Array | None]) -> dict[int, jax.Array]:
    """The arrays that are here, by their items."""
    return {k: x for k, x in zip(items, arrays, strict=True) if x is not None}


def _moved_to(replica: Replica, x: jax.Array) -> jax.Array:
    """A replicated array on some of its devices; moves nothing."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    here = [shards[d] for d in replica.devices if d in shards]
    return jax.make_array_from_single_device_arrays(x.shape, replica.sharding(P()), here)
