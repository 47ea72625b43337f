"""Scans over layers, cut between their iterations: graphs, slots, training, plans, checkpoints."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla

LAYERS, WIDTH, LENGTH, VOCABULARY = 6, 16, 8, 32


class LinenLayer(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, carry, depth):
        x, total = carry
        y = nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        y = nn.Dropout(self.dropout, deterministic=False)(y)
        return (x + y / (1 + depth), total + y.sum((1, 2))), y.mean()


class LinenNet(nn.Module):
    layers: int = LAYERS
    dropout: float = 0.0
    remat: bool = False
    axis: int = 0
    reverse: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        scan = nn.scan(
            nn.remat(LinenLayer, prevent_cse=False) if self.remat else LinenLayer,
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            in_axes=0,
            length=self.layers,
            reverse=self.reverse,
        )
        depths = jnp.arange(self.layers, dtype=jnp.float32)
        (x, total), means = scan(self.dropout, name="layers")((x, jnp.zeros(len(x))), depths)
        weight = self.param("weight", nn.initializers.ones, (self.layers,))
        return nn.Dense(VOCABULARY)(x), total * 1e-3 + (means * weight).sum()


def loss(model, batch):
    logits, extra = model(batch["tokens"][:, :-1])
    own = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return own.mean(1) + extra**2


def data(num=16, seed=0):
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, VOCABULARY, (num, LENGTH + 1)).astype(np.int32)}


def train(model, stages=None, num=None, *, steps=3, batch_size=8, **options):
    num = num or (stages if isinstance(stages, int) else len(stages or [1]))
    config = {"cluster": {"visible_devices": list(range(num))}} | options.pop("config", {})
    arguments = {
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "batch_size": batch_size,
        "microbatch_size": 2,
        "steps": steps,
        "stages": stages,
        "counts": "even",
        "shuffle": False,
        "config": config,
    }
    return hxla.train(model, data(batch_size * steps), loss, **(arguments | options))


def same(ours, theirs):
    np.testing.assert_allclose(
        [s.loss for s in ours.history.steps], [s.loss for s in theirs.history.steps], rtol=2e-6
    )
    for a, b in zip(jax.tree.leaves(ours.state), jax.tree.leaves(theirs.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize(
    "how", [{}, {"remat": True}, {"axis": 1}, {"reverse": True}, {"dropout": 0.1}]
)
@pytest.mark.parametrize("stages", [2, (2, 1, 1)])
def test_stages_between_iterations_train_as_the_whole(how, stages):
    same(train(LinenNet(**how), stages), train(LinenNet(**how)))


def test_bars_24():
    import time

    for stages in [
        (1, 1),
        (3, 1),
        (1, 1, 1),
        (1, 2, 3),
        (1,) * 4,
        (1, 1, 2, 1),
        (1,) * 8,
        (2,) + (1,) * 7,
    ]:
        for layers in (24,):
            start = time.time()
            r = train(LinenNet(layers=layers), stages, batch_size=16)
            print(
                stages,
                time.time() - start,
                [s.name for s in r.plan.pipeline.segments],
                r.plan.explain(),
            )
            if "whole" not in locals():
                whole = train(LinenNet(layers=layers), batch_size=16)
            same(r, whole)
