"""Exact multiplication by powers of two."""

import jax
import jax.numpy as jnp


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2**exponent` without rounding, for float32 and exponents in [-250, 250]."""
    half = exponent >> 1  # the floor; a division would take nine more operations

    def power(e: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((e + 127) << 23, jnp.float32)

    return x * power(half) * power(exponent - half)
