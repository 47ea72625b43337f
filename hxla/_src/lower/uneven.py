"""A traced loss on shards of unlike sizes: manual over the axis that cuts it.

Between two collectives the devices are independent, so their sharded operations there are one
block, see `uneven_block`.

Each device runs the same equations: replicated ones on whole arrays, sharded ones on its shard.
Collectives are outside of blocks, so every device runs all of them.

References:
    Jia et al., "Whale", USENIX ATC 2022, section 3.3.1 (uneven sharding of a `split`).
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..core.errors import PlanError
from ..graph.graph import Graph, Op, Value
from ..graph.interpreter import Env, run_ops
from ..graph.local_ops import EXTREMES, SUMS, Between, run_custom, run_part, take
from ..graph.precision import is_float8_product
from ..graph.segments import Segment
from ..jax.cpu_dots import row_major
from ..jax.jaxpr import checkpoint_like, scan_counts
from ..plan.linked_dims import Parts
from ..plan.sharding import Sharded
from .contribution import gradient_of
from .padding import Cut, Padding, local_shard
from .replica import Replica
from .uneven_block import Block, Width
from .uneven_collectives import (
    Token,
    added,
    completed,
    entered,
    extreme,
    first_token,
    gathered,
)


class Uneven:
    """A graph whose one inner axis has shards of unlike sizes.

    Args:
        place: Place of the one device that runs its programs; None: any device runs them.
        segments: The segments of the loss, each with whether its backward runs it again; empty: the
            loss is no chain.
    """

    def __init__(
        self,
        sharded: Sharded,
        parts: Parts,
        place: int | None = None,
        segments: Sequence[tuple[Segment, bool]] = (),
    ):
        [(self.axis, self.assigned)] = sharded.axes.items()
        self.graph: Graph = sharded.graph
        self.sharded, self.parts, self.place = sharded, parts, place
        self.linked = parts.linked
        self._segments = tuple(segments)

    def on(self, replica: Replica) -> "Uneven":
        """The graph for the local devices of a replica.

        A process with one of them compiles for its sizes only, without branches. So processes have
        unlike programs, which run the same collectives in the same order.
        """
        return Uneven(self.sharded, self.parts, replica.only_place, self._segments)

    def in_segments(self, segments: Sequence[tuple[Segment, bool]]) -> "Uneven":
        """The graph as a chain of segments, each with whether its backward runs it again."""
        return Uneven(self.sharded, self.parts, self.place, segments)

    def cut_of(self, v: int) -> Cut | None:
        """How a value is cut by the operation that makes it; None: it is whole."""
        group, dim = self.linked.of_value(v), self.assigned.made.get(v)
        if group is None or dim is None:
            return None
        return self._cut(group, dim, self.graph.values[v].shape[dim])

    def _cut(self, group: int, dim: int, size: int) -> Cut:
        return Cut(dim, self.parts.sizes(group, size), self.axis, self.place)

    def padding_of(self, v: int) -> Padding:
        """The padding of a value, as its maker leaves it."""
        cut, rank = self.cut_of(v), len(self.graph.values[v].shape)
        if cut is None or len(set(cut.sizes)) == 1:
            return Padding()
        return Padding(tuple(cut.sizes if d == cut.dim else () for d in range(rank)))

    def cuts(self, op: Op) -> bool:
        """Whether devices compute different results in an operation.

        An operation that reads a cut value whole is the same on all.
        """
        made, wanted = self.assigned.made, self.assigned.wanted
        if any(made.get(v) is not None for v in op.outputs):
            return True
        if op.body and op.kind != "custom":
            return any(map(self.cuts, op.body))
        if op.kind == "custom":
            return any(isinstance(v, int) and made.get(v) is not None for v in op.inputs)
        return any(dim is not None for v in op.outputs[:1] for dim in wanted.get(v, ()))

    def aux_paddings(self) -> list[Padding]:
        """Padding of each other variable."""
        return list(map(self.padding_of, self.graph.aux_values))

    def cuts_of_sums(self, trained: Sequence[int], summed: Sequence[bool]) -> list[Cut | None]:
        """How each float tensor of the sums is cut, where its shards are unlike; else None.

        Args:
            summed: For each other variable whether its changes are a float tensor.
        """
        graph = self.graph
        aux = itertools.compress(graph.aux_values, summed)
        cuts = [self.cut_of(v) for v in (*(graph.param_values[i] for i in trained), *aux)]
        return [cut if cut and len(set(cut.sizes)) > 1 else None for cut in cuts]

    # -- gradients -------------------------------------------------------------------------------

    def gradient(
        self, mesh: Mesh, trained: Sequence[int], on_cpu: bool
    ) -> Callable[..., tuple[Any, list[Any]]]:
        """`(params, aux, key, batch) -> ((loss, [sums, *new aux]), gradients)`, padded."""
        params, aux = self.sharded.param_specs(), self.sharded.aux_specs()

        def local(params: Any, aux: Any, key: Any, batch: Any) -> list[Any]:
            return self.run(params, aux, jax.random.wrap_key_data(key), batch, on_cpu=on_cpu)

        mapped = jax.shard_map(
            gradient_of(local, trained, on_cpu),
            mesh=mesh,
            in_specs=(params, aux, P(), [P()] * len(self.graph.batch_values)),
            out_specs=((P(), [P(), *aux]), [params[i] for i in trained]),
            check_vma=False,
        )

        def run(params: Sequence[Any], aux: Sequence[Any], key: Any, batch: Sequence[Any]) -> Any:
            return mapped(list(params), list(aux), jax.random.key_data(key), list(batch))

        return run

    def run(
        self,
        params: Sequence[Any],
        aux: Sequence[Any],
        key: Any,
        batch: Any,
        *,
        on_cpu: bool = False,
    ) -> list[Any]:
        """The results of the loss on this device: two whole, then the shards of other variables."""
        graph = self.graph
        env: Env = dict(graph.consts)
        for numbers, arrays in (
            (graph.param_values, params),
            (graph.aux_values, aux),
            ((graph.key_value,), (key,)),
            (graph.batch_values, batch),
        ):
            env.update(zip(numbers, arrays, strict=True))
        token = first_token()
        for segment, again in self._segments[:-1]:
            token = self._run_segment(segment, env, token, again=again, on_cpu=on_cpu)
        ops = self._segments[-1][0].ops if self._segments else graph.ops
        level = _Level(self, ops, env, token, graph.result_values, on_cpu=on_cpu)
        level.run()
        num = len(graph.result_values) - len(graph.aux_values)
        wanted = [*[None] * num, *map(self.cut_of, graph.aux_values)]
        return [level.as_cut(v, cut) for v, cut in zip(graph.result_values, wanted, strict=True)]

    def whole_results(
        self, ops: Sequence[Op], env: Env, token: Token, ends: Sequence[Any], *, on_cpu: bool
    ) -> tuple[list[Any], Token]:
        """Results of some operations, whole on this device, and the token of their last collective.

        Args:
            env: Arrays that they read; cut ones are padded.
            token: Of the collective before.
        """
        level = _Level(self, ops, env, token, ends, on_cpu=on_cpu)
        level.run()
        return [jnp.asarray(level.whole(v)) for v in ends], level.token

    def _run_segment(
        self, segment: Segment, env: Env, token: Token, *, again: bool, on_cpu: bool
    ) -> Token:
        """Add the results of a segment to the arrays."""
        params = (self.graph.param_values[p] for p in segment.params)
        read = [*params, *segment.inputs, *segment.given]

        def run(token: Token, *arrays: Any) -> tuple[Token, list[Any]]:
            inner: Env = dict(self.graph.consts) | dict(zip(read, arrays, strict=True))
            level = _Level(self, segment.ops, inner, token, segment.outputs, on_cpu=on_cpu)
            level.run()
            return level.token, [inner[v] for v in segment.outputs]

        call = jax.checkpoint(run) if again else run
        token, made = call(token, *(env[v] for v in read))
        env.update(zip(segment.outputs, made, strict=True))
        return token


class _Level:
    """Operations of one program: of the loss, or of a body in it.

    Args:
        env: Arrays that the operations read; cut ones are padded.
        token: Of the collective before.
        ends: Values that must be there after the operations.

    Attributes:
        token: Of the last collective.
    """

    def __init__(
        self,
        uneven: Uneven,
        ops: Sequence[Op],
        env: Env,
        token: Token,
        ends: Sequence[Any],
        prefix: str = "",
        *,
        on_cpu: bool,
    ):
        self._on_cpu = on_cpu
        self._uneven, self._ops, self._env, self._prefix = uneven, ops, env, prefix
        self._values = uneven.graph.values
        self._assigned, self._linked = uneven.assigned, uneven.linked
        self._pending: list[Op] = []
        self._made: set[int] = set()  # by the pending operations
        self._last = {v: i for i, op in enumerate(ops) for v in op.inputs if isinstance(v, int)}
        self._last |= {v: len(ops) for v in ends if isinstance(v, int)}
        self._whole: dict[int, Any] = {}
        self._partial: dict[int, Any] = {}  # sums that are not yet added up over devices
        self._differentiated = _differentiated(ops, ends, self._values)
        self.token = token
        self._entered: dict[int, Any] = {}
        self._enter_first()

    def run(self) -> None:
        """Run all operations and add their results to the arrays."""
        for i, op in enumerate(self._ops):
            inputs = [v for v in op.inputs if isinstance(v, int)]
            if not self._uneven.cuts(op):
                self._before(i, inputs)
                arrays = {v: self.whole(v) for v in inputs}
                run_ops([op], arrays, prefix=self._prefix)
                self._env.update((v, arrays[v]) for v in op.outputs)
            elif self._is_in_block(op):
                states = self._wanted(op)
                self._before(
                    i,
                    [
                        v
                        for v, dim in zip(op.inputs, states, strict=True)
                        if isinstance(v, int)
                        and (self._made_dim(v) is None or self._made_dim(v) != dim)
                    ],
                )
                self._pending.append(op)
                self._made.update(op.outputs)
            else:
                self._before(i, inputs)
                run = self._float8_product if op.kind == "custom" else self._with_body
                run(op)
        self._flush(len(self._ops))
        self._complete([*self._partial])

    def whole(self, v: Any) -> Any:
        """A value, whole on this device."""
        if not isinstance(v, int):
            return v.val
        cut = self._uneven.cut_of(v)
        if cut is None:
            return self._env[v]
        if v not in self._whole:
            self._whole[v], self.token = gathered(self._env[v], self.token, cut)
        return self._whole[v]

    def as_cut(self, v: Any, cut: Cut | None) -> Any:
        """A value, cut as `cut` says."""
        if cut is None:
            return self.whole(v)
        if isinstance(v, int) and self._uneven.cut_of(v) == cut:
            return self._env[v]
        return local_shard(jnp.asarray(self.whole(v)), cut)

    def _made_dim(self, v: int) -> int | None:
        return self._assigned.made.get(v)

    def _wanted(self, op: Op) -> tuple[int | None, ...]:
        """The dimension in which the operation reads each operand cut."""
        if op.kind == "custom":
            return tuple(self._made_dim(v) if isinstance(v, int) else None for v in op.inputs)
        return self._assigned.wanted[op.outputs[0]]

    def _is_in_block(self, op: Op) -> bool:
        """Whether an operation runs beside others on the shards of a device."""
        is_one = not op.body or op.kind == "custom"
        return is_one and self._uneven.cuts(op) and not is_float8_product(op)

    def _before(self, i: int, values: Sequence[int]) -> None:
        """Have these values: run the pending operations, and add up partial sums."""
        if not self._made.isdisjoint(values):
            self._flush(i)
        self._complete(values)

    def _flush(self, i: int) -> None:
        if self._pending:
            made = {v: x for v, x in self._run_block(self._pending, i)}
            self._env.update(made)
        self._pending, self._made = [], set()

    # -- blocks ----------------------------------------------------------------------------------

    def _run_block(self, ops: Sequence[Op], end: int) -> list[tuple[int, Any]]:
        """Run a block: its values that operations from `end` on read, partial results completed."""
        uneven, made = self._uneven, set().union(*(op.outputs for op in ops))
        read: dict[tuple[int, bool], None] = {}  # a value, and whether it is read as it is cut
        for op in ops:
            for v, dim in zip(op.inputs, self._wanted(op), strict=True):
                if isinstance(v, int) and v not in made:
                    read[v, dim is not None and self._made_dim(v) == dim] = None
        results = [v for op in ops for v in op.outputs if self._last.get(v, -1) >= end]
        groups = sorted({g for op in ops for g in self._groups(op)})
        units = [tuple(uneven.parts.units[g][d] for g in groups) for d in range(self._num)]
        classes = sorted(set(units), reverse=True)
        of_class = [dict(zip(groups, each, strict=True)) for each in classes]

        def width(v: int) -> Width:
            group, dim = self._linked.of_value(v), self._made_dim(v)
            if group is None or dim is None:
                return None
            each = self._values[v].shape[dim] // self._linked.groups[group].num_units
            return dim, tuple(units_of[group] * each for units_of in of_class)

        def run(c: int, offsets: Any, inputs: Sequence[Any]) -> list[Any]:
            env = dict(zip(read, inputs, strict=True))
            starts = {g: offsets[k] for k, g in enumerate(groups)}

            def part(group: int) -> Callable[[int], tuple[int, Any]]:
                def of(size: int) -> tuple[int, Any]:
                    each = size // self._linked.groups[group].num_units
                    return of_class[c][group] * each, starts[group] * each

                return of

            for op in ops:
                with self._name_scope(op):
                    made_here = self._run_local(op, env, part)
                env.update(((v, self._made_dim(v) is not None), x) for v, x in made_here)
            return [env[v, self._made_dim(v) is not None] for v in results]

        gathers = [self._gathered_cut(v, as_cut=as_cut) for v, as_cut in read]
        block = Block(
            run=run,
            inputs=tuple(width(v) if as_cut else None for v, as_cut in read),
            gathers=tuple(gathers),
            is_differentiable=tuple(self._values[v].differentiable for v, _ in read),
            results=tuple(map(width, results)),
            num_classes=len(classes),
            only_class=None if uneven.place is None else classes.index(units[uneven.place]),
            lay_out=row_major if self._on_cpu else lambda x: x,
        )
        of_device = Cut(0, (1,) * self._num, uneven.axis, uneven.place)
        starts = jnp.stack(
            [
                of_device.local_value([sum(uneven.parts.units[g][:d]) for d in range(self._num)])
                for g in groups
            ]
        )
        pairs = [(v, as_cut or cut) for (v, as_cut), cut in zip(read, gathers, strict=True)]
        self._enter([v for v, is_shard in pairs if not is_shard])
        inputs = [self._env[v] if is_shard else self._entered[v] for v, is_shard in pairs]
        size_class = of_device.local_value([classes.index(each) for each in units])
        outputs, self.token = block(size_class, starts, inputs, self.token)
        maker = {v: op for op in ops for v in op.outputs}
        made_arrays = dict(zip(results, outputs, strict=True))
        for v in [v for v in results if self._made_dim(v) is None]:
            if maker[v].name in SUMS:
                self._partial[v] = made_arrays.pop(v)
            else:
                made_arrays[v] = self._extreme(maker[v].name, v, made_arrays[v])
        return [*made_arrays.items()]

    def _complete(self, values: Sequence[int]) -> None:
        """Add up all partial sums of devices, if one of these values is such a sum."""
        if not self._partial.keys().isdisjoint(values):
            sums, self.token = added([*self._partial.values()], self.token, self._uneven.axis)
            self._env.update(zip(self._partial, sums, strict=True))
            self._partial = {}

    @property
    def _num(self) -> int:
        return self._assigned.num_devices

    def _groups(self, op: Op) -> set[int]:
        groups = {self._linked.of_value(v) for v in op.outputs}
        if op.kind == "custom":
            groups |= {self._linked.of_value(v) for v in op.inputs if isinstance(v, int)}
        else:
            factors = (self._linked.of_operand(op, k) for k in range(len(op.inputs)))
            groups |= {pair[0] for pair in factors if pair is not None}
        return {g for g in groups if g is not None}

    def _gathered_cut(self, v: int, *, as_cut: bool) -> Cut | None:
        """How tokens with a gradient are cut that a block reads whole; None: it is no such value.

        Only an axis of tokens gathers again in the backward.
        """
        is_gathered = not as_cut and self._values[v].differentiable and self._assigned.regathers
        return self._uneven.cut_of(v) if is_gathered else None

    def _enter_first(self) -> None:
        """The whole values that are there before all operations, as parameters are."""
        read = dict.fromkeys(
            v
            for op in self._ops
            if self._is_in_block(op)
            for v in op.inputs
            if isinstance(v, int) and v in self._env and self._uneven.cut_of(v) is None
        )
        self._enter([*read])

    def _enter(self, values: Sequence[int]) -> None:
        """Whole values for a block, together."""
        new = {v: self.whole(v) for v in values if v not in self._entered}
        self._entered |= new
        floats = [v for v in new if self._values[v].differentiable]
        arrays, self.token = entered([new[v] for v in floats], self.token, self._uneven.axis)
        self._entered |= zip(floats, arrays, strict=True)

    def _run_local(
        self, op: Op, env: dict[tuple[int, bool], Any], part: Any
    ) -> list[tuple[int, Any]]:
        """An operation on this device's shard."""
        states = self._wanted(op)
        [group, *others] = self._groups(op)
        assert not others, "a factor is one group"
        part_of = part(group)
        operands = []
        for v, dim in zip(op.inputs, states, strict=True):
            if not isinstance(v, int):
                operands.append(v.val)
            elif dim is not None and self._made_dim(v) == dim:
                operands.append(env[v, True])
            else:
                x = env[v, False]
                operands.append(x if dim is None else take(x, dim, part_of))
        made_dims = [self._made_dim(v) for v in op.outputs]
        if op.kind != "custom":
            return list(
                zip(op.outputs, run_part(op.eqn, operands, states, made_dims, part_of), strict=True)
            )
        results, dims = run_custom(op.eqn, operands, states, part_of)
        take_part = functools.partial(take, part=part_of)
        return list(zip(op.outputs, _as_made(op, results, dims, made_dims, take_part), strict=True))

    def _float8_product(self, op: Op) -> None:
        """Run a product whose scales are maxima over all devices, and so no part of a block.

        Padding of zeros moves neither scales nor products. A program for one device has none.
        """
        uneven, [group] = self._uneven, self._groups(op)
        units, num_units = uneven.parts.units[group], self._linked.groups[group].num_units
        place = uneven.place

        def cut_of(dim: int, size: int) -> Cut:
            each = size // num_units
            return Cut(dim, tuple(n * each for n in units), uneven.axis, place)

        def part(size: int) -> tuple[int, Any]:
            cut = cut_of(0, size)
            num = cut.padded if place is None else cut.sizes[place]
            return num, cut.local_value(cut.offsets)

        def padded(x: Any, dim: int) -> Any:
            return local_shard(x, cut_of(dim, x.shape[dim]))

        def shard(x: Any, dim: int) -> Any:
            x, cut = padded(x, dim), cut_of(dim, x.shape[dim])
            return x if place is None else cut.narrowed(x)

        states, operands = self._wanted(op), []
        for v, dim in zip(op.inputs, states, strict=True):
            x = self.whole(v) if dim is None else self._env[v]
            if dim is not None and place is not None:
                x = cut_of(dim, self._values[v].shape[dim]).narrowed(x)
            operands.append(x)
        between = Between(functools.partial(completed, axis=uneven.axis), shard)
        with self._name_scope(op):
            results, dims = run_custom(op.eqn, operands, states, part, between)
        made_dims = [self._made_dim(v) for v in op.outputs]
        for k, (v, dim) in enumerate(zip(op.outputs, dims, strict=True)):
            if dim is not None:
                cut = cut_of(dim, self._values[v].shape[dim])
                results[k] = results[k] if place is None else cut.widened(results[k])
                if made_dims[k] is None:
                    results[k], self.token = gathered(results[k], self.token, cut)
                    dims[k] = None
        made = _as_made(op, results, dims, made_dims, padded)
        self._env.update(zip(op.outputs, made, strict=True))

    def _extreme(self, name: str, v: int, x: Any) -> Any:
        """Complete a partial result over all devices."""
        axis = self._uneven.axis
        if name not in EXTREMES:
            raise PlanError(
                f"hxla does not know how to complete partial results of {name} over parts of "
                "unlike sizes: leave it out of the split, or let the parts be alike"
            )
        as_number = x.astype(jnp.int32) if x.dtype == bool else x
        has_gradient = v in self._differentiated
        out, self.token = extreme(as_number, self.token, name, axis, has_gradient)
        return out.astype(x.dtype)

    def _name_scope(self, op: Op) -> Any:
        stack = op.stack.removeprefix(self._prefix)
        stack = stack.removesuffix(str(op.eqn.source_info.name_stack)).strip("/")
        return jax.named_scope(stack) if stack else contextlib.nullcontext()

    # -- bodies ----------------------------------------------------------------------------------

    def _with_body(self, op: Op) -> None:
        """Run a `remat` or a `scan` with cut values in its body."""
        inner = self._uneven.cut_of

        def body(token: Token, *arrays: Any) -> "_Level":
            env: Env = dict(op.body_consts)
            env.update(zip(op.body_inputs, arrays, strict=True))
            level = _Level(
                self._uneven, op.body, env, token, op.body_outputs, op.stack, on_cpu=self._on_cpu
            )
            level.run()
            return level

        if op.kind == "remat":
            operands = [
                self.as_cut(v, inner(i)) for v, i in zip(op.inputs, op.body_inputs, strict=True)
            ]
            cuts = [inner(v) for v in op.outputs]

            def run(token: Token, *arrays: Any) -> list[Any]:
                level = body(token, *arrays)
                made = [level.as_cut(v, c) for v, c in zip(op.body_outputs, cuts, strict=True)]
                return [level.token, *made]

            self.token, *results = checkpoint_like(op.eqn, run)(self.token, *operands)
            self._env.update(zip(op.outputs, results, strict=True))
            return
        self._scan(op, body)

    def _scan(self, op: Op, body: Callable[..., "_Level"]) -> None:
        cut_of, params = self._uneven.cut_of, op.eqn.params
        num_consts, num_carry = scan_counts(op.eqn)
        first = num_consts + num_carry
        cuts = [cut_of(v) for v in op.body_inputs]
        cuts = [*cuts[:first], *(_cut_of_stack(cut) for cut in cuts[first:])]
        operands = [self.as_cut(v, cut) for v, cut in zip(op.inputs, cuts, strict=True)]
        outs = [
            *cuts[num_consts:first],
            *(_cut_of_slice(cut_of(v)) for v in op.outputs[num_carry:]),
        ]

        def step(carry: Any, xs: Any) -> Any:
            token, *carried = carry
            level = body(token, *operands[:num_consts], *carried, *xs)
            results = [level.as_cut(v, c) for v, c in zip(op.body_outputs, outs, strict=True)]
            return [level.token, *results[:num_carry]], results[num_carry:]

        (self.token, *carry), ys = jax.lax.scan(
            step,
            [self.token, *operands[num_consts:first]],
            operands[first:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self._env.update(zip(op.outputs, [*carry, *ys], strict=True))


def _differentiated(ops: Sequence[Op], ends: Sequence[Any], values: Sequence[Value]) -> set[int]:
    """The values through which gradients flow back to what the operations read."""
    found = {v for v in ends if isinstance(v, int)}
    for op in reversed(ops):
        through = any(v in found and values[v].differentiable for v in op.outputs)
        if through and op.name != "stop_gradient":
            found.update(v for v in op.inputs if isinstance(v, int))
    return found


def _as_made(
    op: Op,
    results: Sequence[Any],
    dims: Sequence[int | None],
    wanted: Sequence[int | None],
    take_part: Callable[[Any, int], Any],
) -> list[Any]:
    """The results of an operation with gradient rules of its own, cut as they are outside.

    Raises:
        PlanError: If it cuts inside what is whole outside.
    """
    out = []
    for x, dim, other in zip(results, dims, wanted, strict=True):
        if dim is not None and dim != other:
            raise PlanError(
                f"{op.name} ({op.source}) has gradient rules of its own, and cuts inside "
                "a result that is whole outside: leave it out of the split"
            )
        out.append(take_part(x, other) if dim is None and other is not None else x)
    return out


def _cut_of_stack(cut: Cut | None) -> Cut | None:
    """The cut of a stack whose slices are cut so."""
    return None if cut is None else dataclasses.replace(cut, dim=cut.dim + 1)


def _cut_of_slice(cut: Cut | None) -> Cut | None:
    """The cut of one slice of a stack that is cut so."""
    return None if cut is None else dataclasses.replace(cut, dim=cut.dim - 1)
