"""Whether an optimizer's update may run on padded arrays: no device then needs another's part.

An update that treats each element by itself never sees its neighbours, so padding is harmless as
long as it stays zero. What is known of the padding is followed through the traced update: a number,
or nothing. Sums over a whole array that is zero there are right, too, such as a global norm. The
same update traced without the padding must be the same program: one that divides by the number of
elements is not. Anything else runs on the user's own arrays, which are gathered for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax.jaxpr import BY_ELEMENT, ClosedJaxpr, Literal, inner_jaxpr, kind_of
from .padding import NOT_PADDED, Padding

#: Of an array: its padding, and the number in it, or None where that is not known.
_Known = tuple[Padding, Any]


class _MixedError(Exception):
    """A device would need what others have."""


def keeps_padding(
    function: Callable[..., Any], arguments: Sequence[Any], each: Sequence[Padding]
) -> bool:
    """Whether a function of arrays gives the same with and without padding, and keeps it zero.

    Args:
        arguments: Shapes without padding.
        each: How each argument is padded, and after them each result.
    """
    own, results = each[: len(arguments)], each[len(arguments) :]
    try:
        plain = jax.make_jaxpr(function)(*arguments)
        padded = jax.make_jaxpr(function)(*(p.like(x) for p, x in zip(own, arguments, strict=True)))
    except Exception:  # the user's function refuses shapes that are not those of its state
        return False
    if _words(plain) != _words(padded):
        return False
    given = [(p, None if p.is_none else 0.0) for p in own]
    try:
        found = _follow(padded, given)
    except _MixedError:
        return False
    return all(
        p == wanted and (p.is_none or number == 0)
        for (p, number), wanted in zip(found, results, strict=True)
    )


def _words(closed: ClosedJaxpr) -> list[Any]:
    """Primitives and numbers of a program, without sizes."""
    words: list[Any] = []
    for eqn in closed.jaxpr.eqns:
        literals = [float(v.val) for v in eqn.invars if _is_number(v)]
        words.append((eqn.primitive.name, literals))
        inner = inner_jaxpr(eqn)
        if inner is not None:
            words += _words(inner)
    return words


def _is_number(v: Any) -> bool:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not isinstance(v, Literal):
        return False
    aval: Any = v.aval
    return not aval.shape and any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)


def _follow(closed: ClosedJaxpr, given: Sequence[_Known]) -> list[_Known]:
    known: dict[Any, _Known] = {v: (NOT_PADDED, None) for v in closed.jaxpr.constvars}
    known.update(zip(closed.jaxpr.invars, given, strict=True))

    def read(v: Any) -> _Known:
        if isinstance(v, Literal):
            return NOT_PADDED, float(v.val) if _is_number(v) else None
        return known[v]

    for eqn in closed.jaxpr.eqns:
        own = [read(v) for v in eqn.invars]
        known.update(zip(eqn.outvars, _results(eqn, own), strict=True))
    return [read(v) for v in closed.jaxpr.outvars]


def _results(eqn: Any, own: Sequence[_Known]) -> list[_Known]:
    kind, name = kind_of(eqn), eqn.primitive.name
    if kind in ("inlined", "custom"):
        inner = inner_jaxpr(eqn)
        assert inner is not None
        return _follow(inner, own)
    paddings = {p for p, _ in own if not p.is_none}
    if not paddings:
        number = own[0][1] if name == "broadcast_in_dim" else None
        if name in BY_ELEMENT:
            number = _number(name, own, eqn)
        return [(NOT_PADDED, number)] * len(eqn.outvars)
    if len(paddings) > 1:
        raise _MixedError
    [padding] = paddings
    shape = next(v.aval.shape for v, (p, _) in zip(eqn.invars, own, strict=True) if not p.is_none)
    if name == "reduce_sum" and len(eqn.params["axes"]) == len(shape) and own[0][1] == 0:
        return [(NOT_PADDED, None)]
    if name not in BY_ELEMENT or any(v.aval.shape != shape for v in eqn.outvars):
        raise _MixedError
    return [(padding, _number(name, own, eqn))] * len(eqn.outvars)


def _number(name: str, own: Sequence[_Known], eqn: Any) -> Any:
    """What an element is where its operands are padding; None: not known."""
    numbers = [number for _, number in own]
    if name == "mul" and 0 in numbers:
        return 0.0
    if name == "div" and numbers[0] == 0 and (numbers[1] or own[1][0].is_none):
        # A number of all elements that is zero spoils the array with and without padding.
        return 0.0
    if name == "select_n":
        cases = set(numbers[1:])
        return cases.pop() if len(cases) == 1 else None
    if any(number is None for number in numbers) or len(eqn.outvars) > 1:
        return None
    scalars = [
        np.asarray(number, v.aval.dtype) for number, v in zip(numbers, eqn.invars, strict=True)
    ]
    with jax.ensure_compile_time_eval():
        found = float(eqn.primitive.bind(*map(jax.numpy.asarray, scalars), **eqn.params))
    return found
