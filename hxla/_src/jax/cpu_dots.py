"""Dots that are slow on a CPU, rewritten as fast ones.

A dense layer's weight gradient contracts the leading dimensions of both operands. XLA's CPU backend
takes two to four times longer for it than for a dot whose first operand ends with the contracted
dimensions. So the smaller operand is transposed first, which is cheap; barriers keep XLA from
folding the transposition into the dot again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType

from .jaxpr import ClosedJaxpr, as_function, run_as, splice, with_inner


def uncrossed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of trees of arrays, its crossed dots rewritten."""
    return run_as(function, lambda closed, arguments: as_function(uncross(closed))(*arguments))


def uncross(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program without crossed dots, in its loops and branches too.

    Returns:
        The same object if it has no crossed dot.
    """
    equations = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and _is_crossed(eqn):
            equations += splice(eqn, lambda a, b, eqn=eqn: _dot(eqn, a, b))
        else:
            equations.append(with_inner(eqn, uncross))
    if all(a is b for a, b in zip(equations, closed.jaxpr.eqns, strict=False)):
        return closed
    return ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def row_major(x: jax.Array) -> jax.Array:
    """The same array in row-major layout.

    Reading a transposed array element by element takes ten times longer than a copy.
    """
    if x.ndim < 2:
        return x
    placed = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return jax.lax.optimization_barrier(placed)  # else XLA fuses the copy into every reader


def _is_crossed(eqn: Any) -> bool:
    """Whether a dot contracts leading dimensions of both operands."""
    contracts, batches = eqn.params["dimension_numbers"]

    def across(x: Any, contract: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        free = set(range(x.aval.ndim)) - set(contract) - set(batch)
        return bool(free and contract) and max(contract) < min(free)

    sharding = eqn.params.get("out_sharding")  # empty on automatic and manual axes
    explicit = sharding is not None and AxisType.Explicit in sharding.mesh.axis_types
    return not explicit and all(
        across(x, c, b) for x, c, b in zip(eqn.invars, contracts, batches, strict=True)
    )


def _dot(eqn: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    (a_contract, b_contract), (a_batch, b_batch) = eqn.params["dimension_numbers"]
    swap = not a_batch and b.size < a.size
    if swap:
        a, b, a_contract, b_contract = b, a, b_contract, a_contract
    num_batch, num_contract = len(a_batch), len(a_contract)
    num_free = a.ndim - num_batch - num_contract
    free = [d for d in range(a.ndim) if d not in a_contract and d not in a_batch]
    out = jax.lax.dot_general(
        jax.lax.optimization_barrier(a.transpose(*a_batch, *free, *a_contract)),
        b,
        (
            (tuple(range(num_batch + num_free, a.ndim)), b_contract),
            (tuple(range(num_batch)), b_batch),
        ),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )
    out = jax.lax.optimization_barrier(out)
    return out.transpose(*range(num_free, out.ndim), *range(num_free)) if swap else out
