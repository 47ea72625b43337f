"""An equation of a traced loss run on one device's own part, of its true size.

The equation was traced for whole arrays, so the sizes that it names are those of the whole. Where
they are of a dimension that is cut, they become those of the part; positions count from where the
part begins.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.errors import PlanError
from ..jax.jaxpr import ClosedJaxpr, Literal, inner_jaxpr, kind_of, run_equation
from .factors import PATTERNS, Factor

Dims = Sequence[int | None]
#: From the size of a whole dimension to the size of the part, and to where the part begins.
PartOf = Callable[[int], tuple[int, Any]]

#: Equations whose partial results over parts add up.
SUMS = ("dot_general", "conv_general_dilated", "gather", "reduce_sum")
#: Those whose partial results are the largest (or else the smallest) of each part.
EXTREMES = {"reduce_max": True, "reduce_or": True, "reduce_min": False, "reduce_and": False}


def run_part(
    eqn: Any, operands: Sequence[Any], cut: Dims, results: Dims, part: PartOf
) -> list[Any]:
    """The results of an equation for one part.

    Args:
        operands: The parts, or whole arrays.
        cut: The dimension of each operand that is cut, or None.

    Raises:
        PlanError: If hxla cannot tell what the equation is for a part.
    """
    shapes = [_local(v.aval.shape, dim, part) for v, dim in zip(eqn.outvars, results, strict=True)]
    run = _BY_NAME.get(eqn.primitive.name)
    try:
        if run is None:
            found = run_equation(eqn, operands)
        else:
            found = run(_Call(eqn, operands, cut, results, shapes, part))
    except (TypeError, ValueError) as error:
        raise PlanError(f"{_cannot(eqn)}: {error}") from error
    if [x.shape for x in found] != shapes:
        raise PlanError(_cannot(eqn))
    return found


class _Call(NamedTuple):
    """An equation that is to run on one part.

    Attributes:
        operands: The parts, or whole arrays.
        cut: The dimension of each operand that is cut, or None.
        results: The dimension of each result that is cut, or None.
        shapes: Of the results of this part.
    """

    eqn: Any
    operands: Sequence[Any]
    cut: Dims
    results: Dims
    shapes: list[tuple[int, ...]]
    part: PartOf


def _cannot(eqn: Any) -> str:
    return (
        f"hxla cannot run {eqn.primitive.name} on parts of unlike sizes: leave it out of the "
        "split, or let the parts be alike"
    )


def _local(shape: Sequence[int], dim: int | None, part: PartOf) -> tuple[int, ...]:
    return tuple(part(n)[0] if d == dim else n for d, n in enumerate(shape))


def take(x: Any, dim: int, part: PartOf) -> Any:
    """The part of a whole array."""
    size, start = part(x.shape[dim])
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _reshape(call: _Call) -> list[Any]:
    return [jax.lax.reshape(call.operands[0], call.shapes[0])]


def _broadcast(call: _Call) -> list[Any]:
    dims = call.eqn.params["broadcast_dimensions"]
    return [jax.lax.broadcast_in_dim(call.operands[0], call.shapes[0], dims)]


def _iota(call: _Call) -> list[Any]:
    dtype, along = call.eqn.params["dtype"], call.eqn.params["dimension"]
    found = jax.lax.broadcasted_iota(dtype, call.shapes[0], along)
    if call.results[0] == along:
        found = found + call.part(call.eqn.outvars[0].aval.shape[along])[1].astype(dtype)
    return [found]


def _random_bits(call: _Call) -> list[Any]:
    # Those of the whole, for they are to be the same however it is cut.
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
    # The rows that are not here are zero: another device has them.
    column = numbers.start_index_map.index(dim)
    num = call.eqn.invars[0].aval.shape[dim]
    size, start = call.part(num)
    at = indices[..., column]
    is_outside = (at < 0) | (at >= num)
    if params["mode"] == jax.lax.GatherScatterMode.CLIP:
        at, is_outside = jnp.clip(at, 0, num - 1), jnp.zeros_like(is_outside)
    own = at - start.astype(at.dtype)
    is_own = (own >= 0) & (own < size)
    here = indices.at[..., column].set(jnp.clip(own, 0, size - 1))
    found = _gathered(params, table, here, sizes)
    is_batch = [d for d in range(found.ndim) if d not in numbers.offset_dims]

    def spread(x: jax.Array) -> jax.Array:
        return jax.lax.broadcast_in_dim(x, found.shape, is_batch)

    found = jnp.where(spread(is_own), found, jnp.zeros((), found.dtype))
    if jnp.issubdtype(found.dtype, jnp.floating):
        found = jnp.where(spread(is_outside), jnp.full((), jnp.nan, found.dtype), found)
    return [found]


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


_BY_NAME: dict[str, Callable[[_Call], list[Any]]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "random_bits": _random_bits,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
}


# -- programs inside equations -------------------------------------------------------------------


def run_program(
    closed: ClosedJaxpr, operands: Sequence[Any], cut: Dims, part: PartOf
) -> tuple[list[Any], list[int | None]]:
    """A program on one part of some operands, if no device needs another's.

    Args:
        closed: Traced for whole arrays.
        operands: The parts, or whole arrays.
        cut: The dimension of each operand that is cut, or None.

    Returns:
        The results, and the dimension of each that is cut.

    Raises:
        PlanError: If a device would need what others have.
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
            found, results = run_equation(eqn, arrays), [None] * len(eqn.outvars)
        elif kind_of(eqn) == "inlined":
            inner = inner_jaxpr(eqn)
            assert inner is not None
            found, results = run_program(inner, arrays, dims, part)
        elif kind_of(eqn) == "custom":
            found, results = run_custom(eqn, arrays, dims, part)
        else:
            factor = _following(eqn, dims)
            given = [
                take(x, wanted, part) if dim is None and wanted is not None else x
                for x, dim, wanted in zip(arrays, dims, factor.operands, strict=True)
            ]
            results = list(factor.results)
            found = run_part(eqn, given, factor.operands, results, part)
        env.update(zip(eqn.outvars, zip(found, results, strict=True), strict=True))
    ends = [read(v) for v in closed.jaxpr.outvars]
    return [x for x, _ in ends], [dim for _, dim in ends]


