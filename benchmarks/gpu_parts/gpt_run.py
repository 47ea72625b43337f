"""One contender of gpt_speed.py: hxla, or plain Flax under `jax.jit`, on the same GPT.

    python gpt_run.py {exact,float,plain} --size 124m --micro 8 --turns F --rounds N --out FILE

The arithmetic is the same: parameters in float32, the model in bfloat16, logits in float32.
"""

import argparse
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpu_jobs
import jax
import numpy as np
from flax import nnx
from turns import take_turn

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["exact", "float", "plain"])
parser.add_argument("--size", choices=gpu_jobs.SIZES, required=True)
parser.add_argument("--micro", type=int, required=True, help="sequences of a microbatch")
parser.add_argument("--turns", required=True)
parser.add_argument("--rounds", type=int, required=True)
parser.add_argument("--steps", type=int, required=True, help="of a turn")
parser.add_argument("--out", type=pathlib.Path, required=True)
args = parser.parse_args()
size = gpu_jobs.SIZES[args.size]
num, text, optimizer = size.num_microbatches, size.text(), gpu_jobs.gpt_optimizer()


def batch(n):
    rows = np.arange(n * num * args.micro, (n + 1) * num * args.micro) % len(text)
    return {"text": text[rows]}


def ours():
    """A step, and what to wait for."""
    job = hxla.Job(size.make(), {"text": text}, size.loss, optimizer, batch_size=num * args.micro)
    session = job.open(job.plan(microbatch_size=args.micro, reduction=args.kind))
    return lambda n: session.step(batch(n)).loss, lambda: session.state.params


def plain():
    """A step, and what to wait for."""
    graphdef, params, rest = nnx.split(size.make(), nnx.Param, ...)
    state = [params, optimizer.init(params)]
    run = gpu_jobs.scanned(graphdef, rest, size.loss, optimizer)
    last = []

    def step(n):
        last[:] = [float(x) for x in last]  # the loss of the step before, as one prints it
        found, *state[:] = run(*state, gpu_jobs.stacked(batch(n), num))
        last.append(found)
        return found

    return step, lambda: state


begun = time.perf_counter()
step, state = plain() if args.kind == "plain" else ours()
losses = [float(step(0))]
jax.block_until_ready(jax.tree.leaves(state()))
ready, seconds = time.perf_counter() - begun, []
for turn in range(args.rounds):
    take_turn(args.turns, 0)
    begun = time.perf_counter()
    for n in range(args.steps):
        found = step(1 + turn * args.steps + n)
    jax.block_until_ready(jax.tree.leaves(state()))
    seconds.append((time.perf_counter() - begun) / args.steps)
    losses.append(float(found))
told = {
    "seconds_per_step": seconds,
    "tokens_per_step": num * args.micro * size.length,
    "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    "seconds_to_first_step": ready,
    "losses": losses,
}
args.out.write_text(json.dumps(told))
