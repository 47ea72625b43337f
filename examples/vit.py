"""A vision Transformer (Dosovitskiy et al., ICLR 2021) as an ordinary Flax NNX model.

Nothing here knows of hxla. The defaults are small; table 1 gives ViT-Large's size: images of 224 in
patches of 16, width 1024, hidden 4096, 16 heads, 24 layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Layer(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, rngs: nnx.Rngs, width: int, hidden: int, heads: int, dropout: float):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.fc1, self.fc2 = (
            nnx.Linear(width, hidden, rngs=rngs),
            nnx.Linear(hidden, width, rngs=rngs),
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y = self.dropout(jax.nn.gelu(self.fc1(self.norm2(x))))
        return x + self.dropout(self.fc2(y))


class VisionTransformer(nnx.Module):
    """Images in, logits over classes out."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        dropout: float = 0.0,
        *,
        image: int = 8,
        channels: int = 1,
        patch: int = 2,
        classes: int = 10,
        width: int = 64,
        hidden: int = 256,
        heads: int = 4,
        layers: int = 2,
    ):
        self.patch_embed = nnx.Conv(
            channels, width, (patch, patch), patch, padding="VALID", rngs=rngs
        )
        self.cls_token = nnx.Param(jnp.zeros((1, 1, width)))
        positions = jax.random.normal(rngs.params(), (1, (image // patch) ** 2 + 1, width))
        self.pos_embedding = nnx.Param(0.02 * positions)
        self.layers = nnx.List([Layer(rngs, width, hidden, heads, dropout) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patch_embed(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = jnp.concatenate([jnp.tile(self.cls_token[...], (x.shape[0], 1, 1)), x], axis=1)
        x = self.dropout(x + self.pos_embedding[...])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def loss(model: VisionTransformer, batch: dict) -> tuple:
    """Cross entropy of each example, and whether the best class is right."""
    logits = model(batch["image"])
    right = logits.argmax(-1) == batch["label"]
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return values, {"accuracy": right.astype(np.float32)}
