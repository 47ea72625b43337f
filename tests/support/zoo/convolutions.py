"""Pictures: convolutions, BatchNorm, skips, patches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .row import BATCH, Row

_RNG = np.random.default_rng(0)
SIDE = 8
PICTURES = {
    "image": _RNG.normal(size=(2 * BATCH, SIDE, SIDE, 3)).astype(np.float32),
    "label": _RNG.integers(0, 4, 2 * BATCH).astype(np.int32),
}


def classify(model, batch):
    """Flax's own examples: the mean over the batch, and the accuracy beside it."""
    logits = model(batch["image"])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return value, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


class NnxCnn(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.linear = nnx.Linear(8 * 4, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), (2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


class LinenCnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(4)(x.reshape((x.shape[0], -1)))


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.conv = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.norm(self.conv(x)))


class NnxResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class LinenResNet(nn.Module):
    """`train` is an argument, as in Flax's ImageNet example."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), strides=(2, 2))(x)
        for _ in range(2):
            y = nn.Conv(8, (3, 3), use_bias=False)(x)
            x = x + nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        return nn.Dense(4)(x.mean((1, 2)))


class UNet(nnx.Module):
    """Down, up, and a skip across."""

    def __init__(self, rngs):
        self.down1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.down2 = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.up = nnx.ConvTranspose(16, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.out = nnx.Conv(16, 3, (1, 1), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=4, rngs=rngs)

    def __call__(self, x):
        skip = nnx.gelu(self.norm(self.down1(x)))
        x = self.up(nnx.gelu(self.down2(skip)))
        return self.out(jnp.concatenate([x, skip], -1))


def restore(model, batch):
    """Per-pixel losses: the mean over everything."""
    return ((model(batch["image"]) - batch["image"][:, ::-1]) ** 2).mean((1, 2, 3))


class Mixer(nn.Module):
    """Patches, and two MLPs by turns."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (4, 4), strides=(4, 4), name="stem")(x)
        x = x.reshape(x.shape[0], -1, 8)
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(4, name="tokens_out")(nn.gelu(nn.Dense(16, name="tokens")(y)))
        x = x + y.swapaxes(1, 2)
        y = nn.LayerNorm()(x)
        x = x + nn.Dense(8, name="channels_out")(nn.gelu(nn.Dense(16, name="channels")(y)))
        return nn.Dense(4, name="head", kernel_init=nn.initializers.normal(0.1))(x.mean(1))


class Ensemble(nnx.Module):
    """Members made and run by `nnx.vmap`."""

    def __init__(self):
        make = nnx.vmap(lambda key: nnx.Linear(SIDE * SIDE * 3, 4, rngs=nnx.Rngs(key)))
        self.members = make(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x):
        run = nnx.vmap(lambda member, x: member(x), in_axes=(0, None))
        return run(self.members, x.reshape(x.shape[0], -1)).mean(0)


def image(batch):
    return (batch["image"],)


ROWS = {
    "cnn": Row(make=lambda: NnxCnn(nnx.Rngs(0)), loss=classify, data=PICTURES, cut=["conv1/"]),
    "linen cnn": Row(make=LinenCnn, loss=classify, data=PICTURES, inputs=image, cut=["Conv_0/"]),
    "resnet": Row(
        make=lambda: NnxResNet(nnx.Rngs(0)),
        loss=classify,
        data=PICTURES,
        by_microbatch=True,
        cut=["blocks/0/conv/"],
    ),
    "linen resnet": Row(
        make=LinenResNet,
        loss=classify,
        data=PICTURES,
        inputs=image,
        by_microbatch=True,
        cut=["Conv_1/"],
    ),
    "u-net": Row(make=lambda: UNet(nnx.Rngs(0)), loss=restore, data=PICTURES, cut=["down2/"]),
    "mixer": Row(make=Mixer, loss=classify, data=PICTURES, inputs=image, cut=["channels/"]),
    "ensemble": Row(
        make=Ensemble,
        loss=classify,
        data=PICTURES,
        chain="one vmapped layer",
        cut=["members/"],
    ),
}
