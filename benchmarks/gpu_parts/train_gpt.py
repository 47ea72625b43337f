"""Trains a small GPT and says what came of it: what same_bits.py runs, and prediction.py plans."""

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

NUM = 8  # microbatches of a step
parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--counts", type=int, nargs="+", help="microbatches of each replica")
parser.add_argument("--reduction", default="exact")
parser.add_argument("--order", choices=["forward", "backward"], help="of a step's microbatches")
parser.add_argument("--checkpoint-dir")
parser.add_argument("--join", help="rank and port of one of two processes")
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
width, layers, size = (32, 1, 2) if args.tiny else (512, 4, 16)
if args.join:
    rank, port = map(int, args.join.split(","))
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
text = gpt.library()["text"]


def batches():
    """The text in its order, but for that of the microbatches within a step."""
    for step in range(args.steps):
        rows = text[step * NUM * size : (step + 1) * NUM * size].reshape(NUM, size, -1)
        rows = rows[:: 1 if args.order == "forward" else -1]
        yield {"text": rows.reshape(NUM * size, -1)}


result = hxla.train(
    hxla.Job(
        gpt.GPT(nnx.Rngs(0), dropout=0.0 if args.order else 0.1, width=width, layers=layers),
        batches() if args.order else {"text": text},
        gpt.loss,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        batch_size=NUM * size,
    ),
    microbatch_size=size,
    steps=args.steps,
    counts=args.counts or "even",
    reduction=args.reduction,
    checkpoint_dir=args.checkpoint_dir,
)
if args.out is not None and jax.process_index() == 0:
    told = {
        "sha256": result.sha256,
        "losses": [step.loss for step in result.history.steps],
        "seconds": [step.seconds for step in result.history.steps],
        "counts": result.plan.counts,
        "devices": [f"{d.process_index}: {d.device_kind}" for d in jax.devices()],
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    args.out.write_text(json.dumps(told))
