"""Whether every equation that a plan cuts into unlike parts can be run on one of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core._errors import PlanError
from .._graph._graph import Graph
from .._graph._local_ops import EXTREMES, SUMS, run_custom, run_part
from .._graph._operations import Op
from .._plan._linked_dims import LinkedDims
from .._plan._sharding import AxisAssignment

States = Sequence[int | None]

_REMEDY = "leave it out of the split, or let the parts be alike"


def check_parts(graph: Graph, axis: AxisAssignment, linked: LinkedDims) -> None:
    """Run each kind of equation on the shapes of one unit; nothing is computed.

    Args:
        graph: Of the loss.
        axis: What it cuts.
        linked: The dimensions that it cuts together.

    Raises:
        PlanError: If hxla cannot: the first equation.
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
        own = [linked.groups[g].num_units for g in groups if g is not None]
        if len(own) != 1:
            raise PlanError(
                f"{_where(op)} joins dimensions that are cut at different places: {_REMEDY}"
            )
        if not any(dim is not None for dim in results) and op.name not in (*SUMS, *EXTREMES):
            raise PlanError(
                f"{_where(op)}: partial results are not completed over unlike parts: {_REMEDY}"
            )
        try:
            _try(op, states, results, own[0])
        except PlanError as error:
            raise PlanError(f"{_where(op)}: {error}") from None


def _cut_ops(ops: Sequence[Op], axis: AxisAssignment) -> Iterator[Op]:
    for op in ops:
        if op.body and op.kind != "custom":
            yield from _cut_ops(op.body, axis)
        elif op.outputs and any(d is not None for side in _states(op, axis) for d in side):
            yield op


def _states(op: Op, axis: AxisAssignment) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The dimensions of operands and results that are cut."""
    if op.kind == "custom":
        own = (axis.made.get(v) if isinstance(v, int) else None for v in op.inputs)
        states = tuple(own)
    else:
        states = axis.wanted[op.outputs[0]]
    return states, tuple(axis.made.get(v) for v in op.outputs)


def _try(op: Op, states: States, results: States, num_units: int) -> None:
    """On shapes of one unit."""

    def run(start: Any, *operands: Any) -> Any:
        def part(size: int) -> tuple[int, Any]:
            return size // num_units, start

        if op.kind == "custom":
            found, dims = run_custom(op.eqn, operands, states, part)
            if any(d is not None and d != own for d, own in zip(dims, results, strict=True)):
                raise PlanError(
                    f"it has rules of its own for gradients, and cuts inside: {_REMEDY}"
                )
            floats = [x for x in found if jnp.issubdtype(x.dtype, jnp.inexact)]
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


def _where(op: Op) -> str:
    module = "/".join(p for p in op.stack.split("/") if not p.startswith("hxla."))
    return f"{op.name} in {module or 'the loss'} ({op.source})"
