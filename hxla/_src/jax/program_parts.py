"""A traced program in parts: results computed group by group, in one program or in several.

An equation for one group's results runs with that group. A value for several groups is computed
once, before them, and kept, as a global norm is; a tensor that is cheap to compute is recomputed by
each group, as the gradients below the norm are. Barriers keep XLA from merging the groups again.

Initializers are split into separate programs. Random keys, and small results of constants alone,
are computed first, equation by equation. Then programs of equal layers differ only in their
arguments and are shared.
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
        num: The number of groups, from 1 to `len(sizes)`.
    """
    total = np.cumsum(sizes, dtype=float)
    ends = [0]
    for g in range(1, num):
        fair = int(np.argmin(np.abs(total - total[-1] * g / num))) + 1
        ends.append(min(max(fair, ends[-1] + 1), len(sizes) - (num - g)))
    return [range(a, b) for a, b in itertools.pairwise([*ends, len(sizes)])]


def in_groups(function: Callable[..., Any], groups: Sequence[Iterable[int]]) -> Callable[..., Any]:
    """The same function of trees of arrays, its results computed group after group.

    Args:
        groups: Indices of its flat results. Any other result joins the group with which it shares
            the most values that no other group needs.
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
    """The program of shared values, if there are any, and then that of each group."""
    needing = _groups_by_variable(jaxpr, groups)
    results = variables(jaxpr.outvars)  # keeping these is free
    kept = variables(
        v
        for eqn in jaxpr.eqns
        if _groups_of(needing, eqn.outvars).bit_count() > 1
        and not (_is_recomputed(eqn) and results.keys().isdisjoint(eqn.outvars))
        for v in eqn.outvars
    )
    programs = [part(jaxpr, group, known=kept) for group in groups]
    shared = variables(v for program in programs for v in program.invars if v in kept)
    return [part(jaxpr, list(shared)), *programs] if shared else programs


def _all_grouped(jaxpr: Any, groups: list[list[Any]]) -> list[list[Any]]:
    """The groups with every other result added to one of them."""
    needing = _groups_by_variable(jaxpr, groups)
    grouped = variables(v for group in groups for v in group)
    for v in variables(jaxpr.outvars):
        if v in grouped:
            continue
        needed = [v]
        if needing.get(v, 0).bit_count() != 1:
            needed = [u for eqn in backward_slice(jaxpr.eqns, [v]) for u in eqn.outvars]
        shared = Counter(bits for u in needed if (bits := needing.get(u, 0)).bit_count() == 1)
        best = max(shared, key=shared.__getitem__, default=1)
        groups[best.bit_length() - 1].append(v)
    return groups


def _groups_by_variable(jaxpr: Any, groups: Sequence[Sequence[Any]]) -> dict[Any, int]:
    """For each variable a bit mask of the groups that need it."""
    needing: dict[Any, int] = {}
    for g, group in enumerate(groups):
        needing.update((v, needing.get(v, 0) | 1 << g) for v in variables(group))
    for eqn in reversed(jaxpr.eqns):
        bits = _groups_of(needing, eqn.outvars)
        needing.update((v, needing.get(v, 0) | bits) for v in variables(eqn.invars))
    return needing


def _groups_of(needing: dict[Any, int], variables: Iterable[Any]) -> int:
    return functools.reduce(operator.or_, (needing.get(v, 0) for v in variables), 0)


def _is_recomputed(eqn: Any) -> bool:
    """Whether groups recompute an equation; scalars are kept."""
    return any(v.aval.size > 1 for v in eqn.outvars) and not eqn.effects and is_cheap(eqn)


_MOST_ELEMENTS = 1 << 16  # of what is computed first, which stays until all parts are made


@dataclasses.dataclass(frozen=True)
class ResultGroup:
    """Results of a separate program.

    Attributes:
        places: Indices of the results in the whole program.
        operands: Arguments and constants, as arrays.
        like: Equal for groups that differ only in their operands.
    """

    places: tuple[int, ...]
    jaxpr: Any
    operands: tuple[Any, ...]
    like: Any

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The results, from the operands of this group or of one with equal `like`."""
        return run_jaxpr(self.jaxpr, operands)


def apart(
    closed: ClosedJaxpr, arguments: Sequence[Any], wanted: Sequence[int], least_bytes: int = 0
) -> list[ResultGroup]:
    """The groups of a program's results; see `ResultGroup`.

    Args:
        wanted: Indices of the results to compute.
        least_bytes: Smaller groups are merged into one.
    """
    whole = inlined(closed).jaxpr
    results = [whole.outvars[k] for k in wanted]
    known = dict(zip(whole.constvars, closed.consts, strict=True))
    known |= dict(zip(whole.invars, arguments, strict=True))
    remaining = []
    for eqn in backward_slice(whole.eqns, results):
        if all(v in known for v in variables(eqn.invars)) and _is_small(eqn):
            operands = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
            known.update(zip(eqn.outvars, run_equation(eqn, operands), strict=True))
        else:
            remaining.append(eqn)
    roots = _roots(remaining, known)
    places: dict[Any, list[int]] = {}
    for k, v in zip(wanted, results, strict=True):
        places.setdefault(None if isinstance(v, Literal) else roots.get(v, v), []).append(k)
    sizes = [math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in whole.outvars]
    small = {root for root, ks in places.items() if sum(sizes[k] for k in ks) < least_bytes}
    equations: dict[Any, list[Any]] = {}
    for eqn in remaining:
        root = roots[eqn.outvars[0]]
        equations.setdefault(None if root in small else root, []).append(eqn)
    joined: dict[Any, list[int]] = {}
    for root, ks in places.items():
        joined.setdefault(None if root in small else root, []).extend(ks)
    groups = []
    for root, numbers in joined.items():
        group_jaxpr = whole.replace(eqns=equations.get(root, []))
        jaxpr = part(group_jaxpr, [whole.outvars[k] for k in numbers], known=known)
        group_operands = tuple(known[v] for v in jaxpr.invars)
        groups.append(ResultGroup(tuple(numbers), jaxpr, group_operands, _program_key(jaxpr)))
    return groups


def _is_small(eqn: Any) -> bool:
    """Whether an equation makes few numbers or keys, and none at random.

    Alone it has one rounding. In a program of constants the sharding would decide whether XLA
    folds them, or fuses a product and a sum.
    """
    return not (eqn.effects or eqn.primitive.name == "random_bits") and all(
        math.prod(v.aval.shape) <= _MOST_ELEMENTS for v in eqn.outvars
    )


def _roots(equations: Sequence[Any], known: dict[Any, Any]) -> dict[Any, Any]:
    """For each variable of the equations the representative of its connected component."""
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


def _program_key(jaxpr: Any) -> Any:
    """A key of equal programs: the text, or the identity if a text would hide arrays."""
    if any(_closes_over_arrays(eqn) for eqn in jaxpr.eqns):
        return id(jaxpr)
    return str(jaxpr)


def _closes_over_arrays(eqn: Any) -> bool:
    inner = inner_jaxpr(eqn)
    if inner is None:
        return False
    return bool(inner.consts) or any(map(_closes_over_arrays, inner.jaxpr.eqns))
