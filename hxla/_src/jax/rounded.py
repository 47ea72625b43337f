"""Products that are rounded before they are added, and quotients, whatever a compiler fuses.

A compiler may contract a product and a sum to one operation that rounds once, and which of two
products it takes depends on the shapes and programs around them. That is harmless but for one
thing: the same update in another program then ends with other bits. Here a product's bits pass
through an integer operation with a number that is zero, which no compiler knows, so that it is
rounded by itself.

Likewise XLA makes a product with the reciprocal of some divisions of an array by a number, and not
of others, as the program around them is.

References:
    IEEE 754-2019, section 10.4 (a language's licence to synthesise fused operations).
"""

from typing import Any

import jax
import jax.numpy as jnp

from .jaxpr import ClosedJaxpr, variables

_PRODUCTS = ("mul", "integer_pow", "square")
_SUMS = ("add", "add_any", "reduce_sum", "sub")
#: What a product is still seen through.
_TRANSPARENT = ("broadcast_in_dim", "copy", "expand_dims", "neg", "reshape", "select_n", "squeeze")


def to_round(closed: ClosedJaxpr) -> set[int]:
    """Numbers of the equations of a program whose products some sum might take in."""
    added: set[Any] = set()
    found = set()
    for i in range(len(closed.jaxpr.eqns) - 1, -1, -1):
        eqn = closed.jaxpr.eqns[i]
        name = eqn.primitive.name
        is_added = not added.isdisjoint(eqn.outvars)
        if name in _PRODUCTS and is_added and _is_wide(eqn.outvars[0].aval.dtype):
            found.add(i)
        if name in _SUMS or (name in _TRANSPARENT and is_added):
            added.update(variables(eqn.invars))
    return found


def _is_wide(dtype: Any) -> bool:
    """Narrower ones are rounded when they are converted."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 4


def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same number.

    Args:
        x: float32 or float64.
        zero: int32 scalar, zero, but unknown when a program is compiled.
    """
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, kind) ^ zero.astype(kind)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def is_division(eqn: Any) -> bool:
    """Whether an equation divides what `divided` takes."""
    return eqn.primitive.name == "div" and _is_wide(eqn.outvars[0].aval.dtype)


def divided(x: jax.Array, number: jax.Array, zero: jax.Array) -> jax.Array:
    """The quotient of an array and a number, which no compiler sees to be one for all elements.

    Args:
        x: float32 or float64.
        number: Of its dtype, a scalar or as many as `x` has.
        zero: See `rounded`.
    """
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    nothing = jax.lax.bitcast_convert_type(x, kind) & zero.astype(kind)
    bits = jax.lax.bitcast_convert_type(number, kind) ^ nothing
    return x / jax.lax.bitcast_convert_type(bits, x.dtype)
