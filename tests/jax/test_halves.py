"""Programs in two halves: what they give, which half does what, and how little is kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.inside.jax import halve


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    return x @ params[-1][0]


def backward(params, x, g):
    _, vjp = jax.vjp(mlp, params, x)
    d_params, d_x = vjp(g)
    return d_x, d_params


def arguments():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    widths = [(8, 16), (16, 16), (16, 4)]
    params = [(normal(*w) * 0.3, np.full(w[1], 0.1, np.float32)) for w in widths]
    params[-1] = (params[-1][0],)
    return params, normal(5, 8), normal(5, 4)


def num_dots(program):
    return sum(eqn.primitive.name == "dot_general" for eqn in program.eqns)


def test_both_halves_are_the_whole():
    given = arguments()
    flat = jax.tree.leaves(given)
    whole = jax.tree.leaves(jax.jit(backward)(*given))
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
    assert not halves.late.eqns


def passes(loss, x, w):
    """A forward and its backward: only the first has `x`, only the second the gradient."""

    def run(w, x, g):
        made, vjp = jax.vjp(loss, w, x)
        return made, *vjp(g)

    made = jax.eval_shape(loss, w, x)
    closed = jax.make_jaxpr(run)(w, x, made)
    return halve(closed, 1, only_early=[1], only_late=[2]), closed


def square(w, x):
    return (x @ w) ** 2 * 3.0 + 1.0


def norm(w, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * w[0]


def swish(w, x):
    h = x @ w
    return h * jax.nn.sigmoid(h) + x


def masked(w, x):
    h = jax.lax.select(x > 0, x, 0.1 * x) @ w
    return jax.lax.select(h > 0.5, h, 0.1 * h) * 2.0


def twice_masked(w, x):
    """Of two masks the bytes are half of the floats that make them, the elements twice."""
    h = x @ w
    return jax.lax.select(h > 0.5, jax.lax.select(h > 0, h, 0.1 * h), 0.1 * h)


CHEAP = {"add", "sub", "mul", "neg", "div", "rsqrt", "integer_pow", "square", "reshape", "max"}
CHEAP |= {"select_n", "gt", "lt", "ge", "le", "eq", "broadcast_in_dim", "transpose", "squeeze"}
CHEAP |= {"copy", "convert_element_type", "sqrt", "iota", "logistic", "slice"}


def fewest_bytes(closed):
    """By trying every set of the values that the forward makes, or has."""
    jaxpr = closed.jaxpr
    w, x, g = jaxpr.invars
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    operands = {v: [u for u in eqn.invars if not hasattr(u, "val")] for v, eqn in maker.items()}

    def above(v, found):
        if v not in found:
            found.add(v)
            for u in operands.get(v, []):
                above(u, found)
        return found

    forward = above(jaxpr.outvars[0], set())
    for v in maker:
        if maker[v].primitive.name in CHEAP and forward >= set(operands[v]):
            forward.add(v)
    candidates = [v for v in (x, *maker) if v in forward]
    assert len(candidates) <= 20

    def enough(kept):
        there = {w, g, *jaxpr.constvars, *kept}
        for v in maker:  # in order: what the backward can make
            late = v not in forward or maker[v].primitive.name in CHEAP
            if late and there >= set(operands[v]):
                there.add(v)
        return there >= {v for v in jaxpr.outvars[1:] if not hasattr(v, "val")}

    sets = itertools.chain.from_iterable(
        itertools.combinations(candidates, n) for n in range(min(len(candidates), 5) + 1)
    )
    return min(sum(v.aval.size * v.aval.dtype.itemsize for v in own) for own in sets if enough(own))


@pytest.mark.parametrize("loss", [square, norm, swish, masked, twice_masked])
def test_no_set_of_values_with_fewer_bytes_is_enough_for_the_backward(loss):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    halves, closed = passes(loss, x, w)
    assert sum(k.size * k.dtype.itemsize for k in halves.kept) == fewest_bytes(closed)

    g = jnp.asarray(rng.normal(size=jax.eval_shape(loss, w, x).shape), jnp.float32)

    @jax.jit
    def whole(w, x, g):
        made, vjp = jax.vjp(loss, w, x)
        return made, *vjp(g)

    [first], kept = jax.jit(halves.run_early)([w, x])
    others = jax.jit(halves.run_late)([w, g], kept)
    for got, want in zip([first, *others], whole(w, x, g), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_dots_and_sums_are_never_made_again():
    def loss(w, x):
        return jax.nn.softmax(x @ w) @ w

    halves, _ = passes(loss, jnp.ones((4, 8)), jnp.ones((8, 8)))
    assert num_dots(halves.early) == 2
    assert num_dots(halves.late) == 4
    assert "reduce_max" not in str(halves.late)


def test_what_parameters_and_numbers_can_make_is_not_kept():
    def loss(w, x):
        return (x @ (w * 2.0)) * (0.5 + jnp.arange(8) / 8.0)

    halves, _ = passes(loss, jnp.ones((4, 8)), jnp.ones((8, 8)))
    assert [k.shape for k in halves.kept] == [(4, 8)]  # x, for the weight's gradient
