"""GNMT (Wu et al., "Google's Neural Machine Translation System", 2016) as an ordinary Flax model.

Nothing here knows of hxla. The defaults are small; GNMT has 8 layers of 1024 in each stack and
32,000 word pieces (sections 3 and 4.1). As in MLPerf's reference the attention is asked by the
decoder's first layer and answers all layers above it, so each layer is one scan over the text.

Legend of shape suffixes: B batch, T target positions, S source positions, D width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

PAD, START = 0, 1


def lstm(ins: int, width: int, rngs: nnx.Rngs) -> nnx.RNN:
    return nnx.RNN(nnx.OptimizedLSTMCell(ins, width, rngs=rngs), rngs=rngs)


class Encoder(nnx.Module):
    """The first layer reads both ways; residual connections from the third on."""

    def __init__(self, rngs: nnx.Rngs, width: int, layers: int, dropout: float):
        self.forwards, self.backwards = lstm(width, width, rngs), lstm(width, width, rngs)
        ins = [2 * width] + [width] * (layers - 2)
        self.layers = nnx.List([lstm(i, width, rngs) for i in ins])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, lengths_B: jax.Array) -> jax.Array:
        back_BSD = self.backwards(x_BSD, reverse=True, keep_order=True, seq_lengths=lengths_B)
        x = jnp.concatenate([self.forwards(x_BSD), back_BSD], -1)
        for i, layer in enumerate(self.layers):
            y_BSD = layer(self.dropout(x))
            x = x + y_BSD if i else y_BSD
        return x


class Attention(nnx.Module):
    """A network of one hidden layer scores each source position (Bahdanau et al., 2015)."""

    def __init__(self, rngs: nnx.Rngs, width: int):
        self.query = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.memory = nnx.Linear(width, width, rngs=rngs)
        self.score = nnx.Linear(width, 1, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array, real_BS: jax.Array) -> jax.Array:
        hidden_BTSD = jnp.tanh(self.query(x_BTD)[:, :, None] + self.memory(memory_BSD)[:, None])
        scores_BTS = jnp.where(real_BS[:, None], self.score(hidden_BTSD)[..., 0], -1e9)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores_BTS), memory_BSD)


class Decoder(nnx.Module):
    """The first layer asks the attention, every further one reads its answer."""

    def __init__(self, rngs: nnx.Rngs, width: int, layers: int, dropout: float):
        self.first = lstm(width, width, rngs)
        self.attention = Attention(rngs, width)
        self.layers = nnx.List([lstm(2 * width, width, rngs) for _ in range(layers - 1)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array, real_BS: jax.Array) -> jax.Array:
        x_BTD = self.first(self.dropout(x_BTD))
        context_BTD = self.attention(x_BTD, memory_BSD, real_BS)
        for i, layer in enumerate(self.layers):
            y_BTD = layer(self.dropout(jnp.concatenate([x_BTD, context_BTD], -1)))
            x_BTD = x_BTD + y_BTD if i else y_BTD
        return x_BTD


class Translator(nnx.Module):
    """Two texts in, logits over the second one's next token out."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        dropout: float = 0.0,
        *,
        vocabulary: int = 256,
        width: int = 64,
        layers: int = 3,
    ):
        self.src_embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.tgt_embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.encoder = Encoder(rngs, width, layers, dropout)
        self.decoder = Decoder(rngs, width, layers, dropout)
        self.projection = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, source_BS: jax.Array, target_BT: jax.Array) -> jax.Array:
        real_BS = source_BS != PAD
        memory_BSD = self.encoder(self.src_embed(source_BS), real_BS.sum(-1))
        return self.projection(self.decoder(self.tgt_embed(target_BT), memory_BSD, real_BS))


def loss(model: Translator, batch: dict) -> tuple:
    """Nats of each token of the target but padding."""
    source_BS, target_BT = batch["source"].astype(jnp.int32), batch["target"].astype(jnp.int32)
    before_BT = jnp.pad(target_BT, ((0, 0), (1, 0)), constant_values=START)[:, :-1]
    logits_BTV = model(source_BS, before_BT)
    values_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, target_BT)
    return values_BT, (target_BT != PAD).astype(np.float32)
