"""A small job of many microbatches, with statistics and dropout."""

import numpy as np
import optax
from flax import nnx

import hxla

NUM = 12  # microbatches of a step


class Net(nnx.Module):
    """Averages a batch, counts steps and drops out: floats and integers that no gradient has."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.inner(x)))))[:, 0]


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def job(devices=(0,), cluster=(), **settings):
    rng = np.random.default_rng(5)
    data = {"x": rng.normal(size=(96, 6)).astype("float32"), "y": rng.normal(size=96)}
    data["y"] = data["y"].astype("float32")
    model = Net(nnx.Rngs(0))
    optimizer = optax.adam(1e-2)
    config = {"cluster": {"visible_devices": list(devices), **dict(cluster)}, **settings}
    return hxla.Job(model, data, loss, optimizer, batch_size=2 * NUM, config=config)


def ended(plan, own=None, steps=4):
    with (own or job()).open(plan, steps=steps) as session:
        losses = [record.loss for record in session]
        return losses, session.result().sha256
