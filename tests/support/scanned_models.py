"""Small models whose layers are one scan, and runs of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support.training import train_with

LAYERS, WIDTH, LENGTH, VOCABULARY = 6, 16, 8, 32


class LinenLayer(nn.Module):
    """Carries two arrays, reads its depth beside its parameters, puts out a mean."""

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
    return own.mean(1) + extra


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jax.nn.gelu(self.up(x))))


class NnxNet(nnx.Module):
    def __init__(self, layers=LAYERS):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return NnxLayer(rngs)

        rngs = nnx.Rngs(0, dropout=1)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = make(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(tokens), self.layers)), 0.0


def data(num=16):
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, VOCABULARY, (num, LENGTH + 1)).astype(np.int32)}


def run_plan(model, plan):
    options = {"plan": plan, "counts": None, "microbatch_size": None}
    return train(model, None, len(plan.devices), **options)


def train(model, stages=None, num=None, *, steps=3, batch_size=8, loss=loss, **options):
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
    return train_with(model, data(3 * batch_size), loss, **(arguments | options))


def same(ours, theirs):
    own, other = ({s.step: s.loss for s in r.history.steps} for r in (ours, theirs))
    common = sorted(set(own) & set(other))
    assert common
    np.testing.assert_allclose([own[s] for s in common], [other[s] for s in common], rtol=2e-6)
    assert jax.tree.structure(ours.state) == jax.tree.structure(theirs.state)
    for a, b in zip(jax.tree.leaves(ours.state), jax.tree.leaves(theirs.state), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * max(1.0, np.abs(b).max()))


def job(model, loss=loss):
    return hxla.Job(model, data(24), loss, optax.sgd(0.1), batch_size=8)
