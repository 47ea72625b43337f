"""A pipeline's SPMD program: the loop over ticks, its actions, its sums.

Every stage has the same buffers, as SPMD requires. Parts share buffers for residuals of one shape:
packing them into one array would copy each twice.

Legend of shape suffixes: M microbatches of a step, K of one pipeline at most, T ticks or tensors, S
stages, N devices of a stage, F fields of a table, W 32-bit words.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..core.types import STAGE_AXIS
from ..graph.graph import Graph, entries_of
from ..graph.interpreter import AS_THEY_ARE, Env
from ..graph.parts import ChainPart
from ..plan.sharding import Sharded
from ..schedule.schedules import BACKWARD, FORWARD, WEIGHT, Schedule
from . import actions
from .actions import FIELDS, Actions
from .bitcast_packing import BitcastPacking
from .chain_spec import wanted_values
from .compile import adds_in_order
from .contribution import (
    Contribution,
    DeviceSums,
    Tensors,
    at_least_1d,
    changes,
    joined_words,
    microbatch_key,
    row_bits,
)
from .replica import Replica
from .slots import Slots
from .stage import StagePart, StageSharding


class Accumulated(NamedTuple):
    """Sums of each stage over a step; every array has a leading dimension of stages."""

    small_MS: jax.Array
    peaks_NT: jax.Array
    slots: list[tuple[jax.Array, ...]]
    aux: list[tuple[jax.Array, ...]]
    words: list[jax.Array]


class Buffers(NamedTuple):
    """Arrays kept between ticks; every array has a leading dimension of stages."""

    inputs: jax.Array
    grads: jax.Array
    residuals: list[jax.Array]
    late: list[jax.Array]
    down: jax.Array
    up: jax.Array


class Carry(NamedTuple):
    buffers: Buffers
    acc: Accumulated


_Kind = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class ResidualBuffers:
    """The buffer of each residual of each part.

    Attributes:
        kinds: Shape and dtype of each buffer's entries; random keys are kept as their data.
        of: For each part the buffers of its residuals.
        dtypes: For each part the dtypes of its residuals.
    """

    kinds: tuple[_Kind, ...]
    of: tuple[tuple[int, ...], ...]
    dtypes: tuple[tuple[Any, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of an entry of all buffers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.kinds)

    def put(
        self, buffers: Sequence[jax.Array], part: int, arrays: Sequence[jax.Array], index: jax.Array
    ) -> list[jax.Array]:
        """The buffers with a part's arrays in entry `index`."""
        out = list(buffers)
        for i, x in zip(self.of[part], arrays, strict=True):
            out[i] = jax.lax.dynamic_update_index_in_dim(out[i], _data(x), index, 0)
        return out

    def get(self, buffers: Sequence[jax.Array], part: int, index: jax.Array) -> list[jax.Array]:
        """A part's arrays from entry `index`."""
        out = []
        for i, dtype in zip(self.of[part], self.dtypes[part], strict=True):
            x = jax.lax.dynamic_index_in_dim(buffers[i], index, keepdims=False)
            if jnp.issubdtype(dtype, jax.dtypes.prng_key):
                x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), dtype)))
            out.append(x)
        return out


