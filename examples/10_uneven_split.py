"""Shard one model over a fast device and a slow one, each with a shard that suits its speed.

    hxla run --mesh cpu-1.0-0.5 examples/10_uneven_split.py
    hxla plan --mesh workstation-3090-4090 examples/10_uneven_split.py

The first line trains on a whole core beside half of one: two thirds of the heads and columns lie on
the first. The second plans the same for a small card beside a large one, which need not be here.
What is said of the split are the two lines `mesh=` and `rules=`; `"tensor": (2, 1)` would state the
ratio, and `"tensor": (1, 1)` even parts.
"""

import argparse

import optax
from flax import nnx
from gpt import GPT, library, loss

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

job = hxla.Job(
    GPT(nnx.Rngs(0), heads=12, width=192, layers=2),
    library(),
    loss,
    optax.adamw(2e-3),
    batch_size=16,
)
result = hxla.train(
    job, microbatch_size=4, steps=args.steps, mesh={"data": 1, "tensor": 2}, rules="decoder"
)
print(result.plan.explain())
