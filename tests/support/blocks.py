"""A small model of equal layers, as modules and as one scan, and jobs that train it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla

WIDTH, BATCH, STEPS = 16, 8, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Layers(nnx.Module):
    """An embedding that is the output layer too, and blocks between."""

    def __init__(self, rngs, num=4):
        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(num)])
        self.unused = nnx.Param(jnp.ones(3))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Scanned(nnx.Module):
    """The same as one scan, whose last layers run first, with an input for each."""

    def __init__(self, rngs, num=4):
        @nnx.split_rngs(splits=num)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.blocks = make(rngs)
        self.num = num

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry, reverse=True)
        def run(x, block, scale):
            return block(x) * scale

        scales = 1 + jnp.arange(self.num) / 10
        return self.embed.attend(run(self.embed(tokens), self.blocks, scales))


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


def data():
    tokens = np.random.default_rng(0).integers(0, 11, (BATCH * STEPS, 7))
    return {"tokens": tokens.astype(np.int32)}


def job(model=Layers, config=None, optimizer=None):
    optimizer = optimizer or optax.sgd(0.5)
    return hxla.Job(
        lambda: model(nnx.Rngs(0)), data(), loss, optimizer, batch_size=BATCH, config=config or {}
    )


ONE = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),))


def planned(own, size=2, cluster=ONE, **arguments):
    return own.plan(cluster, auto=False, microbatch_size=size, **arguments)


def trained(own, plan=None, steps=STEPS):
    with own.open(plan or planned(own), steps=steps) as session:
        losses = [record.loss for record in session]
        return losses, jax.tree.map(np.asarray, session.state.params), session.result().sha256
