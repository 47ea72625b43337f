"""The model of examples/gpt.py with its blocks stacked and scanned over, as large models are."""

import gpt
import jax
import jax.numpy as jnp
from flax import nnx


class ScannedGPT(nnx.Module):
    """Takes what `gpt.GPT` takes, and computes the same; T positions, see `gpt.Block`.

    With `remat`, each layer's activations are made again in its backward.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        length: int = gpt.LENGTH,
        width: int = gpt.WIDTH,
        heads: int = gpt.HEADS,
        layers: int = gpt.LAYERS,
        remat: bool = False,
    ):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> gpt.Block:
            return gpt.Block(rngs, 0.0, width, heads)

        self.remat = remat
        self.tok = nnx.Embed(gpt.BYTES, width, rngs=rngs)
        self.pos = nnx.Embed(length, width, rngs=rngs)
        self.blocks = make(rngs)
        self.norm = nnx.LayerNorm(width, use_bias=False, rngs=rngs)

    def __call__(self, text_BT: jax.Array) -> jax.Array:
        def run(x_BTD: jax.Array, block: gpt.Block) -> jax.Array:
            return block(x_BTD)

        run = nnx.remat(run) if self.remat else run
        run = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x_BTD = self.tok(text_BT) + self.pos(jnp.arange(text_BT.shape[1]))
        return self.tok.attend(self.norm(run(x_BTD, self.blocks)))
