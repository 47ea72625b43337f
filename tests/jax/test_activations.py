"""Activation functions are computed again in the backward: the same values, fewer residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from support.inside.jax import as_function, recomputed
from support.tiers import rows

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
ACTIVATIONS = {
    "gelu": nnx.gelu,
    "exact gelu": lambda x: nnx.gelu(x, approximate=False),
    "silu": nnx.silu,
    "scaled tanh": lambda x: 2 * jnp.tanh(x / 3),
}
#: What has no activation whose argument is worth more than its residuals.
OTHERS = {
    "tanh": jnp.tanh,  # its derivative needs its result only
    "relu": nnx.relu,
    "softmax": nnx.softmax,
    "gate of another array": lambda x: nnx.sigmoid(x) * x[:, ::-1],
    "two results": lambda x: (y := jax.lax.logistic(x)) @ W + (x * y) @ W,
    "of one number": lambda x: x * nnx.gelu(x[0, 0]),
}


def loss_of(function):
    return lambda x, w: (function(function(x @ w) @ w) @ w).sum()


def remats(closed):
    return str(closed).count("remat2[")


def both(loss):
    closed = jax.make_jaxpr(loss)(X, W)
    again = recomputed(closed)
    each = [as_function(program) for program in (closed, again)]
    values = [jax.jit(jax.value_and_grad(lambda *x, f=f: f(*x)[0], (0, 1)))(X, W) for f in each]
    for one, other in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    return closed, again


def residuals(closed):
    """The number of arrays that a backward reads."""
    function = as_function(closed)
    return len(jax.tree.leaves(jax.vjp(lambda x: function(x, W)[0], X)[1]))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_keeps_its_argument_only(name):
    closed, again = both(loss_of(ACTIVATIONS[name]))
    assert remats(closed) == 0
    assert remats(again) == 2
    num = [residuals(closed), residuals(again)]
    assert num[1] < num[0]


@pytest.mark.parametrize("name", rows(OTHERS, "tanh", "two results", "gate of another array"))
def test_other_functions_stay_as_they_are(name):
    closed, again = both(loss_of(OTHERS[name]))
    assert again is closed


def test_layers_in_a_scan_keep_less_too():
    def loss(x, w):
        return jax.lax.scan(lambda x, w: (nnx.gelu(x @ w), 0), x, jnp.stack([w, w]))[0].sum()

    closed, again = both(loss)
    assert (remats(closed), remats(again)) == (0, 1)


def test_what_is_printed_stays():
    def loss(x, w):
        jax.debug.callback(lambda x: None, x)
        return nnx.gelu(x @ w).sum()

    closed = jax.make_jaxpr(loss)(X, W)
    assert recomputed(closed).effects == closed.effects
    assert remats(recomputed(closed)) == 1
