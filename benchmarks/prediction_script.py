"""What benchmarks/prediction.py profiles, plans and trains: one of three small models."""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import bert
import gpt

import hxla
from hxla._train import _dry
from hxla._train._step import Engine


class Conv(nnx.Module):
    """Four convolutions of digits, eight times enlarged."""

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
parser.add_argument("--folder", type=pathlib.Path, help="profile, wait for a split, run, profile")
args = parser.parse_args()

MICROBATCH_SIZE = 4


def images():
    from sklearn.datasets import load_digits  # seconds on a third of a core, for one model only

    digits = load_digits()
    return {
        "image": np.repeat(np.repeat(digits.images[..., None] / 16, 8, 1), 8, 2).astype(np.float32),
        "label": digits.target.astype(np.int32),
    }


model, data, loss = {
    "gpt": lambda: (gpt.GPT(nnx.Rngs(0), width=192, layers=3), gpt.library(), gpt.loss),
    "bert": lambda: (bert.Bert(nnx.Rngs(0), width=128, layers=3), gpt.library(), bert.loss),
    "conv": lambda: (Conv(nnx.Rngs(0)), images(), conv_loss),
}[args.model]()


def train(**options):
    return hxla.train(
        model,
        data,
        loss,
        optax.adamw(1e-3),
        batch_size=16 * MICROBATCH_SIZE,
        microbatch_size=MICROBATCH_SIZE,
        **options,
    )


def profile(name):
    """What `hxla profile` does, in a process that is there already."""
    request = _dry.ProfileRequest(file=str(args.folder / name), num_segments=1)
    os.environ[_dry.VARIABLE] = request.model_dump_json()
    with contextlib.suppress(SystemExit):
        train(steps=1)
    del os.environ[_dry.VARIABLE]


if args.folder is None:
    train(steps=1)
    sys.exit()
profile("before.json")
while not (args.folder / "split.json").exists():
    time.sleep(0.05)
options = json.loads((args.folder / "split.json").read_text())
engines = []
close = Engine.close
# Only the engine knows the programs that a run compiled.
Engine.close = lambda engine: (engines.append(engine), close(engine))
result = train(**options)
Engine.close = close
if jax.process_index() == 0:
    [engine] = engines
    steps = result.history.steps
    batch = sum(x[:MICROBATCH_SIZE].nbytes for x in data.values())
    held = engine.memory_bytes()  # the same on every device: they hold the same programs
    summary = {
        "seconds": [s.seconds for s in steps],
        "busy_seconds": [s.busy_seconds for s in steps],
        "compiled_bytes": [held + count * batch for count in steps[-1].counts],
    }
    (args.folder / "run.json").write_text(json.dumps(summary))
profile("after.json")
