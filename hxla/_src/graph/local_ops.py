"""An equation of a traced loss run on one device's shard, without padding.

The equation was traced for whole arrays, so its params hold global sizes. In a cut dimension they
become the sizes of the shard, and indices count from the start of the shard.

A device may have some experts of a layer. Tokens are whole, rows are sorted by expert. Rows are
rolled so that those of this device's experts come first, and the others are zero: products, and
what is row by row, then run on them alone. What is summed over rows gives a partial sum, whose
total over devices is the result.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.errors import PlanError
from ..jax.jaxpr import ClosedJaxpr, Literal, inner_jaxpr, kind_of, run_equation, run_with
from .experts import ADDITIVE, Experts, Step
from .factors import PATTERNS, Factor
from .interpreter import AS_THEY_ARE, evaluate, read, scope_of


def run_some_experts(experts: Experts, operands: Sequence[Any], num: int, start: Any) -> list[Any]:
    """The partial sums of some experts.

    Args:
        operands: Matrices of `num` experts; all others whole.
        start: The first of the experts, int32.
    """
    return _Shard(experts, operands, num, start).run()


class _Shard:
    def __init__(self, experts: Experts, operands: Sequence[Any], num: int, start: Any):
        self._experts = experts
        self._env: dict[int, Any] = dict(zip(experts.inputs, operands, strict=True))
        self._sums: dict[int, Any] = {}
        self._rolled: dict[tuple[int, int], Any] = {}
        self._is_first = start == 0
        sizes = self._env[experts.sizes]
        before = (jnp.cumsum(sizes) - sizes).astype(jnp.int32)
        self._sizes = jax.lax.dynamic_slice_in_dim(sizes, start, num)
        self._first_row = jax.lax.dynamic_index_in_dim(before, start, keepdims=False)
        self._num_rows = self._sizes.sum().astype(jnp.int32)

    def run(self) -> list[Any]:
        for step in self._experts.steps:
            with scope_of(step.op, self._experts.stack):
                results = self._step(step)
            env = self._sums if step.kind == "sum" else self._env
            env.update(zip(step.op.outputs, results, strict=True))
        return [self._sum(v) for v in self._experts.outputs]

    def _step(self, step: Step) -> list[Any]:
        op = step.op
        if step.kind == "sum":
            return evaluate(op, self._summands(step), AS_THEY_ARE)
        pairs = zip(op.inputs, step.dims, strict=True)
        operands = [read(self._env, v) if dim is None else self._rows(v, dim) for v, dim in pairs]
        if step.kind != "product":
            return evaluate(op, operands, AS_THEY_ARE)
        [dim], [rows] = (d for d in step.dims if d is not None), [op.outputs[0]]
        first = self._masked(operands[0], dim)
        results = run_equation(op.eqn, [first, operands[1], self._sizes])
        return [self._masked(results[0], self._experts.row_dims[rows])]

    def _summands(self, step: Step) -> list[Any]:
        """Operands of a linear operation; one device alone adds what is whole."""
        op, additive = step.op, ADDITIVE.get(step.op.name)
        operands = []
        for k, v in enumerate(op.inputs):
            if isinstance(v, int) and (v in self._sums or v in self._experts.row_dims):
                operands.append(self._sum(v))
                continue
            x = read(self._env, v)
            if additive is not None and k not in additive:
                x = jnp.where(self._is_first, x, jnp.zeros_like(x))
            operands.append(x)
        return operands

    def _rows(self, v: Any, dim: int) -> Any:
        """A value whose first rows are those of this device's experts."""
        if not isinstance(v, int):
            return v.val
        if v in self._experts.row_dims:
            return self._env[v]
        if (v, dim) not in self._rolled:
            self._rolled[v, dim] = self._roll(self._env[v], dim, self._first_row)
        return self._rolled[v, dim]

    def _sum(self, v: int) -> Any:
        """A partial sum of this device; rows of others are zero in it."""
        if v not in self._sums:
            dim = self._experts.row_dims[v]
            back = self._experts.num_rows - self._first_row
            self._sums[v] = self._roll(self._masked(self._env[v], dim), dim, back)
        return self._sums[v]

    def _roll(self, x: Any, dim: int, first: Any) -> Any:
        twice = jnp.concatenate([x, x], axis=dim)
        return jax.lax.dynamic_slice_in_dim(twice, first, self._experts.num_rows, dim)

    def _masked(self, x: Any, dim: int) -> Any:
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where(places < self._num_rows, x, jnp.zeros((), x.dtype))


Dims = Sequence[int | None]
#: From the global size of a dimension to the size and the start of the shard.
PartOf = Callable[[int], tuple[int, Any]]

