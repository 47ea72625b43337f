"""What follows from the sums of a step, decided on the devices: no GPU waits for its host.

The divisor of the gradients, whether the update counts, and the scales of the next step are pure
functions of the summed bits, so every replica and every process decides alike. All are integer
operations on the bits of floats, for a device may flush denormal floats to zero. They equal what
`exact`, `math.fsum` and `numpy` say of the same bits.

Legend of shape suffixes: M microbatches of a step, S sums per microbatch (loss, weight, metrics),
T float tensors, D replicas, N statistics of a replica, K sums of floats.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .exact import LARGEST_EXPONENT, LEAST_EXPONENT, Limbs

_INFINITE = 0x7F800000  # the bits of the float32; those of NaNs are larger
_DIGIT, _MASK = 16, 0xFFFF
NUM_DIGITS = 8  # of a sum
_LARGEST_PLACE = 88  # of the last bit of its largest term, below 14 bits of carries and a sign
_LEAST_FLOAT = -149  # the exponent of the least float32
_MOST_TERMS = 1 << 14  # their digits of 16 bits sum to less than 2**30


class Decisions(NamedTuple):
    """What an update and the next step read; equal on all replicas, but for an island's weight.

    Attributes:
        is_accepted: bool, whether the update counts: all sums are finite, no scale left its window.
        weight: float32, the divisor of the sums.
        value: float32, the loss of the global batch as the optimizer sees it.
        exponents_T: int32, the scales of this step's gradients.
        next_T: int32, those of the next step, or of this one if its window was left.
        next_used_T: int32, `next_T` of the gradients of a scaled loss.
        told: int32, what the host reads: see `Told`.
    """

    is_accepted: jax.Array
    weight: jax.Array
    value: jax.Array
    exponents_T: jax.Array
    next_T: jax.Array
    next_used_T: jax.Array
    told: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecisionSpec:
    """What decisions depend on besides sums.

    Attributes:
        limbs: Limbs of exact sums; None: sums are floats, which have no scales.
        num_params: The tensors that are gradients; the others are changes of variables.
        mean: Whether gradients are of the mean loss, not of its sum.
        is_scaled: Whether the loss is scaled.
    """

    limbs: Limbs | None
    num_params: int
    mean: bool
    is_scaled: bool = False


def decide(
    spec: DecisionSpec,
    small_MS: jax.Array,
    peaks_T: jax.Array,
    used_T: jax.Array,
    scale: jax.Array | None = None,
    stats_DN: jax.Array | None = None,
    island: tuple[jax.Array, jax.Array] | None = None,
) -> Decisions:
    """The decisions of a step.

    Args:
        small_MS: int32, bits of the sums of every microbatch, over all replicas.
        peaks_T: int32, bits of the largest magnitudes in any microbatch of any replica.
        used_T: int32, the scales with which microbatches joined the sums.
        scale: int32[1], the exponent by which gradients are scaled; None: they are not.
        stats_DN: int32, bits of what replicas tell each other; None: nothing.
        island: The first microbatch of each island and the number of all, int32[I + 1], and the
            island whose weight is the divisor, int32; None: the sums are of all microbatches.
    """
    exponents_T, shift_T = used_T, None
    if spec.is_scaled:
        assert scale is not None
        shift_T = jnp.where(jnp.arange(used_T.size) < spec.num_params, scale[0], 0)
        exponents_T, peaks_T = used_T + shift_T, times_power_of_two_bits(peaks_T, -shift_T)
    losses_and_weights = small_MS[:, :2]
    loss, weight = sums_of_floats(losses_and_weights)
    is_finite = finite(losses_and_weights).all() & finite(peaks_T).all()
    is_finite &= jax.lax.bitcast_convert_type(weight, jnp.int32) != 0
    divisor = weight
    if island is not None:
        bounds, number = island
        ids = jnp.arange(len(small_MS))[:, None]
        is_of_MI = (ids >= bounds[None, :-1]) & (ids < bounds[None, 1:])
        weights_I = sums_of_floats(jnp.where(is_of_MI, small_MS[:, 1:2], 0))
        is_finite &= (jax.lax.bitcast_convert_type(weights_I, jnp.int32) != 0).all()
        divisor = weights_I[number]
    fits, next_T = jnp.bool_(True), exponents_T
    if spec.limbs is not None:
        next_T = next_exponents(exponents_T, peaks_T, spec.limbs)
        fits = ~out_of_window(exponents_T, peaks_T, spec.limbs).any()
        next_T = jnp.where(is_finite, next_T, exponents_T)
    flags = jnp.stack([is_finite, fits]).astype(jnp.int32)
    stats = [] if stats_DN is None else [stats_DN.reshape(-1)]
    return Decisions(
        is_accepted=is_finite & fits,
        weight=divisor if spec.mean else jnp.float32(1),
        value=loss / weight if spec.mean else loss,
        exponents_T=exponents_T,
        next_T=next_T,
        next_used_T=next_T if shift_T is None else next_T - shift_T,
        told=jnp.concatenate([flags, next_T, peaks_T, small_MS.reshape(-1), *stats]),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What the host reads of `Decisions.told`, in one transfer.

    Attributes:
        is_finite: Whether the loss and all tensors are finite, and the weight is not zero.
        fits: Whether every scale is in its window.
        next_T: int32, see `Decisions`.
        maxima_T: float32, the largest magnitude of each tensor in any microbatch.
        rows_MS: float32, the sums of every microbatch.
        stats_DN: float32, the statistics of each replica; empty: none were sent.
    """

    is_finite: bool
    fits: bool
    next_T: np.ndarray
    maxima_T: np.ndarray
    rows_MS: np.ndarray
    stats_DN: np.ndarray

    @classmethod
    def of(
        cls, told: Any, num_tensors: int, stats_shape: tuple[int, ...], row_shape: tuple[int, ...]
    ) -> "Told":
        """Read `Decisions.told`; blocks on it."""
        bits = np.asarray(told)
        ends = np.cumsum([2, num_tensors, num_tensors, row_shape[0] * row_shape[1]])
        flags, next_T, peaks_T, rows, stats = np.split(bits, ends)
        return cls(
            is_finite=bool(flags[0]),
            fits=bool(flags[1]),
            next_T=next_T,
            maxima_T=peaks_T.view(np.float32),
            rows_MS=rows.view(np.float32).reshape(row_shape),
            stats_DN=stats.view(np.float32).reshape(-1, stats_shape[1]),
        )


