"""What benchmarks/prediction.py profiles, plans and trains: one of three small models."""

import argparse
import itertools
import json
import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import bert
import gpt
from sklearn.datasets import load_digits

import hxla
from hxla._train._step import Engine


class Conv(nnx.Module):
    """Four convolutions of digits, four times enlarged."""

    def __init__(self, rngs):
        widths = [1, 32, 64, 64, 128]
        self.layers = nnx.List(
            [
                nnx.Conv(i, o, (3, 3), strides=1 + (n > 0), rngs=rngs)
                for n, (i, o) in enumerate(itertools.pairwise(widths))
            ]
        )
        self.out = nnx.Linear(widths[-1], 10, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(x.mean(axis=(1, 2)))


def conv_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["gpt", "bert", "conv"])
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--split", type=lambda text: [int(c) for c in text.split(",")])
parser.add_argument("--microbatch-size", type=int, default=4)
parser.add_argument("--summary", type=pathlib.Path)
args = parser.parse_args()

text = gpt.library()["text"]
digits = load_digits()
images = {
    "image": np.repeat(np.repeat(digits.images[..., None] / 16, 4, 1), 4, 2).astype(np.float32),
    "label": digits.target.astype(np.int32),
}
model, data, loss = {
    "gpt": lambda: (gpt.GPT(nnx.Rngs(0), width=192, layers=3), {"text": text}, gpt.loss),
    "bert": lambda: (bert.Bert(nnx.Rngs(0), width=128, layers=3), {"text": text}, bert.loss),
    "conv": lambda: (Conv(nnx.Rngs(0)), images, conv_loss),
}[args.model]()
engines = []
close = Engine.close


def closed(engine):
    """The programs that a run compiled are known to its engine only."""
    engines.append(engine)
    close(engine)


Engine.close = closed
result = hxla.train(
    model,
    data,
    loss,
    optax.adamw(1e-3),
    batch_size=16 * args.microbatch_size,
    microbatch_size=args.microbatch_size,
    steps=args.steps,
    split=args.split or "measured",
)
if args.summary is not None and jax.process_index() == 0:
    [engine] = engines
    steps = result.history.steps
    batch = sum(x[: args.microbatch_size].nbytes for x in data.values())
    held = engine.memory_bytes()  # the same on every device: they hold the same programs
    summary = {
        "seconds": [s.seconds for s in steps],
        "busy_seconds": [s.busy_seconds for s in steps],
        "compiled_bytes": [held + count * batch for count in steps[-1].counts],
    }
    args.summary.write_text(json.dumps(summary))
