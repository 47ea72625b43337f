"""Trains a small GPT and prints the SHA-256; one process of one run of same_bits.py."""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))

import gpt
import jax
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--dry", action="store_true")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--counts", default="even")
parser.add_argument("--reduction", default="exact")
parser.add_argument("--checkpoint-dir")
parser.add_argument("--microbatches", type=int, default=8)
args = parser.parse_args()

hxla.join()
counts = [int(c) for c in args.counts.split(",")] if "," in args.counts else args.counts
width, layers, size = (32, 1, 2) if args.dry else (512, 4, 16)
result = hxla.train(
    gpt.GPT(nnx.Rngs(0), dropout=0.1, width=width, layers=layers),
    gpt.library(),
    gpt.loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    batch_size=args.microbatches * size,
    microbatch_size=size,
    steps=args.steps,
    counts=counts,
    reduction=args.reduction,
    checkpoint_dir=args.checkpoint_dir,
)
if jax.process_index() == 0:
    told = {
        "sha256": result.sha256,
        "losses": [step.loss for step in result.history.steps],
        "counts": result.plan.counts,
        "devices": [f"{d.process_index}: {d.device_kind}" for d in jax.devices()],
        "seconds_per_step": [step.seconds for step in result.history.steps][-3:],
    }
    print("TOLD " + json.dumps(told), flush=True)
