"""Exact sums against float64 and against every order of addition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hxla._lower import _exact


def exact_sum(terms: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Sum over axis 0 in the given order, as a step does it."""
    bits = _exact.num_bits(len(terms))
    maxima = np.abs(terms).max()[None]
    exponent = _exact.next_exponents(np.zeros(1, np.int32), maxima, bits)
    assert not _exact.out_of_window(exponent, maxima, bits).any()
    encode = jax.jit(_exact.encode, static_argnums=2)
    limbs = [encode(jnp.asarray(terms[i]), exponent[0], bits) for i in order]
    hi = sum(np.asarray(limb[0]) for limb in limbs)
    lo = sum(np.asarray(limb[1]) for limb in limbs)
    total = jax.jit(_exact.combine, static_argnums=2)(hi, lo, bits)
    return np.asarray(_exact.rescale(total, exponent[0]))


def float_sum(terms: np.ndarray) -> np.ndarray:
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


@settings(max_examples=40, deadline=None)
@given(
    num=st.sampled_from([1, 2, 3, 8, 12, 64, 100]),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    scale=st.sampled_from([-60, -20, 0, 20, 60]),
    seed=st.integers(0, 2**32 - 1),
)
def test_sum_is_the_same_in_every_order_and_no_worse_than_float(num, spread, scale, seed):
    rng = np.random.default_rng(seed)
    magnitudes = np.exp(spread * rng.normal(size=257)) * 2.0**scale
    terms = (rng.normal(size=(num, 257)) * magnitudes).astype(np.float32)
    result = exact_sum(terms, np.arange(num))
    shuffled = exact_sum(terms, rng.permutation(num))
    assert result.tobytes() == shuffled.tobytes()
    reference = terms.astype(np.float64).sum(0)
    exact_error = np.abs(result - reference)
    # One unit in the last place is one final rounding, plus the parts below the lowest limb.
    ulp = np.spacing(np.abs(reference).astype(np.float32))
    floor = np.abs(terms).max() * 2.0 ** -(2 * _exact.num_bits(num) - 6) * num
    assert (exact_error <= 0.51 * ulp + floor).all()
    float_error = np.abs(float_sum(terms) - reference)
    # Norms, not elements: a float sum may be exact by luck in one element. A single term is exact
    # in both but for what lies below the lowest limb.
    assert np.linalg.norm(exact_error) <= np.linalg.norm(float_error) + 0.51 * (
        np.linalg.norm(ulp) if num <= 2 else 0
    ) + np.linalg.norm(floor)


def test_window_asks_for_a_redo_only_outside():
    bits = _exact.num_bits(8)
    maxima = np.array([1.0, 1.0, 1.0, 0.0], np.float32)
    exponents = _exact.next_exponents(np.zeros(4, np.int32), maxima, bits)
    grown = maxima * np.array([63.0, 1000.0, 2.0**-30, 0.0], np.float32)
    np.testing.assert_array_equal(
        _exact.out_of_window(exponents, grown, bits), [False, True, True, False]
    )
    redone = _exact.next_exponents(exponents, grown, bits)
    assert not _exact.out_of_window(redone, grown, bits).any()
    assert redone[3] == exponents[3]


@pytest.mark.parametrize("extreme", [1e-45, 1e-38, 3e38])
def test_extreme_magnitudes_never_loop(extreme):
    bits = _exact.num_bits(4)
    maxima = np.array([extreme], np.float32)
    exponents = _exact.next_exponents(np.zeros(1, np.int32), maxima, bits)
    assert not _exact.out_of_window(exponents, maxima, bits).any()


def test_terms_at_the_bound_do_not_overflow():
    for num in (1, 2, 3, 64, 1 << 14):
        bits = _exact.num_bits(num)
        hi, lo = _exact.encode(jnp.float32(2.0**bits * (1 - 2.0**-24)), jnp.int32(0), bits)
        assert num * int(hi) < 2**31
        assert num * int(lo) < 2**31


def test_too_many_microbatches_are_refused():
    with pytest.raises(ValueError, match="larger microbatch_size"):
        _exact.num_bits((1 << 14) + 1)
