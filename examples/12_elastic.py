"""Train a GPT while devices come and go, and get the same bits.

    hxla run --elastic --mesh devices.toml examples/12_elastic.py

While it runs, add a `[[device]]` to devices.toml, remove one, or change a `core_share`. Kill one of
its processes, or freeze it. It ends with the SHA-256 of an undisturbed `hxla run -n 1`.
"""

import argparse

import gpt
import jax
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

job = hxla.Job(
    gpt.GPT(nnx.Rngs(0), width=64, layers=2),
    gpt.library(),
    gpt.loss,
    optax.adamw(3e-3),
    batch_size=args.batch_size,
)
result = hxla.train(job, microbatch_size=4, steps=args.steps)
if jax.process_index() == 0:
    print("sha256", result.sha256)
