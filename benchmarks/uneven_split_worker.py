"""Trains a Transformer in turns of a step, split over two devices or whole on one."""

import argparse
import json
import pathlib
import sys

import jax

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

import optax  # noqa: E402
from flax import nnx  # noqa: E402
from gpt import GPT, library, loss  # noqa: E402
from turns import take_turn  # noqa: E402

import hxla  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--shares", help="of the devices of a copy, 1,1; none: by their speeds")
parser.add_argument("--copies", type=int, default=1)
parser.add_argument("--manual", action="store_true", help="equal parts in the form of unlike ones")
parser.add_argument("--whole", action="store_true", help="no split")
args = parser.parse_args()

shares = tuple(map(int, args.shares.split(","))) if args.shares else 2
job = hxla.Job(
    GPT(nnx.Rngs(0), width=768, heads=12, layers=1),
    library(),
    loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3)),
    batch_size=16,
)
if args.whole:
    plan = job.plan(microbatch_size=4)
else:
    axes = {"data": args.copies, "tensor": shares}
    plan = job.plan(microbatch_size=4, mesh=axes, rules="decoder")
if args.manual:
    [axis] = plan.axes
    plan = plan.replaced(axes=(axis.model_copy(update={"shares": (1,) * axis.size}),))
with job.open(plan, steps=args.turns + 1) as session:
    for _ in session:
        take_turn(args.folder, jax.process_index())
    losses = [round(step.loss, 4) for step in session.history.steps]
if jax.process_index() == 0:
    told = {
        "losses": losses,
        "sizes": {p.name: p.sizes for p in plan.parameters if p.sizes and "0" in p.name},
        "device_parameter_bytes": plan.device_parameter_bytes,
    }
    print("RESULT " + json.dumps(told))
