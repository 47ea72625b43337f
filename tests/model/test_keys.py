"""Random keys: new ones for each microbatch of each step, and the loss's apart from the model's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support import models

STEPS, NUM, SIZE = 3, 4, 2


class Noisy(nnx.Module):
    """A parameter beside Dropout."""

    def __init__(self):
        self.weight = nnx.Param(jnp.zeros(()))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def losses(loss, *, microbatch_size=SIZE):
    """Of each step of training that moves no parameter."""
    data = {"x": np.arange(NUM * SIZE, dtype=np.float32)}
    job = hxla.Job(Noisy(), data, loss, optax.sgd(0.0), batch_size=NUM * SIZE, shuffle=False)
    options = {"microbatch_size": microbatch_size, "mesh": models.mesh(data=1)}
    result = hxla.train(job, steps=STEPS, quiet=True, **options)
    return [step.loss for step in result.history.steps]


def drawn_by_loss(model, batch, key):
    return model.weight + jax.random.uniform(key, batch["x"].shape)


def drawn_by_dropout(model, batch):
    return model.weight + model.dropout(jnp.ones((*batch["x"].shape, 64))).mean(-1)


def test_each_step_draws_other_numbers():
    for loss in (drawn_by_loss, drawn_by_dropout):
        assert len(set(losses(loss, microbatch_size=NUM * SIZE))) == STEPS, loss.__name__


def test_each_microbatch_draws_other_numbers():
    def digits(model, batch, key):
        """One digit of base 16 for each microbatch, at a place of its own."""
        place = 16.0 ** (batch["x"][0] // SIZE)
        return model.weight + jnp.floor(16 * jax.random.uniform(key)) * place

    for loss in losses(digits):
        drawn = np.base_repr(round(loss * NUM), 16).zfill(NUM)
        assert len(set(drawn)) > 1, drawn


def test_no_stream_of_the_model_is_what_a_loss_folds_from_its_key():
    def same(model, batch, key):
        own = jax.random.key_data(model.dropout.rngs.key[...])
        folded = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(jnp.arange(64))
        return model.weight + (folded == own).all(-1).any().astype(jnp.float32)

    assert losses(same) == [0.0] * STEPS
