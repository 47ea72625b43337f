"""What benchmarks/regret.py profiles, plans and trains: one of some small models.

    python benchmarks/regret_script.py FOLDER MODEL [--turns N --chunk N] [options of a plan]

It takes a turn after its first step and after each chunk of steps from there on, unless FOLDER is
`none`. Options say what plan is made by rule; without any, hxla makes its default plan.
"""

import argparse
import itertools
import json
import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import gpt  # noqa: E402
import t5  # noqa: E402
from convnet import ConvNet  # noqa: E402
from turns import take_turn  # noqa: E402

import hxla  # noqa: E402


class Mlp(nnx.Module):
    """Three dense layers."""

    def __init__(self, rngs):
        widths = [64, 256, 256, 10]
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(widths)])

    def __call__(self, x):
        *inner, last = self.layers
        for layer in inner:
            x = nnx.relu(layer(x))
        return last(x)


class Lstm(nnx.Module):
    """One layer over the rows of a picture."""

    def __init__(self, rngs):
        self.cell = nnx.RNN(nnx.OptimizedLSTMCell(32, 96, rngs=rngs))
        self.out = nnx.Linear(96, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.cell(x[..., 0])[:, -1])


def pictures(shape):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(512, *shape)).astype(np.float32),
        "label": rng.integers(0, 10, 512).astype(np.int32),
    }


def class_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"])


def texts():
    text = np.random.default_rng(0).integers(1, 256, (512, 33)).astype(np.int32)
    return {"source": text[:, :32], "target": text[:, 1:]}


def decoder(length=gpt.LENGTH, **sizes):
    return gpt.GPT(nnx.Rngs(0), length=length, **sizes), gpt.library(length), gpt.loss


MODELS = {
    "mlp": lambda: (Mlp(nnx.Rngs(0)), pictures((64,)), class_loss, 256),
    "cnn": lambda: (ConvNet([1, 16, 32, 32], nnx.Rngs(0)), pictures((32, 32, 1)), class_loss, 64),
    "gpt": lambda: (*decoder(width=96, heads=4, layers=2), 32),
    "gpt-wide": lambda: (*decoder(width=384, heads=8, layers=1), 16),
    "t5": lambda: (t5.T5(nnx.Rngs(0)), texts(), t5.loss, 32),
    "lstm": lambda: (Lstm(nnx.Rngs(0)), pictures((32, 32, 1)), class_loss, 64),
    "long": lambda: (*decoder(512, width=64, heads=4, layers=2), 16),
    "vocabulary": lambda: (*decoder(width=64, heads=4, layers=1, vocabulary=16384), 16),
}


def numbers(text):
    """A number, or several as a tuple."""
    found = tuple(map(int, text.split(",")))
    return found if len(found) > 1 else found[0]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns, or `none`")
parser.add_argument("model", choices=list(MODELS))
parser.add_argument("--turns", type=int, default=0)
parser.add_argument("--chunk", type=int, default=4, help="steps of a turn")
parser.add_argument("--plan", help="auto")
parser.add_argument("--microbatches", type=int, help="so many in a step")
parser.add_argument("--stages", help="of a pipeline: their number, or shares such as 1,1")
parser.add_argument("--forms", help="of unlike stages, as JSON")
parser.add_argument("--tensor", help="a split by rules: the number of devices, or parts")
parser.add_argument("--counts", help="even")
args = parser.parse_args()
model, data, loss, batch_size = MODELS[args.model]()
form = {}
if args.plan:
    form["plan"] = args.plan
if args.microbatches:
    form["microbatch_size"] = batch_size // args.microbatches
if args.stages:
    form["stages"] = numbers(args.stages)
if args.forms:
    form["stages"] = json.loads(args.forms)
if args.tensor:
    form |= {"mesh": {"data": 1, "tensor": numbers(args.tensor)}, "rules": "decoder"}
if args.counts:
    form["counts"] = args.counts


def wait_for_turn(record, session):
    if args.folder != "none" and record.step % args.chunk == 1 % args.chunk:
        take_turn(args.folder, jax.process_index(), jax.process_count())


result = hxla.train(
    hxla.Job(model, data, loss, optax.adamw(1e-3), batch_size=batch_size),
    steps=1 + args.turns * args.chunk,
    callbacks=[wait_for_turn],
    quiet=True,
    **form,
)
if jax.process_index() == 0:
    # The first step of a chunk contains the time that it waited for its turn.
    steps = [
        s for s in result.history.steps if s.step > 1 and s.step % args.chunk != 2 % args.chunk
    ]
    known = result.plan.prediction
    told = {
        "words": result.plan.explain().splitlines()[0],
        "counts": result.plan.counts,
        "axes": {axis.name: axis.size for axis in result.plan.axes},
        "predicted_seconds": known.step_seconds if known is not None else 0.0,
        "seconds": [s.seconds for s in steps],
    }
    print("RESULT " + json.dumps(told))
