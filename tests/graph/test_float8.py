"""Products in float8: what multiplies in it, what the scales are, and that bits stay."""

import collections

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from support import families
from support.inside.graph import BACKWARD, FORWARD, float8_product, quantized
from support.precision_programs import MODELS, every_equation, gradient_program, under

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def by_hand(x, dtype):
    """NumPy's float64 and the dtypes of ml_dtypes: the array, and the power of two that it has."""
    x, most = np.asarray(x, np.float64), float(ml_dtypes.finfo(dtype).max)
    exponent = int(np.floor(np.log2(most / np.abs(x).max())))
    return (x * 2.0**exponent).astype(np.float32).astype(NUMPY[np.dtype(dtype).name]), exponent


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 447.0, 448.0, 449.0, 57344.0, 57345.0, 3e38])
def test_the_largest_element_is_as_high_as_the_dtype_allows(dtype, size):
    x = np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype(np.float32)
    x[2, 3] = -1
    x *= np.float32(size)
    found, exponent = jax.jit(quantized, static_argnums=1)(x, dtype)
    expected, of_scale = by_hand(x, dtype)
    assert int(exponent) == of_scale
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected.astype(np.float32))
    largest = np.abs(np.asarray(found, np.float32)).max()
    assert float(jnp.finfo(dtype).max) / 2 <= largest <= float(jnp.finfo(dtype).max)


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_zeros_stay_and_what_is_not_finite_is_not_lost(dtype):
    found, exponent = quantized(jnp.zeros((3,)), dtype)
    assert not np.asarray(found, np.float32).any()
    assert int(exponent) == 0
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        found, _ = quantized(jnp.array([1.0, bad]), dtype)
        assert not np.isfinite(np.asarray(found, np.float32)).all()


PRODUCTS = {
    "a kernel": ("bsd,df->bsf", (2, 3, 16), (16, 8)),
    "heads": ("bsd,dhk->bshk", (2, 3, 16), (16, 4, 8)),
    "joined heads": ("bshk,hkd->bsd", (2, 3, 4, 8), (4, 8, 16)),
    "tied": ("bsd,vd->bsv", (2, 3, 16), (11, 16)),
    "experts": ("ecd,edf->ecf", (3, 5, 16), (3, 16, 8)),
    "a parameter on the left": ("df,bd->fb", (16, 8), (4, 16)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_and_its_gradients_are_those_of_numpy(name):
    formula, *shapes = PRODUCTS[name]
    program = jax.make_jaxpr(lambda x, y: jnp.einsum(formula, x, y))(*map(jnp.zeros, shapes))
    [eqn] = [e for e in every_equation(program.jaxpr) if e.primitive.name == "dot_general"]
    shapes = [v.aval.shape for v in eqn.invars]  # einsum may have swapped them
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype(np.float32) * 10.0**i for i, s in enumerate(shapes))
    out, pull = jax.vjp(lambda *own: float8_product(eqn, own, jnp.float32), x, y)
    back = rng.normal(size=out.shape).astype(np.float32) * 1e-6
    (contracted, batched), (qx, ex), (qy, ey) = (
        eqn.params["dimension_numbers"],
        by_hand(x, FORWARD),
        by_hand(y, FORWARD),
    )
    wide = [jnp.asarray(q.astype(np.float32)) for q in (qx, qy)]

    def exact(a, b):
        return jax.lax.dot_general(a, b, (contracted, batched), precision="highest")

    product, exact_pull = jax.vjp(exact, *wide)
    # Products of float8 are exact in float32, so only the order of their sum may differ.
    assert_near = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        a, b, rtol=0, atol=32 * 2.0**-24 * np.abs(b).max()
    )
    assert_near(np.asarray(out), np.asarray(product) * 2.0 ** -(ex + ey))
    qg, eg = by_hand(back, BACKWARD)
    expected = exact_pull(jnp.asarray(qg.astype(np.float32)))
    for own, other, scale in zip(pull(jnp.asarray(back)), expected, (ey, ex), strict=True):
        assert own.dtype == np.float32
        assert_near(np.asarray(own), np.asarray(other) * 2.0 ** -(eg + scale))


def products_of(graph):
    """How often operands of which dtypes are multiplied, forward and backward."""
    found = collections.Counter()
    for eqn in every_equation(gradient_program(graph)[0].jaxpr):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found[tuple(v.aval.dtype.name for v in eqn.invars)] += 1
    return found


E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"


@pytest.mark.parametrize("name", MODELS)
def test_what_reads_a_parameter_multiplies_in_float8(name):
    """Forward e4m3 times e4m3, backward e5m2 times e4m3; the others as in bfloat16."""
    model, loss, batch = MODELS[name]()
    batch = jax.tree.map(lambda x: x[:2], batch)
    low = products_of(under(model, loss, batch, "bf16")[1])
    found = products_of(under(model, loss, batch, "fp8")[1])
    assert set(found) <= {(E4M3, E4M3), (E5M2, E4M3), (BF16, BF16)}
    forward, backward = found[E4M3, E4M3], found[E5M2, E4M3]
    assert set(low) == {(BF16, BF16)}
    assert sum(found.values()) >= sum(low.values())  # a gradient of the batch is asked for as well
    assert 0 < forward <= backward <= 2 * forward


def test_an_exception_stays_in_16_bits():
    model, loss, batch = families.gpt()
    batch = jax.tree.map(lambda x: x[:1], batch)
    whole = products_of(under(model, loss, batch, "fp8")[1])
    policy = {
        "preset": "fp8",
        "exceptions": [{"path": "blocks/0/up/kernel$", "compute": "bfloat16"}],
    }
    found = products_of(under(model, loss, batch, policy)[1])
    assert found[E4M3, E4M3] == whole[E4M3, E4M3] - 1
    assert found[BF16, BF16] == whole[BF16, BF16] + 3
