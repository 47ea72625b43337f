"""Exact sums against float64 and against every order of addition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import hxla
from support.inside.lower import _exact
from support.tiers import examples

pytestmark = pytest.mark.optimized


def exact_sum(terms: np.ndarray, order: np.ndarray, num: int = 2) -> np.ndarray:
    """Sum over axis 0 in the given order, as a step does it that takes the scale that fits."""
    limbs = _exact.Limbs(num, len(terms))
    maxima = np.abs(terms).max()[None]
    exponent = _exact.next_exponents(np.zeros(1, np.int32), maxima, limbs)
    assert not _exact.out_of_window(exponent, maxima, limbs).any()
    return sum_at(terms[order], exponent[0], limbs)


def sum_at(terms: np.ndarray, exponent: np.int32, limbs: _exact.Limbs) -> np.ndarray:
    """Sum over axis 0 relative to a scale, in the integers of a device."""
    encoded = jax.jit(_exact.encode, static_argnums=2)(jnp.asarray(terms), exponent, limbs)
    sums = [np.asarray(own).sum(0, np.int32) for own in encoded]
    total = jax.jit(_exact.combine, static_argnums=1)(sums, limbs)
    return np.asarray(_exact.rescale(total, exponent))


def float_sum(terms: np.ndarray) -> np.ndarray:
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


@settings(max_examples=examples(10, 100))
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


def draw_terms(rng, num, kind):
    """Terms of 257 elements: alike, of unlike sizes, all at the peak, or just where they round."""
    terms = rng.normal(size=(num, 257)) * 2.0 ** rng.integers(-40, 40)
    if kind == "unlike":
        terms *= np.exp(4 * rng.normal(size=257))
    if kind == "peaks":
        terms = np.full((num, 257), np.abs(terms).max()) * (1 - 2.0**-24)
        terms[:, 1::2] *= -1
    if kind == "halves":
        terms = (rng.integers(-(2**22), 2**22, (num, 257)) + 0.5) * 2.0**-9
    return terms.astype(np.float32)


@settings(max_examples=examples(12, 150))
@given(
    num=st.sampled_from([1, 2, 3, 8, 12, 64, 100]),
    limbs=st.sampled_from([1, 2]),
    kind=st.sampled_from(["alike", "unlike", "peaks", "halves"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_scale_of_the_window_lets_a_sum_err_more_than_its_bound(num, limbs, kind, seed):
    rng = np.random.default_rng(seed)
    terms, limbs = draw_terms(rng, num, kind), _exact.Limbs(limbs, num)
    maxima = np.abs(terms).max()[None]
    around = np.arange(-60, 60, dtype=np.int32)
    around += _exact.next_exponents(np.zeros(1, np.int32), maxima, limbs)
    inside = [e for e in around if not _exact.out_of_window(e[None], maxima, limbs).any()]
    assert len(inside) == limbs.slack_bits + 1
    reference = terms.astype(np.float64).sum(0)
    for exponent in (inside[0], rng.choice(inside), inside[-1]):
        error = np.abs(sum_at(terms, exponent, limbs) - reference)
        rounded = 0.51 * np.spacing(np.abs(reference).astype(np.float32))
        assert (error <= rounded + limbs.error_bound * maxima).all()
    with np.errstate(over="ignore"):
        beyond = np.abs(terms.astype(np.float64)).max() * 2.0 ** (inside[-1] + 1)
    assert beyond >= 2.0 ** (limbs.bits - 1)  # the next scale is refused for good reason


@pytest.mark.parametrize("num", [1, 2, 3, 16, 64, 1000])
def test_the_bound_of_one_limb_is_what_the_settings_say(num):
    mean = _exact.Limbs(1, num).error_bound / num
    assert mean == 2.0 ** (8 - 30 + np.ceil(np.log2(num)))
    assert (mean <= 2.0**-16) == (num <= 64)
    # A scale that fits its own step is up to 32 times as good, and then no worse than float32:
    # added one by one, terms at the peak err by up to num**2 / 2 units of 2**-24 of it.
    terms = np.random.default_rng(num).uniform(0.5, 1, (num, 999)).astype(np.float32)
    error = np.abs(exact_sum(terms, np.arange(num), 1) - terms.astype(np.float64).sum(0))
    assert error.max() <= max(num**2 / 2, 1) * 2.0**-24


def test_one_limb_is_bounded_above_a_float_sum_of_any_number_of_terms():
    for num in range(2, 1 << 14):  # so no number of terms makes it the default
        of_floats = num * (num - 1) * 2.0**-24
        assert _exact.Limbs(1, num).error_bound > 4 * of_floats
        assert _exact.Limbs(2, num).error_bound < of_floats


@pytest.mark.parametrize("num", [1, 2])
def test_one_limb_and_two_are_the_same_in_every_order(num):
    rng = np.random.default_rng(0)
    terms = draw_terms(rng, 13, "unlike")
    found = {exact_sum(terms, rng.permutation(13), num).tobytes() for _ in range(4)}
    assert len(found) == 1


def test_window_asks_for_a_redo_only_outside():
    limbs = _exact.Limbs(2, 8)
    maxima = np.array([1.0, 1.0, 1.0, 0.0], np.float32)
    exponents = _exact.next_exponents(np.zeros(4, np.int32), maxima, limbs)
    grown = maxima * np.array([63.0, 1000.0, 2.0**-30, 0.0], np.float32)
    np.testing.assert_array_equal(
        _exact.out_of_window(exponents, grown, limbs), [False, True, True, False]
    )
    redone = _exact.next_exponents(exponents, grown, limbs)
    assert not _exact.out_of_window(redone, grown, limbs).any()
    assert redone[3] == exponents[3]


@pytest.mark.parametrize("extreme", [1e-45, 1e-38, 3e38])
def test_extreme_magnitudes_never_loop(extreme):
    limbs = _exact.Limbs(2, 4)
    maxima = np.array([extreme], np.float32)
    exponents = _exact.next_exponents(np.zeros(1, np.int32), maxima, limbs)
    assert not _exact.out_of_window(exponents, maxima, limbs).any()


def test_terms_at_the_bound_do_not_overflow():
    for num in (1, 2, 3, 64, 1 << 14):
        for limbs in (_exact.Limbs(1, num), _exact.Limbs(2, num)):
            largest = jnp.float32(2.0**limbs.bits * (1 - 2.0**-24))
            for x in (largest, -largest):
                parts = _exact.encode(x, jnp.int32(0), limbs)
                assert len(parts) == limbs.num
                assert all(num * abs(int(part)) <= 2**30 for part in parts)


def test_too_many_microbatches_are_refused():
    with pytest.raises(ValueError, match="larger microbatch_size"):
        _exact.num_bits((1 << 14) + 1)


def planned(batch_size, limbs, reduction="exact", **config):
    """For two copies, in microbatches of one example."""
    rows = np.zeros((batch_size, 3), np.float32)
    own = hxla.Job(
        lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        {"x": rows},
        lambda model, batch: model(batch["x"]).sum(1),
        optax.sgd(0.1),
        batch_size=batch_size,
        config={"communication": {"limbs": limbs}} | config,
    )
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 2)
    return own.plan(cluster, microbatch_size=1, mesh={"data": 2}, reduction=reduction)


def test_one_limb_is_taken_where_its_bound_allows_and_said():
    few, many = planned(64, "auto"), planned(66, "auto")
    assert (few.sums.limbs, many.sums.limbs) == (1, 2)
    assert "one limb: an element's sum of 64 terms errs by at most 2**-10" in few.explain()
    assert "their mean by 2**-16" in few.explain()
    assert "two limbs: one would let the mean of 66 terms err by 2**-15" in many.explain()
    assert few.numerics == planned(64, 1).numerics != planned(64, 2).numerics
    assert planned(66, 1).sums.limbs == 1
    assert "of one limb" in few.explain()
    assert not any("limb" in reason for reason in planned(64, 2).reasons)
    assert (few.sums.travel_factor, planned(64, 2).sums.travel_factor) == (1.0, 1.5)
    with pytest.raises(hxla.ConfigError, match="'auto' is of exact sums"):
        planned(64, "auto", reduction="float")
