"""Train the byte-level GPT on all present devices.

python examples/train_gpt.py                             one device
hxla run --mesh cpu-1.0-0.33 examples/train_gpt.py       two unequal processes
srun hxla run examples/train_gpt.py                      a Slurm job, one task per accelerator
"""

import argparse
import json
import pathlib

import jax
import optax
from flax import nnx
from gpt import GPT, library, loss, write

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--counts", default="measured", help="measured, even, or counts such as 9,3")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--microbatch-size", type=int, default=2)
parser.add_argument("--stages", type=int, help="cut the model into a pipeline")
parser.add_argument("--reduction", default="exact")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--run-dir")
parser.add_argument("--checkpoint-dir")
parser.add_argument("--checkpoint-every", type=int)
parser.add_argument("--summary", help="write a few figures of the run to this JSON file")
parser.add_argument("--sample", type=int, default=0, help="bytes to write after training")
args = parser.parse_args()
counts = [int(c) for c in args.counts.split(",")] if "," in args.counts else args.counts

job = hxla.Job(
    GPT(nnx.Rngs(0), dropout=args.dropout),
    library(),
    loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3)),
    batch_size=args.batch_size,
)
result = hxla.train(
    job,
    microbatch_size=args.microbatch_size or None,
    steps=args.steps,
    stages=args.stages,
    counts=counts,
    reduction=args.reduction,
    run_dir=args.run_dir,
    checkpoint_dir=args.checkpoint_dir,
    checkpoint_every=args.checkpoint_every,
)

if jax.process_index() == 0:
    print("sha256", result.sha256)
    if args.sample:
        print(write(result.model, "def ", args.sample))
    if args.summary:
        history = result.history
        summary = {
            "sha256": result.sha256,
            "loss": [s.loss for s in history.steps],
            "seconds": [s.seconds for s in history.steps],
            "counts": [s.counts for s in history.steps],
            "busy_seconds": [s.busy_seconds for s in history.steps],
            "tokens_per_step": args.batch_size * 128,
            "num_compilations": history.num_compilations,
        }
        pathlib.Path(args.summary).write_text(json.dumps(summary))
