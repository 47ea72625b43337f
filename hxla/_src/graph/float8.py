"""Matrix products in float8, each operand scaled by a power of two of its own.

Activations and parameters are float8_e4m3fn, the gradients that come back float8_e5m2, and what is
added up inside a product is float32. A scale puts an operand's largest element as high as its dtype
allows. It is that of the very operand in the very microbatch, so there is no state of earlier steps
and nothing that depends on which device ran what. A power of two is undone exactly.

References:
    Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433): the two dtypes, and
    which is for what.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.powers_of_two import times_power_of_two

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round an array to float8 under a scale that is a power of two.

    Args:
        dtype: `float8_e4m3fn` or `float8_e5m2`.

    Returns:
        The array in `dtype`, and int32[], the exponent of its scale: `x` is about the array times
        `2**-exponent`. The largest element that is finite in `dtype` is not exceeded; where an
        element of `x` is not finite, neither is all of the result.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), initial=0.0)
    most, room = np.frexp(np.float32(jnp.finfo(dtype).max))
    mantissa, magnitude = jnp.frexp(largest)  # largest = mantissa * 2**magnitude
    exponent = room - magnitude - (mantissa > most)
    exponent = jnp.where(largest > 0, exponent, 0)
    return times_power_of_two(x, exponent).astype(dtype), exponent


def float8_product(eqn: Any, operands: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """A product of two arrays in float8, and so are those of its gradients.

    Args:
        eqn: A `dot_general` as traced.
        operands: Its operands, float32 or lower.
        dtype: Of the result. Each operand's gradient has that operand's dtype, rounded once.
    """
    dimensions = eqn.params["dimension_numbers"]
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in operands]
    pulls = [_pull(dimensions, shapes, place) for place in range(2)]

    @jax.custom_vjp
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return forward(x, y)[0]

    def forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        kept = (own, of_x), (other, of_y) = quantized(x, FORWARD), quantized(y, FORWARD)
        return _unscaled(_dot(dimensions, own, other), of_x, of_y).astype(dtype), kept

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        back, of_back = quantized(cotangent, BACKWARD)
        others = zip(operands, pulls, reversed(kept), strict=True)
        return tuple(
            _unscaled(_in_float8(pull, back, other), of_back, of_other).astype(own.dtype)
            for own, pull, (other, of_other) in others
        )

    product.defvjp(forward, backward)
    return product(*operands)


def _dot(dimensions: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    # The highest precision: else a GPU may add up in fewer bits than float32 has.
    precision = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, y, dimensions, precision, jnp.float32)


def _unscaled(x: jax.Array, *exponents: jax.Array) -> jax.Array:
    for exponent in exponents:  # one after the other: their sum may be no exponent of float32
        x = times_power_of_two(x, -exponent)
    return x


def _pull(dimensions: Any, shapes: Sequence[Any], place: int) -> Any:
    """The program that makes an operand's gradient of the result's and the other operand."""

    def pulled(cotangent: jax.Array, other: jax.Array) -> jax.Array:
        def product(own: jax.Array) -> jax.Array:
            return _dot(dimensions, *((own, other) if place == 0 else (other, own)))

        return jax.linear_transpose(product, shapes[place])(cotangent)[0]  # type: ignore[no-any-return]

    out = jax.eval_shape(lambda x, y: _dot(dimensions, x, y), *shapes)
    return jax.make_jaxpr(pulled)(out, shapes[1 - place]).jaxpr


def _in_float8(program: Any, cotangent: jax.Array, other: jax.Array) -> jax.Array:
    """The same program of operands in float8; its products are added up in float32."""
    env = dict(zip(program.invars, (cotangent, other), strict=True))
    for eqn in program.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name == "dot_general":
            params["preferred_element_type"] = np.dtype(np.float32)
        env[eqn.outvars[0]] = eqn.primitive.bind(*(env[v] for v in eqn.invars), **params)
    return env[program.outvars[0]]