#: Equations whose partial results are added over shards.
SUMS = ("dot_general", "conv_general_dilated", "gather", "reduce_sum", "scatter-add", "experts")
#: Equations whose partial results are maxima (True) or minima (False) over shards.
EXTREMES = {"reduce_max": True, "reduce_or": True, "reduce_min": False, "reduce_and": False}


def run_part(
    eqn: Any, operands: Sequence[Any], cut: Dims, results: Dims, part: PartOf
) -> list[Any]:
    """Run an equation on one shard.

    Args:
        operands: Shards, or whole arrays.
        cut: The cut dimension of each operand, or None.
        results: The cut dimension of each result, or None.

    Raises:
        PlanError: If hxla has no local form of the equation.
    """
    shapes = [
        _shard_shape(v.aval.shape, dim, part) for v, dim in zip(eqn.outvars, results, strict=True)
    ]
    run = _BY_NAME.get(eqn.primitive.name)
    try:
        if run is None:
            arrays = run_equation(eqn, operands)
        else:
            arrays = run(_Call(eqn, operands, cut, results, shapes, part))
    except (TypeError, ValueError) as error:
        raise PlanError(f"{_refusal(eqn)}: {error}") from error
    if [x.shape for x in arrays] != shapes:
        raise PlanError(_refusal(eqn))
    return arrays


class _Call(NamedTuple):
    """An equation to run on one shard.

    Attributes:
        operands: Shards, or whole arrays.
        cut: The cut dimension of each operand, or None.
        results: The cut dimension of each result, or None.
        shapes: The shapes of the results on this shard.
    """

    eqn: Any
    operands: Sequence[Any]
    cut: Dims
    results: Dims
    shapes: list[tuple[int, ...]]
    part: PartOf


def _refusal(eqn: Any) -> str:
    return (
        f"hxla cannot run {eqn.primitive.name} on parts of unlike sizes: leave it out of the "
        "split, or let the parts be alike"
    )


def _shard_shape(shape: Sequence[int], dim: int | None, part: PartOf) -> tuple[int, ...]:
    return tuple(part(n)[0] if d == dim else n for d, n in enumerate(shape))


def take(x: Any, dim: int, part: PartOf) -> Any:
    """The shard of a whole array."""
    size, start = part(x.shape[dim])
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _reshape(call: _Call) -> list[Any]:
    return [jax.lax.reshape(call.operands[0], call.shapes[0])]


def _broadcast(call: _Call) -> list[Any]:
    dims = call.eqn.params["broadcast_dimensions"]
    return [jax.lax.broadcast_in_dim(call.operands[0], call.shapes[0], dims)]


def _iota(call: _Call) -> list[Any]:
    dtype, along = call.eqn.params["dtype"], call.eqn.params["dimension"]
    positions = jax.lax.broadcasted_iota(dtype, call.shapes[0], along)
    if call.results[0] == along:
        positions = positions + call.part(call.eqn.outvars[0].aval.shape[along])[1].astype(dtype)
    return [positions]


def _random_bits(call: _Call) -> list[Any]:
    # Drawn for the whole array, so that they do not depend on the sharding.
    [bits], dim = run_equation(call.eqn, call.operands), call.results[0]
    return [bits if dim is None else take(bits, dim, call.part)]


def _slice(call: _Call) -> list[Any]:
    params, [dim] = call.eqn.params, call.cut
    limits = list(params["limit_indices"])
    if dim is not None:
        limits[dim] = call.operands[0].shape[dim]
    return [jax.lax.slice(call.operands[0], params["start_indices"], limits, params["strides"])]


def _dynamic_slice(call: _Call) -> list[Any]:
    return [jax.lax.dynamic_slice(call.operands[0], call.operands[1:], call.shapes[0])]


