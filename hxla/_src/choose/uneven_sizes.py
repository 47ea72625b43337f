"""Sizes of the shards of an uneven split, in whole units, and a check that it can run."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import PlanError
from ..core.types import TOKEN_AXIS
from ..graph.graph import Graph, Op
from ..graph.local_ops import EXTREMES, SUMS, Between, run_custom, run_part, take
from ..graph.precision import is_float8_product
from ..plan.linked_dims import LinkedDims, in_shares
from ..plan.sharding import AxisAssignment
from .apportionment import SplitDevice, best_sizes

#: For each dimension of a parameter the sizes of its shards, as in a layout.
Sizes = tuple[tuple[int, ...], ...]

_MOST_SIZE_LINES = 8
_LEAST_GRANULES = 64  # of a dimension, for each device: parts are then within a percent or two

States = Sequence[int | None]

_REMEDY = "leave it out of the split, or use even parts"


def check_parts(graph: Graph, axis: AxisAssignment, linked: LinkedDims) -> None:
    """Trace each kind of equation on the shapes of one unit; nothing is computed.

    Raises:
        PlanError: For the first equation that hxla cannot shard unevenly.
    """
    seen = set()
    for op in _cut_ops(graph.ops, axis):
        states, results = _states(op, axis)
        shapes = tuple(tuple(v.aval.shape) for v in op.eqn.invars)
        key = op.name, shapes, states, results
        if key in seen and op.kind != "custom":
            continue
        seen.add(key)
        groups = {linked.of_value(v) for v in op.outputs} | {
            linked.of_value(v) if op.kind == "custom" else (linked.of_operand(op, k) or (None,))[0]
            for k, v in enumerate(op.inputs)
            if isinstance(v, int)
        }
        units = [linked.groups[g].num_units for g in groups if g is not None]
        if len(units) != 1:
            raise PlanError(
                f"{_location(op)} joins dimensions that are cut at different places: {_REMEDY}"
            )
        is_completed = op.name in (*SUMS, *EXTREMES) or is_float8_product(op)
        if not any(dim is not None for dim in results) and not is_completed:
            raise PlanError(
                f"{_location(op)}: partial results are not completed over unlike parts: {_REMEDY}"
            )
        try:
            _trace_unit(op, states, results, units[0])
        except PlanError as error:
            raise PlanError(f"{_location(op)}: {error}") from None


def _cut_ops(ops: Sequence[Op], axis: AxisAssignment) -> Iterator[Op]:
    for op in ops:
        if op.body and op.kind != "custom":
            yield from _cut_ops(op.body, axis)
        elif op.outputs and any(d is not None for side in _states(op, axis) for d in side):
            yield op


def _states(op: Op, axis: AxisAssignment) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The sharded dimensions of operands and results."""
    if op.kind == "custom":
        dims = (axis.made.get(v) if isinstance(v, int) else None for v in op.inputs)
        states = tuple(dims)
    else:
        states = axis.wanted[op.outputs[0]]
    return states, tuple(axis.made.get(v) for v in op.outputs)


