"""Small models and data that several tests train."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla

VOCABULARY, WIDTH, LENGTH = 32, 16, 12


def mesh(**axes):
    """The first fake devices as a mesh with these axes."""
    num = math.prod(axes.values())
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        devices=jax.devices()[:num],
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    )


class NnxNet(nnx.Module):
    """Attention, dropout and BatchNorm: what makes bits depend on the spread elsewhere."""

    def __init__(self, rngs: nnx.Rngs, heads: int = 2):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, WIDTH, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.dropout(self.attention(self.norm(x)))
        return self.out(x)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        y = nn.BatchNorm(use_running_average=not train)(x)
        y = nn.MultiHeadDotProductAttention(2)(y)
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        return nn.Dense(VOCABULARY)(x)


class SplitLayers(nn.Module):
    """Layers in a scan, each with a split inside."""

    layers: int
    outputs: int
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                with hxla.split():
                    y = nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(4 * WIDTH)(x)))
                return x + y, None

        scan = nn.scan(
            nn.remat(Layer) if self.remat else Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        return nn.Dense(self.outputs)(scan(name="layers")(x, None)[0])


def token_loss(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def tokens(num=256):
    """Sequences with structure to learn: each token follows from the one before, with noise."""
    rng = np.random.default_rng(0)
    out = np.zeros((num, LENGTH + 1), np.int32)
    out[:, 0] = rng.integers(0, VOCABULARY, num)
    for t in range(LENGTH):
        noise = rng.random(num) < 0.1
        step = (out[:, t] * 5 + 3) % VOCABULARY
        out[:, t + 1] = np.where(noise, rng.integers(0, VOCABULARY, num), step)
    return {"tokens": out}


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, inputs=6, outputs=3):
        self.layer = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def regression(num=96, inputs=6, outputs=3):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(num, inputs)).astype(np.float32)
    w = rng.normal(size=(inputs, outputs)).astype(np.float32)
    return {"x": x, "y": np.asarray(jnp.tanh(x @ w)), "mask": rng.random(num) < 0.6}


class Layers(nnx.Module):
    """So many layers of one size with residuals; a number for each example."""

    def __init__(self, rngs, num, width=6):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(num)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x.sum(1)


def squared_error(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


class Blocks(nnx.Module):
    """Dense layers of one width over tokens, to be cut into stages."""

    def __init__(self, rngs, width, num):
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(num)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return x


def mean_square(model, batch):
    return (model(batch["x"]) ** 2).mean((1, 2))
