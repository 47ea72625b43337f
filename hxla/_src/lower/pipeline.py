"""A pipeline as one SPMD program: a `shard_map` over the stages, a loop over the schedule's ticks.

In a tick every stage runs the action of its row of the table. Each possible action is a loop of one
round or none, so that buffers are updated in place, which no conditional promises. Then arrays
travel to the neighbours: two permutes over the boundaries of the table's set for that tick. The
table, the number of ticks and the numbers of the microbatches are arguments: another schedule or
count of microbatches compiles nothing.

A stage may have several devices, which cut its parameters as a `Sharded` says. Filling and emptying
the slots is manual over all axes, for each device moves its pieces; the ticks are manual over
`stage` only, and XLA adds the collectives inside a stage. An action may contain them, because all
devices of a stage run it in the same tick. Arrays that cross a boundary are whole on each device.

Legend of shape suffixes: M microbatches of a step, K of one pipeline at most, T ticks or tensors, S
stages, N devices of a stage, F fields of a table, W 32-bit words.

References:
    Huang et al., "GPipe", NeurIPS 2019. Narayanan et al., SC 2021 (1F1B, interleaved).
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ..core.timing import middle_seconds
from ..core.types import STAGE_AXIS, PyTree
from ..graph.graph import params_of, shapes_of
from ..graph.segments import low_params
from ..schedule.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from . import actions
from . import actions as _actions
from .actions import FIELDS
from .compile import compiler_options, extra_bytes
from .contribution import DeviceSums
from .pipeline_program import (
    Accumulated,
    Buffers,
    Carry,
    PipelineProgram,
    PipelineSpec,
    scope_of_part,
)
from .program_text import ProgramText
from .replica import Replica, device_bytes
from .slots import Slots
from .stage import check_permutes, map_specs, only


class Compiled(NamedTuple):
    """The compiled programs of a pipeline; lists have one for each group of slots."""

    fills: Sequence[Any]
    ticks: Any
    collects: Sequence[Any]
    empty_buffers: Any
    empty_sums: Any


def _distinct(params: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(p for p in params if p is not None))


def _params_of_scopes(spec: PipelineSpec, program: PipelineProgram) -> dict[str, set[int]]:
    """The parameters that the parts in each scope read."""
    scopes: dict[str, set[int]] = {}
    param_of = params_of(spec.graph)
    for p, stage in zip(program.programs, program.stages, strict=True):
        scopes.setdefault(scope_of_part(p), set()).update(param_of[i] for i in stage.params)
    return scopes


class Pipeline:
    """The programs of one pipeline on its devices.

    Args:
        replica: Devices of the pipeline; the first axis is that of the stages.

    Attributes:
        groups: Slots that are filled and emptied together.
        timed: Whether `ticks` waits after each tick to take its time; the results are the same.
        times: Start and end of each tick of the last step, if it was timed.
    """

    text = ""  # processes have alike programs

    def __init__(self, spec: PipelineSpec, replica: Replica):
        self.spec = spec
        self.unit, self.most_inputs = spec.unit, spec.most
        self.replica = replica
        self.program = PipelineProgram(spec, replica)
        self._mesh = replica.mesh
        self._options = compiler_options(replica.devices[0].platform, spec.contribution.form)
        self._batch_shapes = shapes_of(spec.graph, spec.graph.batch_values)
        self._num_ticks = len(self.program.actions(spec.most).table_TSF)
        self.groups = spec.slot_groups
        #: For each group the places of its slots among the summed ones.
        self._places = [
            [k for k, i in enumerate(spec.slots.summed) if i in group] for group in spec.groups
        ]
        carry, slot_specs = self.program.carry_specs, self.program.slot_specs
        self._fills = [
            self._jit(
                _fill(group),
                ([spec.slots.specs[p] for p in group.params],),
                [slot_specs[i] for i in numbers],
            )
            for group, numbers in zip(self.groups, spec.groups, strict=True)
        ]
        self._ticks = self._jit(
            self.program.run_ticks,
            (slot_specs, P(), carry, P(), P(), P(), P()),
            (carry, P()),
            donate=(2,),
            manual=(STAGE_AXIS,),
        )
        self._collects = [self._collect(g) for g in range(len(self.groups))]
        shapes = self.program.shapes()
        self._empty = [
            jax.jit(
                lambda shapes=shapes: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
                out_shardings=map_specs(replica.sharding, specs),
            )
            for shapes, specs in zip(shapes, carry, strict=True)
        ]
        num = len(self.groups)
        self.names = (
            *["the stages' slots"] * num,
            "the ticks",
            *["the stages' sums"] * num,
            "empty buffers",
            "empty sums",
        )
        self._buffers: Buffers | None = None
        self._compiled: Compiled | None = None
        self.timed = False
        self.times: tuple[tuple[float, float], ...] = ()

    def _jit(
        self,
        run: Any,
        ins: Any,
        outs: Any,
        donate: tuple[int, ...] = (),
        manual: Sequence[str] | None = None,
    ) -> Any:
        names = frozenset(self._mesh.axis_names if manual is None else manual)
        manual_ins, manual_outs = map_specs(lambda s: only(s, names), (ins, outs))
        mapped = jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=manual_ins,
            out_specs=manual_outs,
            axis_names=names,
            check_vma=False,
        )
        ins, outs = map_specs(self.replica.sharding, (ins, outs))
        return jax.jit(
            mapped,
            in_shardings=ins,
            out_shardings=outs,
            donate_argnums=donate,
            compiler_options=self._options,
        )

    def _collect(self, g: int) -> Any:
        """The program that collects the sums of a group; the first also collects small arrays."""
        spec, group, acc = self.spec, self.groups[g], self.program.carry_specs.acc
        num_parts = spec.contribution.form.num_parts
        whole: Any = P()  # a tree of specs stands where arrays will be
        small = DeviceSums(
            whole,
            whole,
            [(whole,) * num_parts] * sum(spec.tensors.is_summed),
            [whole] * len(spec.tensors.words),
        )
        ins = self._sums_of(g, acc.slots), None if g else acc._replace(slots=[])
        outs = [(spec.slots.specs[p],) * num_parts for p in group.trained], None if g else small
        return self._jit(functools.partial(self.program.collect, group), ins, outs)

    def _sums_of(self, g: int, slots: Sequence[Any]) -> list[Any]:
        """The entries of a group, from one for each summed slot."""
        return [slots[k] for k in self._places[g]]

    # -- running -----------------------------------------------------------------------------------

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        return self._collected(self.programs.empty_sums())

    def run(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        _sums: DeviceSums | None,
        exponents: jax.Array,
        step: int,
        ids: range,
        batches: Sequence[PyTree],
    ) -> tuple[DeviceSums, jax.Array]:
        """Run a step's microbatches.

        Args:
            exponents: Scales, int32[tensors].
            ids: Microbatches of this pipeline, at least one.

        Returns:
            The sums of the stages, and a small array to wait on.
        """
        slots = self.filled(params)
        acc, tick = self.ticks(slots, aux, exponents, step, ids, batches)
        del slots
        assert tick is not None
        return self._collected(acc), tick

    def filled(self, params: Sequence[jax.Array]) -> list[jax.Array]:
        """All slots, from parameters as they are stored."""
        slots: list[list[jax.Array]] = []
        for g in range(len(self.groups)):
            jax.block_until_ready(slots)  # Gloo mixes up independent collectives
            slots.append(self.fill(g, params))
        return self.in_order(slots)

    def _collected(self, acc: Accumulated) -> DeviceSums:
        values: dict[int, tuple[jax.Array, ...]] = {}
        small: DeviceSums | None = None
        for g, group in enumerate(self.groups):
            jax.block_until_ready(values)  # see `filled`
            sums, rest = self.collect(g, acc)
            values |= zip(group.trained, sums, strict=True)
            small = rest or small
        assert small is not None
        return small._replace(values=[values[p] for p in self.spec.slots.trained] + small.values)

    def fill(
        self, g: int, stored: Sequence[jax.Array] | Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """The slots of a group.

        Args:
            stored: The group's parameters, by their places.
        """
        params = self.groups[g].params
        return self.programs.fills[g]([stored[p] for p in params])  # type: ignore[no-any-return]

    def low_params(self) -> dict[int, str]:
        """Places of the parameters that all stages read in one dtype of 16 bits, with the dtype."""
        graph, param_of = self.spec.graph, params_of(self.spec.graph)
        dtypes: dict[int, set[str | None]] = {}
        for part in self.spec.parts:
            low = low_params(graph, part.segment)
            for p in {param_of[entry] for entry in part.segment.params}:
                dtypes.setdefault(p, set()).add(low.get(p))
        pairs = ((p, next(iter(each))) for p, each in dtypes.items() if len(each) == 1)
        return {p: dtype for p, dtype in pairs if dtype is not None}

    def in_order(self, filled: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """All slots, from those of each group."""
        numbers = [i for group in self.spec.groups for i in group]
        arrays = dict(zip(numbers, (x for slots in filled for x in slots), strict=True))
        return [arrays[i] for i in range(len(numbers))]

    def ticks(
        self,
        slots: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        step: int,
        ids: Sequence[int],
        batches: Sequence[PyTree],
    ) -> tuple[Accumulated, jax.Array | None]:
        """The sums of the stages, and a small array to wait on; None: there are no microbatches."""
        acc, tick = self.programs.empty_sums(), None
        if not ids:
            return acc, tick
        table = self.program.actions(len(ids)).table_TSF
        fixed = exponents, self._padded(table)
        batch = self._stack(batches)
        carry = Carry(self._take_buffers(), acc)
        del acc  # the carry is donated
        spans = [(t, t + 1) for t in range(len(table))] if self.timed else [(0, len(table))]
        times = []
        for span in spans:
            where = self.replica.put(np.array([step, ids[0], *span], np.int32))
            start = time.perf_counter()
            carry, tick = self.programs.ticks(slots, list(aux), carry, *fixed, where, batch)
            if self.timed:
                jax.block_until_ready(tick)
                times.append((start, time.perf_counter()))
        self.times = tuple(times)
        self._buffers = carry.buffers
        return carry.acc, tick

    def collect(
        self, g: int, acc: Accumulated
    ) -> tuple[list[tuple[jax.Array, ...]], DeviceSums | None]:
        """The sums of a group, sharded as its parameters are stored.

        Args:
            acc: Sums of the stages; those of the group are removed.

        Returns:
            For each trained parameter of the group its parts; with the first group the small
            arrays, whose values are the other variables'.
        """
        small = None if g else acc._replace(slots=[])
        collected = self.programs.collects[g](self._sums_of(g, acc.slots), small)
        for k in self._places[g]:
            acc.slots[k] = ()
        return collected  # type: ignore[no-any-return]

    def _take_buffers(self) -> Buffers:
        """The last step's buffers; made when first needed, so that lowering needs no device."""
        buffers, self._buffers = self._buffers, None
        return buffers or self.programs.empty_buffers()  # type: ignore[no-any-return]

    def pieces(
        self,
        fill: Callable[[], list[jax.Array]],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        batch: PyTree,
    ) -> tuple[Callable[[np.ndarray], Callable[[], Any]], Callable[[], Any]]:
        """The pieces of a step as functions to time, in no more memory than a step takes.

        Returns:
            From a table of one tick, int32[1, S, F], to a function that runs it; and a function
            that fills the slots and collects the sums. Both return arrays to wait on.
        """
        slots = fill()
        stacked = self._stack([batch])
        where = self.replica.put(np.array([0, 0, 0, 1], np.int32))
        carry = Carry(self._take_buffers(), self.programs.empty_sums())

        def run_tick(table_TSF: np.ndarray) -> Callable[[], Any]:
            placed = self._padded(table_TSF)

            def run() -> Any:
                nonlocal carry
                carry, tick = self.programs.ticks(
                    slots, list(aux), carry, exponents, placed, where, stacked
                )
                return tick, carry

            return run

        def once() -> Any:
            nonlocal slots, carry
            slots = []
            slots = fill()
            jax.block_until_ready(slots)
            buffers, acc = carry
            carry = Carry(buffers, acc._replace(slots=[]))
            sums = self._collected(acc)
            carry = Carry(buffers, self.programs.empty_sums())
            return sums

        return run_tick, once

    def crossed(self, schedule: Schedule) -> list[tuple[int, ...]]:
        """Boundaries of each tick's exchange."""
        return [self.program.exchanges[i] for i in actions.exchange_of(schedule)]

    def lower(self, params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation, in the order of `names`."""
        spec = self.spec
        like = self.replica.like
        state = jax.tree.map(like, self.program.shapes(), self.program.carry_specs)
        slots = [
            like(jax.ShapeDtypeStruct((spec.slots.num_stages, *s.shape), s.dtype), p)
            for s, p in zip(spec.slots.slots, self.program.slot_specs, strict=True)
        ]
        batch = [jax.ShapeDtypeStruct((spec.most, *x.shape), x.dtype) for x in self._batch_shapes]
        table = np.zeros((self._num_ticks, spec.slots.num_stages, len(FIELDS)), np.int32)
        small = [state.acc._replace(slots=[]), *[None] * (len(self.groups) - 1)]
        return [
            *(
                fill.lower([params[p] for p in group.params])
                for fill, group in zip(self._fills, self.groups, strict=True)
            ),
            self._ticks.lower(
                slots, list(aux), state, exponents, table, np.zeros(4, np.int32), batch
            ),
            *(
                collect.lower(self._sums_of(g, state.acc.slots), small[g])
                for g, collect in enumerate(self._collects)
            ),
            *(empty.lower() for empty in self._empty),
        ]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled.

        Raises:
            PlanError: If a collective inside one stage would make other stages wait for ever.
        """
        num = len(self.groups)
        programs = Compiled(
            compiled[:num], compiled[num], compiled[num + 1 : -2], compiled[-2], compiled[-1]
        )
        if self.replica.axes[1:]:
            check_permutes(programs.ticks.as_text(), len(self.replica.rows[0]))
        self._compiled = programs

    @property
    def programs(self) -> Compiled:
        """The compiled programs."""
        assert self._compiled is not None
        return self._compiled

    def texts(self) -> Iterator[ProgramText]:
        """The optimized program of all microbatches; parts that share a program share a scope."""
        of_slot = enumerate(slot.params for slot in self.spec.slots.slots)
        yield ProgramText(
            text=self.programs.ticks.as_text() or "",
            params={f"slots[{i}]": _distinct(params) for i, params in of_slot},
            scopes=_params_of_scopes(self.spec, self.program),
        )

    # -- memory ------------------------------------------------------------------------------------

    @property
    def kept_bytes(self) -> int:
        """Bytes of one device between steps."""
        return self._bytes_of(self.program.shapes().buffers, self.program.carry_specs.buffers)

    def _bytes_of(self, shapes: Any, specs: Any) -> int:
        """Bytes of arrays on one device."""
        like = map(
            self.replica.like,
            jax.tree.leaves(shapes),
            jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)),
        )
        return sum(map(device_bytes, like))

    def sums_bytes(self, g: int) -> int:
        """Bytes of a device's sums in the slots of a group; the first has the small arrays too."""
        acc, specs = self.program.shapes().acc, self.program.carry_specs.acc
        slots = self._bytes_of(self._sums_of(g, acc.slots), self._sums_of(g, specs.slots))
        if g:
            return slots
        return slots + self._bytes_of(acc._replace(slots=[]), specs._replace(slots=[]))

    def slots_bytes(self, g: int) -> int:
        """Bytes of a group's slots on a device."""
        return sum(slot.num_bytes for slot in self.groups[g].slots)

    def memory_bytes(self, _sums_bytes: int) -> int:
        """Bytes that one device needs beside the state and `kept_bytes` while a step runs.

        The last programs make the sums, so their bytes are counted here.
        """
        each = range(len(self.groups))
        slots, acc = sum(map(self.slots_bytes, each)), sum(map(self.sums_bytes, each))
        ticks = slots + acc + extra_bytes(self.programs.ticks)
        return max(ticks, acc + sum(map(extra_bytes, self.programs.collects)))

    def _padded(self, table_TSF: np.ndarray) -> jax.Array:
        padded = np.zeros((self._num_ticks, *table_TSF.shape[1:]), np.int32)
        padded[: len(table_TSF)] = table_TSF
        return self.replica.put(padded)

    def _stack(self, batches: Sequence[PyTree]) -> list[jax.Array]:
        leaves = [jax.tree.leaves(b) for b in batches]
        out = []
        for i, like in enumerate(self._batch_shapes):
            stacked = np.zeros((self.spec.most, *like.shape), like.dtype)
            for k, arrays in enumerate(leaves):
                stacked[k] = arrays[i]
            out.append(self.replica.put(stacked))
        return out


