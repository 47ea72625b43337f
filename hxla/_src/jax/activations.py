"""Activation functions, whose backward computes them again from their argument.

An activation such as a GELU is element-wise work on one array, with a function that XLA does not
compute twice: a GPU then keeps what its derivative needs beside its argument and its result.
Computed again, the backward reads the argument only, which is kept anyway. In a loss whose products
are cuBLAS's this also lets XLA move a GELU into the product before it.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax

from .jaxpr import (
    BY_ELEMENT,
    ClosedJaxpr,
    as_function,
    part,
    splice,
    variables,
    with_inner,
)

#: Functions that XLA does not compute twice, and whose derivatives need more than their results.
_FUNCTIONS = frozenset({"erf", "erfc", "logistic", "tanh"})
_ELEMENTWISE = BY_ELEMENT - {"optimization_barrier", "stop_gradient"} | _FUNCTIONS


def recomputed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A loss whose activation functions are computed again in its backward, in loops too.

    Returns:
        The same object if it has none.
    """
    jaxpr = closed.jaxpr
    equations = [with_inner(eqn, recomputed) for eqn in jaxpr.eqns]
    argument_of = _arguments(equations)
    inside: dict[Any, list[Any]] = {}
    for eqn in equations:
        if eqn.outvars and eqn.outvars[0] in argument_of:
            inside.setdefault(argument_of[eqn.outvars[0]], []).append(eqn)
    replaced: dict[int, list[Any]] = {}
    for argument, members in inside.items():
        if len(members) < 2 or _FUNCTIONS.isdisjoint(eqn.primitive.name for eqn in members):
            continue
        last = _only_result(jaxpr, equations, members)
        if last is not None:
            replaced |= {id(eqn): [] for eqn in members}
            replaced[id(last)] = _checkpointed(jaxpr, equations, last, argument)
    if not replaced and all(a is b for a, b in zip(equations, jaxpr.eqns, strict=True)):
        return closed
    new = [e for eqn in equations for e in replaced.get(id(eqn), [eqn])]
    return ClosedJaxpr(jaxpr.replace(eqns=new), closed.consts)


def _arguments(equations: list[Any]) -> Mapping[Any, Any]:
    """Of each result of element-wise work on one array that array; scalars are no arrays."""
    found: dict[Any, Any] = {}
    for eqn in equations:
        if eqn.primitive.name not in _ELEMENTWISE or not _is_array(eqn.outvars[0]):
            continue
        arrays = [v for v in variables(eqn.invars) if _is_array(v)]
        each = {found.get(v, v) for v in arrays}
        if len(each) == 1 and all(v.aval.shape == eqn.outvars[0].aval.shape for v in arrays):
            found[eqn.outvars[0]] = each.pop()
    return found


def _is_array(v: Any) -> bool:
    return math.prod(getattr(v.aval, "shape", ())) > 1


def _only_result(jaxpr: Any, equations: list[Any], members: list[Any]) -> Any:
    """The equation whose result alone others read; None: they read several."""
    own = {id(eqn) for eqn in members}
    made = {eqn.outvars[0]: eqn for eqn in members}
    read = variables(v for eqn in equations if id(eqn) not in own for v in eqn.invars)
    results = [v for v in {*read, *variables(jaxpr.outvars)} if v in made]
    return made[results[0]] if len(results) == 1 else None


def _checkpointed(jaxpr: Any, equations: list[Any], last: Any, argument: Any) -> list[Any]:
    known = {v for eqn in equations for v in eqn.outvars if not _is_array(v)}
    inner = part(jaxpr.replace(eqns=equations), last.outvars, {*known, argument})
    function = jax.checkpoint(as_function(ClosedJaxpr(inner, ())))
    return splice(last.replace(invars=inner.invars), function)
