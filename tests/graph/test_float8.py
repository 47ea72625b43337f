"""Products in float8: what multiplies in it, what the scales are, and that bits stay."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from support.inside.graph import BACKWARD, FORWARD, float8_product, quantized
from support.precision_programs import (
    MODELS,
    every_equation,
    gradient_program,
    shapes_only,
    under,
)
from support.tiers import rows

NUMPY = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


quantize = jax.jit(quantized, static_argnums=1)
#: XLA's, for programs that run once.
QUICKLY_COMPILED = {"xla_backend_optimization_level": 0}
compiled = functools.partial(jax.jit, compiler_options=QUICKLY_COMPILED)


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
    found, exponent = quantize(x, dtype)
    expected, of_scale = by_hand(x, dtype)
    assert int(exponent) == of_scale
    np.testing.assert_array_equal(np.asarray(found, np.float32), expected.astype(np.float32))
    largest = np.abs(np.asarray(found, np.float32)).max()
    assert float(jnp.finfo(dtype).max) / 2 <= largest <= float(jnp.finfo(dtype).max)


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_zeros_stay_and_what_is_not_finite_is_not_lost(dtype):
    found, exponent = quantize(np.zeros((5, 7), np.float32), dtype)
    assert not np.asarray(found, np.float32).any()
    assert int(exponent) == 0
    for bad in (np.inf, -np.inf, np.nan):
        found, _ = quantize(np.full((5, 7), [1.0] * 6 + [bad], np.float32), dtype)
        assert not np.isfinite(np.asarray(found, np.float32)).all()


PRODUCTS = {
    "a kernel": ("bsd,df->bsf", (2, 3, 16), (16, 8)),
    "heads": ("bsd,dhk->bshk", (2, 3, 16), (16, 4, 8)),
    "joined heads": ("bshk,hkd->bsd", (2, 3, 4, 8), (4, 8, 16)),
    "tied": ("bsd,vd->bsv", (2, 3, 16), (11, 16)),
    "experts": ("ecd,edf->ecf", (3, 5, 16), (3, 16, 8)),
    "a parameter on the left": ("df,bd->fb", (16, 8), (4, 16)),
}


@pytest.mark.parametrize(
    "name", rows(PRODUCTS, "joined heads", "experts", "a parameter on the left")
)
def test_a_product_and_its_gradients_are_those_of_numpy(name):
    formula, *shapes = PRODUCTS[name]
    program = jax.make_jaxpr(lambda x, y: jnp.einsum(formula, x, y))(*map(jnp.zeros, shapes))
    [eqn] = [e for e in every_equation(program.jaxpr) if e.primitive.name == "dot_general"]
    shapes = [v.aval.shape for v in eqn.invars]  # einsum may have swapped them
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype(np.float32) * 10.0**i for i, s in enumerate(shapes))

    @compiled
    def with_gradients(x, y, back):
        out, pull = jax.vjp(lambda *own: float8_product(eqn, own, jnp.float32), x, y)
        return out, pull(back)

    back = rng.normal(size=eqn.outvars[0].aval.shape).astype(np.float32) * 1e-6
    out, gradients = with_gradients(x, y, back)
    (contracted, batched), (qx, ex), (qy, ey) = (
        eqn.params["dimension_numbers"],
        by_hand(x, FORWARD),
        by_hand(y, FORWARD),
    )
    wide = [jnp.asarray(q.astype(np.float32)) for q in (qx, qy)]

    @compiled
    def exact_with_gradients(a, b, back):
        product, pull = jax.vjp(
            lambda a, b: jax.lax.dot_general(a, b, (contracted, batched), precision="highest"),
            a,
            b,
        )
        return product, pull(back)

    qg, eg = by_hand(back, BACKWARD)
    product, expected = exact_with_gradients(*wide, qg.astype(np.float32))
    # Products of float8 are exact in float32, so only the order of their sum may differ.
    assert_near = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        a, b, rtol=0, atol=32 * 2.0**-24 * np.abs(b).max()
    )
    assert_near(np.asarray(out), np.asarray(product) * 2.0 ** -(ex + ey))
    for own, other, scale in zip(gradients, expected, (ey, ex), strict=True):
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


@functools.cache
def of_model(name, precision):
    return products_of(under(*shapes_only(name), precision)[1])


@pytest.mark.parametrize("name", rows(MODELS, "vit", "scanned"))
def test_what_reads_a_parameter_multiplies_in_float8(name):
    """Forward e4m3 times e4m3, backward e5m2 times e4m3; the others as in bfloat16."""
    low, found = of_model(name, "bf16"), of_model(name, "fp8")
    assert set(found) <= {(E4M3, E4M3), (E5M2, E4M3), (BF16, BF16)}
    forward, backward = found[E4M3, E4M3], found[E5M2, E4M3]
    assert set(low) == {(BF16, BF16)}
    assert sum(found.values()) >= sum(low.values())  # a gradient of the batch is asked for as well
    assert 0 < forward <= backward <= 2 * forward


class TwoLayers(nnx.Module):
    def __init__(self):
        self.body, self.head = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, x):
        return self.head(jnp.tanh(self.body(x)))


def test_an_exception_stays_in_16_bits():
    model, batch = nnx.eval_shape(TwoLayers), {"x": np.ones((3, 4), np.float32)}
    exception = {"path": "head/kernel$", "compute": "bfloat16"}
    whole, found = (
        products_of(under(model, lambda m, b: m(b["x"]).mean(-1), batch, policy)[1])
        for policy in ("fp8", {"preset": "fp8", "exceptions": [exception]})
    )
    assert found[E4M3, E4M3] == whole[E4M3, E4M3] - 1
    assert found[BF16, BF16] == whole[BF16, BF16] + 3
