"""The global norm of a gradient, the same however the gradient lies.

Squares are cut into integers and added as such, so neither who has which part nor the order in
which a compiler adds can change a bit. What is left is added by the host, exactly.

References:
    Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers 2015, section 3
    (pre-rounding to a common exponent).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LIMB_BITS, _NUM_LIMBS = 15, 4
_ROW = 1 << 12  # so many limbs add up below 2**27
_DIGIT = 16  # of what is added over rows and devices


def square_digits(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """The sum of squares of a tensor's part, as digits that may be added to those of other parts.

    Args:
        x: float32, any shape, at most 2**28 elements.
        exponent: int32 scalar, `abs(x) * 2**exponent <= 1`.

    Returns:
        int32[_NUM_LIMBS, 4]: of each limb's sum digits of 16 bits, of which 2**15 may be added.
    """
    half = exponent >> 1
    y = x.reshape(-1) * _power(half) * _power(exponent - half)
    y = jnp.pad(y, (0, -y.size % _ROW)).reshape(-1, _ROW)
    rest, digits = y * y, []
    for _ in range(_NUM_LIMBS):
        rest = rest * np.float32(1 << _LIMB_BITS)
        limb = jnp.floor(rest)
        rest = rest - limb
        rows = limb.astype(jnp.int32).sum(axis=1)
        digits.append(
            jnp.stack([_digits((rows & 0xFFFF).sum()), _digits((rows >> _DIGIT).sum())]).reshape(-1)
        )
    return jnp.stack(digits)


def norm_program(
    sums: Callable[[Sequence[jax.Array], jax.Array], Mapping[int, jax.Array]],
    num_params: int,
    options: Mapping[str, Any],
) -> Any:
    """The program `(totals, exponents, scales) -> int32[T, _NUM_LIMBS, 4]`: what a copy has.

    Args:
        sums: From the totals of a step and the exponents of its sums to those of each parameter.
        num_params: T.
        options: For the compiler.
    """

    def hxla_norm(
        totals: Sequence[jax.Array], exponents_T: jax.Array, scales_T: jax.Array
    ) -> jax.Array:
        own = sums(totals, exponents_T)
        return jnp.stack([square_digits(own[i], scales_T[i]) for i in range(num_params)])

    return jax.jit(hxla_norm, compiler_options=dict(options))


def _digits(x: jax.Array) -> jax.Array:
    return jnp.stack([x & 0xFFFF, (x >> _DIGIT) & 0xFFFF])


def _power(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def exponents_for(maxima: np.ndarray, num_terms: int) -> np.ndarray:
    """int32[T]: scales for sums of so many terms, none of which is above its tensor's maximum."""
    _, magnitude = np.frexp(maxima)
    return np.clip(-(magnitude + math.ceil(math.log2(num_terms))), -250, 250).astype(np.int32)


def norm_of(digits: np.ndarray, exponents: Sequence[int]) -> float:
    """The norm of all tensors together.

    Args:
        digits: int32[T, _NUM_LIMBS, 4], added over all parts.
        exponents: Those of `square_digits`.
    """
    total = Fraction(0)
    for own, exponent in zip(digits.astype(object), exponents, strict=True):
        value = Fraction(0)
        for k, (low_low, low_high, high_low, high_high) in enumerate(own):
            whole = low_low + ((low_high + high_low) << _DIGIT) + (high_high << 2 * _DIGIT)
            value += Fraction(int(whole), 1 << _LIMB_BITS * (k + 1))
        total += value / Fraction(2) ** (2 * int(exponent))
    # An integer's square root: a float might overflow where a norm does not.
    shift = max(0, 128 - total.numerator.bit_length() + total.denominator.bit_length())
    scaled = (total.numerator << 2 * shift) // total.denominator
    return float(Fraction(math.isqrt(scaled), 1 << shift))
