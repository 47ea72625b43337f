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

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._cluster._hardware import middle_seconds
from .._core._types import STAGE_AXIS, PyTree
from .._graph._graph import Graph
from .._graph._interpreter import Env
from .._graph._parts import Part
from .._plan._sharding import Sharded
from .._schedule._schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from . import _actions, _exact
from ._actions import FIELDS, Actions
from ._inside import Inside, check_permutes, map_specs, only
from ._kept import make_kept
from ._replica import Replica
from ._replicate import Reduction, Sums, compiler_options, num_parts
from ._slots import Slots
from ._stage import StagePart


class _Accumulated(NamedTuple):
    """What each stage adds up over a step; every array has a leading dimension of stages."""

    small_MS: jax.Array
    peaks_NT: jax.Array
    slots: list[tuple[jax.Array, ...]]
    aux: list[tuple[jax.Array, ...]]
    ints: list[jax.Array]


class _Buffers(NamedTuple):
    """What waits between ticks; every array has a leading dimension of stages."""

    inputs: jax.Array
    grads: jax.Array
    residuals: list[jax.Array]
    late: list[jax.Array]
    down: jax.Array
    up: jax.Array


class _Carry(NamedTuple):
    buffers: _Buffers
    acc: _Accumulated


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What a pipeline's programs are made from.

    Attributes:
        graph: Of the loss, for one microbatch.
        parts: Of the chain: part `c * S + s` is chunk c of stage s.
        slots: Where the stages find their parameters.
        schedule: From a number of microbatches to a schedule of S stages.
        most: Microbatches that one pipeline may be given.
        unit: It takes multiples of this.
        num_microbatches: M, of a step.
        num_sums: Columns of a microbatch's sums.
        seed: Root of all random keys.
        reduction: `exact` or `float`.
        recompute: Whether backwards run forwards again from kept inputs.
        sharded: What the devices of a stage cut, by the numbers of `graph`; None: a stage has one.
    """

    graph: Graph
    parts: tuple[Part, ...]
    slots: Slots
    schedule: Callable[[int], Schedule]
    most: int
    unit: int
    num_microbatches: int
    num_sums: int
    seed: int
    reduction: Reduction
    recompute: bool
    sharded: Sharded | None = None

    @property
    def num_terms(self) -> int:
        """Terms of one element's sum: a parameter that several parts read has more."""
        readers = collections.Counter(p for part in self.parts for p in part.segment.params)
        return self.num_microbatches * max(readers.values(), default=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of a pipeline's pieces.

    Attributes:
        seconds: Of each kind of action of each part.
        meeting_seconds: Of a forward on both sides of a boundary and the exchange after it;
            boundary b is below stage b.
        fixed_seconds: Of filling the slots and collecting the sums, once a step.
    """

    seconds: dict[tuple[str, int], float]
    meeting_seconds: dict[int, float]
    fixed_seconds: float

    def transfer_seconds(self, num_stages: int) -> dict[int, float]:
        """Of the exchange over each boundary, beyond the longer forward of its two sides.

        By itself, one after another, it would take a throttled process longer: there it has not
        waited for its neighbour, and so has used up what it may run.
        """

        def longer(boundary: int) -> float:
            sides = boundary, (boundary + 1) % num_stages
            return max(self.seconds.get((FORWARD, side), 0.0) for side in sides)

        return {b: max(0.0, took - longer(b)) for b, took in self.meeting_seconds.items()}


class Pipeline:
    """The programs of one pipeline on its devices.

    Args:
        spec: What to run.
        replica: Its devices; the first axis is that of the stages.
        aux: Other variables, for shapes.
        batch: One microbatch, for shapes.

    Attributes:
        timed: Whether `run` waits after each tick to take its time; the results are the same.
        times: Start and end of each tick of the last `run`, if it was timed.
    """

    def __init__(self, spec: PipelineSpec, replica: Replica, aux: PyTree, batch: PyTree):
        self.spec = spec
        self._replica = replica
        self._mesh = replica.mesh
        graph, slots = spec.graph, spec.slots
        platform = replica.devices[0].platform
        self._options = compiler_options(platform, spec.reduction)
        inner = tuple(name for name, _ in replica.axes[1:])
        self._inside = Inside(mesh=self._mesh, axes=inner, on_cpu=platform == "cpu")
        placement = spec.sharded.placement(self._mesh) if spec.sharded is not None else None
        self._stages = [
            StagePart(graph, part, placement, on_cpu=platform == "cpu") for part in spec.parts
        ]
        self._aux = jax.tree.leaves(aux)
        self._batch_shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(batch)
        ]
        self._float_aux = [bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in self._aux]
        self._parts = num_parts(spec.reduction)
        self._exact = spec.reduction == "exact"
        self._bits = _exact.num_bits(spec.num_terms) if self._exact else 0
        self._sum_dtype = jnp.int32 if self._exact else jnp.float32
        self._num_tensors = len(slots.dims) + sum(self._float_aux)
        self._halves = spec.schedule(spec.unit).has_weight
        self._programs = self._shared()
        kept = [] if spec.recompute else self._stages
        self._residuals = make_kept([stage.residuals for stage in kept])
        self._late = make_kept([stage.late for stage in kept if self._halves])
        self._actions = functools.cache(self._lower)
        self._num_ticks = len(self._actions(spec.most).table_TSF)
        self._exchanges = _actions.exchanges(slots.num_stages, len(spec.parts) // slots.num_stages)
        spec_of: Any = P  # a tree of specs stands where arrays will be
        self._slot_specs = [P(STAGE_AXIS, *slot.spec) for slot in slots.slots]
        self._carry_specs = self._specs_of_carry()
        out_sums = Sums(
            spec_of(),
            spec_of(),
            [(s,) * self._parts for s in [*slots.specs, *[spec_of()] * sum(self._float_aux)]],
            [spec_of()] * (len(self._aux) - sum(self._float_aux)),
        )
        carry = self._carry_specs
        self._fill = self._jit(slots_fill(slots), ([*slots.specs],), self._slot_specs)
        self._ticks = self._jit(
            self._run_ticks,
            (self._slot_specs, P(), carry, P(), P(), P(), P()),
            (carry, P()),
            donate=(2,),
            manual=(STAGE_AXIS,),
        )
        self._finish = self._jit(self._run_finish, (carry,), (out_sums, carry), donate=(0,))
        self._state: Any = None
        self._compiled: tuple[Any, ...] = ()
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
        own_ins, own_outs = map_specs(lambda s: only(s, names), (ins, outs))
        mapped = jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=own_ins,
            out_specs=own_outs,
            axis_names=names,
            check_vma=False,
        )
        ins, outs = map_specs(lambda s: NamedSharding(self._mesh, s), (ins, outs))
        return jax.jit(
            mapped,
            in_shardings=ins,
            out_shardings=outs,
            donate_argnums=donate,
            compiler_options=self._options,
        )

    def _lower(self, count: int) -> Actions:
        return _actions.lower(
            self.spec.schedule(count), recompute=self.spec.recompute, programs=self._programs
        )

    def _shared(self) -> tuple[int, ...]:
        """For each part the first that computes the same in the same slots."""
        num = self.spec.slots.num_stages
        seen: dict[Any, int] = {}
        out = []
        for p, stage in enumerate(self._stages):
            held = self.spec.slots.of[p % num]
            key = stage.signature(), *(held[i] for i in stage.params)
            out.append(seen.setdefault(key, p))
        return tuple(out)

    # -- buffers -------------------------------------------------------------------------------

    def _shapes(self) -> _Carry:
        spec, num = self.spec, self.spec.slots.num_stages

        def each(shape: tuple[int, ...], dtype: Any = jnp.uint32) -> Any:
            return jax.ShapeDtypeStruct((num, *shape), dtype)

        def sums(shape: tuple[int, ...]) -> tuple[Any, ...]:
            return tuple(each(shape, self._sum_dtype) for _ in range(self._parts))

        most = self._actions(spec.most)
        down = max(s.below.words.size for s in self._stages)
        up = max(s.above.float_words.size for s in self._stages)
        buffers = _Buffers(
            inputs=each((most.num_inputs, down)),
            grads=each((most.num_grads, up)),
            residuals=[each((most.num_residuals, *s), t) for s, t in self._residuals.kinds],
            late=[each((most.num_late, *s), t) for s, t in self._late.kinds],
            down=each((down,)),
            up=each((up,)),
        )
        acc = _Accumulated(
            small_MS=each((spec.num_microbatches, spec.num_sums), jnp.int32),
            peaks_NT=each(
                (len(self._replica.rows[0]), len(spec.slots.slots) + sum(self._float_aux)),
                jnp.int32,
            ),
            slots=[sums(slot.shape) for slot in spec.slots.slots],
            aux=[
                sums(x.shape or (1,)) for x, f in zip(self._aux, self._float_aux, strict=True) if f
            ],
            ints=[
                each(x.shape or (1,), jnp.int32)
                for x, f in zip(self._aux, self._float_aux, strict=True)
                if not f
            ],
        )
        return _Carry(buffers, acc)

    def _specs_of_carry(self) -> _Carry:
        """A PartitionSpec for each array of a carry."""
        shapes = self._shapes()
        whole: Any = jax.tree.map(lambda _: P(STAGE_AXIS), shapes)
        acc = whole.acc._replace(
            peaks_NT=P(STAGE_AXIS, self._inside.axes or None),
            slots=[(s,) * self._parts for s in self._slot_specs],
        )
        return whole._replace(acc=acc)  # type: ignore[no-any-return]

    def _zeros(self) -> _Carry:
        shapes = self._shapes()
        make = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            out_shardings=map_specs(lambda s: NamedSharding(self._mesh, s), self._carry_specs),
        )
        return make()  # type: ignore[no-any-return]

    # -- programs ------------------------------------------------------------------------------

    def _run_ticks(
        self,
        slots: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        carry: _Carry,
        exponents: jax.Array,
        table_TSF: jax.Array,
        where: jax.Array,
        batch_K: Sequence[jax.Array],
    ) -> tuple[_Carry, jax.Array]:
        """Run the ticks from `where[2]` to `where[3]`; the first two are step and microbatch."""
        me = jax.lax.axis_index(STAGE_AXIS)
        own_slots = [x[0] for x in slots]
        exponents = exponents[self._tensors()[me]]
        inner = jax.tree.map(lambda x: x[0], carry)

        def tick(t: jax.Array, carry: _Carry) -> _Carry:
            row_F = table_TSF[t, me]
            field = {name: row_F[i] for i, name in enumerate(FIELDS)}
            index = where[1] + field["microbatch"]
            given = self._given(aux, batch_K, where[0], index, field["microbatch"])
            for number, action in self._all_actions():
                own = (own_slots, given, field, index, exponents)
                carry = _when(field["action"] == number, self._placing(action), carry, own)
            return self._exchange(carry, field)

        inner = jax.lax.fori_loop(where[2], where[3], tick, inner)
        return jax.tree.map(lambda x: x[None], inner), inner.acc.small_MS[0, 0]

    def _placing(self, action: Callable[..., _Carry]) -> Callable[..., _Carry]:
        """An action whose arrays lie where they did, whatever it does with them."""

        def run(carry: _Carry, slots: Any, *others: Any) -> _Carry:
            carry = self._inside.place(carry, self._carry_specs)
            carry = action(carry, self._inside.place(slots, self._slot_specs), *others)
            return self._inside.place(carry, self._carry_specs)  # type: ignore[no-any-return]

        return run

    def _tensors(self) -> jax.Array:
        """For each stage the tensor of every slot, and the other variables; tensor 0: padding."""
        slots = self.spec.slots
        num_params, num_aux = len(slots.dims), sum(self._float_aux)
        rows = [
            [slot.params[s] or 0 for slot in slots.slots] + [num_params + i for i in range(num_aux)]
            for s in range(slots.num_stages)
        ]
        return jnp.array(rows, jnp.int32)

    def _given(
        self,
        aux: Sequence[jax.Array],
        batch_K: Sequence[jax.Array],
        step: jax.Array,
        index: jax.Array,
        local: jax.Array,
    ) -> Env:
        graph = self.spec.graph
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.spec.seed), step), index)
        batch = [jax.lax.dynamic_index_in_dim(x, local, keepdims=False) for x in batch_K]
        given: Env = dict(zip(graph.aux_values, aux, strict=True))
        given |= dict(zip(graph.batch_values, batch, strict=True))
        given[graph.key_value] = key
        return given

    def _all_actions(self) -> list[tuple[int, Any]]:
        out: list[tuple[int, Any]] = []
        for p in sorted(set(self._programs)):
            stage = self._stages[p]
            if not (self.spec.recompute and stage.part.is_last):
                out.append((_actions.number(p, FORWARD), self._forward(p, stage)))
            if self._halves:
                out.append((_actions.number(p, BACKWARD), self._input_grads(p, stage)))
                out.append((_actions.number(p, WEIGHT), self._weight_grads(p, stage)))
            else:
                out.append((_actions.number(p, BACKWARD), self._backward(p, stage)))
        return out

    def _params(self, p: int, stage: StagePart, slots: Sequence[jax.Array]) -> list[jax.Array]:
        held = self.spec.slots.of[p % self.spec.slots.num_stages]
        return [slots[held[i]] for i in stage.params]

    def _forward(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: _Carry, slots: Any, given: Env, field: Any, index: jax.Array, exponents: Any
        ) -> _Carry:
            buffers, acc = carry
            inputs = self._inside.whole(stage.above.words.unpack(buffers.inputs[field["input"]]))
            params = self._params(p, stage, slots)
            if self.spec.recompute:
                made = stage.forward(params, inputs, given)
            else:
                made, saved = stage.forward_and_residuals(params, inputs, given)
                kept = self._residuals.put(buffers.residuals, p, saved, field["residual"])
                buffers = buffers._replace(residuals=kept)
            if stage.part.is_last:
                acc = self._record(acc, made, given, index, exponents)
            else:
                packed = stage.below.words.pack(self._inside.whole(made), buffers.down.size)
                buffers = buffers._replace(down=packed)
            return _Carry(buffers, acc)

        return run

    def _backward(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: _Carry, slots: Any, given: Env, field: Any, index: jax.Array, exponents: Any
        ) -> _Carry:
            buffers, acc = carry
            params = self._params(p, stage, slots)
            if self.spec.recompute:
                grads = self._inside.whole(
                    stage.below.float_words.unpack(buffers.grads[field["grad"]])
                )
                inputs = self._inside.whole(
                    stage.above.words.unpack(buffers.inputs[field["input"]])
                )
                d_params, d_inputs, made = stage.backward(params, inputs, given, grads)
                if stage.part.is_last:
                    acc = self._record(acc, made, given, index, exponents)
            else:
                saved, grads = self._waiting(p, stage, buffers, field)
                d_params, d_inputs = stage.backward_from_residuals(params, saved, given, grads)
            acc = self._add_grads(p, stage, acc, d_params, exponents)
            packed = stage.above.float_words.pack(self._inside.whole(d_inputs), buffers.up.size)
            return _Carry(buffers._replace(up=packed), acc)

        return run

    def _input_grads(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: _Carry, slots: Any, given: Env, field: Any, index: jax.Array, exponents: Any
        ) -> _Carry:
            buffers = carry.buffers
            saved, grads = self._waiting(p, stage, buffers, field)
            params = self._params(p, stage, slots)
            d_inputs, kept = stage.input_grads(params, saved, given, grads)
            buffers = buffers._replace(
                late=self._late.put(buffers.late, p, kept, field["late"]),
                up=stage.above.float_words.pack(d_inputs, buffers.up.size),
            )
            return carry._replace(buffers=buffers)

        return run

    def _weight_grads(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: _Carry, slots: Any, given: Env, field: Any, index: jax.Array, exponents: Any
        ) -> _Carry:
            saved, grads = self._waiting(p, stage, carry.buffers, field)
            params = self._params(p, stage, slots)
            kept = self._late.get(carry.buffers.late, p, field["late"])
            d_params = stage.weight_grads(params, saved, given, grads, kept)
            return carry._replace(acc=self._add_grads(p, stage, carry.acc, d_params, exponents))

        return run

    def _waiting(self, p: int, stage: StagePart, buffers: _Buffers, field: Any) -> tuple[Any, Any]:
        """A part's residuals and the gradients of its outputs."""
        saved = self._residuals.get(buffers.residuals, p, field["residual"])
        return saved, stage.below.float_words.unpack(buffers.grads[field["grad"]])

    def _add_grads(
        self, p: int, stage: StagePart, acc: _Accumulated, grads: Sequence[Any], exponents: Any
    ) -> _Accumulated:
        held = self.spec.slots.of[p % self.spec.slots.num_stages]
        places = [held[param] for param in stage.params]
        specs = [self._slot_specs[slot] for slot in places]
        peaks_NT, grads = self._inside.raise_peaks(
            acc.peaks_NT, places, self._inside.place(list(grads), specs), specs
        )
        slots = list(acc.slots)
        for slot, grad in zip(places, grads, strict=True):
            slots[slot] = self._add(slots[slot], grad, exponents[slot])
        return acc._replace(slots=slots, peaks_NT=peaks_NT)

    def _add(self, before: Sequence[Any], x: jax.Array, exponent: Any) -> tuple[Any, ...]:
        x = x.astype(jnp.float32).reshape(before[0].shape)
        terms = _exact.encode(x, exponent, self._bits) if self._exact else (x,)
        return tuple(old + new for old, new in zip(before, terms, strict=True))

    def _record(
        self, acc: _Accumulated, results: list[Any], given: Env, index: jax.Array, exponents: Any
    ) -> _Accumulated:
        """Sums of a microbatch and what it did to other variables, on the last stage."""
        _, sums_S, *new_aux = self._inside.whole(results)
        first = len(self.spec.slots.slots)
        deltas: list[jax.Array] = []
        floats: list[tuple[Any, ...]] = []
        ints: list[Any] = []
        for old_value, new, is_float in zip(
            self.spec.graph.aux_values, new_aux, self._float_aux, strict=True
        ):
            if is_float:
                delta = new.astype(jnp.float32) - given[old_value].astype(jnp.float32)
                exponent = exponents[first + len(floats)]
                floats.append(self._add(acc.aux[len(floats)], delta, exponent))
                deltas.append(delta)
            else:
                before = acc.ints[len(ints)]
                mine = jnp.where(index == 0, new.astype(jnp.int32), 0)
                ints.append(before + mine.reshape(before.shape))
        bits = jax.lax.bitcast_convert_type(jnp.asarray(sums_S, jnp.float32), jnp.int32)
        tensors = range(first, first + len(deltas))
        peaks_NT, _ = self._inside.raise_peaks(
            acc.peaks_NT, tensors, deltas, [P(STAGE_AXIS)] * len(deltas)
        )
        return acc._replace(
            small_MS=acc.small_MS.at[index].set(bits),
            peaks_NT=peaks_NT,
            aux=floats,
            ints=ints,
        )

    def _exchange(self, carry: _Carry, field: Any) -> _Carry:
        """Arrays to the neighbours, over the boundaries of this tick."""
        buffers = carry.buffers
        num = self.spec.slots.num_stages

        def over(boundaries: Sequence[int]) -> Any:
            downward = [(b, (b + 1) % num) for b in boundaries]
            upward = [(b, a) for a, b in downward]

            def run(buffers: _Buffers) -> _Buffers:
                down = jax.lax.ppermute(buffers.down, STAGE_AXIS, downward)
                up = jax.lax.ppermute(buffers.up, STAGE_AXIS, upward)
                return buffers._replace(
                    inputs=_set(buffers.inputs, down, field["down"]),
                    grads=_set(buffers.grads, up, field["up"]),
                )

            return run

        for i, boundaries in enumerate(self._exchanges):
            if boundaries:  # every stage does the same, for the set is the tick's
                buffers = _when(field["exchange"] == i, over(boundaries), buffers, ())
        return carry._replace(buffers=buffers)

    def _run_finish(self, carry: _Carry) -> tuple[Sums, _Carry]:
        """Sums of all stages in the pieces of storage, and the accumulators empty again."""
        acc = jax.tree.map(lambda x: x[0], carry.acc)
        peaks_T = self._inside.largest(acc.peaks_NT)
        small = [acc.small_MS, peaks_T, *acc.ints, *(x for parts in acc.aux for x in parts)]
        values, (small_MS, peaks, *others) = self.spec.slots.collect(acc.slots, small)
        num_ints = len(acc.ints)
        totals = [x.sum(0) for x in others]  # zero on all stages but the last
        aux = [
            tuple(totals[num_ints + i * self._parts :][: self._parts]) for i in range(len(acc.aux))
        ]
        values = [tuple(x.reshape(x.shape or (1,)) for x in parts) for parts in values]
        tensors = self._tensors().reshape(-1)
        peaks_T = jnp.zeros(self._num_tensors, jnp.int32).at[tensors].max(peaks.reshape(-1))
        sums = Sums(small_MS.sum(0), peaks_T, [*values, *aux], totals[:num_ints])
        empty = jax.tree.map(jnp.zeros_like, carry.acc)
        return sums, carry._replace(acc=empty)

    # -- a step --------------------------------------------------------------------------------

    def run(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        step: int,
        ids: range,
        batches: Sequence[PyTree],
    ) -> tuple[Sums, jax.Array]:
        """Run a step's microbatches.

        Args:
            params: As stored.
            aux: Other variables.
            exponents: Scales, int32[tensors].
            step: Number of the step.
            ids: Microbatches of this pipeline, at least one.
            batches: Their arrays.

        Returns:
            What the stages added up, and a small array to wait on.
        """
        fill, ticks, finish = self._compiled
        table = self._actions(len(ids)).table_TSF
        slots = fill(list(params))
        fixed = (exponents, self._padded(table))
        batch = self._stack(batches)
        carry = self._state
        spans = [(t, t + 1) for t in range(len(table))] if self.timed else [(0, len(table))]
        times = []
        for span in spans:
            where = self._put(np.array([step, ids.start, *span], np.int32))
            start = time.perf_counter()
            carry, tick = ticks(slots, list(aux), carry, *fixed, where, batch)
            if self.timed:
                jax.block_until_ready(tick)
                times.append((start, time.perf_counter()))
        self.times = tuple(times)
        sums, self._state = finish(carry)
        return sums, tick

    def measure(
        self,
        params: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        exponents: jax.Array,
        batch: PyTree,
        *,
        repeats: int,
    ) -> Measured:
        """Time everything that a step consists of.

        Args:
            params: As stored.
            aux: Other variables.
            exponents: Scales.
            batch: One microbatch.
            repeats: Of each.

        Returns:
            Times of this process's stages; those of others are not in it.
        """
        fill, ticks, finish = self._compiled
        slots = fill(list(params))
        stacked = self._stack([batch])
        num_stages = self.spec.slots.num_stages
        here = set(jax.local_devices())
        own = [s for s, devices in enumerate(self._replica.rows) if here & set(devices)]
        kinds = (FORWARD, BACKWARD, WEIGHT) if self._halves else (FORWARD, BACKWARD)

        def tick_seconds(actions: Sequence[int], exchange: int) -> float:
            table = np.zeros((1, num_stages, len(FIELDS)), np.int32)
            table[0, :, 0] = actions
            table[0, :, -1] = exchange
            where = self._put(np.array([0, 0, 0, 1], np.int32))
            placed = self._padded(table)

            def run() -> Any:
                self._state, tick = ticks(
                    slots, list(aux), self._state, exponents, placed, where, stacked
                )
                return tick, self._state

            return middle_seconds(run, repeats)

        found: dict[tuple[str, int], float] = {}
        nothing = tick_seconds([0] * num_stages, 0)

        def numbers(first: int, kind: str) -> list[int]:
            return [_actions.number(p, kind) for p in self._programs[first : first + num_stages]]

        for kind in kinds:
            for first in range(0, len(self._stages), num_stages):
                took = tick_seconds(numbers(first, kind), 0)
                found |= {(kind, first + s): max(0.0, took - nothing) for s in own}
        meetings: dict[int, float] = {}
        for i, boundaries in enumerate(self._exchanges):
            new = set(boundaries) - meetings.keys()
            if new:  # the same for every process, as collectives must be
                took = tick_seconds(numbers(0, FORWARD), i)
                meetings |= dict.fromkeys(new, max(0.0, took - nothing))
        ours = {b for b in meetings for s in own if s in (b, (b + 1) % num_stages)}

        def once() -> Any:
            jax.block_until_ready(fill(list(params)))
            sums, self._state = finish(self._state)
            return sums

        return Measured(
            seconds=found,
            meeting_seconds={b: meetings[b] for b in sorted(ours)},
            fixed_seconds=middle_seconds(once, repeats),
        )

    def crossed(self, schedule: Schedule) -> list[tuple[int, ...]]:
        """Boundaries of each tick's exchange."""
        return [self._exchanges[i] for i in _actions.exchange_of(schedule)]

    def lower(self, params: Sequence[Any], aux: Sequence[Any], exponents: Any) -> list[Any]:
        """The programs before compilation: filling slots, ticks, collecting sums."""
        spec = self.spec
        if self._state is None:
            self._state = self._zeros()

        def like(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self._mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        state = jax.tree.map(like, self._shapes(), self._carry_specs)
        slots = [
            like(jax.ShapeDtypeStruct((spec.slots.num_stages, *s.shape), s.dtype), p)
            for s, p in zip(spec.slots.slots, self._slot_specs, strict=True)
        ]
        batch = [jax.ShapeDtypeStruct((spec.most, *x.shape), x.dtype) for x in self._batch_shapes]
        table = np.zeros((self._num_ticks, spec.slots.num_stages, len(FIELDS)), np.int32)
        return [
            self._fill.lower(list(params)),
            self._ticks.lower(
                slots, list(aux), state, exponents, table, np.zeros(4, np.int32), batch
            ),
            self._finish.lower(state),
        ]

    def adopt(self, compiled: Sequence[Any]) -> None:
        """Take over the programs of `lower`, compiled.

        Raises:
            PlanError: If a stage's own collectives would make other stages wait for ever.
        """
        if self._inside.axes:
            check_permutes(compiled[1].as_text(), len(self._replica.rows[0]))
        self._compiled = tuple(compiled)

    def memory_bytes(self) -> int:
        """Bytes that one device needs while the ticks run, parameters' storage left out."""
        stats = self._compiled[1].memory_analysis()
        if stats is None:
            return 0
        return int(
            stats.argument_size_in_bytes
            + stats.temp_size_in_bytes
            + stats.output_size_in_bytes
            - stats.alias_size_in_bytes
        )

    def explain(self) -> tuple[str, ...]:
        """The stages, for the plan."""
        spec = self.spec
        schedule = spec.schedule(spec.most)
        total = sum(p.segment.flops for p in spec.parts) or 1.0
        lines = [
            f"pipeline of {schedule.num_stages} stages, {schedule.name}"
            + (f" with {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else "")
            + (": forwards run again" if spec.recompute else ": residuals are kept")
        ]
        for p, part in enumerate(spec.parts):
            lines.append(
                f"stage {p % schedule.num_stages}: {part.segment.name}, "
                f"{part.segment.flops / total:.0%} of the work"
            )
        lines.append(f"padding of the stages' parameters: {spec.slots.padding:.0%}")
        return tuple(lines)

    def _padded(self, table_TSF: np.ndarray) -> jax.Array:
        padded = np.zeros((self._num_ticks, *table_TSF.shape[1:]), np.int32)
        padded[: len(table_TSF)] = table_TSF
        return self._put(padded)

    def _put(self, x: np.ndarray) -> jax.Array:
        return self._replica.put(x)

    def _stack(self, batches: Sequence[PyTree]) -> list[jax.Array]:
        leaves = [jax.tree.leaves(b) for b in batches]
        out = []
        for i, like in enumerate(self._batch_shapes):
            stacked = np.zeros((self.spec.most, *like.shape), like.dtype)
            for k, own in enumerate(leaves):
                stacked[k] = own[i]
            out.append(self._put(stacked))
        return out


def slots_fill(slots: Slots) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """`Slots.fill` with a leading dimension of stages."""

    def run(stored: Sequence[jax.Array]) -> list[jax.Array]:
        return [x[None] for x in slots.fill(stored)]

    return run


def _when(condition: jax.Array, run: Callable[..., Any], carry: Any, operands: Any) -> Any:
    """`run(carry, *operands)` once or not at all, in place."""

    def body(i: jax.Array, carry: Any) -> Any:
        # XLA takes what does not vary out of a loop, even out of one that may never run.
        _, carry, own = jax.lax.optimization_barrier((i, carry, operands))
        return run(carry, *own)

    return jax.lax.fori_loop(0, condition.astype(jnp.int32), body, carry)


def _set(buffers: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffers, value, index, 0)
