"""Dots as a CPU likes them: the same numbers, and no dot left whose operands lie across."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.inside.jax import row_major, uncross, uncrossed


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]


@pytest.mark.parametrize(
    ("subscripts", "a", "b"),
    [
        ("bi,bo->io", (8, 3), (8, 5)),  # the first is smaller
        ("bi,bo->io", (8, 5), (8, 3)),
        ("bti,bto->io", (2, 4, 3), (2, 4, 5)),  # two contracted dimensions
        ("bthk,btd->hkd", (2, 4, 3, 5), (2, 4, 7)),  # heads
        ("nti,nto->nio", (6, 4, 3), (6, 4, 5)),  # a batch of dots
        ("nti,nto->nio", (6, 4, 5), (6, 4, 3)),
    ],
)
def test_crossed_dots_give_the_same_numbers(subscripts, a, b):
    def dot(x, y):
        return jnp.einsum(subscripts, x, y)

    x, y = arrays(a, b)
    closed = jax.make_jaxpr(dot)(x, y)
    assert uncross(closed) is not closed
    np.testing.assert_allclose(uncrossed(dot)(x, y), dot(x, y), rtol=1e-5, atol=1e-5)


def test_a_program_without_crossed_dots_stays_the_same_object():
    closed = jax.make_jaxpr(lambda x, y: jnp.tanh(x @ y).sum())(*arrays((4, 3), (3, 5)))
    assert uncross(closed) is closed


def network(params, x):
    """Layers under jit, checkpoint, scan, cond and while."""
    first, inner, stack, either = params
    x = jax.jit(lambda x: jnp.tanh(x @ first))(x)
    x = jax.checkpoint(lambda x: jnp.tanh(x @ inner))(x)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
    x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ either, lambda x: x @ (2 * either), x)
    return (x**2).sum() / 2


def test_gradients_inside_loops_and_branches_are_the_same_and_have_no_crossed_dot():
    params = arrays((16, 24), (24, 24), (3, 24, 24), (24, 8))
    [x] = arrays((32, 16))
    gradient = jax.value_and_grad(network)
    compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    for own, other in zip(
        jax.tree.leaves(compiled(uncrossed(gradient))(params, x)),
        jax.tree.leaves(compiled(gradient)(params, x)),
        strict=True,
    ):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)

    def crossed(function):
        text = jax.jit(function).lower(params, x).as_text()
        return len(re.findall(r"contracting_dims = \[0\] x \[0\]", text))

    assert crossed(gradient) == 5
    assert crossed(uncrossed(gradient)) == 0


def test_the_compiled_gradient_of_a_dense_layer_stays_uncrossed_and_is_row_major():
    x, w, v = arrays((512, 256), (256, 1024), (1024, 256))

    def loss(w, v, x):
        return (jnp.tanh(x @ w) @ v).sum()

    def laid(w, v, x):
        return [row_major(g) + 1 for g in uncrossed(jax.grad(loss, argnums=(0, 1)))(w, v, x)]

    text = jax.jit(laid).lower(w, v, x).compile().as_text()
    dots = re.findall(r" dot\(.*?lhs_contracting_dims=\{(\d)\}", text)
    assert len(dots) >= 4
    assert set(dots) == {"1"}


def test_name_stacks_survive():
    def loss(w, x):
        with jax.named_scope("part"):
            return (x @ w).sum()

    w, x = arrays((3, 5), (4, 3))
    text = jax.jit(uncrossed(jax.grad(loss))).lower(w, x).as_text(debug_info=True)
    assert re.search(r"part\)*/dot_general", text)
