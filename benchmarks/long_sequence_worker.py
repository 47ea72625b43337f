"""Trains a decoder of long texts in turns of a step, over devices that share tokens or heads."""

import argparse
import json
import pathlib
import sys

import jax

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from gpt import GPT, library  # noqa: E402
from turns import take_turn  # noqa: E402

import hxla  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--axis", choices=["sequence", "tensor"], required=True)
parser.add_argument("--shares", help="of the devices, 1,1; none: by their speeds")
parser.add_argument("--length", type=int, required=True)
args = parser.parse_args()


def next_byte(model, batch):
    """Nats of each byte, [examples, tokens]."""
    text = batch["text"].astype(jnp.int32)
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])


job = hxla.Job(
    GPT(nnx.Rngs(0), length=args.length, width=128, heads=4, layers=1),
    library(args.length),
    next_byte,
    optax.adamw(1e-3),
    batch_size=2,
)
shares = tuple(map(int, args.shares.split(","))) if args.shares else 2
plan = job.plan(
    microbatch_size=1,
    mesh={args.axis: shares},
    rules="decoder" if args.axis == "tensor" else None,
)
with job.open(plan, steps=args.turns + 1) as session:
    for _ in session:
        take_turn(args.folder, jax.process_index())
    history = session.result().history
if jax.process_index() == 0:
    told = {
        "losses": [round(step.loss, 4) for step in history.steps],
        "shares": plan.axes[0].shares,
        "sent_bytes": plan.prediction.sent_bytes if plan.prediction is not None else 0,
        "worked": [round(s / history.split.step_seconds, 3) for s in history.split.work_seconds]
        if history.split
        else [],
    }
    print("RESULT " + json.dumps(told))
