"""One small model and the optimizers that people give it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .row import BATCH, Row

_RNG = np.random.default_rng(5)
POINTS = {
    "x": _RNG.normal(size=(2 * BATCH, 6)).astype(np.float32),
    "y": _RNG.normal(size=(2 * BATCH, 2)).astype(np.float32),
}


class Mlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layer1, self.layer2 = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.tanh(self.layer2(nnx.tanh(self.layer1(x)))))


def squared(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def moving_average(decay):
    """Of the parameters, kept in the state beside those that are trained."""

    def update(updates, state, params=None):
        after = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(after, state, 1 - decay)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.array, params), update)


def labels(params):
    """The head by one optimizer, the trunk by another, the first layer's bias not at all."""

    def label(path, _):
        name = jax.tree_util.keystr(path)
        return "head" if "head" in name else "none" if "layer1']['bias" in name else "trunk"

    return jax.tree_util.tree_map_with_path(label, params)


def warm_up():
    return optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 10)


_BY_LABEL = {"head": optax.sgd(0.1), "trunk": optax.adam(1e-2), "none": optax.set_to_zero()}

OPTIMIZERS = {
    "ema": optax.chain(optax.sgd(0.05, momentum=0.9), moving_average(0.9)),
    "multi steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "polyak": optax.polyak_sgd(max_learning_rate=0.1),
    "noisy": optax.noisy_sgd(1e-2, key=7),
    "labels": optax.multi_transform(_BY_LABEL, labels),
    "warm-up": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(warm_up(), weight_decay=0.1)
    ),
    "lamb": optax.lamb(1e-2),
    "lbfgs": optax.lbfgs(0.1, linesearch=None),
}

ROWS = {
    name: Row(make=Mlp, loss=squared, data=POINTS, optimizer=optimizer, cut=["layer2/"])
    for name, optimizer in OPTIMIZERS.items()
}
