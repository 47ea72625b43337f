"""Models at their published sizes, as shapes only: scripts for `hxla plan`, see plans.py.

    hxla plan --mesh whale-8v100-8p100 benchmarks/plan_script.py BERT-Large

Sizes are those of the papers that the examples' docstrings name; the decoders are those of GPT-3
(Brown et al., 2020, table 2.1) with the embedding tied. Nothing is ever computed, so the data are
zeros without storage.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import bert
import gpt
import lstm
import resnet
import t5
import vit

import hxla

Job = tuple[Callable[[], nnx.Module], Callable, dict[str, np.ndarray], int]


class ResNet(resnet.ResNet):
    """Without the example's annotations, which would say how it is planned."""

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def zeros(*shape: int, kind: Any = np.int32) -> np.ndarray:
    """Of a shape, without storage."""
    return np.broadcast_to(np.zeros((), kind), shape)


def images(batch_size: int) -> dict[str, np.ndarray]:
    """Of ImageNet's size."""
    return {"image": zeros(batch_size, 224, 224, 3, kind=np.float32), "label": zeros(batch_size)}


def decoder(batch_size: int, **size: int) -> Job:
    """A GPT over sequences of 2,048 tokens."""

    def make() -> nnx.Module:
        return gpt.GPT(nnx.Rngs(0), vocabulary=50304, length=2048, **size)

    return make, gpt.loss, {"text": zeros(batch_size, 2049)}, batch_size


# Constructor, loss, data, examples of a global batch.
JOBS: dict[str, Job] = {
    "ResNet-50": (
        lambda: ResNet((3, 4, 6, 3), 64, 3, 1000, nnx.Rngs(0)),
        resnet.loss,
        images(1024),
        1024,
    ),
    "BERT-Large": (
        lambda: bert.Bert(
            nnx.Rngs(0), vocabulary=30522, length=512, width=1024, heads=16, layers=24
        ),
        bert.loss,
        {"text": zeros(512, 128)},
        512,
    ),
    "GNMT": (
        lambda: lstm.Translator(nnx.Rngs(0), vocabulary=32000, width=1024, layers=8),
        lstm.loss,
        {"source": zeros(1024, 50), "target": zeros(1024, 50)},
        1024,
    ),
    "T5-Large": (
        lambda: t5.T5(nnx.Rngs(0), vocabulary=32128, width=1024, hidden=4096, heads=16, layers=24),
        t5.loss,
        {"source": zeros(256, 512), "target": zeros(256, 128)},
        256,
    ),
    "GPT-1.3e9": decoder(256, width=2048, heads=16, layers=24),
    "GPT-13e9": decoder(256, width=5120, heads=40, layers=40),
    "ViT-Large": (
        lambda: vit.VisionTransformer(
            nnx.Rngs(0),
            image=224,
            channels=3,
            patch=16,
            classes=1000,
            width=1024,
            hidden=4096,
            heads=16,
            layers=24,
        ),
        vit.loss,
        images(1024),
        1024,
    ),
}


def main() -> None:
    """Train the model that is asked for, or let `hxla plan` see that it would be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=list(JOBS))
    make, loss, data, batch_size = JOBS[parser.parse_args().model]
    model = nnx.eval_shape(make)
    hxla.train(hxla.Job(model, data, loss, optax.adamw(1e-4), batch_size=batch_size), steps=1)


if __name__ == "__main__":
    main()
