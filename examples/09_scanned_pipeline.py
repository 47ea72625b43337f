"""Train a decoder with scanned layers in a pipeline, which divides the iterations of the scan.

    hxla run --mesh cpu-1.0-0.5 examples/09_scanned_pipeline.py

The layers' parameters are stacked: `blocks/up/kernel` is of shape (8, 256, 1024). Each process
has and runs some of the eight layers, here about 5 and 3. In the result they are stacked again.
Without `stages` the same script trains a replica on each device.
"""

import argparse

import gpt
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hxla

LAYERS = 8


class ScannedGPT(nnx.Module):
    """The GPT of gpt.py with its blocks stacked and scanned over, as large Flax models are."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> gpt.Block:
            return gpt.Block(rngs, 0.0, gpt.WIDTH, gpt.HEADS)

        self.tok = nnx.Embed(gpt.BYTES, gpt.WIDTH, rngs=rngs)
        self.pos = nnx.Embed(gpt.LENGTH, gpt.WIDTH, rngs=rngs)
        self.blocks = make(rngs)
        self.norm = nnx.LayerNorm(gpt.WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, text_BT: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x_BTD: jax.Array, block: gpt.Block) -> jax.Array:
            return block(x_BTD)

        x_BTD = self.tok(text_BT) + self.pos(jnp.arange(text_BT.shape[1]))
        return self.tok.attend(self.norm(run(x_BTD, self.blocks)))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

job = hxla.Job(ScannedGPT(nnx.Rngs(0)), gpt.library(), gpt.loss, optax.adamw(1e-3), batch_size=32)
result = hxla.train(job, microbatch_size=2, stages=2, steps=args.steps)
losses = [step.loss for step in result.history.steps]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
