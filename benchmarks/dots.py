"""Plain JAX with the dots of its gradients written as hxla writes them for a CPU.

A dense layer's weight gradient contracts the leading dimensions of both its operands, which XLA's
CPU back end does slowly. hxla transposes the smaller operand first. Here the same is done to any
function of arrays by an interpreter of its jaxpr, so that what comes of it can be told apart from
all else that hxla does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Literal


def uncrossed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, without a dot that contracts the leading dimensions of both operands."""

    def run(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), map(_row_major, results))

    return run


def _run(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    names = (*jaxpr.constvars, *jaxpr.invars)
    values = dict(zip(names, (*consts, *arguments), strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        own = [read(x) for x in eqn.invars]
        name = eqn.primitive.name
        if name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            results = _run(inner.jaxpr, inner.consts, own)
        elif name == "dot_general" and _is_crossed(eqn):
            results = [_dot(eqn.params, *own)]
        else:
            found = eqn.primitive.bind(*own, **eqn.params)
            results = found if eqn.primitive.multiple_results else [found]
        values |= zip(eqn.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars]


def _is_crossed(eqn: Any) -> bool:
    def across(x: Any, contract: Sequence[int], batch: Sequence[int]) -> bool:
        free = set(range(x.aval.ndim)) - set(contract) - set(batch)
        return bool(free and contract) and max(contract) < min(free)

    return all(map(across, eqn.invars, *eqn.params["dimension_numbers"]))


def _dot(params: dict[str, Any], a: jax.Array, b: jax.Array) -> jax.Array:
    contracts, (a_batch, b_batch) = params["dimension_numbers"]
    a_contract, b_contract = contracts
    swap = not a_batch and b.size < a.size
    if swap:
        a, b, a_contract, b_contract = b, a, b_contract, a_contract
    free = [d for d in range(a.ndim) if d not in (*a_contract, *a_batch)]
    first = a.transpose(*a_batch, *free, *a_contract)
    last = range(len(a_batch) + len(free), a.ndim)
    numbers = ((tuple(last), b_contract), (tuple(range(len(a_batch))), b_batch))
    # Barriers, or XLA folds the transpositions into the dot again.
    out = jax.lax.optimization_barrier(
        jax.lax.dot_general(
            jax.lax.optimization_barrier(first),
            b,
            numbers,
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
    )
    num = len(free)
    return out.transpose(*range(num, out.ndim), *range(num)) if swap else out


def _row_major(x: jax.Array) -> jax.Array:
    if x.ndim < 2:
        return x
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
