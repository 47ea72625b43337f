"""Trains small models of uneven splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support import models

SIZE = 4  # of a microbatch


class Columns(nnx.Module):
    """An MLP whose hidden units are cut, after a BatchNorm."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.up = nnx.Linear(6, 256, rngs=rngs)
        self.down = nnx.Linear(256, 3, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        with hxla.split():
            return self.down(jnp.tanh(self.up(x)))


class SevenUnits(nnx.Module):
    """Seven hidden units, of which a device has five and another two."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(()))
        self.up = nnx.Linear(6, 7, rngs=rngs)
        self.down = nnx.Linear(7, 3, rngs=rngs)

    def __call__(self, x):
        with hxla.split():
            return self.down(jnp.tanh(self.up(x * self.scale[...])))


#: The model of each, its loss and its data.
NETS = {
    "columns": (Columns, models.squared_error, models.regression),
    "heads": (functools.partial(models.NnxNet, heads=8), models.token_loss, models.tokens),
}
OPTIMIZERS = {
    "sgd": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5, momentum=0.9)),
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "shifted": optax.chain(
        optax.stateless(lambda grads, _: jax.tree.map(lambda x: x + 0.1, grads)),
        optax.clip_by_global_norm(0.5),
        optax.sgd(0.5),
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


@functools.cache
def job(net="columns", optimizer="sgd", num_devices=None, recompute=None):
    """Traced, and each of its plans compiled, once; None: on all devices of all processes."""
    cluster = {} if num_devices is None else {"visible_devices": list(range(num_devices))}
    make, loss, data = NETS[net]
    return hxla.Job(
        lambda: make(nnx.Rngs(0)),
        data(96),
        loss,
        OPTIMIZERS[optimizer],
        batch_size=2 * SIZE,
        seed=1,
        config={"cluster": cluster, "memory": {"recompute": recompute}},
    )


def planned(own, mesh, net="columns", counts="even"):
    rules = "decoder" if net == "heads" and "tensor" in mesh else None
    return own.plan(microbatch_size=SIZE, mesh=mesh, rules=rules, counts=counts)


def train(
    mesh,
    *,
    steps,
    net="columns",
    optimizer="sgd",
    counts="even",
    recompute=None,
    checkpoint_dir=None,
):
    """The result of a run, and the loss of an evaluation after it."""
    num = int(np.prod([len(s) if isinstance(s, tuple) else s for s in mesh.values()]))
    own = job(net, optimizer, num, recompute)
    plan = planned(own, mesh, net, counts)
    with own.open(plan, steps=steps, checkpoint_dir=checkpoint_dir) as session:
        for _ in session:
            pass
        if checkpoint_dir is not None:
            session.save()
        return session.result(), session.evaluate(NETS[net][2](8)).loss
