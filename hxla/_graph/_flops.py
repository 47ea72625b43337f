"""Floating-point operations of equations."""

import math
from typing import Any

import numpy as np


def equation_flops(eqn: Any) -> int:
    """Floating-point operations of one equation, as XLA's cost analysis counts them.

    A multiplication and an addition are two; a transcendental function is counted apart by XLA and
    not at all here.
    """
    name = eqn.primitive.name
    shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
    out = tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
    size = math.prod(out)
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(shapes[0][d] for d in contract)
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = shapes[1]
        window = math.prod(kernel[d] for d in numbers.rhs_spec[2:])
        return 2 * size * window * kernel[numbers.rhs_spec[1]]
    if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"):
        return math.prod(shapes[0]) - size
    if name in _ARITHMETIC and eqn.outvars[0].aval.dtype != np.bool_:
        return size
    return 0


_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "max", "min", "neg", "abs", "add_any", "clamp"),
        *("integer_pow", "square", "select_n", "sign", "floor"),
    }
)
