"""A program in groups of results that have nothing in common but small whole numbers.

Such numbers are the random keys of a model's arrays and the counters that they are made from. They
are found first, one equation after another, so that programs of equal layers differ in their
arguments only: one of them makes the arrays of all.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._jaxpr import (
    ClosedJaxpr,
    Literal,
    backward_slice,
    inlined,
    inner_jaxpr,
    part,
    run_equation,
    run_jaxpr,
    variables,
)

_MOST_ELEMENTS = 4096  # of whole numbers that are found first


@dataclasses.dataclass(frozen=True)
class Apart:
    """Results that are made without the others.

    Attributes:
        places: Their numbers among all.
        jaxpr: Makes them.
        operands: Arrays that it takes.
        like: Equal for groups that differ in their operands only.
    """

    places: tuple[int, ...]
    jaxpr: Any
    operands: tuple[Any, ...]
    like: Any

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The results, from `operands` or those of a group that is like it."""
        return run_jaxpr(self.jaxpr, operands)


def apart(
    closed: ClosedJaxpr, arguments: Sequence[Any], wanted: Sequence[int], least_bytes: int = 0
) -> list[Apart]:
    """The groups of a program's results; see `Apart`.

    Args:
        closed: The program.
        arguments: Arrays.
        wanted: Numbers of the results that are made.
        least_bytes: Those of smaller ones are one group.
    """
    whole = inlined(closed).jaxpr
    results = [whole.outvars[k] for k in wanted]
    known = dict(zip(whole.constvars, closed.consts, strict=True))
    known |= dict(zip(whole.invars, arguments, strict=True))
    left = []
    for eqn in backward_slice(whole.eqns, results):
        if all(v in known for v in variables(eqn.invars)) and _is_small(eqn):
            operands = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
            known.update(zip(eqn.outvars, run_equation(eqn, operands), strict=True))
        else:
            left.append(eqn)
    roots = _roots(left, known)
    places: dict[Any, list[int]] = {}
    for k, v in zip(wanted, results, strict=True):
        places.setdefault(None if isinstance(v, Literal) else roots.get(v, v), []).append(k)
    sizes = [math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in whole.outvars]
    small = {root for root, own in places.items() if sum(sizes[k] for k in own) < least_bytes}
    equations: dict[Any, list[Any]] = {}
    for eqn in left:
        root = roots[eqn.outvars[0]]
        equations.setdefault(None if root in small else root, []).append(eqn)
    joined: dict[Any, list[int]] = {}
    for root, own in places.items():
        joined.setdefault(None if root in small else root, []).extend(own)
    groups = []
    for root, numbers in joined.items():
        of_group = whole.replace(eqns=equations.get(root, []))
        jaxpr = part(of_group, [whole.outvars[k] for k in numbers], given=known)
        taken = tuple(known[v] for v in jaxpr.invars)
        groups.append(Apart(tuple(numbers), jaxpr, taken, _like(jaxpr)))
    return groups


def _is_small(eqn: Any) -> bool:
    """Whether it makes few whole numbers, of which no compiler rounds any, and no random array."""
    return not (eqn.effects or eqn.primitive.name == "random_bits") and all(
        math.prod(v.aval.shape) <= _MOST_ELEMENTS
        and (
            jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
            or jnp.issubdtype(v.aval.dtype, jnp.integer)
        )
        for v in eqn.outvars
    )


def _roots(equations: Sequence[Any], known: dict[Any, Any]) -> dict[Any, Any]:
    """For each variable that equations make, one that stands for all which hang together."""
    parents: dict[Any, Any] = {}

    def root(v: Any) -> Any:
        while parents[v] is not v:
            parents[v] = v = parents[parents[v]]
        return v

    for eqn in equations:
        first, *others = eqn.outvars
        parents |= {v: first for v in eqn.outvars}
        for v in (*others, *variables(eqn.invars)):
            if v not in known:
                parents[root(v)] = root(first)
    return {v: root(v) for v in parents}


def _like(jaxpr: Any) -> Any:
    """The text of a program, or itself: a text does not show the arrays inside."""
    if any(_closes_over_arrays(eqn) for eqn in jaxpr.eqns):
        return id(jaxpr)
    return str(jaxpr)


def _closes_over_arrays(eqn: Any) -> bool:
    inner = inner_jaxpr(eqn)
    if inner is None:
        return False
    return bool(inner.consts) or any(map(_closes_over_arrays, inner.jaxpr.eqns))
