"""Train the deepest GPT that fits in a given memory; the planner chooses what is recomputed.

    python examples/11_memory_limit.py --mib 200

Each layer is a separate program, and the fastest sequence of programs that fits is taken. Forwards
run again only if memory is short. This changes the time, and no bit.
"""

import argparse

import gpt
import jax
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--mib", type=int, default=200)
parser.add_argument("--most-layers", type=int, default=32)
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

memory = hxla.Device(kind="cpu", memory_bytes=args.mib << 20)
device = hxla.Cluster(name="", devices=(memory,))
data = gpt.library()


def job(layers):
    model = lambda: gpt.GPT(nnx.Rngs(0), layers=layers)  # noqa: E731
    config = {"memory": {"recompute": "auto"}}
    return hxla.Job(model, data, gpt.loss, optax.adamw(1e-3), batch_size=16, config=config)


layers, step = 1, args.most_layers
while step := step // 2:
    try:
        plan = job(layers + step).plan(device, auto=False, microbatch_size=8)
    except hxla.PlanError as error:
        print(f"{layers + step} layers: {str(error).split('. ')[0]}")
    else:
        layers += step
        print(f"{layers} layers: {plan.reasons[-1]}")

plan = job(layers).plan(device, auto=False, microbatch_size=8)
with job(layers).open(plan, steps=args.steps) as session:
    *_, record = session
    print(f"{layers} layers, loss {record.loss:.3f}, sha256 {session.result().sha256}")
    num = sum(x.size for x in jax.tree.leaves(session.state.params))
    print(f"{num:,} parameters in {args.mib} MiB")
