"""What benchmarks/prediction.py profiles, plans and trains: one of a few small models.

    python benchmarks/prediction_script.py FOLDER MODEL [--turns N --chunk N]

With the folder of its turns, and not `none`, it takes a turn after its first step and after each
chunk of steps from there on.
Within a chunk nothing waits: steps follow one another as in any training. With `--stages` the model
is a pipeline, with `--tensor` it is split, both as in benchmarks/prediction_forms.py.
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import bert  # noqa: E402
import gpt  # noqa: E402
from convnet import ConvNet  # noqa: E402
from turns import take_turn  # noqa: E402

import hxla  # noqa: E402

MICROBATCH_SIZE = 4


def conv_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])


def images():
    """Digits, eight times enlarged."""
    from sklearn.datasets import load_digits  # seconds on a third of a core, for one model only

    digits = load_digits()
    return {
        "image": np.repeat(np.repeat(digits.images[..., None] / 16, 8, 1), 8, 2).astype(np.float32),
        "label": digits.target.astype(np.int32),
    }


parser = argparse.ArgumentParser()
parser.add_argument("folder", help="of the turns, or `none`")
parser.add_argument("model", choices=["gpt", "bert", "conv", "wide"])
parser.add_argument("--turns", type=int, default=0)
parser.add_argument("--chunk", type=int, default=1, help="steps of a turn")
parser.add_argument("--stages", help="of a pipeline: their number, or shares such as 1,1")
parser.add_argument("--tensor", help="a split: the number of devices, or parts such as 2,1")
args = parser.parse_args()
model, data, loss = {
    "gpt": lambda: (gpt.GPT(nnx.Rngs(0), width=192, layers=3), gpt.library(), gpt.loss),
    "bert": lambda: (bert.Bert(nnx.Rngs(0), width=128, layers=3), gpt.library(), bert.loss),
    "wide": lambda: (gpt.GPT(nnx.Rngs(0), width=1024, heads=16, layers=1), gpt.library(), gpt.loss),
    "conv": lambda: (ConvNet([1, 32, 64, 64, 128], nnx.Rngs(0)), images(), conv_loss),
}[args.model]()


def numbers(text):
    """A number, or several as a tuple."""
    found = tuple(map(int, text.split(",")))
    return found if len(found) > 1 else found[0]


def wait_for_turn(record, session):
    if args.folder != "none" and record.step % args.chunk == 1 % args.chunk:
        take_turn(args.folder, jax.process_index())


form = {}
if args.stages:
    form = {"stages": numbers(args.stages)}
if args.tensor:
    form = {"mesh": {"data": 1, "tensor": numbers(args.tensor)}, "rules": "decoder"}
batch_size = (4 if args.model == "wide" else 16) * MICROBATCH_SIZE
result = hxla.train(
    hxla.Job(model, data, loss, optax.adamw(1e-3), batch_size=batch_size),
    microbatch_size=MICROBATCH_SIZE,
    steps=1 + args.turns * args.chunk,
    callbacks=[wait_for_turn],
    **form,
)
if jax.process_index() == 0:
    # The first step of a chunk contains the time that it waited for its turn.
    steps = [s for s in result.history.steps if s.step % args.chunk != 2 % args.chunk]
    told = {
        "counts": result.plan.counts,
        "predicted_seconds": result.plan.prediction.step_seconds,
        "reasons": result.plan.reasons,
        "plan": result.plan.to_json(),
        "seconds": [s.seconds for s in steps if s.step > 1],
        "busy_seconds": [s.busy_seconds for s in steps if s.step > 1],
        "memory_bytes": {d.rank: d.memory_bytes for d in result.plan.prediction.devices},
    }
    print("RESULT " + json.dumps(told))
