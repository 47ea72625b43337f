"""Train a GPT that fits on no single device, without a line of annotation: Whale's Example 3.

    hxla run --mesh cpu-2-small examples/05_auto.py

`plan="auto"` times the model's parts and the links of the present devices. It searches over
replicas, stages, tensor parallelism, recomputation and microbatch sizes, runs the fastest plan, and
lists the next ones. Here whole state fits on no device. So one replica is sharded over both, or two
replicas shard their state, whichever is predicted to be faster. On devices with more memory the
same script trains a replica on each. `hxla plan` searches for other devices:

    hxla profile --mesh cpu-1.0-0.33 --write runs/gpt.json examples/05_auto.py
    hxla plan --mesh cpu-1.0-0.33 --profile runs/gpt.json --write runs/plan.json examples/05_auto.py
    hxla run --plan runs/plan.json examples/05_auto.py
    hxla plan --mesh whale-8v100-8p100 --compare whale-4v100-4p100 examples/05_auto.py
"""

import argparse

import gpt
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

job = hxla.Job(gpt.GPT(nnx.Rngs(0)), gpt.library(), gpt.loss, optax.adamw(1e-3), batch_size=16)
result = hxla.train(job, microbatch_size=4, steps=args.steps, plan="auto")
losses = [step.loss for step in result.history.steps]
print(f"{len(result.plan.counts)} replicas, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
