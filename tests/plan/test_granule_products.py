"""Products in granules: as jax's, and with the same bits on one device, two and four."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from support.inside.plan import GranuleProduct

pytestmark = pytest.mark.optimized

RNG = np.random.default_rng(0)
#: Shapes, dimension numbers, and the dimension that is cut of each operand.
PRODUCTS = {
    "column": ((3, 7, 32), (32, 48), (((2,), (0,)), ((), ())), (None, 1)),
    "row": ((3, 7, 48), (48, 20), (((2,), (0,)), ((), ())), (2, 0)),
    "left": ((8, 7, 32), (32, 20), (((2,), (0,)), ((), ())), (0, None)),
    "attend": ((3, 7, 32), (16, 32), (((2,), (1,)), ((), ())), (None, 0)),
    "heads": ((3, 8, 7, 4), (3, 5, 8, 4), (((3,), (3,)), ((0, 1), (0, 2))), (1, 2)),
    "whole": ((7, 32), (32, 20), (((1,), (0,)), ((), ())), (None, None)),
    "outer": ((8,), (5,), (((), ()), ((), ())), (0, None)),
    "two contracted": ((4, 6, 9), (6, 4, 5), (((0, 1), (1, 0)), ((), ())), (0, 1)),
}


@functools.cache
def gradients(name, num):
    """The product, both of its gradients, and the text of the compiled program."""
    *_, numbers, dims = PRODUCTS[name]
    x, y, cotangent = operands(name)
    mesh = jax.make_mesh((num,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:num])
    product = GranuleProduct(mesh=mesh, axis="tensor", granules=4, dims=dims)
    [eqn] = jax.make_jaxpr(lambda x, y: jax.lax.dot_general(x, y, numbers))(x, y).eqns

    def run(x, y, cotangent):
        out, pull = jax.vjp(lambda *xs: product.of(eqn, xs), x, y)
        return out, *pull(cotangent)

    compiled = jax.jit(run).lower(x, y, cotangent).compile()
    return list(map(np.asarray, compiled(x, y, cotangent))), compiled.as_text()


@functools.cache
def operands(name):
    *shapes, numbers, _ = PRODUCTS[name]
    x, y = (RNG.normal(size=shape).astype(np.float32) for shape in shapes)
    out = jax.eval_shape(lambda x, y: jax.lax.dot_general(x, y, numbers), x, y)
    return x, y, RNG.normal(size=out.shape).astype(np.float32)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_gradients_are_jax_s(name):
    numbers = PRODUCTS[name][2]
    x, y, cotangent = (np.float64(a) for a in operands(name))
    with jax.enable_x64(True):
        out, pull = jax.vjp(lambda x, y: jax.lax.dot_general(x, y, numbers), x, y)
        wanted = [np.asarray(a) for a in (out, *pull(cotangent))]
    for a, b in zip(gradients(name, 1)[0], wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bits_are_those_of_one_device(name):
    for num in (2, 4):
        for a, b in zip(gradients(name, num)[0], gradients(name, 1)[0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_product_is_alone_and_of_one_shape():
    """What XLA fuses with a product could change how it is computed."""
    for num in (1, 2, 4):
        text = gradients("row", num)[1]
        shapes = re.findall(r"= (\S+?)\{\S* dot\(", text)
        assert sorted(set(shapes)) == sorted({"f32[21,20]", "f32[21,12]", "f32[12,20]"})
        assert len(shapes) == 3 * 4 // num
        for computation in re.findall(r"\{\n(.*?)\n\}", text, re.DOTALL):
            if " dot(" in computation and "ENTRY" not in computation:
                made = re.findall(r" ([a-z-]+)\(", computation)
                assert sorted(made) in (["dot", "parameter", "parameter"],) or "fusion" in made
