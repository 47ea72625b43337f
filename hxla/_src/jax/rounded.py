"""Products and quotients that are rounded the same way in every program.

A compiler may contract a product and a sum to a fused multiply-add, which rounds once. Which
product it fuses depends on the surrounding program, so the same update in another program could
have other bits. Here a product's bits pass through an integer operation with a zero that is unknown
to the compiler, so the product is rounded.

Likewise XLA replaces some divisions of an array by a scalar with products by the reciprocal,
depending on the surrounding program.

Multiplication by powers of two is exact.

References:
    IEEE 754-2019, section 10.4 (a language's licence to synthesise fused operations).
"""

from typing import Any

import jax
import jax.numpy as jnp

from .jaxpr import ClosedJaxpr, variables

_PRODUCTS = ("mul", "integer_pow", "square")
_SUMS = ("add", "add_any", "reduce_sum", "sub")
#: Primitives through which a compiler still fuses a product.
_TRANSPARENT = ("broadcast_in_dim", "copy", "expand_dims", "neg", "reshape", "select_n", "squeeze")


def to_round(closed: ClosedJaxpr) -> set[int]:
    """Indices of the equations whose products a compiler might fuse with a sum."""
    added: set[Any] = set()
    products = set()
    for i in range(len(closed.jaxpr.eqns) - 1, -1, -1):
        eqn = closed.jaxpr.eqns[i]
        name = eqn.primitive.name
        is_added = not added.isdisjoint(eqn.outvars)
        if name in _PRODUCTS and is_added and _is_wide(eqn.outvars[0].aval.dtype):
            products.add(i)
        if name in _SUMS or (name in _TRANSPARENT and is_added):
            added.update(variables(eqn.invars))
    return products


def _is_wide(dtype: Any) -> bool:
    """Whether a dtype has 32 bits or more; narrower results are rounded by their conversion."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize >= 4


def rounded(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same value, rounded before it is added.

    Args:
        x: float32 or float64.
        zero: int32 scalar, zero, but not a constant of the compiled program.
    """
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, kind) ^ zero.astype(kind)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def is_division(eqn: Any) -> bool:
    """Whether an equation is a division of dtypes that `divided` takes."""
    return eqn.primitive.name == "div" and _is_wide(eqn.outvars[0].aval.dtype)


def divided(x: jax.Array, number: jax.Array, zero: jax.Array) -> jax.Array:
    """The quotient of an array and a number, hiding that the number is one for all elements.

    Args:
        x: float32 or float64.
        number: An array of the dtype of `x`, a scalar or of the shape of `x`.
        zero: See `rounded`.
    """
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    nothing = jax.lax.bitcast_convert_type(x, kind) & zero.astype(kind)
    bits = jax.lax.bitcast_convert_type(number, kind) ^ nothing
    return x / jax.lax.bitcast_convert_type(bits, x.dtype)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2**exponent` without rounding, for float32 and exponents in [-250, 250]."""
    half = exponent >> 1  # the floor; a division would take nine more operations

    def power(e: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((e + 127) << 23, jnp.float32)

    return x * power(half) * power(exponent - half)
