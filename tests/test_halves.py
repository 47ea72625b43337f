"""A backward in two halves gives what it gives whole, and each half does its own part only."""

import jax
import jax.numpy as jnp
import numpy as np

from hxla._halves import halve


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    return x @ params[-1][0]


def backward(params, x, g):
    _, vjp = jax.vjp(mlp, params, x)
    d_params, d_x = vjp(g)
    return d_x, d_params


def arguments():
    keys = jax.random.split(jax.random.key(0), 6)
    widths = [(8, 16), (16, 16), (16, 4)]
    params = [
        (jax.random.normal(k, w) * 0.3, jnp.full(w[1], 0.1))
        for k, w in zip(keys, widths, strict=False)
    ]
    params[-1] = (params[-1][0],)
    return params, jax.random.normal(keys[4], (5, 8)), jax.random.normal(keys[5], (5, 4))


def num_dots(equations):
    return sum(eqn.primitive.name == "dot_general" for eqn in equations)


def test_both_halves_are_the_whole():
    given = arguments()
    flat = jax.tree.leaves(given)
    whole = jax.tree.leaves(backward(*given))
    halves = halve(jax.make_jaxpr(backward)(*given), 1)
    first, kept = jax.jit(halves.run_early)(flat)
    others = jax.jit(halves.run_late)(flat, kept)
    for got, want in zip([*first, *others], whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_products_for_the_weights_wait():
    halves = halve(jax.make_jaxpr(backward)(*arguments()), 1)
    # Three layers: forward 2 (nobody reads the last), gradients of inputs 3, of weights 3.
    assert num_dots(halves.early) == 2 + 3
    assert num_dots(halves.late) == 3
    assert halves.kept


def test_a_result_that_is_an_argument_or_a_number_passes_through():
    def run(x):
        return x * 2.0, x, 3.0

    halves = halve(jax.make_jaxpr(run)(jnp.ones(2)), 1)
    first, kept = halves.run_early([jnp.full(2, 5.0)])
    x, three = halves.run_late([jnp.full(2, 5.0)], kept)
    assert list(first[0]) == [10.0, 10.0]
    assert list(x) == [5.0, 5.0]
    assert three == 3.0
    assert not halves.late