def _trace_unit(op: Op, states: States, results: States, num_units: int) -> None:
    """Trace an equation on the shapes of one unit."""

    def run(start: Any, *operands: Any) -> Any:
        def part(size: int) -> tuple[int, Any]:
            return size // num_units, start

        if op.kind == "custom":
            between = None
            if is_float8_product(op):
                between = Between(lambda _, x, token: (x, token), lambda x, dim: take(x, dim, part))
            outputs, dims = run_custom(op.eqn, operands, states, part, between)
            pairs = [(d, wanted) for d, wanted in zip(dims, results, strict=True) if d is not None]
            if between is not None:  # it is gathered where it is whole outside
                pairs = [(d, wanted) for d, wanted in pairs if wanted is not None]
            if any(d != wanted for d, wanted in pairs):
                raise PlanError(
                    f"it has rules of its own for gradients, and cuts inside: {_REMEDY}"
                )
            floats = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]
            return sum(jnp.sum(x) for x in floats)
        return run_part(op.eqn, operands, states, results, part)

    shapes = [
        jax.ShapeDtypeStruct(
            tuple(n // num_units if d == dim else n for d, n in enumerate(v.aval.shape)),
            v.aval.dtype,
        )
        for v, dim in zip(op.eqn.invars, states, strict=True)
    ]
    start = jax.ShapeDtypeStruct((), jnp.int32)
    is_float = [jnp.issubdtype(x.dtype, jnp.inexact) for x in shapes]
    if op.kind != "custom" or not any(is_float):
        jax.eval_shape(run, start, *shapes)
        return
    places = tuple(i + 1 for i, f in enumerate(is_float) if f)
    jax.eval_shape(jax.grad(run, argnums=places), start, *shapes)


def _location(op: Op) -> str:
    module = "/".join(p for p in op.stack.split("/") if not p.startswith("hxla."))
    return f"{op.name} in {module or 'the loss'} ({op.source})"


def sizes_of(
    graph: Graph,
    assigned: AxisAssignment,
    axis: str,
    shares: Sequence[int],
    *,
    stated: bool = False,
) -> tuple[tuple[Sizes, ...], list[str]]:
    """The shard sizes of each parameter, see `Layout.sizes`, and lines for the plan.

    Args:
        axis: The name of the mesh axis.
        stated: Whether the user states the ratio.

    Raises:
        PlanError: For the first equation that hxla cannot shard unevenly, or for too few units.
    """
    linked, num = LinkedDims(graph, assigned), len(shares)
    check_parts(graph, assigned, linked)
    sizes: list[list[tuple[int, ...]]] = [[()] * len(shape) for shape in graph.param_shapes]
    lines: list[str] = []
    for group in linked.groups:
        if group.num_units < num:
            raise PlanError(_too_few(graph, group.num_units, group.params, num))
        units = _units(group.num_units, shares, stated=stated)
        if axis == TOKEN_AXIS:
            parts = in_shares(group.num_units, shares)
            lines.append(f"tokens over {axis}: {' + '.join(map(str, parts))} of {group.num_units}")
        for p, dim in group.params:
            size = graph.param_shapes[p][dim]
            parts = tuple(n * (size // group.num_units) for n in units)
            if len(set(parts)) > 1:
                sizes[p][dim] = parts
                padding = max(parts) * num / size - 1
                lines.append(
                    f"sizes of {graph.param_names[p]} over {axis}: "
                    f"{' + '.join(map(str, parts))} of {size}, {group.num_units} units, "
                    f"padded by {padding:.0%}"
                )
    lines = list(dict.fromkeys(lines))
    if len(lines) > _MOST_SIZE_LINES:
        more = len(lines) - _MOST_SIZE_LINES
        lines = [*lines[:_MOST_SIZE_LINES], f"and sizes of {more} parameters more"]
    return tuple(tuple(dims) if any(dims) else () for dims in sizes), lines


def _units(num_units: int, shares: Sequence[int], *, stated: bool) -> tuple[int, ...]:
    """Units of each device: a stated ratio is rounded, one by speeds takes the optimum.

    Many units, such as columns, are dealt in powers of two, because kernels are slow on odd sizes.
    """
    granule, least = 1, _LEAST_GRANULES * len(shares)
    while num_units % (2 * granule) == 0 and num_units // (2 * granule) >= least:
        granule *= 2
    num = num_units // granule
    if stated:
        sizes = in_shares(num, shares)
    else:
        devices = [SplitDevice(name=str(d), unit_seconds=1 / s) for d, s in enumerate(shares)]
        sizes = best_sizes(num, devices)
    return tuple(n * granule for n in sizes)


def _too_few(
    graph: Graph, num_units: int, params: Sequence[tuple[int, int]], num_devices: int
) -> str:
    names = ", ".join(
        f"dimension {dim} of {graph.param_names[p]} {list(graph.param_shapes[p])}"
        for p, dim in params[:3]
    )
    dims = f"{names or 'the batch'}"
    return (
        f"{dims}: {num_units} whole units, such as heads, cannot be cut over {num_devices} "
        "devices; ask for fewer devices, or leave it out of the split"
    )
