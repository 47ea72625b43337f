"""Sums of microbatch gradients that do not depend on the order of addition.

Each float is cut into two int32 limbs relative to a power-of-two scale of its tensor::

    y  = x * 2**exponent                       |y| < 2**bits
    hi = round(y)                              lo = round((y - hi) * 2**(bits + 1))

and limbs are added as integers, which is associative: over microbatches, devices and any
collective algorithm the sum is the same. `bits` is chosen so that `num_microbatches` terms cannot
overflow. One limb alone (about 31 bits below the largest element) loses to a float32 sum on
tensors whose elements differ widely, such as embeddings; two limbs keep every element that matters
to float32 precision, so the only error left is the final rounding.

The scale follows the largest magnitude of the last step. A step in which some magnitude leaves
the window is redone with the scale it asks for: a function of the global maximum alone, therefore
the same on every device and for every spread of the work.

References:
    Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers 2015, section 3
    (pre-rounding to a common exponent).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

_HEADROOM_BITS = 6  # growth of a tensor's maximum within one step that needs no redo: 64x
_SLACK_BITS = 20  # shrinkage within one step that needs no redo: 2**14 below the headroom
_MAX_MICROBATCHES = 1 << 14


def num_bits(num_microbatches: int) -> int:
    """Bits of one microbatch's limb so that the sum of all stays below 2**30.

    Args:
        num_microbatches: Number of terms, 1 to 16384.

    Returns:
        `30 - ceil(log2(num_microbatches))`.

    Raises:
        ValueError: If there are more microbatches than the limbs have room for.
    """
    if not 1 <= num_microbatches <= _MAX_MICROBATCHES:
        raise ValueError(
            f"exact sums take 1 to {_MAX_MICROBATCHES} microbatches a step, not "
            f"{num_microbatches}: use a larger microbatch_size or reduction='float'"
        )
    return 30 - math.ceil(math.log2(num_microbatches))


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2**exponent` without rounding, for exponents in [-250, 250]."""
    half = exponent >> 1  # its floor; a division would be nine more operations for each tensor

    def power(e: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type((e + 127) << 23, jnp.float32)

    return x * power(half) * power(exponent - half)


def encode(x: jax.Array, exponent: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Cut floats into two int32 limbs.

    Args:
        x: Floats of any shape; computed in float32.
        exponent: int32 scalar, the scale of this tensor.
        bits: See `num_bits`.

    Returns:
        `(hi, lo)`, int32, of the shape of `x`; meaningless where `abs(x) * 2**exponent >= 2**bits`
        or `x` is not finite (`inspect_maxima` says so).
    """
    y = times_power_of_two(x.astype(jnp.float32), exponent)
    whole = jnp.round(y)
    rest = (y - whole) * np.float32(2.0 ** (bits + 1))
    return whole.astype(jnp.int32), jnp.round(rest).astype(jnp.int32)


def combine(hi: jax.Array, lo: jax.Array, bits: int) -> jax.Array:
    """Summed limbs as float32, correctly rounded but for a few parts in 2**24 of an ulp.

    Every product is by a power of two and every other rounding is meant, so a compiler that fuses
    multiplications and additions does not change a bit.

    Args:
        hi: int32 sums of the upper limbs.
        lo: int32 sums of the lower limbs.
        bits: The same as in `encode`.

    Returns:
        float32 of the same shape, in units of the upper limb: `rescale` gives the value.
    """
    unit = np.float32(2.0 ** -(bits + 1))

    def split(whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        head = whole.astype(jnp.float32)
        return head, (whole - head.astype(jnp.int32)).astype(jnp.float32)  # what rounding lost

    head, head_rest = split(hi)
    tail, tail_rest = split(lo)
    tail, tail_rest = tail * unit, tail_rest * unit
    total = head + tail
    back = total - head  # Knuth's TwoSum: hi and lo may cancel
    lost = (head - (total - back)) + (tail - back)
    return total + (lost + (head_rest + tail_rest))


def rescale(total: jax.Array, exponent: jax.Array) -> jax.Array:
    """Undo the scale that `encode` was given."""
    return times_power_of_two(total, -exponent)


def next_exponents(exponents: np.ndarray, maxima: np.ndarray, bits: int) -> np.ndarray:
    """Scales that put each tensor's maximum `_HEADROOM_BITS` below overflow.

    Args:
        exponents: int32[num_tensors], kept where a maximum is zero.
        maxima: float32[num_tensors], largest finite magnitude of any microbatch.
        bits: See `num_bits`.

    Returns:
        int32[num_tensors].
    """
    _, magnitude = np.frexp(maxima)  # maxima < 2**magnitude
    wanted = np.clip(bits - _HEADROOM_BITS - magnitude, -160, 200)
    return np.where(maxima > 0, wanted, exponents).astype(np.int32)


def out_of_window(exponents: np.ndarray, maxima: np.ndarray, bits: int) -> np.ndarray:
    """Tensors whose sum overflowed, or was too coarse to be as good as a float32 sum.

    Args:
        exponents: int32[num_tensors] that the step used.
        maxima: float32[num_tensors], finite.
        bits: See `num_bits`.

    Returns:
        bool[num_tensors].
    """
    _, magnitude = np.frexp(maxima)
    top = magnitude + exponents  # maximum * 2**exponent < 2**top
    wanted = next_exponents(exponents, maxima, bits)
    moved = wanted != exponents  # at the clip, a redo could not do better
    return (maxima > 0) & moved & ((top > bits) | (top < bits - _SLACK_BITS))
