"""A GPT that fits no single device, without a line of annotation: Whale's Example 3.

    hxla run --mesh cpu-2-small examples/05_auto.py

`auto_parallel` measures nothing and asks nothing: it traces the model, adds up what a copy keeps,
and cuts it over as few devices as hold it; which dimensions are cut is the choice of least
communication. On devices with more memory the same script trains one copy on each.

    hxla profile --mesh cpu-1.0-0.33 --write runs/gpt.json examples/05_auto.py
    hxla plan --mesh cpu-1.0-0.33 --profile runs/gpt.json --write runs/plan examples/05_auto.py
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

result = hxla.train(
    gpt.GPT(nnx.Rngs(0)),
    gpt.library(),
    gpt.loss,
    optax.adamw(1e-3),
    batch_size=16,
    microbatch_size=4,
    steps=args.steps,
    config={"auto": {"auto_parallel": True}},
)
for reason in result.plan.reasons:
    print(reason)
losses = [step.loss for step in result.history.steps]
print(f"{len(result.plan.counts)} copies, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