def _fill(slots: Slots) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """`Slots.fill` of the slots' parameters, with a leading dimension of stages."""

    def run(stored: Sequence[jax.Array]) -> list[jax.Array]:
        return [x[None] for x in slots.fill(dict(zip(slots.params, stored, strict=True)))]

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PieceTimes:
    """Times of a pipeline's pieces.

    Attributes:
        seconds: By kind of action and part.
        meeting_seconds: By boundary, a forward on both sides and the exchange after it; boundary b
            is below stage b.
        fixed_seconds: Filling the slots and collecting the sums, once a step.
    """

    seconds: dict[tuple[str, int], float]
    meeting_seconds: dict[int, float]
    fixed_seconds: float

    def transfer_seconds(self, num_stages: int) -> dict[int, float]:
        """Seconds of the exchange over each boundary, beyond the longer forward of its two sides.

        Exchanges timed alone would be too slow in a throttled process: without waits for a
        neighbour it uses up its CPU quota.
        """

        def longer(boundary: int) -> float:
            sides = boundary, (boundary + 1) % num_stages
            return max(self.seconds.get((FORWARD, side), 0.0) for side in sides)

        return {b: max(0.0, took - longer(b)) for b, took in self.meeting_seconds.items()}


def piece_times(
    pipeline: Pipeline,
    fill: Callable[[], list[jax.Array]],
    aux: Sequence[jax.Array],
    exponents: jax.Array,
    batch: PyTree,
    *,
    repeats: int,
) -> PieceTimes:
    """Time the pieces of a step.

    Returns:
        Times of this process's stages only.
    """
    program = pipeline.program
    num_stages = pipeline.spec.slots.num_stages
    here = set(jax.local_devices())
    local_stages = [s for s, devices in enumerate(pipeline.replica.rows) if here & set(devices)]
    kinds = (FORWARD, BACKWARD, WEIGHT) if program.halves else (FORWARD, BACKWARD)
    run_tick, once = pipeline.pieces(fill, aux, exponents, batch)

    def tick_seconds(actions: Sequence[int], exchange: int) -> float:
        table = np.zeros((1, num_stages, len(FIELDS)), np.int32)
        table[0, :, 0] = actions
        table[0, :, -1] = exchange
        return middle_seconds(run_tick(table), repeats)

    seconds: dict[tuple[str, int], float] = {}
    nothing = tick_seconds([0] * num_stages, 0)

    def numbers(first: int, kind: str) -> list[int]:
        return [_actions.number(p, kind) for p in program.programs[first : first + num_stages]]

    for kind in kinds:
        for first in range(0, len(program.stages), num_stages):
            took = tick_seconds(numbers(first, kind), 0)
            seconds |= {(kind, first + s): max(0.0, took - nothing) for s in local_stages}
    meetings: dict[int, float] = {}
    for i, boundaries in enumerate(program.exchanges):
        new = set(boundaries) - meetings.keys()
        if new:  # the same for every process, as collectives must be
            took = tick_seconds(numbers(0, FORWARD), i)
            meetings |= dict.fromkeys(new, max(0.0, took - nothing))
    ours = {b for b in meetings for s in local_stages if s in (b, (b + 1) % num_stages)}

    return PieceTimes(
        seconds=seconds,
        meeting_seconds={b: meetings[b] for b in sorted(ours)},
        fixed_seconds=middle_seconds(once, repeats),
    )
