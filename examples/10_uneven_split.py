"""Shard one model over a fast device and a slow one, each with a shard that suits its speed.

    hxla run --mesh cpu-1.0-0.5 examples/10_uneven_split.py
    hxla plan --mesh workstation-3090-4090 examples/10_uneven_split.py

The first command trains on a whole core beside half of one: about two thirds of the heads and
columns are on the first. The second plans the same for a 3090 beside a 4090, without these cards.
`mesh=` and `rules=` ask for the split; `"tensor": (2, 1)` would set the ratio, and `(1, 1)` would
make even shards.
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
