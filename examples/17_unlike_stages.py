"""Train a decoder in stages of unlike devices: one card alone, and two that share a stage.

    hxla run -n 3 examples/17_unlike_stages.py

The first stage is on one device. The second is on two, which shard its parameters (`tensor`), and
by default it has twice the work. Between steps all three share the state.
"""

import argparse

import gpt
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

job = hxla.Job(gpt.GPT(nnx.Rngs(0)), gpt.library(), gpt.loss, optax.adamw(1e-3), batch_size=32)
stages = [{"devices": 1}, {"tensor": 2}]
result = hxla.train(job, microbatch_size=4, stages=stages, rules="decoder", steps=args.steps)
losses = [step.loss for step in result.history.steps]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
