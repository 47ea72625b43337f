"""The arguments that results of a traced program equal, or depend on."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters import partial_eval

from ..core.fingerprint import fingerprint
from .jaxpr import ClosedJaxpr, Literal, inner_jaxpr, kind_of, part, program_text, scan_counts

_KEEPS = frozenset({"copy", "copy_p", "optimization_barrier"})
#: Primitives that move or scale elements, and the operands that a route passes; None: all.
_ON_A_ROUTE: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        (
            *("add", "add_any", "broadcast_in_dim", "clamp", "concatenate", "copy", "copy_p"),
            *("convert_element_type", "expand_dims", "max", "min", "mul", "neg", "rev", "reshape"),
            *("optimization_barrier", "reduce_precision", "slice", "squeeze", "sub", "transpose"),
            *("and", "or", "xor", "not"),
        )
    ),
    **dict.fromkeys(("div", "dynamic_slice", "gather"), (0,)),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 1)),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"), (0,)),
}


def sources(closed: ClosedJaxpr) -> list[Any]:
    """The argument or equation result that each result of a program equals, unchanged.

    Returns:
        Variables of the program; None for a literal.
    """
    source: dict[Any, Any] = {}
    for eqn in closed.jaxpr.eqns:
        for var, k in zip(eqn.outvars, _operands_kept(eqn), strict=True):
            if k is not None and not isinstance(operand := eqn.invars[k], Literal):
                source[var] = source.get(operand, operand)
    return [None if isinstance(v, Literal) else source.get(v, v) for v in closed.jaxpr.outvars]


def passed_through(closed: ClosedJaxpr) -> list[int | None]:
    """The index of the argument that each result of a program equals, or None."""
    place: dict[Any, int | None] = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    return [None if v is None else place.get(v) for v in sources(closed)]


def _operands_kept(eqn: Any) -> Sequence[int | None]:
    """The index of the operand that each result of an equation equals, or None."""
    name, none = eqn.primitive.name, [None] * len(eqn.outvars)
    if name in _KEEPS:
        return range(len(eqn.outvars))
    if name in ("convert_element_type", "reshape"):
        first, made = eqn.invars[0].aval, eqn.outvars[0].aval
        return [0] if (made.shape, made.dtype) == (first.shape, first.dtype) else none
    if name == "cond":
        each = [passed_through(branch) for branch in eqn.params["branches"]]
        kept = [ks[0] if len(set(ks)) == 1 else None for ks in zip(*each, strict=True)]
        return [None if k is None else k + 1 for k in kept]  # the first operand is the branch index
    if name == "while":
        num_consts = eqn.params["body_nconsts"]
        kept = passed_through(eqn.params["body_jaxpr"])
        start = eqn.params["cond_nconsts"] + num_consts
        return [start + i if k == num_consts + i else None for i, k in enumerate(kept)]
    inner, kind = inner_jaxpr(eqn), kind_of(eqn)
    if inner is None or kind in ("leaf", None):
        return none
    kept = passed_through(inner)
    if kind != "scan":
        return kept
    num_consts, num_carry = scan_counts(eqn)
    carried = [k if k == num_consts + i else None for i, k in enumerate(kept[:num_carry])]
    slices = [None if k is None or k < num_consts + num_carry else k for k in kept[num_carry:]]
    return [*carried, *slices]


class Needed(NamedTuple):
    """The dependences of one result of a program.

    Attributes:
        text: Its equations, and a hash of their constants.
        arguments: Indices of the arguments that it reads.
    """

    text: str
    arguments: frozenset[int]


def needed_for(closed: ClosedJaxpr, result: int) -> Needed:
    """The equations, constants and arguments of one result of a program."""
    jaxpr = closed.jaxpr
    # First without other equations: those with effects would keep what they read.
    sliced = part(jaxpr, [jaxpr.outvars[result]])
    needed, used = partial_eval.dce_jaxpr(sliced, [True])
    read = list(itertools.compress(sliced.invars, used))
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    used_arrays = [np.asarray(consts[v]) for v in read if v in consts]
    arguments = frozenset(places[v] for v in read if v in places)
    return Needed(f"{program_text(needed)} {fingerprint(used_arrays)}", arguments)


def read_arguments(closed: ClosedJaxpr) -> frozenset[int]:
    """Indices of the arguments that some result of a program depends on."""
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return frozenset(i for i, is_used in enumerate(used) if is_used)


def routes(closed: ClosedJaxpr, result: int) -> dict[int, frozenset[str]]:
    """The arguments whose elements a result contains, moved, selected or scaled.

    Returns:
        For each argument, by index, the names of all operations on its routes to the result.
    """
    jaxpr = closed.jaxpr
    names: dict[Any, frozenset[str]] = {}

    def reach(var: Any, new: frozenset[str]) -> None:
        if not isinstance(var, Literal):
            names[var] = names.get(var, frozenset()) | new

    reach(jaxpr.outvars[result], frozenset())
    for eqn in reversed(jaxpr.eqns):
        for k, var in enumerate(eqn.outvars):
            if var not in names:
                continue
            for i, step in _steps(eqn, k).items():
                reach(eqn.invars[i], names[var] | step)
    return {i: names[v] for i, v in enumerate(jaxpr.invars) if v in names}


def _steps(eqn: Any, result: int) -> dict[int, frozenset[str]]:
    """The operands of an equation that a route passes, with the operations on it."""
    name, inner = eqn.primitive.name, inner_jaxpr(eqn)
    if inner is not None and kind_of(eqn) in ("inlined", "remat", "custom"):
        return routes(inner, result)
    step, every = frozenset({name}), range(len(eqn.invars))
    if name == "select_n":
        return dict.fromkeys(every[1:], step)
    if name not in _ON_A_ROUTE:
        return {}
    if name == "optimization_barrier":
        return {result: step}
    places = _ON_A_ROUTE[name]
    return dict.fromkeys(every if places is None else places, step)
