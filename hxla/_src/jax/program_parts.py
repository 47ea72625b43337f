"""A traced program in parts: results made group by group, or group apart from group.

Equations that only one group's results need run with that group. What several groups need is
either made once, before all of them, and kept, as a global norm is; or, where it is a tensor that
costs hardly more than reading it, made again by each of them, as the gradients are that the norm
was taken of. Barriers keep XLA from bringing the groups together again.

Such numbers are the random keys of a model's arrays and the counters that they are made from. They
are found first, one equation after another, so that programs of equal layers differ in their
arguments only: one of them makes the arrays of all.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .jaxpr import (
    ClosedJaxpr,
    Literal,
    backward_slice,
    inlined,
    inner_jaxpr,
    is_cheap,
    part,
    run_as,
    run_equation,
    run_jaxpr,
    variables,
)


def balanced(sizes: Sequence[int], num: int) -> list[range]:
    """Consecutive groups of about equal size, none of them empty.

    Args:
        num: Groups, from 1 to as many as there are sizes.
    """
    total = np.cumsum(sizes, dtype=float)
    ends = [0]
    for g in range(1, num):
        fair = int(np.argmin(np.abs(total - total[-1] * g / num))) + 1
        ends.append(min(max(fair, ends[-1] + 1), len(sizes) - (num - g)))
    return [range(a, b) for a, b in itertools.pairwise([*ends, len(sizes)])]


def in_groups(function: Callable[..., Any], groups: Sequence[Iterable[int]]) -> Callable[..., Any]:
    """The same function of trees of arrays, its results made group after group.

    Args:
        groups: Numbers of its flat results. A result in none of them is made with the group with
            which it has most in common that no other has.
    """
    return run_as(function, lambda closed, arguments: _run(inlined(closed), groups, arguments))


def _run(
    closed: ClosedJaxpr, groups: Sequence[Iterable[int]], arguments: Sequence[Any]
) -> list[Any]:
    jaxpr = closed.jaxpr
    wanted = _all_grouped(jaxpr, [[jaxpr.outvars[i] for i in group] for group in groups])
    programs = _programs(jaxpr, wanted)
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))
    before: list[Any] = []
    for program in programs:
        operands = [env[v] for v in program.invars]
        if before:
            operands, before = jax.lax.optimization_barrier((operands, before))
        before = run_jaxpr(program, operands)
        made = zip(program.outvars, before, strict=True)
        env.update((v, x) for v, x in made if not isinstance(v, Literal))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _programs(jaxpr: Any, groups: Sequence[Sequence[Any]]) -> list[Any]:
    """What is shared, if anything is, and then one group's results after another's."""
    needing = _needing(jaxpr, groups)
    results = variables(jaxpr.outvars)  # these cost nothing to keep
    kept = variables(
        v
        for eqn in jaxpr.eqns
        if _any_of(needing, eqn.outvars).bit_count() > 1
        and not (_is_made_again(eqn) and results.keys().isdisjoint(eqn.outvars))
        for v in eqn.outvars
    )
    programs = [part(jaxpr, group, given=kept) for group in groups]
    shared = variables(v for program in programs for v in program.invars if v in kept)
    return [part(jaxpr, list(shared)), *programs] if shared else programs


def _all_grouped(jaxpr: Any, groups: list[list[Any]]) -> list[list[Any]]:
    """The groups with every other result added to one of them."""
    needing = _needing(jaxpr, groups)
    grouped = variables(v for group in groups for v in group)
    for v in variables(jaxpr.outvars):
        if v in grouped:
            continue
        own = [v]
        if needing.get(v, 0).bit_count() != 1:
            own = [u for eqn in backward_slice(jaxpr.eqns, [v]) for u in eqn.outvars]
        found = Counter(bits for u in own if (bits := needing.get(u, 0)).bit_count() == 1)
        only = max(found, key=found.__getitem__, default=1)
        groups[only.bit_length() - 1].append(v)
    return groups


def _needing(jaxpr: Any, groups: Sequence[Sequence[Any]]) -> dict[Any, int]:
    """For each variable the groups that need it, as bits."""
    needing: dict[Any, int] = {}
    for g, group in enumerate(groups):
        needing.update((v, needing.get(v, 0) | 1 << g) for v in variables(group))
    for eqn in reversed(jaxpr.eqns):
        bits = _any_of(needing, eqn.outvars)
        needing.update((v, needing.get(v, 0) | bits) for v in variables(eqn.invars))
    return needing


def _any_of(needing: dict[Any, int], variables: Iterable[Any]) -> int:
    return functools.reduce(operator.or_, (needing.get(v, 0) for v in variables), 0)


def _is_made_again(eqn: Any) -> bool:
    """A scalar can as well be kept."""
    return any(v.aval.size > 1 for v in eqn.outvars) and not eqn.effects and is_cheap(eqn)


_MOST_ELEMENTS = 4096  # of whole numbers that are found first


@dataclasses.dataclass(frozen=True)
class ResultGroup:
    """Results that are made without the others.

    Attributes:
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
) -> list[ResultGroup]:
    """The groups of a program's results; see `ResultGroup`.

    Args:
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
        groups.append(ResultGroup(tuple(numbers), jaxpr, taken, _like(jaxpr)))
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
