"""What devices decide of a step's sums equals what the host says of the same bits."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.inside.lower import _decisions, _exact
from support.tiers import examples

#: Floats where rules change: zero, denormals, powers of two and their neighbours, the largest.
EDGES = [
    *(0.0, 1e-45, 2.0**-149, 2.0**-148, 3e-45, 1e-40, 2.0**-126, 1.1754942e-38, 3.4028235e38),
    *(s for e in range(-148, 128, 7) for s in (2.0**e, 2.0**e * 1.5)),
]
BITS = st.integers(0, 0x7F7FFFFF) | st.sampled_from(EDGES).map(
    lambda x: int(np.float32(x).view(np.int32))
)
WINDOWS = [_exact.Limbs(num, terms) for num in (1, 2) for terms in (1, 8, 1000)]


def bits_of(values):
    return np.asarray(values, np.uint32).view(np.int32)


@settings(max_examples=examples(15, 200), deadline=None)
@given(st.lists(BITS, min_size=64, max_size=64), st.sampled_from(WINDOWS), st.integers(-160, 200))
def test_scales_and_windows_are_those_of_the_host(bits, limbs, exponent):
    peaks = bits_of(bits)
    maxima = peaks.view(np.float32)
    fitting = _exact.next_exponents(np.zeros(64, np.int32), maxima, limbs)
    around = fitting + np.arange(64, dtype=np.int32) - 32
    for old in (np.full(64, exponent, np.int32), around):
        new = jax.jit(_decisions.next_exponents, static_argnums=2)(old, peaks, limbs)
        np.testing.assert_array_equal(new, _exact.next_exponents(old, maxima, limbs))
        outside = jax.jit(_decisions.out_of_window, static_argnums=2)(old, peaks, limbs)
        np.testing.assert_array_equal(outside, _exact.out_of_window(old, maxima, limbs))


@settings(max_examples=examples(15, 200), deadline=None)
@given(st.lists(BITS, min_size=64, max_size=64), st.integers(-60, 60))
def test_a_scale_is_taken_off_maxima_as_ldexp_does(bits, exponent):
    x = bits_of([*bits[:-2], 0x7F800000, 0x7FC00000])
    new = jax.jit(_decisions.times_power_of_two_bits)(x, np.int32(exponent))
    with np.errstate(over="ignore", under="ignore"):
        wanted = np.ldexp(x.view(np.float32), exponent)
    np.testing.assert_array_equal(np.asarray(new).view(np.float32), wanted)


def summed(values):
    bits = np.asarray(values, np.float32).view(np.int32)
    return np.asarray(jax.jit(_decisions.sums_of_floats)(bits[:, None]))[0]


@settings(max_examples=examples(15, 300), deadline=None)
@given(
    st.lists(BITS, min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from(["all", "counts", "near", "cancel"]),
)
def test_a_sum_of_floats_is_that_of_fsum(bits, signs, kind):
    x = bits_of(bits).view(np.float32) * np.where(signs, -1, 1).astype(np.float32)
    if kind == "counts":
        x = bits_of(bits).astype(np.float32) % 1000
    if kind == "near":  # halves of the last place, of both roundings
        steps = np.array([0, 24, 25, 53, 54, 60, 77, 24, 30, 53, 23, 1])
        x = x[0] * np.exp2(-steps).astype(np.float32) * np.where(signs, -1, 1)
    if kind == "cancel":
        x[6:] = -x[:6]
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        wanted = np.float32(math.fsum(x))
    assert summed(x).tobytes() == (wanted + np.float32(0)).tobytes()


@settings(max_examples=examples(20, 300), deadline=None)
@given(st.integers(-(2**110), 2**110) | st.integers(0, 110).map(lambda k: 2**k + 1), st.data())
def test_an_integer_is_rounded_as_a_float64_and_a_float32(number, data):
    unit = data.draw(st.integers(-250, 60))
    digits = [jnp.int32(0)] * 8
    for k in range(0, 112, 28):  # pieces of 28 bits, signed
        piece = (abs(number) >> k & (1 << 28) - 1) * (-1 if number < 0 else 1)
        _decisions.put_digits(digits, jnp.int32(piece), k)
    result = jax.jit(_decisions.as_float)(digits, np.int32(unit))
    value = fractions.Fraction(number) * fractions.Fraction(2) ** unit
    with np.errstate(over="ignore"):
        assert np.asarray(result).tobytes() == np.float32(float(value)).tobytes()


def decided(limbs, rows, peaks, exponents, *, mean=True, scale=None):
    spec = _decisions.DecisionSpec(
        limbs=limbs, num_params=len(peaks), mean=mean, is_scaled=scale is not None
    )
    rows, peaks = np.asarray(rows, np.float32), np.asarray(peaks, np.float32)
    arguments = rows.view(np.int32), peaks.view(np.int32), np.asarray(exponents, np.int32)
    scale = None if scale is None else np.array([scale], np.int32)
    made = jax.jit(_decisions.decide, static_argnums=0)(spec, *arguments, scale)
    return made, _decisions.Told.of(made.told, len(peaks), (1, 3), rows.shape)


LIMBS = _exact.Limbs(2, 8)
FITTING = _exact.next_exponents(np.zeros(2, np.int32), np.array([1.0, 0.1], np.float32), LIMBS)


def test_a_step_whose_scales_fit_is_accepted():
    made, told = decided(LIMBS, [[3.0, 2.0, 7.0], [5.0, 2.0, 8.0]], [1.0, 0.1], FITTING)
    assert (bool(made.is_accepted), float(made.weight), float(made.value)) == (True, 4.0, 2.0)
    assert told.is_finite
    assert told.fits
    np.testing.assert_array_equal(told.next_T, FITTING)
    np.testing.assert_array_equal(told.maxima_T, np.array([1.0, 0.1], np.float32))
    np.testing.assert_array_equal(told.rows_MS, [[3.0, 2.0, 7.0], [5.0, 2.0, 8.0]])
    of_sum, _ = decided(LIMBS, [[3.0, 2.0], [5.0, 2.0]], [1.0, 0.1], FITTING, mean=False)
    assert (float(of_sum.weight), float(of_sum.value)) == (1.0, 8.0)


def test_a_step_whose_window_was_left_is_refused_and_gets_the_scales_that_fit():
    made, told = decided(LIMBS, [[1.0, 1.0]], [1.0, 0.1], FITTING + 30)
    assert not made.is_accepted
    assert told.is_finite
    assert not told.fits
    np.testing.assert_array_equal(told.next_T, FITTING)


@pytest.mark.parametrize(
    ("row", "peak"),
    [
        *([(np.nan, 1.0), 1.0], [(np.inf, 1.0), 1.0], [(1.0, np.inf), 1.0], [(1.0, 0.0), 1.0]),
        *([(1.0, 1.0), np.inf], [(1.0, 1.0), np.nan]),
    ],
)
def test_what_is_not_finite_is_refused_and_keeps_the_scales(row, peak):
    made, told = decided(LIMBS, [row, (1.0, 0.0)], [peak, 0.1], FITTING + 30)
    assert not made.is_accepted
    assert not told.is_finite
    np.testing.assert_array_equal(told.next_T, FITTING + 30)


def test_scaled_gradients_have_the_scales_of_their_loss():
    used = FITTING - 10
    made, told = decided(LIMBS, [[1.0, 1.0]], [1024.0, 102.4], used, scale=10)
    assert made.is_accepted
    np.testing.assert_array_equal(made.exponents_T, FITTING)
    np.testing.assert_array_equal(made.next_used_T, used)
    np.testing.assert_array_equal(told.maxima_T, np.array([1.0, 0.1], np.float32))


def test_sums_of_floats_have_no_window():
    made, told = decided(None, [[1.0, 1.0]], [1e30, 1e-30], [0, 0])
    assert made.is_accepted
    assert told.fits
