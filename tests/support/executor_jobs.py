"""A small job of many microbatches, with statistics and dropout."""

import functools
import json

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


@functools.cache
def _job(config):
    rng = np.random.default_rng(5)
    data = {"x": rng.normal(size=(96, 6)).astype("float32"), "y": rng.normal(size=96)}
    data["y"] = data["y"].astype("float32")
    make, optimizer = lambda: Net(nnx.Rngs(0)), optax.sgd(0.1, momentum=0.9)
    return hxla.Job(make, data, loss, optimizer, batch_size=2 * NUM, config=json.loads(config))


def job(devices=(0,), cluster=(), **settings):
    """Traced once for all who ask for the same; each session begins with the same parameters."""
    here = {"visible_devices": list(devices), **dict(cluster)}
    return _job(json.dumps({"cluster": here, **settings}))


def ended(plan, own=None, steps=4, **options):
    """The losses of a run and the hash of its state."""
    with (own or job()).open(plan, steps=steps, **options) as session:
        losses = [record.loss for record in session]
        if options.get("checkpoint_dir"):
            session.save()
        return losses, session.result().sha256