def _gather(call: _Call) -> list[Any]:
    table, indices = call.operands
    params, dim = dict(call.eqn.params), call.cut[0]
    numbers, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    if dim is None or call.results[0] is not None:
        if dim is not None and dim not in numbers.operand_batching_dims:
            sizes[dim] = table.shape[dim]
        return [_gathered(params, table, indices, sizes)]
    # Rows of other devices are zero here.
    column = numbers.start_index_map.index(dim)
    num = call.eqn.invars[0].aval.shape[dim]
    size, start = call.part(num)
    at = indices[..., column]
    is_outside = (at < 0) | (at >= num)
    if params["mode"] == jax.lax.GatherScatterMode.CLIP:
        at, is_outside = jnp.clip(at, 0, num - 1), jnp.zeros_like(is_outside)
    local = at - start.astype(at.dtype)
    is_local = (local >= 0) & (local < size)
    local_indices = indices.at[..., column].set(jnp.clip(local, 0, size - 1))
    rows = _gathered(params, table, local_indices, sizes)
    is_batch = [d for d in range(rows.ndim) if d not in numbers.offset_dims]

    def spread(x: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(x, rows.shape, is_batch)

    rows = jnp.where(spread(is_local), rows, jnp.zeros((), rows.dtype))
    if jnp.issubdtype(rows.dtype, jnp.floating):
        rows = jnp.where(spread(is_outside), jnp.full((), jnp.nan, rows.dtype), rows)
    return [rows]


def _gathered(params: Any, table: Any, indices: Any, sizes: Sequence[int]) -> jax.Array:
    return jax.lax.gather(
        table,
        indices,
        params["dimension_numbers"],
        tuple(sizes),
        unique_indices=params["unique_indices"],
        indices_are_sorted=False,
        mode=params["mode"],
        fill_value=params["fill_value"],
    )


def _scatter(call: _Call) -> list[Any]:
    operand, indices, updates = call.operands
    numbers, dim = call.eqn.params["dimension_numbers"], call.cut[0]
    if call.results[0] is None:  # one device alone adds what is whole
        _, start = call.part(call.eqn.invars[2].aval.shape[call.cut[2] or 0])
        operand = jnp.where(start == 0, operand, jnp.zeros_like(operand))
    if dim not in numbers.scatter_dims_to_operand_dims:
        return run_with(call.eqn, [operand, indices, updates])
    column = numbers.scatter_dims_to_operand_dims.index(dim)
    num = call.eqn.invars[0].aval.shape[dim]
    size, start = call.part(num)
    at, modes = indices[..., column], jax.lax.GatherScatterMode
    if call.eqn.params["mode"] == modes.CLIP:
        at = jnp.clip(at, 0, num - 1)
    local = at - start.astype(at.dtype)
    local = jnp.where((local >= 0) & (local < size), local, size)  # dropped
    indices = indices.at[..., column].set(local)
    return run_with(
        call.eqn,
        [operand, indices, updates],
        mode=modes.FILL_OR_DROP,
        unique_indices=False,
        indices_are_sorted=False,
    )


def _experts(call: _Call) -> list[Any]:
    experts = call.eqn.params["experts"]
    num, start = call.part(experts.num_experts)
    return run_some_experts(experts, call.operands, num, start)


_BY_NAME: dict[str, Callable[[_Call], list[Any]]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "random_bits": _random_bits,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "experts": _experts,
}


# -- programs inside equations -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Between:
    """What devices do between two equations of a program, where they may communicate there.

    Attributes:
        complete: From the name of an equation, its partial result and the token of the collective
            before to the whole result and a token, see `lower.uneven_collectives`.
        take: From a whole array and a dimension to this device's shard.
    """

    complete: Callable[[str, Any, Any], tuple[Any, Any]]
    take: Callable[[Any, int], Any]
    _token: list[Any] = dataclasses.field(default_factory=list)

    def completed(self, name: str, x: Any) -> Any:
        """The whole result of an equation, after those before."""
        token = self._token.pop() if self._token else jnp.zeros(1, jnp.float32)
        out, token = self.complete(name, x, token)
        self._token.append(token)
        return out

    def again(self) -> "Between":
        """The same for another trace."""
        return Between(self.complete, self.take)


def run_program(
    closed: ClosedJaxpr,
    operands: Sequence[Any],
    cut: Dims,
    part: PartOf,
    between: Between | None = None,
) -> tuple[list[Any], list[int | None]]:
    """Run a program on one shard of some operands.

    Args:
        closed: A program traced for whole arrays.
        operands: Shards, or whole arrays.
        cut: The cut dimension of each operand, or None.
        between: How partial results are completed; None: there is no communication.

    Returns:
        The results, and the cut dimension of each, or None.

    Raises:
        PlanError: If a device would need the shards of others.
    """
    env: dict[Any, tuple[Any, int | None]] = {}
    env.update(zip(closed.jaxpr.constvars, ((c, None) for c in closed.consts), strict=True))
    env.update(zip(closed.jaxpr.invars, zip(operands, cut, strict=True), strict=True))

    def read(v: Any) -> tuple[Any, int | None]:
        return (v.val, None) if isinstance(v, Literal) else env[v]

    for eqn in closed.jaxpr.eqns:
        pairs = [read(v) for v in eqn.invars]
        arrays, dims = [x for x, _ in pairs], [dim for _, dim in pairs]
        results: list[int | None]
        if all(dim is None for dim in dims):
            outputs, results = run_equation(eqn, arrays), [None] * len(eqn.outvars)
        elif kind_of(eqn) == "inlined":
            inner = inner_jaxpr(eqn)
            assert inner is not None
            outputs, results = run_program(inner, arrays, dims, part, between)
        elif kind_of(eqn) == "custom":
            outputs, results = run_custom(eqn, arrays, dims, part, between)
        else:
            factor = _factor_for(eqn, dims, may_be_partial=between is not None)
            local = _resharded(arrays, dims, factor.operands, eqn, part, between)
            results = list(factor.results)
            outputs = run_part(eqn, local, factor.operands, results, part)
            if factor.partial and between is not None:
                outputs = [between.completed(eqn.primitive.name, x) for x in outputs]
        env.update(zip(eqn.outvars, zip(outputs, results, strict=True), strict=True))
    ends = [read(v) for v in closed.jaxpr.outvars]
    return [x for x, _ in ends], [dim for _, dim in ends]


def _factor_for(eqn: Any, dims: Dims, *, may_be_partial: bool) -> Factor:
    """The factor under which the operands stay cut as they are."""
    ins, outs = ([v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars))
    for factor in PATTERNS.factors(eqn.primitive.name, ins, outs, eqn.params):
        agrees = all(d is None or d == f for d, f in zip(dims, factor.operands, strict=True))
        if agrees and (may_be_partial or not factor.partial):
            return factor
    raise PlanError(_refusal(eqn))


def _resharded(
    arrays: Sequence[Any],
    dims: Dims,
    wanted: Dims,
    eqn: Any,
    part: PartOf,
    between: Between | None,
) -> list[Any]:
    """Arrays with the wanted cut dimensions; whole arrays are cut."""
    out = []
    for x, dim, other in zip(arrays, dims, wanted, strict=True):
        if dim is not None and dim != other:
            raise PlanError(_refusal(eqn))
        if dim is None and other is not None:
            x = take(x, other, part) if between is None else between.take(x, other)
        out.append(x)
    return out


def run_custom(
    eqn: Any, operands: Sequence[Any], cut: Dims, part: PartOf, between: Between | None = None
) -> tuple[list[Any], list[int | None]]:
    """Run an equation with custom gradient rules on one shard, and its rules too.

    Args:
        eqn: A `custom_jvp_call` or `custom_vjp_call`.
        operands: Shards, or whole arrays.
        cut: The cut dimension of each operand, or None.
        between: See `run_program`.
    """
    closed = inner_jaxpr(eqn)
    assert closed is not None
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    is_float = [jnp.issubdtype(s.dtype, jnp.inexact) for s in shapes]
    float_places = [i for i, f in enumerate(is_float) if f]
    results: list[int | None] = []

    def here() -> Between | None:
        return None if between is None else between.again()

    def primal(*arrays: Any) -> list[Any]:
        outputs, dims = run_program(closed, arrays, cut, part, here())
        results[:] = dims
        return outputs

    def merged(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        replaced = dict(zip(float_places, arrays, strict=True))
        return [replaced.get(i, x) for i, x in enumerate(others)]

    rest = list(operands)
    jax.eval_shape(primal, *rest)  # a gradient rule may run without the primal
    floats = [rest[i] for i in float_places]
    if eqn.primitive.name == "custom_jvp_call":

        def tangent(arrays: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            def whole(*both: Any) -> Any:
                primals, moved = list(both[: len(shapes)]), both[len(shapes) :]
                call = lambda *xs: run_equation(eqn, merged(xs, primals))  # noqa: E731
                return jax.jvp(call, tuple(primals[i] for i in float_places), moved)

            traced = jax.make_jaxpr(whole)(*shapes, *[shapes[i] for i in float_places])
            dims = [*cut, *[cut[i] for i in float_places]]
            moved = [*merged(arrays, rest), *tangents]
            both, dims = run_program(traced, moved, dims, part, here())
            both = _resharded(both, dims, results * 2, eqn, part, between)
            return both[: len(results)], both[len(results) :]

        run = jax.custom_jvp(lambda *xs: primal(*merged(xs, rest)))
        run.defjvp(tangent)
        return run(*floats), results

    def backward(saved: Any, cotangents: Any) -> Any:
        def whole(*both: Any) -> Any:
            primals, back = list(both[: len(shapes)]), both[len(shapes) :]
            call = lambda *xs: run_equation(eqn, merged(xs, primals))  # noqa: E731
            return jax.vjp(call, *[primals[i] for i in float_places])[1](list(back))

        outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        traced = jax.make_jaxpr(whole)(*shapes, *outs)
        arrays = [*saved, *cotangents]
        grads, dims = run_program(traced, arrays, [*cut, *results], part, here())
        return tuple(_resharded(grads, dims, [cut[i] for i in float_places], eqn, part, between))

    with_vjp = jax.custom_vjp(lambda *xs: primal(*merged(xs, rest)))
    with_vjp.defvjp(lambda *xs: (primal(*merged(xs, rest)), merged(xs, rest)), backward)
    return with_vjp(*floats), results
