"""Shard the experts of a mixture of experts over the devices, and replicate the rest, as M6 does.

    python examples/03_experts.py

Trains a small model on the sources of Python's library over eight devices (fake ones, on the CPU).
Then plans the model of 100 billion parameters for 128 devices, without computing anything.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from experts import Decoder, Size, loss
from flax import nnx
from gpt import library

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()

job = hxla.Job(
    Decoder(Size(), nnx.Rngs(0)),
    library(),
    loss,
    optax.adam(3e-3),
    batch_size=16,
    default=hxla.replicate(),
)
result = hxla.train(job, microbatch_size=16, steps=args.steps)
history = result.history.steps
print(f"loss {history[0].loss:.2f} -> {history[-1].loss:.2f}\n")

# Lin et al., "M6", 2021: 24 layers, 1,024 wide, 512 experts of 4,096.
size = Size(vocabulary=50_000, model=1024, hidden=4096, heads=16, layers=24, experts=512)
model = nnx.eval_shape(lambda: Decoder(size, nnx.Rngs(0)))
graph = hxla.trace(
    model,
    loss,
    {"text": jax.ShapeDtypeStruct((128, 513), np.int32)},
    default=hxla.replicate(),
)
plan = hxla.make_plan(graph, 128)
print(*plan.explain().splitlines()[:8], "...", sep="\n")
