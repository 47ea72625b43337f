"""The gradient's global norm, where an update computes it anyway, as clipping does."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..jax.jaxpr import Literal
from ..plan.ownership import Ownership

_SAME = ("copy", "reshape", "convert_element_type")


def squares_of_gradient(ownership: Ownership) -> tuple[int, ...]:
    """The update's sums that are of the squares of the gradients, one of each trained parameter.

    Returns:
        Their numbers in `exact_norms.summed`; empty: a gradient has none.
    """
    update, first = ownership.update, ownership.num_arrays
    jaxpr = update.closed.jaxpr
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    summed = [jaxpr.eqns[i].invars[0] for i in update.sums]
    gradients = jaxpr.invars[first : first + ownership.num_params]
    of_gradient = {
        gradient: next((k for k, x in enumerate(summed) if _is_square(x, gradient, made)), None)
        for gradient in gradients
    }
    places = [k for k in of_gradient.values() if k is not None]
    return tuple(places) if len(places) == len(gradients) else ()


def norm_of(sums: np.ndarray, places: Sequence[int]) -> float | None:
    """The norm from an update's sums; None without sums of squares."""
    return math.sqrt(sum(float(sums[k]) for k in places)) if places else None


def _is_square(x: Any, of: Any, made: dict[Any, Any]) -> bool:
    """Whether a variable is the square of another, plus that of an imaginary part of zeros."""
    eqn = made.get(x)
    if eqn is None:
        return False
    name, operands = eqn.primitive.name, eqn.invars
    if name == "add":
        left, right = operands
        return any(
            _is_square(a, of, made) and _is_zero(b, made) for a, b in ((left, right), (right, left))
        )
    if name in _SAME:
        return _is_square(operands[0], of, made)
    is_power = name == "square" or (name == "integer_pow" and eqn.params["y"] == 2)
    is_product = name == "mul" and operands[0] is operands[1]
    return (is_power or is_product) and operands[0] is of


def _is_zero(x: Any, made: dict[Any, Any]) -> bool:
    if isinstance(x, Literal):
        return not np.any(x.val)
    eqn = made.get(x)
    if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "square", *_SAME):
        return False
    return _is_zero(eqn.invars[0], made)
