"""Train a GPT that fits on no single device, without a line of annotation: Whale's Example 3.

    hxla run --mesh cpu-2-small examples/05_auto.py

`plan="auto"` times the model's parts on the devices that are here, searches over copies, stages,
tensor parallelism, recomputation and microbatch sizes, runs the best plan that it finds, and says
which come next. Here whole state fits no device, so a copy is cut over both, or two copies share
their state, whichever is faster by what was measured; on devices with more memory the same script
trains one copy on each. `hxla plan` searches for devices that are not here:

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
print(f"{len(result.plan.counts)} copies, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
