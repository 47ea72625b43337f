"""ResNet (He et al., 2015) with a classifier over many classes, as an ordinary Flax NNX model.

The two scopes are all that hxla adds: Whale's Example 2 (USENIX ATC 2022, section 3.3).
"""

import jax
import numpy as np
import optax
from flax import nnx

import hxla


class Bottleneck(nnx.Module):
    """1x1, 3x3, 1x1 convolutions around a residual."""

    def __init__(self, ins: int, width: int, stride: int, rngs: nnx.Rngs):
        conv = lambda i, o, k, s=1: nnx.Conv(i, o, (k, k), s, use_bias=False, rngs=rngs)  # noqa: E731
        norm = lambda n: nnx.BatchNorm(n, rngs=rngs)  # noqa: E731
        self.conv1, self.norm1 = conv(ins, width, 1), norm(width)
        self.conv2, self.norm2 = conv(width, width, 3, stride), norm(width)
        self.conv3, self.norm3 = conv(width, 4 * width, 1), norm(4 * width)
        self.project = conv(ins, 4 * width, 1, stride) if stride > 1 or ins != 4 * width else None
        self.norm4 = norm(4 * width) if self.project else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (self.norm4(self.project(x)) if self.project else x))


class ResNet(nnx.Module):
    """Blocks per stage and width make the size: (3, 4, 6, 3) and 64 are ResNet-50."""

    def __init__(self, stages: tuple, width: int, channels: int, classes: int, rngs: nnx.Rngs):
        self.stem = nnx.Conv(channels, width, (7, 7), 2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        blocks, ins = [], width
        for stage, num in enumerate(stages):
            for i in range(num):
                stride = 2 if stage and i == 0 else 1
                blocks.append(Bottleneck(ins, width << stage, stride, rngs))
                ins = 4 * (width << stage)
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(ins, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        with hxla.replicate():
            x = nnx.relu(self.norm(self.stem(images)))
            if x.shape[1] > 8:
                x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
            for block in self.blocks:
                x = block(x)
            x = x.mean((1, 2))
        with hxla.split():
            return self.head(x)


def loss(model: ResNet, batch: dict) -> tuple:
    """Cross entropy of each example, and whether the best class is right."""
    logits = model(batch["image"])
    right = logits.argmax(-1) == batch["label"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return values, {"accuracy": right.astype(np.float32)}
