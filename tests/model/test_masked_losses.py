"""Weights of a loss: an example of weight 0 counts for nothing, whatever its loss is."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models

X = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], np.float32)
WEIGHTS = np.array([1, 0, 1, 0.5, 0, 1, 0, 2], np.float32)


class Scalar(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(()))


def trained(bad):
    """A step whose masked examples have losses of `bad`."""
    data = {"x": np.where(WEIGHTS == 0, np.float32(bad), X), "weights": WEIGHTS}

    def loss(model, batch):
        return model.weight + batch["x"], batch["weights"]

    job = hxla.Job(Scalar(), data, loss, optax.sgd(0.01), batch_size=8, shuffle=False)
    result = hxla.train(job, microbatch_size=2, steps=1, mesh=models.mesh(data=1), quiet=True)
    return result.history.steps[0].loss, float(result.model.weight[...])


@pytest.mark.parametrize("bad", [0.0, np.inf, -np.inf, np.nan, 1e30])
def test_a_masked_example_may_have_any_loss(bad):
    loss, weight = trained(bad)
    wanted = float((WEIGHTS * (1 + X)).sum() / WEIGHTS.sum())
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert weight == pytest.approx(1 - 0.01, rel=1e-6)
