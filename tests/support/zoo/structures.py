"""Batches that are no single array, and models that return more than one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .row import BATCH, Row

NODES, EDGES, WIDTH = 5, 8, 8
_RNG = np.random.default_rng(4)
GRAPHS = {
    "nodes": _RNG.normal(size=(2 * BATCH, NODES, 4)).astype(np.float32),
    "from": _RNG.integers(0, NODES, (2 * BATCH, EDGES)).astype(np.int32),
    "to": _RNG.integers(0, NODES, (2 * BATCH, EDGES)).astype(np.int32),
    "label": _RNG.normal(size=2 * BATCH).astype(np.float32),
}
STEPS_OF_PLAY = {
    "seen": _RNG.normal(size=(2 * BATCH, 6)).astype(np.float32),
    "action": _RNG.integers(0, 3, 2 * BATCH).astype(np.int32),
    "gain": _RNG.normal(size=2 * BATCH).astype(np.float32),
    "gone": _RNG.random(2 * BATCH) < 0.3,
}


class GraphNet(nnx.Module):
    """Messages along edges, summed by segment."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, WIDTH, rngs=rngs)
        self.message = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, nodes, source, target):
        def one(x, source, target):
            x = nnx.relu(self.embed(x))
            sent = nnx.relu(self.message(jnp.concatenate([x[source], x[target]], -1)))
            x = x + jax.ops.segment_sum(sent, target, num_segments=NODES)
            return self.head(x.mean(0))[0]

        return jax.vmap(one)(nodes, source, target)


def graph_error(model, batch):
    return (model(batch["nodes"], batch["from"], batch["to"]) - batch["label"]) ** 2


class ActorCritic(nn.Module):
    """Two heads: the loss of one reads the other."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16, name="trunk")(x))
        return nn.Dense(3, name="actor")(x), nn.Dense(1, name="critic")(x)[:, 0]


def advantage(model, batch):
    logits, value = model(batch["seen"])
    surprise = batch["gain"] - value
    policy = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(policy, batch["action"][:, None], 1)[:, 0]
    entropy = -(jnp.exp(policy) * policy).sum(-1)
    losses = -taken * jax.lax.stop_gradient(surprise) + 0.5 * surprise**2 - 0.01 * entropy
    weights = 1.0 - batch["gone"]
    return losses, weights, {"entropy": entropy}


class Methods(nn.Module):
    """`setup`, and methods that a loss calls by name."""

    def setup(self):
        self.inward = nn.Dense(16)
        self.outward = nn.Dense(6)

    def encode(self, x):
        return nn.gelu(self.inward(x))

    def decode(self, z):
        return self.outward(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


def coded(model, batch):
    z = model.encode(batch["seen"])
    return ((model.decode(z) - batch["seen"]) ** 2).mean(-1) + 1e-3 * jnp.abs(z).mean(-1)


class Branching(nnx.Module):
    """A branch by the data, and an early stop by a `while` without gradient."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(6, 6, rngs=rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x):
        def one(x):
            num = jax.lax.while_loop(lambda n: n * n < jnp.abs(x).sum(), lambda n: n + 1, 0)
            y = jax.lax.cond(x[0] > 0, jnp.tanh, jnp.sin, self.layer(x))
            return y / (1 + num)

        return self.head(jax.vmap(one)(x))[:, 0]


def value_error(model, batch):
    return (model(batch["seen"]) - batch["gain"]) ** 2


ROWS = {
    "graph": Row(
        make=lambda: GraphNet(nnx.Rngs(0)), loss=graph_error, data=GRAPHS, cut=["message/"]
    ),
    "actor-critic": Row(
        make=ActorCritic,
        loss=advantage,
        data=STEPS_OF_PLAY,
        inputs=lambda batch: (batch["seen"],),
        cut=["trunk/"],
    ),
    "linen methods": Row(
        make=Methods,
        loss=coded,
        data=STEPS_OF_PLAY,
        inputs=lambda batch: (batch["seen"],),
        cut=["inward/"],
    ),
    "branches": Row(
        make=lambda: Branching(nnx.Rngs(0)), loss=value_error, data=STEPS_OF_PLAY, cut=["layer/"]
    ),
}
