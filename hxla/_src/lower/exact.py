"""Sums of microbatch gradients that do not depend on the order of addition.

Each float is cut into int32 limbs, two or one, relative to a power-of-two scale of its tensor::

    y  = x * 2**exponent                       |y| < 2**bits
    hi = round(y)                              lo = round((y - hi) * 2**(bits + 1))

and limbs are added as integers, which is associative: over microbatches, devices and any
collective algorithm the sum is the same. `bits` is chosen so that `num_terms` terms cannot
overflow. Two limbs keep all but tiny elements to float32 precision, so the only error left is the
final rounding. One limb alone, `hi`, takes half of the memory and traffic. All elements of a tensor
then have the absolute error of its largest (`Limbs.error_bound`). So one limb is worse than a
float32 sum on tensors whose elements differ widely, such as embeddings.

The scale follows the largest magnitude of the last step. A step in which some magnitude leaves
the window is redone with a new scale. That scale is a function of the global maximum alone, so it
is the same on every device and for every spread of the work. In the window integers neither
overflow nor are too coarse; the window of one limb is narrower, for each of its bits is precision.

References:
    Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers 2015, section 3
    (pre-rounding to a common exponent).
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..jax.rounded import times_power_of_two

_HEADROOM_BITS = {1: 3, 2: 6}  # a maximum may grow 8x, 64x in a step without a redo
_SLACK_BITS = {1: 8, 2: 20}  # and shrink by 2**5, 2**14 below the headroom
_MAX_MICROBATCHES = 1 << 14
#: Limits of scales, for magnitudes that are no normal float32.
LEAST_EXPONENT, LARGEST_EXPONENT = -160, 200


def num_bits(num_microbatches: int) -> int:
    """Bits of one term's upper limb so that the sum of all stays below 2**30.

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


@dataclasses.dataclass(frozen=True)
class Limbs:
    """The int32 limbs of an element's sum.

    Attributes:
        num: One or two.
        num_terms: Most terms of a sum.
    """

    num: int
    num_terms: int

    @property
    def bits(self) -> int:
        """See `num_bits`."""
        return num_bits(self.num_terms)

    @property
    def headroom_bits(self) -> int:
        """How far below overflow a new scale puts its tensor's maximum, as a power of two."""
        return _HEADROOM_BITS[self.num]

    @property
    def slack_bits(self) -> int:
        """How far below overflow a maximum may be before its step is redone, likewise."""
        return _SLACK_BITS[self.num]

    @property
    def error_bound(self) -> float:
        """The largest error of an element's sum, relative to its tensor's largest term.

        It is `num_terms * 2**(slack_bits - bits)` with one limb, `2**-(bits + 1)` of that with two,
        beside the rounding of the sum to float32. In the window the largest term is at least
        `2**(bits - slack_bits - 1)` units of the first limb. So a unit is at most
        `2**(1 + slack_bits - bits)` of it, and each term is rounded by at most half a unit. The
        unit of the second limb is `2**-(bits + 1)` of the first one's. Only if the largest
        magnitude is no normal float32 may the error be larger.
        """
        of_last = 0 if self.num == 1 else self.bits + 1
        return self.num_terms * 2.0 ** (self.slack_bits - self.bits - of_last)


def encode(x: jax.Array, exponent: jax.Array, limbs: Limbs) -> tuple[jax.Array, ...]:
    """Cut floats into int32 limbs.

    Args:
        x: Floats of any shape; computed in float32.
        exponent: int32 scalar, the scale of this tensor.

    Returns:
        `(hi, lo)` or `(hi,)`, int32, of the shape of `x`; meaningless where `abs(x) * 2**exponent
        >= 2**bits` or `x` is not finite (`out_of_window` and the maxima say so).
    """
    y = times_power_of_two(x.astype(jnp.float32), exponent)
    whole = jnp.round(y)
    if limbs.num == 1:
        return (whole.astype(jnp.int32),)
    rest = (y - whole) * np.float32(2.0 ** (limbs.bits + 1))
    return whole.astype(jnp.int32), jnp.round(rest).astype(jnp.int32)


def combine(sums: Sequence[jax.Array], limbs: Limbs) -> jax.Array:
    """Summed limbs as float32, correctly rounded; two limbs but for a few parts in 2**24 of an ulp.

    Every product is exact, by a power of two, so a compiler that fuses multiplications and
    additions does not change a bit.

    Args:
        sums: int32 sums of each limb, the upper one first.
        limbs: The same as in `encode`.

    Returns:
        float32 of the same shape, in units of the upper limb: `rescale` gives the value.
    """
    if limbs.num == 1:
        return sums[0].astype(jnp.float32)
    unit = np.float32(2.0 ** -(limbs.bits + 1))

    def split(whole: jax.Array) -> tuple[jax.Array, jax.Array]:
        head = whole.astype(jnp.float32)
        return head, (whole - head.astype(jnp.int32)).astype(jnp.float32)  # what rounding lost

    hi, lo = sums
    head, head_rest = split(hi)
    tail, tail_rest = split(lo)
    tail, tail_rest = tail * unit, tail_rest * unit
    total = head + tail
    back = total - head  # Knuth's TwoSum: hi and lo may cancel
    lost = (head - (total - back)) + (tail - back)
    return total + (lost + (head_rest + tail_rest))


def rescale(total: jax.Array, exponent: jax.Array) -> jax.Array:
    """Undo the scale of `encode`."""
    return times_power_of_two(total, -exponent)


def next_exponents(exponents: np.ndarray, maxima: np.ndarray, limbs: Limbs) -> np.ndarray:
    """Scales that put each tensor's maximum `headroom_bits` below overflow.

    Args:
        exponents: int32[num_tensors], kept where a maximum is zero.
        maxima: float32[num_tensors], largest finite magnitude of any microbatch.

    Returns:
        int32[num_tensors].
    """
    _, magnitude = np.frexp(maxima)  # maxima < 2**magnitude
    wanted = limbs.bits - limbs.headroom_bits - magnitude
    wanted = np.clip(wanted, LEAST_EXPONENT, LARGEST_EXPONENT)
    return np.where(maxima > 0, wanted, exponents).astype(np.int32)


def out_of_window(exponents: np.ndarray, maxima: np.ndarray, limbs: Limbs) -> np.ndarray:
    """Tensors whose sum overflowed, or was coarser than `Limbs.error_bound` allows.

    Args:
        exponents: int32[num_tensors] that the step used.
        maxima: float32[num_tensors], finite.

    Returns:
        bool[num_tensors].
    """
    _, magnitude = np.frexp(maxima)
    top = magnitude + exponents  # maximum * 2**exponent < 2**top
    wanted = next_exponents(exponents, maxima, limbs)
    moved = wanted != exponents  # at the clip, a redo could not do better
    return (maxima > 0) & moved & ((top > limbs.bits) | (top < limbs.bits - limbs.slack_bits))
