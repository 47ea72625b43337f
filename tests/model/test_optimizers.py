"""Optimizers that ask for more than gradients: given, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import hxla
from support import models
from support.filled import filled
from support.tiers import rows
from support.training import train_with

#: Every sort of state and argument that optax has: a user's own script gives the same.
OPTIMIZERS = {
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "momo": optax.contrib.momo(0.1),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
    "noisy": optax.noisy_sgd(1e-2, key=jax.random.key(5)),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "masked": optax.masked(optax.adam(1e-2), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "muon": optax.contrib.muon(1e-2),
    "sam": optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2), sync_period=2),
}
STEPS, BATCH = 5, 24


def dense():
    return filled(lambda: models.Dense(nnx.Rngs(0)))


def plain(optimizer):
    """Losses and trained arrays of a loop as users write it."""
    data = models.regression()
    graphdef, params = nnx.split(dense())
    state = jax.jit(optimizer.init)(params)
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()

    @jax.value_and_grad
    def gradient(params, batch):
        return models.squared_error(nnx.merge(graphdef, params), batch).mean()

    @jax.jit
    def train_step(params, state, batch):
        value, grads = gradient(params, batch)
        try:
            updates, state = optimizer.update(grads, state, params, value=value, grad=grads)
        except TypeError:
            updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    losses = []
    for step in range(STEPS):
        own = np.arange(step * BATCH, (step + 1) * BATCH) % len(data["x"])
        value, params, state = train_step(params, state, {k: v[own] for k, v in data.items()})
        losses.append(float(value))
    return losses, jax.tree.leaves(params)


def ours(optimizer, counts, **options):
    arguments = {"steps": STEPS, "model": dense()} | options
    return train_with(
        arguments.pop("model"),
        models.regression(),
        arguments.pop("loss", models.squared_error),
        optimizer,
        batch_size=BATCH,
        microbatch_size=3,
        shuffle=False,
        mesh=models.mesh(data=len(counts)),
        counts=counts,
        **arguments,
    )


@pytest.mark.parametrize("name", rows(OPTIMIZERS, "polyak"))
def test_an_optimizer_is_given_what_is_known_of_a_step(name):
    optimizer = OPTIMIZERS[name]
    result = ours(optimizer, (5, 3))
    losses, params = plain(optimizer)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(result.state), params, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert ours(optimizer, (8,)).sha256 == result.sha256


class Noise(nnx.Module):
    """A key of its own, which every call moves on."""

    def __init__(self):
        self.layer = dense().layer
        self.key = nnx.Variable(jax.random.key(7))

    def __call__(self, x):
        self.key[...], key = jax.random.split(self.key[...])
        return self.layer(x) + 0.1 * jax.random.uniform(key, (3,))


class LinenNoise(nn.Module):
    @nn.compact
    def __call__(self, x):
        key = self.variable("noise", "key", lambda: jax.random.key(7))
        key.value, own = jax.random.split(key.value)
        return nn.Dense(3)(x) + 0.1 * jax.random.uniform(own, (3,))


@pytest.mark.parametrize("kind", rows([Noise, LinenNoise], Noise, ids=lambda k: k.__name__))
def test_keys_in_variables_and_states_are_resumed_and_returned_as_keys(kind, tmp_path):
    optimizer = OPTIMIZERS["noisy"]
    whole = ours(optimizer, (5, 3), model=kind())
    ours(optimizer, (5, 3), model=kind(), steps=2, checkpoint_dir=tmp_path)
    resumed = ours(optimizer, (3, 5), model=kind(), checkpoint_dir=tmp_path)
    assert resumed.sha256 == whole.sha256
    key, initial = jax.random.key(7), kind() if kind is Noise else None
    for _ in range(STEPS + (kind is LinenNoise)):  # Linen runs the loss once to initialise
        key, _ = jax.random.split(key)
    found = whole.model.key[...] if initial else whole.state["noise"]["key"]
    assert (jax.random.key_data(found) == jax.random.key_data(key)).all()
    # What is returned goes on in optax itself.
    own = resumed.state if initial is None else nnx.state(resumed.model, nnx.Param)
    params = jax.tree.map(jnp.asarray, own["params"] if initial is None else own)
    jax.eval_shape(optimizer.update, params, resumed.opt_state, params)


def test_what_no_update_has_is_refused_by_name():
    def needs(names):
        def update(updates, state, params=None, *, curvature, **_):
            return updates, state

        return optax.GradientTransformationExtraArgs(lambda params: (), update)

    with pytest.raises(hxla.ConfigError, match=r"value_fn.*line search.*linesearch=None"):
        ours(optax.lbfgs(), (8,))
    with pytest.raises(hxla.ConfigError, match=r"required keyword-only argument: 'curvature'"):
        ours(needs("curvature"), (8,))
    with pytest.raises(hxla.ConfigError, match=r"obj_fn must be provided"):
        ours(optax.contrib.sophia(1e-2), (8,))


def test_a_state_that_changes_its_dtype_is_refused():
    def update(updates, state, params=None):
        return updates, {"count": state["count"] + 0.5}

    optimizer = optax.GradientTransformation(lambda params: {"count": jnp.int32(0)}, update)
    with pytest.raises(hxla.ConfigError, match=r"count: int32\[\] before, float32\[\] after"):
        ours(optimizer, (8,))
