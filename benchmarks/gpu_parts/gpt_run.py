"""One contender of gpt_speed.py or precision.py: hxla, or plain Flax under `jax.jit`, on one GPT.

    python gpt_run.py {exact,float,plain,fp32,bf16,fp16} --size 124m --micro 8 --turns F ...

`exact`, `float` and `plain` have the same arithmetic: parameters in float32, the model cast to
bfloat16, logits in float32. The others are the model as it is by a `precision` of hxla.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import gpu_jobs
import jax
import numpy as np
from flax import nnx
from turns import turns_of_steps

import hxla

PRECISIONS = ("fp32", "bf16", "fp16")
parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["exact", "float", "plain", *PRECISIONS])
parser.add_argument("--size", choices=gpu_jobs.SIZES, required=True)
parser.add_argument("--attention", choices=["fused", "unfused"], default="unfused")
parser.add_argument("--micro", type=int, required=True, help="sequences of a microbatch")
parser.add_argument("--memory", type=json.loads, default={}, help="that setting of hxla, as JSON")
parser.add_argument("--turns", required=True)
parser.add_argument("--rounds", type=int, required=True)
parser.add_argument("--steps", type=int, required=True, help="of a turn")
parser.add_argument("--out", type=pathlib.Path, required=True)
args = parser.parse_args()
size = gpu_jobs.SIZES[args.size]
if args.attention == "fused":
    size = dataclasses.replace(size, block=gpu_jobs.FusedBlock)
num, text, optimizer = size.num_microbatches, size.text(), gpu_jobs.gpt_optimizer()


def batch(n):
    rows = np.arange(n * num * args.micro, (n + 1) * num * args.micro) % len(text)
    return {"text": text[rows]}


told, ends = {}, []  # what is told, and what tells more of it after the last turn


def wait(state):
    jax.block_until_ready(jax.tree.leaves(state))


def ours():
    """A step, and a wait until all is done."""
    of, batch_size, reduction = size, num * args.micro, args.kind
    config = {"memory": args.memory}
    if args.kind in PRECISIONS:
        of, reduction = dataclasses.replace(size, dtype="float32"), "exact"
        config |= {"precision": args.kind}
    job = hxla.Job(
        of.make(), {"text": text}, of.loss, optimizer, batch_size=batch_size, config=config
    )
    session = job.open(job.plan(microbatch_size=args.micro, reduction=reduction))
    told["numerics"] = session.plan.numerics

    def end():
        told["memory_bytes"], told["sha256"] = (
            session.running_plan.memory_bytes,
            session.result().sha256,
        )

    ends.append(end)
    return lambda n: session.step(batch(n)).loss, lambda: wait(jax.live_arrays())


def plain():
    """A step, and a wait until all is done."""
    graphdef, params, rest = nnx.split(size.make(), nnx.Param, ...)
    state = [params, optimizer.init(params)]
    run = gpu_jobs.scanned(graphdef, rest, size.loss, optimizer)
    last = []

    def step(n):
        last[:] = [float(x) for x in last]  # the loss of the step before, as one prints it
        found, *state[:] = run(*state, gpu_jobs.stacked(batch(n), num))
        last.append(found)
        return found

    return step, lambda: wait(state)


taken = turns_of_steps(
    plain if args.kind == "plain" else ours,
    args.turns,
    num_turns=args.rounds,
    num_steps=args.steps,
)
told |= taken | {
    "tokens_per_step": num * args.micro * size.length,
    "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
}
for end in ends:
    end()
args.out.write_text(json.dumps(told))
