"""Jobs whose copies share their state: ZeRO's stages 1 to 3."""

import jax.numpy as jnp
import optax
from flax import nnx

import hxla
from support.blocks import Layers, job

WIDTH = 32


class Block(nnx.Module):
    """One matrix, and what is drawn anew for each microbatch."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.up(x)))


class Few(nnx.Module):
    """`support.blocks.Layers` with few parameters, so that its programs are compiled soon."""

    def __init__(self, rngs, num=2):
        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(num)])
        self.unused = nnx.Param(jnp.ones(3))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def cluster(num, **known):
    return hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", **known),) * num)


def planned(own, num, counts=None, **known):
    plan = own.plan(
        cluster(num, **known),
        auto=False,
        microbatch_size=1,
        mesh={"data": num},
        counts="even",
    )
    return plan if counts is None else plan.with_counts(counts)


def shared(stage, model=Layers, optimizer=None, clip=None, over=None, **memory):
    memory = {"zero": stage, "recompute": "boundaries"} | memory
    config = {"memory": memory, "communication": {"clip_norm": clip, "over": over}}
    return job(model, config, optimizer or optax.adamw(1e-2))
