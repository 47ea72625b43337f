"""A program whose results are made group after group, so that few temporaries live at once.

Equations that only one group's results need run with that group. What several groups need is
either made once, before all of them, and kept, as a global norm is; or, where it is a tensor that
costs hardly more than reading it, made again by each of them, as the gradients are that the norm
was taken of. Barriers keep XLA from bringing the groups together again.
"""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ._jaxpr import (
    ClosedJaxpr,
    Literal,
    backward_slice,
    inlined,
    is_cheap,
    part,
    run_as,
    run_jaxpr,
    variables,
)


def balanced(sizes: Sequence[int], num: int) -> list[range]:
    """Consecutive groups of about equal size, none of them empty.

    Args:
        sizes: Of what is grouped.
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
        function: Any.
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
