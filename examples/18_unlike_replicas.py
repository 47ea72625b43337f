"""Train a decoder in replicas of unlike depth: one card has it whole, two smaller ones share it.

    hxla run -n 3 examples/18_unlike_replicas.py

Each list is a replica, and each table in it a stage. The microbatches of a step follow the measured
speeds. Wherever a microbatch runs, the parameters end with the same bits.
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
stages = [[{"devices": 1}], [{"devices": 1}, {"devices": 1}]]
result = hxla.train(job, microbatch_size=2, stages=stages, steps=args.steps)
losses = [step.loss for step in result.history.steps]
print(f"microbatches {result.plan.counts}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
