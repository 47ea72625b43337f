"""Sequences by recurrence: cells, selective scans, transforms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .row import BATCH, Row

LENGTH, WIDTH = 6, 8
_RNG = np.random.default_rng(2)
SERIES = {
    "x": _RNG.normal(size=(2 * BATCH, LENGTH, 4)).astype(np.float32),
    "y": _RNG.normal(size=(2 * BATCH, 4)).astype(np.float32),
}


def forecast(model, batch):
    return optax.huber_loss(model(batch["x"]), batch["y"]).mean(-1)


class Lstm(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.RNN(nnx.OptimizedLSTMCell(4, WIDTH, rngs=rngs))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.layers(x)[:, -1])


class Gru(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.GRUCell(WIDTH), name="layers")(x)
        return nn.Dense(4, name="head")(x[:, -1])


class Selective(nnx.Module):
    """Mamba: steps, inputs and outputs of a linear recurrence depend on the token."""

    def __init__(self, rngs, states=4):
        self.inward = nnx.Linear(4, 2 * WIDTH, rngs=rngs)
        self.step = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, 2 * states, use_bias=False, rngs=rngs)
        self.decay = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (WIDTH, 1))))
        self.skip = nnx.Param(jnp.ones(WIDTH))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x_BTD, gate_BTD = jnp.split(self.inward(x), 2, -1)
        step_BTD = nnx.softplus(self.step(x_BTD))
        b_BTN, c_BTN = jnp.split(self.mix(x_BTD), 2, -1)
        keep_BTDN = jnp.exp(-step_BTD[..., None] * jnp.exp(self.decay[...]))
        new_BTDN = (step_BTD * x_BTD)[..., None] * b_BTN[:, :, None]

        def combine(a, b):
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, state_BTDN = jax.lax.associative_scan(combine, (keep_BTDN, new_BTDN), axis=1)
        y = (state_BTDN * c_BTN[:, :, None]).sum(-1) + self.skip[...] * x_BTD
        return self.head((y * nnx.silu(gate_BTD))[:, -1])


class Gated(nnx.Module):
    """A recurrence written with `jax.lax.scan` by hand."""

    def __init__(self, rngs):
        self.inward = nnx.Linear(4, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        a, b = jnp.split(self.inward(x), 2, -1)

        def step(h, ab):
            keep = jax.nn.sigmoid(ab[0])
            return keep * h + (1 - keep) * jnp.tanh(ab[1]), None

        first = jnp.zeros((x.shape[0], WIDTH))
        h, _ = jax.lax.scan(step, first, (a.swapaxes(0, 1), b.swapaxes(0, 1)))
        return self.head(h)


class Fourier(nnx.Module):
    """FNet: tokens are mixed by a Fourier transform."""

    def __init__(self, rngs):
        self.inward = nnx.Linear(4, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.inward(x)
        x = self.norm(x + 0.2 * jnp.fft.fft2(x).real)
        return self.head(nnx.gelu(self.up(x)).mean(1))


def series(batch):
    return (batch["x"],)


ROWS = {
    "lstm": Row(
        make=lambda: Lstm(nnx.Rngs(0)), loss=forecast, data=SERIES, chain="one scan", cut=["head/"]
    ),
    "linen gru": Row(
        make=Gru, loss=forecast, data=SERIES, inputs=series, chain="one scan", cut=["head/"]
    ),
    "mamba": Row(make=lambda: Selective(nnx.Rngs(0)), loss=forecast, data=SERIES, cut=["step/"]),
    "lax.scan": Row(make=lambda: Gated(nnx.Rngs(0)), loss=forecast, data=SERIES, cut=["inward/"]),
    "fourier": Row(make=lambda: Fourier(nnx.Rngs(0)), loss=forecast, data=SERIES, cut=["up/"]),
}
