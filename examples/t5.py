"""T5 (Raffel et al., JMLR 2020), an encoder-decoder, as an ordinary Flax NNX model.

Nothing here knows of hxla. The defaults are small; section 2.1 and table 13 give T5-Large's size:
vocabulary 32,128, width 1024, hidden 4096, 16 heads, 24 layers in each of the two stacks.

Legend of shape suffixes: B batch, T positions that ask, S positions that are asked, N heads, H head
width, D model width, V vocabulary.
"""

import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

BUCKETS, FARTHEST = 32, 128


class Attention(nnx.Module):
    """Heads without biases; scores are not scaled, the initial weights are instead."""

    def __init__(self, rngs: nnx.Rngs, width: int, heads: int):
        dense = lambda std: nnx.Linear(  # noqa: E731
            width, width, use_bias=False, kernel_init=nnx.initializers.normal(std), rngs=rngs
        )
        self.q, self.o = dense((width * width / heads) ** -0.5), dense(width**-0.5)
        self.k, self.v = dense(width**-0.5), dense(width**-0.5)
        self.heads = heads

    def __call__(self, x_BTD: jax.Array, y_BSD: jax.Array, bias_NTS: jax.Array) -> jax.Array:
        split = lambda x_BTD: x_BTD.reshape(*x_BTD.shape[:2], self.heads, -1)  # noqa: E731
        q_BTNH, k_BSNH, v_BSNH = split(self.q(x_BTD)), split(self.k(y_BSD)), split(self.v(y_BSD))
        scores_BNTS = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH) + bias_NTS
        mixed_BTNH = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores_BNTS), v_BSNH)
        return self.o(mixed_BTNH.reshape(x_BTD.shape))


class Layer(nnx.Module):
    """Self-attention, in the decoder cross-attention to the encoder, then ReLU."""

    def __init__(
        self, rngs: nnx.Rngs, width: int, hidden: int, heads: int, dropout: float, decodes: bool
    ):
        norm = lambda: nnx.RMSNorm(width, rngs=rngs)  # noqa: E731
        self.attention, self.norm1 = Attention(rngs, width, heads), norm()
        self.cross = Attention(rngs, width, heads) if decodes else None
        self.norm2 = norm() if decodes else None
        self.wi = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)
        self.norm3 = norm()
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(
        self, x_BTD: jax.Array, bias_NTT: jax.Array, memory_BSD: jax.Array | None = None
    ) -> jax.Array:
        y_BTD = self.norm1(x_BTD)
        x_BTD = x_BTD + self.dropout(self.attention(y_BTD, y_BTD, bias_NTT))
        if self.cross:
            no_bias = jnp.zeros(())
            x_BTD = x_BTD + self.dropout(self.cross(self.norm2(x_BTD), memory_BSD, no_bias))
        return x_BTD + self.dropout(self.wo(self.dropout(nnx.relu(self.wi(self.norm3(x_BTD))))))


class Stack(nnx.Module):
    """The encoder or the decoder; all its layers share one relative position bias."""

    def __init__(self, rngs: nnx.Rngs, width: int, layers: int, **size):
        heads, self.decodes = size["heads"], size["decodes"]
        self.relative_attention_bias = nnx.Embed(BUCKETS, heads, rngs=rngs)
        self.layers = nnx.List([Layer(rngs, width, **size) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(size["dropout"], rngs=rngs)

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array | None = None) -> jax.Array:
        T = x_BTD.shape[1]
        ahead_TT = jnp.arange(T) - jnp.arange(T)[:, None]
        bias_NTT = self.relative_attention_bias(bucket(ahead_TT, self.decodes)).transpose(2, 0, 1)
        if self.decodes:
            bias_NTT = jnp.where(ahead_TT <= 0, bias_NTT, -1e9)
        x_BTD = self.dropout(x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD, bias_NTT, memory_BSD)
        return self.dropout(self.norm(x_BTD))


def bucket(ahead: jax.Array, decodes: bool) -> jax.Array:
    """Near distances have a bucket each, far ones share them by their logarithm."""
    num = BUCKETS if decodes else BUCKETS // 2
    distance = jnp.maximum(-ahead, 0) if decodes else jnp.abs(ahead)
    near = num // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / near) / math.log(FARTHEST / near)
    far = jnp.minimum(near + (ratio * (num - near)).astype(jnp.int32), num - 1)
    found = jnp.where(distance < near, distance, far)
    return found if decodes else found + jnp.where(ahead > 0, num, 0)


class T5(nnx.Module):
    """Two texts in, logits over the second one's next token out; one embedding does for all."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        dropout: float = 0.0,
        *,
        vocabulary: int = 256,
        width: int = 64,
        hidden: int = 256,
        heads: int = 4,
        layers: int = 2,
    ):
        size = {"hidden": hidden, "heads": heads, "dropout": dropout}
        self.shared = nnx.Embed(
            vocabulary, width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        self.encoder = Stack(rngs, width, layers, decodes=False, **size)
        self.decoder = Stack(rngs, width, layers, decodes=True, **size)

    def __call__(self, source_BS: jax.Array, target_BT: jax.Array) -> jax.Array:
        memory_BSD = self.encoder(self.shared(source_BS))
        x_BTD = self.decoder(self.shared(target_BT), memory_BSD)
        return self.shared.attend(x_BTD * x_BTD.shape[-1] ** -0.5)


def loss(model: T5, batch: dict) -> jax.Array:
    """Nats of each token of the target, after a start token 0."""
    source_BS, target_BT = batch["source"].astype(jnp.int32), batch["target"].astype(jnp.int32)
    logits_BTV = model(source_BS, jnp.pad(target_BT, ((0, 0), (1, 0)))[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, target_BT)