def guarded(is_accepted: jax.Array | None, new: Any, old: Any) -> Any:
    """A tree of arrays after an update that counts, or as before.

    Args:
        is_accepted: None: only updates that count are called, see `update_waits`.
    """
    if is_accepted is None:
        return new
    return jax.tree.map(lambda a, b: jnp.where(is_accepted, a, b), new, old)


# -- scales ---------------------------------------------------------------------------------------


def finite(bits: jax.Array) -> jax.Array:
    """Whether floats are finite, from their bits."""
    return (bits & _INFINITE) != _INFINITE


def magnitudes(bits: jax.Array) -> jax.Array:
    """`np.frexp(x)[1]` of finite floats, from the bits of their magnitudes: x < 2**magnitude."""
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    of_denormal = jnp.where(mantissa > 0, 32 - jax.lax.clz(mantissa) + _LEAST_FLOAT, 0)
    return jnp.where(field > 0, field - 126, of_denormal)


def next_exponents(exponents_T: jax.Array, peaks_T: jax.Array, limbs: Limbs) -> jax.Array:
    """`exact.next_exponents`, from the bits of finite maxima."""
    wanted = limbs.bits - limbs.headroom_bits - magnitudes(peaks_T)
    wanted = jnp.clip(wanted, LEAST_EXPONENT, LARGEST_EXPONENT)
    return jnp.where(peaks_T > 0, wanted, exponents_T)


def out_of_window(exponents_T: jax.Array, peaks_T: jax.Array, limbs: Limbs) -> jax.Array:
    """`exact.out_of_window`, from the bits of finite maxima."""
    top = magnitudes(peaks_T) + exponents_T
    moved = next_exponents(exponents_T, peaks_T, limbs) != exponents_T
    is_outside = (top > limbs.bits) | (top < limbs.bits - limbs.slack_bits)
    return (peaks_T > 0) & moved & is_outside


def times_power_of_two_bits(bits: jax.Array, exponent: jax.Array) -> jax.Array:
    """`np.ldexp(x, exponent)` of floats that are not negative, from their bits to its bits."""
    field, mantissa = bits >> 23, bits & 0x7FFFFF
    mantissa = jnp.where(field > 0, mantissa | 1 << 23, mantissa)
    up = jax.lax.clz(jnp.maximum(mantissa, 1)) - 8  # a denormal's leading zeros
    mantissa, field = mantissa << up, jnp.maximum(field, 1) - up + exponent
    down = jnp.clip(1 - field, 0, 25)
    whole, rest, half = mantissa >> down, mantissa & ((1 << down) - 1), (1 << down) >> 1
    rounds_up = (down > 0) & ((rest > half) | ((rest == half) & (whole & 1 == 1)))
    denormal = whole + rounds_up
    normal = (field << 23) + (mantissa & 0x7FFFFF)
    result = jnp.where(field > 0, jnp.where(field < 255, normal, _INFINITE), denormal)
    return jnp.where((bits == 0) | (bits >= _INFINITE), bits, result)


# -- sums of floats -------------------------------------------------------------------------------


