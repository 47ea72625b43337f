"""BERT (Devlin et al., 2019) over bytes, as an ordinary Flax NNX model: nothing knows of hxla."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

MASK = 0  # a byte that sources do not hold


class Layer(nnx.Module):
    """Post-norm attention and MLP."""

    def __init__(self, rngs: nnx.Rngs, width: int, heads: int):
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(jax.nn.gelu(self.up(x))))


class Bert(nnx.Module):
    """Tokens in, logits over the masked ones out; the embedding is tied."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        vocabulary: int = 256,
        length: int = 129,
        width: int = 256,
        heads: int = 4,
        layers: int = 4,
    ):
        self.tok = nnx.Embed(vocabulary, width, rngs=rngs)
        self.pos = nnx.Embed(length, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, width, heads) for _ in range(layers)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.norm(self.tok(tokens) + self.pos(jnp.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.tok.attend(x)


def loss(model: Bert, batch: dict) -> tuple:
    """Nats of each masked token; one in seven is masked, at places that follow from the text."""
    text = batch["text"].astype(jnp.int32)
    masked = (text + jnp.arange(text.shape[1])) % 7 == 0
    logits = model(jnp.where(masked, MASK, text))
    values = optax.softmax_cross_entropy_with_integer_labels(logits, text)
    return values, masked.astype(np.float32)