def _following(eqn: Any, dims: Dims) -> Factor:
    """The factor that keeps what is cut as it is."""
    ins, outs = ([v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars))
    for factor in PATTERNS.factors(eqn.primitive.name, ins, outs, eqn.params):
        agrees = all(d is None or d == f for d, f in zip(dims, factor.operands, strict=True))
        if agrees and not factor.partial:
            return factor
    raise PlanError(_cannot(eqn))


def _as(found: Sequence[Any], dims: Dims, wanted: Dims, eqn: Any, part: PartOf) -> list[Any]:
    """Arrays cut as they are wanted: a whole one has every part."""
    out = []
    for x, dim, other in zip(found, dims, wanted, strict=True):
        if dim is not None and dim != other:
            raise PlanError(_cannot(eqn))
        out.append(take(x, other, part) if dim is None and other is not None else x)
    return out


def run_custom(
    eqn: Any, operands: Sequence[Any], cut: Dims, part: PartOf
) -> tuple[list[Any], list[int | None]]:
    """An equation with gradient rules of its own, which it keeps.

    Args:
        eqn: A `custom_jvp_call` or `custom_vjp_call`.
        operands: The parts, or whole arrays.
        cut: The dimension of each operand that is cut, or None.
    """
    closed = inner_jaxpr(eqn)
    assert closed is not None
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    is_float = [jnp.issubdtype(s.dtype, jnp.inexact) for s in shapes]
    floats = [i for i, f in enumerate(is_float) if f]
    results: list[int | None] = []

    def primal(*arrays: Any) -> list[Any]:
        found, dims = run_program(closed, arrays, cut, part)
        results[:] = dims
        return found

    def merged(arrays: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        own = dict(zip(floats, arrays, strict=True))
        return [own.get(i, x) for i, x in enumerate(others)]

    rest = list(operands)
    jax.eval_shape(primal, *rest)  # a rule of gradients may run alone
    own = [rest[i] for i in floats]
    if eqn.primitive.name == "custom_jvp_call":

        def tangent(arrays: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            def whole(*both: Any) -> Any:
                given, moved = list(both[: len(shapes)]), both[len(shapes) :]
                of = lambda *xs: run_equation(eqn, merged(xs, given))  # noqa: E731
                return jax.jvp(of, tuple(given[i] for i in floats), moved)

            traced = jax.make_jaxpr(whole)(*shapes, *[shapes[i] for i in floats])
            dims = [*cut, *[cut[i] for i in floats]]
            both, dims = run_program(traced, [*merged(arrays, rest), *tangents], dims, part)
            both = _as(both, dims, results * 2, eqn, part)
            return both[: len(results)], both[len(results) :]

        run = jax.custom_jvp(lambda *xs: primal(*merged(xs, rest)))
        run.defjvp(tangent)
        return run(*own), results

    def backward(saved: Any, cotangents: Any) -> Any:
        def whole(*both: Any) -> Any:
            given, back = list(both[: len(shapes)]), both[len(shapes) :]
            of = lambda *xs: run_equation(eqn, merged(xs, given))  # noqa: E731
            return jax.vjp(of, *[given[i] for i in floats])[1](list(back))

        outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        traced = jax.make_jaxpr(whole)(*shapes, *outs)
        found, dims = run_program(traced, [*saved, *cotangents], [*cut, *results], part)
        return tuple(_as(found, dims, [cut[i] for i in floats], eqn, part))

    turned = jax.custom_vjp(lambda *xs: primal(*merged(xs, rest)))
    turned.defvjp(lambda *xs: (primal(*merged(xs, rest)), merged(xs, rest)), backward)
    return turned(*own), results
