"""A small convolutional net, which benchmarks/prediction_script.py and regret_script.py train."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx


class ConvNet(nnx.Module):
    """Convolutions that halve their pictures from the second on, and a linear layer of 10 classes.

    Args:
        widths: Channels of the pictures, and of each convolution.
    """

    def __init__(self, widths: Sequence[int], rngs: nnx.Rngs):
        self.layers = nnx.List(
            [
                nnx.Conv(i, o, (3, 3), strides=1 + (n > 0), rngs=rngs)
                for n, (i, o) in enumerate(itertools.pairwise(widths))
            ]
        )
        self.out = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(x.mean(axis=(1, 2)))