def assign_buffers(arrays: Sequence[Sequence[Any]]) -> ResidualBuffers:
    """Assign buffers to the residuals of each part.

    Args:
        arrays: For each part its residuals, or their shapes.
    """
    kinds: list[_Kind] = []
    of = []
    for residuals in arrays:
        used: set[int] = set()
        places = []
        for x in residuals:
            data = jax.eval_shape(_data, x)
            kind = (tuple(data.shape), data.dtype)
            place = next((i for i, k in enumerate(kinds) if k == kind and i not in used), None)
            if place is None:
                place = len(kinds)
                kinds.append(kind)
            used.add(place)
            places.append(place)
        of.append(tuple(places))
    dtypes = tuple(tuple(x.dtype for x in residuals) for residuals in arrays)
    return ResidualBuffers(kinds=tuple(kinds), of=tuple(of), dtypes=dtypes)


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """The inputs of a pipeline's programs.

    Attributes:
        graph: Graph of the loss of one microbatch, in the order in which it is cut.
        contribution: How gradients join the sums.
        parts: Parts of the chain: part `c * S + s` is chunk c of stage s.
        slots: Slots of the stages' parameters.
        groups: Numbers of the slots that are filled and emptied together.
        schedule: From a number of microbatches to a schedule of S stages.
        most: Most microbatches of one pipeline.
        unit: The number of microbatches is a multiple of this.
        seed: Root of all random keys.
        recompute: Whether backwards run forwards again from kept inputs.
        sharded: How the devices of a stage cut `graph`; None: a stage has one device.
    """

    graph: Graph
    tensors: Tensors
    contribution: Contribution
    parts: tuple[ChainPart, ...]
    slots: Slots
    groups: tuple[tuple[int, ...], ...]
    schedule: Callable[[int], Schedule]
    most: int
    unit: int
    num_microbatches: int
    num_columns: int
    seed: int
    recompute: bool
    sharded: Sharded | None = None

    @property
    def slot_groups(self) -> list[Slots]:
        """The slots of each group."""
        return [self.slots.only(numbers) for numbers in self.groups]

    @property
    def is_cut_free(self) -> bool:
        """See `are_cut_free`."""
        return self.sharded is not None and self.sharded.granules is not None

    @functools.cached_property
    def trained_entries(self) -> tuple[int, ...]:
        """See `entries_of`, of the trained parameters."""
        return entries_of(self.graph, set(self.slots.trained))

    @functools.cached_property
    def wanted(self) -> set[int]:
        """See `wanted_values`."""
        return wanted_values(self.graph, self.slots.trained)


