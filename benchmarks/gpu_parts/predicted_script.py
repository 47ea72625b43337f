"""What prediction.py measures, plans and trains."""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))

import gpt
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--dry", action="store_true")
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
width, layers, size = (32, 1, 2) if args.dry else (768, 8, 32)
result = hxla.train(
    gpt.GPT(nnx.Rngs(0), width=width, heads=8, layers=layers),
    gpt.library(),
    gpt.loss,
    optax.adamw(1e-3),
    batch_size=8 * size,
    microbatch_size=size,
    steps=6 if args.dry else 40,
)
seconds = [step.seconds for step in result.history.steps]
if args.out is not None:
    told = {"seconds": seconds, "memory_bytes": result.plan.prediction.devices[0].memory_bytes}
    args.out.write_text(json.dumps(told))
