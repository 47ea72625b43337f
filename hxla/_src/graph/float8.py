"""Matrix products in float8, each operand scaled by a separate power of two.

Activations and parameters are float8_e4m3fn, cotangents float8_e5m2, and products accumulate in
float32. A scale puts an operand's largest element as high as its dtype allows. It depends on that
operand in that microbatch alone: on no earlier step, and not on which device ran it. Dividing by a
power of two is exact.

References:
    Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433): the two dtypes and
    their uses.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..jax.rounded import times_power_of_two

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round an array to float8 under a scale that is a power of two.

    Args:
        dtype: `float8_e4m3fn` or `float8_e5m2`.

    Returns:
        The array in `dtype`, and int32[], the exponent of its scale: `x` is about the array times
        `2**-exponent`. Finite elements stay finite in `dtype`; an infinite or NaN element of `x`
        leaves some element of the result not finite.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), initial=0.0)
    most, room = np.frexp(np.float32(jnp.finfo(dtype).max))
    mantissa, magnitude = jnp.frexp(largest)  # largest = mantissa * 2**magnitude
    exponent = room - magnitude - (mantissa > most)
    exponent = jnp.where(largest > 0, exponent, 0)
    return times_power_of_two(x, exponent).astype(dtype), exponent


def float8_product(eqn: Any, operands: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Multiply two arrays in float8, in the backward too.

    Args:
        eqn: A traced `dot_general`.
        operands: Two arrays, float32 or lower.
        dtype: The result's dtype. A gradient has its operand's dtype, rounded once.
    """
    dimensions = eqn.params["dimension_numbers"]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands]
    pulls = [_pull(dimensions, shapes, place) for place in range(2)]

    @jax.custom_vjp
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return forward(x, y)[0]

    def forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        residuals = (lhs, lhs_exp), (rhs, rhs_exp) = quantized(x, FORWARD), quantized(y, FORWARD)
        return _unscaled(_dot(dimensions, lhs, rhs), lhs_exp, rhs_exp).astype(dtype), residuals

    def backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        back, back_exp = quantized(cotangent, BACKWARD)
        others = zip(operands, pulls, reversed(residuals), strict=True)
        return tuple(
            _unscaled(_in_float8(pull, back, other), back_exp, other_exp).astype(operand.dtype)
            for operand, pull, (other, other_exp) in others
        )

    product.defvjp(forward, backward)
    return product(*operands)


def _dot(dimensions: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    # The highest precision: else a GPU may accumulate in fewer bits than float32.
    precision = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dimensions, precision, jnp.float32)


def _unscaled(x: jax.Array, *exponents: jax.Array) -> jax.Array:
    for exponent in exponents:  # one after the other: their sum may exceed the exponents of float32
        x = times_power_of_two(x, -exponent)
    return x


def _pull(dimensions: Any, shapes: Sequence[Any], place: int) -> Any:
    """The program from a cotangent and the other operand to an operand's gradient."""

    def pulled(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        def product(operand: jax.Array) -> jax.Array:
            return _dot(dimensions, *((operand, other) if place == 0 else (other, operand)))

        return jax.linear_transpose(product, shapes[place])(cotangent)[0]  # type: ignore[no-any-return]

    out = jax.eval_shape(lambda x, y: _dot(dimensions, x, y), *shapes)
    return jax.make_jaxpr(pulled)(out, shapes[1 - place]).jaxpr


def _in_float8(program: Any, cotangent: jax.Array, other: jax.Array) -> jax.Array:
    """Run the program on float8 operands; its products accumulate in float32."""
    env = dict(zip(program.invars, (cotangent, other), strict=True))
    for eqn in program.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name == "dot_general":
            params["preferred_element_type"] = np.dtype(np.float32)
        env[eqn.outvars[0]] = eqn.primitive.bind(*(env[v] for v in eqn.invars), **params)
    return env[program.outvars[0]]