class PipelineProgram:
    """The functions from which a pipeline's programs are traced.

    Args:
        replica: Devices of the pipeline; the first axis is that of the stages.
    """

    def __init__(self, spec: PipelineSpec, replica: Replica):
        self.spec = spec
        self._num_inner = len(replica.rows[0])
        platform = replica.devices[0].platform
        on_cpu, in_order = platform == "cpu", adds_in_order(platform, spec.contribution.form)
        inner = tuple(name for name, _ in replica.axes[1:])
        self.inside = StageSharding(mesh=replica.mesh, axes=inner, on_cpu=on_cpu)
        place = AS_THEY_ARE if spec.sharded is None else spec.sharded.placement(replica.mesh)
        self.stages = [
            StagePart(
                spec.graph,
                part,
                place,
                trained=spec.trained_entries,
                on_cpu=on_cpu,
                in_order=in_order,
                wanted=spec.wanted,
            )
            for part in spec.parts
        ]
        self._sum_of = {slot: i for i, slot in enumerate(spec.slots.summed)}
        self._num_aux = sum(spec.tensors.is_summed)
        self.halves = spec.schedule(spec.unit).has_weight
        self.programs = self._shared()
        kept = [] if spec.recompute else self.stages
        self._residuals = assign_buffers([stage.residuals for stage in kept])
        self._late = assign_buffers([stage.late for stage in kept if self.halves])
        self.actions = functools.cache(self._lowered)
        num_stages = spec.slots.num_stages
        self.exchanges = actions.exchanges(num_stages, len(spec.parts) // num_stages)
        self.slot_specs = [P(STAGE_AXIS, *slot.spec) for slot in spec.slots.slots]
        self.carry_specs = self._specs_of_carry()

    def _lowered(self, count: int) -> Actions:
        return actions.lower(
            self.spec.schedule(count), recompute=self.spec.recompute, programs=self.programs
        )

    def _shared(self) -> tuple[int, ...]:
        """For each part the first that computes the same in the same slots."""
        seen: dict[Any, int] = {}
        out = []
        for p, stage in enumerate(self.stages):
            key = stage.signature(), *self._slots_of(p)
            out.append(seen.setdefault(key, p))
        return tuple(out)

    # -- buffers -----------------------------------------------------------------------------

    def shapes(self) -> Carry:
        spec, num = self.spec, self.spec.slots.num_stages

        def each(shape: tuple[int, ...], dtype: Any = jnp.uint32) -> Any:
            return jax.ShapeDtypeStruct((num, *shape), dtype)

        def sums(shape: tuple[int, ...]) -> tuple[Any, ...]:
            contribution = spec.contribution
            return (each(shape, contribution.dtype),) * contribution.form.num_parts

        most = self.actions(spec.most)
        down = self._even(max(s.below.words.size for s in self.stages))
        up = self._even(max(s.above.float_words.size for s in self.stages))
        buffers = Buffers(
            inputs=each((most.num_inputs, down)),
            grads=each((most.num_grads, up)),
            residuals=[each((most.num_residuals, *s), t) for s, t in self._residuals.kinds],
            late=[each((most.num_late, *s), t) for s, t in self._late.kinds],
            down=each((down,)),
            up=each((up,)),
        )
        acc = Accumulated(
            small_MS=each((spec.num_microbatches, spec.num_columns), jnp.int32),
            peaks_NT=each(
                (self._num_inner, len(self._sum_of) + self._num_aux),
                jnp.int32,
            ),
            slots=[sums(spec.slots.slots[i].shape) for i in self._sum_of],
            aux=[
                sums(at_least_1d(x.shape)) for x in spec.tensors.floats[len(spec.tensors.params) :]
            ],
            words=[each(x.shape, x.dtype) for x in spec.tensors.words],
        )
        return Carry(buffers, acc)

    def _even(self, size: int) -> int:
        return -(-size // self._num_inner) * self._num_inner

    def _specs_of_carry(self) -> Carry:
        """A PartitionSpec for each array of a carry."""
        shapes = self.shapes()
        whole: Any = jax.tree.map(lambda _: P(STAGE_AXIS), shapes)
        acc = whole.acc._replace(
            peaks_NT=P(STAGE_AXIS, self.inside.axes or None),
            slots=[
                (self.slot_specs[i],) * self.spec.contribution.form.num_parts for i in self._sum_of
            ],
        )
        cut = self.inside.axes or None  # arrays that wait for a stage, or are sent
        buffers = whole.buffers._replace(
            inputs=P(STAGE_AXIS, None, cut),
            grads=P(STAGE_AXIS, None, cut),
            down=P(STAGE_AXIS, cut),
            up=P(STAGE_AXIS, cut),
        )
        return whole._replace(buffers=buffers, acc=acc)  # type: ignore[no-any-return]

    # -- programs ------------------------------------------------------------------------------

    def run_ticks(
        self,
        slots: Sequence[jax.Array],
        aux: Sequence[jax.Array],
        carry: Carry,
        exponents: jax.Array,
        table_TSF: jax.Array,
        where: jax.Array,
        batch_K: Sequence[jax.Array],
    ) -> tuple[Carry, jax.Array]:
        """Run the ticks from `where[2]` to `where[3]`; the first two are step and microbatch."""
        me = jax.lax.axis_index(STAGE_AXIS)
        stage_slots = [x[0] for x in slots]
        exponents = exponents[self._tensors()[me]]
        inner = jax.tree.map(lambda x: x[0], carry)
        # Once for all ticks: else each action would copy the rows of a slot.
        params = {p: self._params(p, stage_slots) for p in sorted(set(self.programs))}

        def tick(t: jax.Array, carry: Carry) -> Carry:
            row_F = table_TSF[t, me]
            field = {name: row_F[i] for i, name in enumerate(FIELDS)}
            index = where[1] + field["microbatch"]
            env = self._env(aux, batch_K, where[0], index, field["microbatch"])
            for number, p, action in self._all_actions():
                operands = (params[p], env, field, index, exponents)
                carry = _when(field["action"] == number, self._placing(p, action), carry, operands)
            return self._exchange(carry, field)

        inner = jax.lax.fori_loop(where[2], where[3], tick, inner)
        return jax.tree.map(lambda x: x[None], inner), inner.acc.small_MS[0, 0]

    def _placing(self, p: int, action: Callable[..., Carry]) -> Callable[..., Carry]:
        """An action of a part that leaves its arrays' shardings as they were."""
        specs = [self.slot_specs[i] for i in self._slots_of(p)]

        def run(carry: Carry, params: Any, *others: Any) -> Carry:
            with jax.named_scope(scope_of_part(p)):
                carry = self.inside.place(carry, self.carry_specs)
                carry = action(carry, self.inside.place(params, specs), *others)
                return self.inside.place(carry, self.carry_specs)  # type: ignore[no-any-return]

        return run

    def _tensors(self) -> jax.Array:
        """For each stage the tensor of every sum, then the other variables; padding is tensor 0."""
        slots, num_aux = self.spec.slots, self._num_aux
        tensor: dict[int | None, int] = {param: i for i, param in enumerate(slots.trained)}
        aux = [len(tensor) + i for i in range(num_aux)]
        rows = [
            [tensor.get(slots.slots[i].params[s], 0) for i in self._sum_of] + aux
            for s in range(slots.num_stages)
        ]
        return jnp.array(rows, jnp.int32)

    def _env(
        self,
        aux: Sequence[jax.Array],
        batch_K: Sequence[jax.Array],
        step: jax.Array,
        index: jax.Array,
        local: jax.Array,
    ) -> Env:
        graph = self.spec.graph
        key = microbatch_key(self.spec.seed, step, index)
        batch = [jax.lax.dynamic_index_in_dim(x, local, keepdims=False) for x in batch_K]
        env: Env = dict(zip(graph.aux_values, aux, strict=True))
        env |= dict(zip(graph.batch_values, batch, strict=True))
        env[graph.key_value] = key
        return env

    def _all_actions(self) -> list[tuple[int, int, Any]]:
        """For each action its number, its part and its function."""
        out: list[tuple[int, int, Any]] = []
        for p in sorted(set(self.programs)):
            stage = self.stages[p]
            if not (self.spec.recompute and stage.part.is_last):
                out.append((actions.number(p, FORWARD), p, self._forward(p, stage)))
            if self.halves:
                out.append((actions.number(p, BACKWARD), p, self._input_grads(p, stage)))
                out.append((actions.number(p, WEIGHT), p, self._weight_grads(p, stage)))
            else:
                out.append((actions.number(p, BACKWARD), p, self._backward(p, stage)))
        return out

    def _slots_of(self, p: int) -> list[int]:
        """The slots of a part's parameters."""
        slot_of = self.spec.slots.of[p % self.spec.slots.num_stages]
        return [slot_of[i] for i in self.stages[p].params]

    def _params(self, p: int, slots: Sequence[jax.Array]) -> list[jax.Array]:
        graph = self.spec.graph
        shapes = [graph.values[graph.param_values[i]].shape for i in self.stages[p].params]
        return [
            _first_rows(slots[i], shape) for i, shape in zip(self._slots_of(p), shapes, strict=True)
        ]

    def _written(self, function: Callable[..., Any], index: jax.Array) -> Callable[..., Any]:
        if self.spec.sharded is None:
            return function
        return self.spec.sharded.invariant(function, self.inside.mesh, index)

    def _forward(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: Carry, params: Any, env: Env, field: Any, index: jax.Array, exponents: Any
        ) -> Carry:
            buffers, acc = carry
            inputs = self._unpacked(stage.above.words, buffers.inputs[field["input"]])
            if self.spec.recompute:
                forward = stage.forward_of_gradient if self.spec.is_cut_free else stage.forward
                made = self._written(forward, index)(params, inputs, env)
            else:
                forward = self._written(stage.forward_and_residuals, index)
                made, saved = forward(params, inputs, env)
                kept = self._residuals.put(buffers.residuals, p, saved, field["residual"])
                buffers = buffers._replace(residuals=kept)
            if stage.part.is_last:
                acc = self._record(acc, made, env, index, exponents)
            else:
                packed = self._packed(stage.below.words, made, buffers.down)
                buffers = buffers._replace(down=packed)
            return Carry(buffers, acc)

        return run

    def _backward(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: Carry, params: Any, env: Env, field: Any, index: jax.Array, exponents: Any
        ) -> Carry:
            buffers, acc = carry
            if self.spec.recompute:
                grads = self._unpacked(stage.below.float_words, buffers.grads[field["grad"]])
                inputs = self._unpacked(stage.above.words, buffers.inputs[field["input"]])
                backward = self._written(stage.backward, index)
                d_params, d_inputs, made = backward(params, inputs, env, grads)
                if stage.part.is_last:
                    acc = self._record(acc, made, env, index, exponents)
            else:
                saved, grads = self._waiting(p, stage, buffers, field)
                backward = self._written(stage.backward_from_residuals, index)
                d_params, d_inputs = backward(params, saved, env, grads)
            acc = self._add_grads(p, stage, acc, d_params, exponents)
            packed = self._packed(stage.above.float_words, d_inputs, buffers.up)
            return Carry(buffers._replace(up=packed), acc)

        return run

    def _input_grads(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: Carry, params: Any, env: Env, field: Any, index: jax.Array, _exponents: Any
        ) -> Carry:
            buffers = carry.buffers
            saved, grads = self._waiting(p, stage, buffers, field)
            backward = self._written(stage.input_grads, index)
            d_inputs, kept = backward(params, saved, env, grads)
            buffers = buffers._replace(
                late=self._late.put(buffers.late, p, kept, field["late"]),
                up=self._packed(stage.above.float_words, d_inputs, buffers.up),
            )
            return carry._replace(buffers=buffers)

        return run

    def _weight_grads(self, p: int, stage: StagePart) -> Any:
        def run(
            carry: Carry, params: Any, env: Env, field: Any, index: jax.Array, exponents: Any
        ) -> Carry:
            saved, grads = self._waiting(p, stage, carry.buffers, field)
            kept = self._late.get(carry.buffers.late, p, field["late"])
            backward = self._written(stage.weight_grads, index)
            d_params = backward(params, saved, env, grads, kept)
            return carry._replace(acc=self._add_grads(p, stage, carry.acc, d_params, exponents))

        return run

    def _waiting(self, p: int, stage: StagePart, buffers: Buffers, field: Any) -> tuple[Any, Any]:
        """A part's residuals and the gradients of its outputs."""
        saved = self._residuals.get(buffers.residuals, p, field["residual"])
        return saved, self._unpacked(stage.below.float_words, buffers.grads[field["grad"]])

    # Arrays that cross a boundary are sharded over the devices of a stage while they wait and
    # travel, as ZeRO-R's partitioned activations are (Rajbhandari et al., SC 2020, section 6.1).
    # They are whole while packed and unpacked, for shards do not end where arrays do.

    def _packed(self, words: BitcastPacking, arrays: Sequence[Any], like: jax.Array) -> jax.Array:
        [packed] = self.inside.whole([words.pack(self.inside.whole(arrays), like.size)])
        return packed

    def _unpacked(self, words: BitcastPacking, packed: jax.Array) -> list[Any]:
        return self.inside.whole(words.unpack(*self.inside.whole([packed])))

    def _add_grads(
        self, p: int, stage: StagePart, acc: Accumulated, grads: Sequence[Any], exponents: Any
    ) -> Accumulated:
        slots_of = self._slots_of(p)
        summed = [slots_of[i] for i in stage.trained]
        places, specs = [self._sum_of[i] for i in summed], [self.slot_specs[i] for i in summed]
        peaks_NT, grads = self.inside.raise_peaks(
            acc.peaks_NT, places, self.inside.place(grads, specs), specs
        )
        slots = list(acc.slots)
        for i, grad in zip(places, grads, strict=True):
            added = self.spec.contribution.add(
                tuple(_first_rows(x, grad.shape) for x in slots[i]), grad, exponents[i]
            )
            slots[i] = tuple(map(_with_first_rows, slots[i], added))
        return acc._replace(slots=slots, peaks_NT=peaks_NT)

    def _record(
        self, acc: Accumulated, results: list[Any], env: Env, index: jax.Array, exponents: Any
    ) -> Accumulated:
        """Record a microbatch's sums and its changes of other variables, on the last stage."""
        _, row_S, *new_aux = self.inside.whole(results)
        old_aux = [env[v] for v in self.spec.graph.aux_values]
        tensors, num = self.spec.tensors, self.spec.num_microbatches
        deltas, words = changes(tensors, old_aux, new_aux, index, num)
        first = len(self._sum_of)
        places = range(first, first + len(deltas))
        peaks_NT, deltas = self.inside.raise_peaks(
            acc.peaks_NT, places, deltas, [P(STAGE_AXIS)] * len(deltas)
        )
        add = self.spec.contribution.add
        return acc._replace(
            small_MS=acc.small_MS.at[index].set(row_bits(row_S)),
            peaks_NT=peaks_NT,
            aux=[
                add(before, x, exponents[t])
                for t, before, x in zip(places, acc.aux, deltas, strict=True)
            ],
            words=joined_words(tensors, acc.words, words),
        )

    def _exchange(self, carry: Carry, field: Any) -> Carry:
        """Send arrays to the neighbours, over the boundaries of this tick."""
        buffers = carry.buffers
        num = self.spec.slots.num_stages

        def over(boundaries: Sequence[int]) -> Any:
            downward = [(b, (b + 1) % num) for b in boundaries]
            upward = [(b, a) for a, b in downward]

            def run(buffers: Buffers) -> Buffers:
                down = jax.lax.ppermute(buffers.down, STAGE_AXIS, downward)
                up = jax.lax.ppermute(buffers.up, STAGE_AXIS, upward)
                return buffers._replace(
                    inputs=_set(buffers.inputs, down, field["down"]),
                    grads=_set(buffers.grads, up, field["up"]),
                )

            return run

        for i, boundaries in enumerate(self.exchanges):
            if boundaries:  # the same on every stage, for the set is the tick's
                buffers = _when(field["exchange"] == i, over(boundaries), buffers, ())
        return carry._replace(buffers=buffers)

    def collect(
        self, group: Slots, slots: Sequence[tuple[jax.Array, ...]], small: Accumulated | None
    ) -> tuple[list[tuple[jax.Array, ...]], DeviceSums | None]:
        """Sums of all stages, in the pieces of storage.

        Args:
            slots: Sums in the trained slots of the group.
            small: The small arrays, collected in the same exchange; None: not with this group.

        Returns:
            For each trained parameter of the group its parts; and the small arrays, whose values
            are the other variables'.
        """
        if small is None:
            stage_sums = [[x[0] for x in parts] for parts in slots]
            return _at_least_1d(group.collect(stage_sums, [])[0]), None
        slots, acc = jax.tree.map(lambda x: x[0], (list(slots), small))
        peaks_T = self.inside.largest(acc.peaks_NT)
        every = [acc.small_MS, peaks_T, *acc.words, *(x for parts in acc.aux for x in parts)]
        values, (small_MS, peaks, *others) = group.collect(slots, every)
        num_words = len(acc.words)
        totals = [x.sum(0, dtype=x.dtype) for x in others]  # zero on all stages but the last
        num = self.spec.contribution.form.num_parts
        aux = [tuple(totals[num_words + i * num :][:num]) for i in range(len(acc.aux))]
        tensors = self._tensors().reshape(-1)
        peaks_T = (
            jnp.zeros(len(self.spec.tensors.floats), jnp.int32).at[tensors].max(peaks.reshape(-1))
        )
        sums = DeviceSums(small_MS.sum(0, dtype=jnp.int32), peaks_T, aux, totals[:num_words])
        return _at_least_1d(values), sums


def scope_of_part(p: int) -> str:
    """The scope of a part's operations in the names of a compiled program."""
    return f"hxla.part.{p}"


def _at_least_1d(values: Sequence[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
    return [tuple(x.reshape(at_least_1d(x.shape)) for x in parts) for parts in values]


def _when(condition: jax.Array, run: Callable[..., Any], carry: Any, operands: Any) -> Any:
    """Run `run(carry, *operands)` once or not at all, in place."""

    def body(i: jax.Array, carry: Any) -> Any:
        # XLA moves invariant work out of a loop, even out of one that may never run.
        _, carry, pinned = jax.lax.optimization_barrier((i, carry, operands))
        return run(carry, *pinned)

    return jax.lax.fori_loop(0, condition.astype(jnp.int32), body, carry)


def _first_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A stage's rows of a slot, which is as long as the longest stage's."""
    return x if x.shape == shape else jax.lax.slice(x, (0,) * x.ndim, shape)


def _with_first_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    return rows if x.shape == rows.shape else jax.lax.dynamic_update_slice(x, rows, (0,) * x.ndim)


def _set(buffers: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffers, value, index, 0)
