"""A pipeline as one SPMD program: a `shard_map` over the stages, a loop over the schedule's ticks.

In a tick every stage does what its row of the table says: for each action that a stage could have
to do there is a loop that runs once or not at all, so that buffers are updated in place, which no
conditional promises. Then arrays travel to the neighbours: two permutes over the boundaries of the
table's set for that tick. The table, the number of ticks and the numbers of the microbatches are
arguments: another schedule or count of microbatches compiles nothing.

A stage may have several devices, which cut its parameters as a `Sharded` says. Filling and emptying
the slots is manual over all axes, for each device moves its own pieces; the ticks are manual over
`stage` only, and XLA adds the collectives inside a stage. They may stand in an action, because all
devices of a stage take it in the same tick. What crosses a boundary is whole on each of them.

Legend of shape suffixes: M microbatches of a step, K of one pipeline at most, T ticks or tensors, S
stages, N devices of a stage, F fields of a table, W 32-bit words.

References:
    Huang et al., "GPipe", NeurIPS 2019. Narayanan et al., SC 2021 (1F1B, interleaved).
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .._core._types import STAGE_AXIS, PyTree
from .._graph._graph import shapes_of
from .._schedule._schedules import Schedule
from . import _actions
from ._actions import FIELDS
from ._contribution import DeviceSums
from ._inside import check_permutes, map_specs, only
from ._options import compiler_options, extra_bytes
from ._pipeline_program import Carry, PipelineProgram, PipelineSpec
from ._replica import Replica
from ._slots import Slots


class Pipeline:
    """The programs of one pipeline on its devices.

    Args:
        spec: What to run.
        replica: Its devices; the first axis is that of the stages.

    Attributes:
        names: Of the programs.
        timed: Whether `run` waits after each tick to take its time; the results are the same.
        times: Start and end of each tick of the last `run`, if it was timed.
    """

    text = ""  # processes have alike programs
    names = ("the stages' slots", "the ticks", "the stages' sums", "empty buffers")

    def __init__(self, spec: PipelineSpec, replica: Replica):
        self.spec = spec
        self.unit = spec.unit
        self.replica = replica
        self.program = PipelineProgram(spec, replica)
        self._mesh = replica.mesh
        self._options = compiler_options(replica.devices[0].platform, spec.contribution.form)
        self._batch_shapes = shapes_of(spec.graph, spec.graph.batch_values)
        self._num_ticks = len(self.program.actions(spec.most).table_TSF)
        slots, tensors = spec.slots, spec.tensors
        own = [slots.specs[p] for p in slots.trained]
        num_parts, num_aux = spec.contribution.form.num_parts, sum(tensors.is_float)
        whole: Any = P()  # a tree of specs stands where arrays will be
        out_sums = DeviceSums(
            whole,
            whole,
            [(s,) * num_parts for s in [*own, *[whole] * num_aux]],
            [whole] * len(tensors.others),
        )
        carry, slot_specs = self.program.carry_specs, self.program.slot_specs
        self._fill = self._jit(_fill(slots), ([*slots.specs],), slot_specs)
        self._ticks = self._jit(
            self.program.run_ticks,
            (slot_specs, P(), carry, P(), P(), P(), P()),
            (carry, P()),
            donate=(2,),
            manual=(STAGE_AXIS,),
        )
        self._finish = self._jit(self.program.run_finish, (carry,), (out_sums, carry), donate=(0,))
        shapes = self.program.shapes()
        self._empty = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            out_shardings=map_specs(replica.sharding, carry),
        )
        self._state: Any = None
        self._compiled: tuple[Any, ...] = ()
        self.timed = False
        self.times: tuple[tuple[float, float], ...] = ()

    def empty(self) -> DeviceSums:
        """Sums of no microbatch."""
        sums, self._state = self._compiled[2](self._carry())
        return sums  # type: ignore[no-any-return]

    def _jit(
        self,
        run: Any,
        ins: Any,
        outs: Any,
        donate: tuple[int, ...] = (),
        manual: Sequence[str] | None = None,
    ) -> Any:
        names = frozenset(self._mesh.axis_names if manual is None else manual)
        own_ins, own_outs = map_specs(lambda s: only(s, names), (ins, outs))
        mapped = jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=own_ins,
            out_specs=own_outs,
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

    def _carry(self) -> Carry:
        """What the last step left; at first nothing, so that lowering needs no device."""
        if self._state is None:
            self._state = self._compiled[3]()
        return self._state  # type: ignore[no-any-return]

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
            params: As stored.
            aux: Other variables.
            sums: Not used.
            exponents: Scales, int32[tensors].
            step: Number of the step.
            ids: Microbatches of this pipeline, at least one.
            batches: Their arrays.

        Returns:
            What the stages added up, and a small array to wait on.
        """
        fill, ticks, finish, _ = self._compiled
        table = self.program.actions(len(ids)).table_TSF
        slots = fill(list(params))
        fixed = (exponents, self._padded(table))
        batch = self._stack(batches)
        carry = self._carry()
        spans = [(t, t + 1) for t in range(len(table))] if self.timed else [(0, len(table))]
        times = []
        for span in spans:
            where = self.replica.put(np.array([step, ids.start, *span], np.int32))
            start = time.perf_counter()
            carry, tick = ticks(slots, list(aux), carry, *fixed, where, batch)
            if self.timed:
                jax.block_until_ready(tick)
                times.append((start, time.perf_counter()))
        self.times = tuple(times)
        sums, self._state = finish(carry)
        return sums, tick

    def pieces(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        batch: PyTree,
    ) -> tuple[Callable[[np.ndarray], Callable[[], Any]], Callable[[], Any]]:
        """What a step consists of, to be timed piece by piece.

        Returns:
            From a table of one tick, int32[1, S, F], to a function that runs it; and a function
            that fills the slots and collects the sums. Both return arrays to wait on.
        """
        fill, ticks, finish, _ = self._compiled
        slots = fill(list(params))
        stacked = self._stack([batch])
        where = self.replica.put(np.array([0, 0, 0, 1], np.int32))

        def run_tick(table_TSF: np.ndarray) -> Callable[[], Any]:
            placed = self._padded(table_TSF)

            def run() -> Any:
                self._state, tick = ticks(
                    slots, list(aux), self._carry(), exponents, placed, where, stacked
                )
                return tick, self._state

            return run

        def once() -> Any:
            jax.block_until_ready(fill(list(params)))
            sums, self._state = finish(self._carry())
            return sums

        return run_tick, once

    def crossed(self, schedule: Schedule) -> list[tuple[int, ...]]:
        """Boundaries of each tick's exchange."""
        return [self.program.exchanges[i] for i in _actions.exchange_of(schedule)]

    def lower(self, params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation: filling slots, ticks, collecting sums, empty buffers."""
        spec = self.spec
        like = self.replica.like
        state = jax.tree.map(like, self.program.shapes(), self.program.carry_specs)
        slots = [
            like(jax.ShapeDtypeStruct((spec.slots.num_stages, *s.shape), s.dtype), p)
            for s, p in zip(spec.slots.slots, self.program.slot_specs, strict=True)
        ]
        batch = [jax.ShapeDtypeStruct((spec.most, *x.shape), x.dtype) for x in self._batch_shapes]
        table = np.zeros((self._num_ticks, spec.slots.num_stages, len(FIELDS)), np.int32)
        return [
            self._fill.lower(list(params)),
            self._ticks.lower(
                slots, list(aux), state, exponents, table, np.zeros(4, np.int32), batch
            ),
            self._finish.lower(state),
            self._empty.lower(),
        ]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled.

        Raises:
            PlanError: If a stage's own collectives would make other stages wait for ever.
        """
        if self.replica.axes[1:]:
            check_permutes(compiled[1].as_text(), len(self.replica.rows[0]))
        self._compiled = tuple(compiled)

    @property
    def kept_bytes(self) -> int:
        """Of one device between steps."""
        arrays = jax.tree.leaves(self.program.shapes())
        specs = jax.tree.leaves(self.program.carry_specs, is_leaf=lambda s: isinstance(s, P))
        return sum(
            math.prod(self.replica.sharding(spec).shard_shape(x.shape)) * x.dtype.itemsize
            for x, spec in zip(arrays, specs, strict=True)
        )

    def memory_bytes(self, sums_bytes: int) -> int:
        """Bytes that one device needs beside the state and `kept_bytes` while a step runs.

        Args:
            sums_bytes: Not used: the last program makes them.
        """
        _, ticks, finish, _ = self._compiled
        slots = sum(
            math.prod(slot.piece) * jnp.dtype(slot.dtype).itemsize for slot in self.spec.slots.slots
        )
        return max(slots + extra_bytes(ticks), extra_bytes(finish))

    def _padded(self, table_TSF: np.ndarray) -> jax.Array:
        padded = np.zeros((self._num_ticks, *table_TSF.shape[1:]), np.int32)
        padded[: len(table_TSF)] = table_TSF
        return self.replica.put(padded)

    def _stack(self, batches: Sequence[PyTree]) -> list[jax.Array]:
        leaves = [jax.tree.leaves(b) for b in batches]
        out = []
        for i, like in enumerate(self._batch_shapes):
            stacked = np.zeros((self.spec.most, *like.shape), like.dtype)
            for k, own in enumerate(leaves):
                stacked[k] = own[i]
            out.append(self.replica.put(stacked))
        return out


def _fill(slots: Slots) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """`Slots.fill` with a leading dimension of stages."""

    def run(stored: Sequence[jax.Array]) -> list[jax.Array]:
        return [x[None] for x in slots.fill(stored)]

    return run