def sums_of_floats(bits_MK: jax.Array) -> jax.Array:
    """float32[K]: `np.float32(math.fsum(x))` of finite floats, from their bits, in any order.

    Bits below 2**-112 of the largest term are cut off.
    """
    assert len(bits_MK) <= _MOST_TERMS
    field, sign = (bits_MK >> 23) & 0xFF, jnp.where(bits_MK < 0, -1, 1)
    mantissa = bits_MK & 0x7FFFFF
    mantissa = jnp.where(field > 0, mantissa | 1 << 23, mantissa)
    field = jnp.maximum(field, 1)
    largest_1K = field.max(0, keepdims=True)
    place = _LARGEST_PLACE + field - largest_1K
    mantissa >>= jnp.clip(-place, 0, 24)
    place = jnp.maximum(place, 0)
    first, shift = place >> 4, place & 15
    middle = (mantissa >> (_DIGIT - shift)) & _MASK
    pieces = (mantissa << shift) & _MASK, middle, (mantissa >> _DIGIT) >> (_DIGIT - shift)
    digits = jnp.arange(NUM_DIGITS)[:, None, None]
    spread = [jnp.where(first[None] + n == digits, x[None], 0) for n, x in enumerate(pieces)]
    summed = (sign[None] * (spread[0] + spread[1] + spread[2])).sum(1, dtype=jnp.int32)
    return as_float(list(summed), largest_1K[0] - 1 + _LEAST_FLOAT - _LARGEST_PLACE)


def put_digits(digits: list[jax.Array], x: jax.Array, shift: int) -> None:
    """Add `x * 2**shift` to digits, the lowest first.

    Args:
        x: int32 of any sign; the digits of all that is added stay below 2**30.
    """
    first, by = divmod(shift, _DIGIT)
    for k, half in enumerate((x & _MASK, x >> _DIGIT)):
        digits[first + k] += (half << by) & _MASK
        digits[first + k + 1] += half >> (_DIGIT - by)


def as_float(digits: Sequence[jax.Array], unit: jax.Array) -> jax.Array:
    """Integers as float32, rounded to float64 and from that to float32, as `np.float32` does.

    It is one chain of element-wise operations, which compilers make one kernel. It ends with a
    sum, or they would repeat it in each kernel that reads its result: it is 250 operations long.

    Args:
        digits: `NUM_DIGITS` arrays of int32, the lowest digits first, of any sign and below 2**30;
            the integers are below 2**127.
        unit: int32, the exponents of the lowest digits' units.
    """
    positive, carry = _carried(digits)
    negative, _ = _carried([-x for x in digits])
    is_negative = carry < 0
    each = zip(negative, positive, strict=True)
    window = [jnp.where(is_negative, a, b) for a, b in each][::-1]
    top = jnp.full_like(carry, NUM_DIGITS - 1)
    for step in (4, 2, 1):  # until the first digit is not zero
        is_empty = functools.reduce(jnp.bitwise_or, window[:step]) == 0
        moved = [*window[step:], *[jnp.zeros_like(carry)] * step]
        window = [jnp.where(is_empty, a, b) for a, b in zip(moved, window, strict=True)]
        top -= jnp.where(is_empty, step, 0)
    rest = functools.reduce(jnp.bitwise_or, window[5:])
    lead = 32 - jax.lax.clz(window[0])
    shift = _DIGIT - lead
    pairs = itertools.pairwise(window[:6])
    a, b, c, d, e = (((x << shift) | (y >> lead)) & _MASK for x, y in pairs)
    # The first 24 bits, the next 29 as in a float64, and what is below these.
    head, tail = (a << 8) | (b >> 8), ((b & 0xFF) << 21) | (c << 5) | (d >> 11)
    is_more = ((d & 0x3FF) | e | rest) > 0
    tail += ((d >> 10) & 1) * (is_more | (tail & 1 == 1))
    head, tail = head + (tail >> 29), tail & ((1 << 29) - 1)
    exponent = top * _DIGIT + lead - 1 + unit
    lost = jnp.clip(-126 - exponent, 0, 25)  # bits that a denormal has not
    whole, left, half = head >> lost, head & ((1 << lost) - 1), (1 << lost) >> 1
    is_odd = whole & 1 == 1
    of_normal = (tail > 1 << 28) | ((tail == 1 << 28) & is_odd)
    of_denormal = (left > half) | ((left == half) & ((tail > 0) | is_odd))
    whole += jnp.where(lost > 0, of_denormal, of_normal)
    normal = jnp.where(exponent > 127, _INFINITE, ((exponent + 126) << 23) + whole)
    bits = jnp.where(lost > 0, whole, jnp.minimum(normal, _INFINITE))
    bits |= jnp.where(is_negative, jnp.int32(-(2**31)), 0)
    is_first = jax.lax.broadcasted_iota(jnp.int32, (2, *bits.shape), 0) == 0
    bits = jnp.where(window[0] == 0, 0, bits)
    bits = jnp.where(is_first, bits[None], 0).sum(0, dtype=jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _carried(digits: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Digits from 0 to 2**16 - 1, and the carry: negative if the number is."""
    out, carry = [], jnp.zeros_like(digits[0])
    for digit in digits:
        x = digit + carry
        out.append(x & _MASK)
        carry = x >> _DIGIT
    return out, carry
