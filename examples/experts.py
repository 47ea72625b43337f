"""A Transformer decoder with mixtures of experts in the manner of M6, as an ordinary Flax model.

The one scope is all that hxla adds: experts are split, the rest is replicated (Whale, USENIX ATC
2022, section 5.3; Lin et al., "M6", 2021; Lepikhin et al., "GShard", 2020, for the einsums).

Legend of shape suffixes: G sequences, S positions, M model, H hidden, E experts, C capacity.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import hxla


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions of the model."""

    vocabulary: int = 256
    model: int = 64
    hidden: int = 256
    heads: int = 4
    layers: int = 2
    experts: int = 8
    capacity_factor: float = 1.25


class Experts(nnx.Module):
    """Every token goes to its best expert, if there is room."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        self.gate = nnx.Linear(size.model, size.experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (size.experts, size.model, size.hidden)))
        self.down = nnx.Param(init(rngs.params(), (size.experts, size.hidden, size.model)))
        self.size = size

    def __call__(self, x_GSM: jax.Array) -> jax.Array:
        num = self.size.experts
        capacity = math.ceil(self.size.capacity_factor * x_GSM.shape[1] / num)
        gates_GSE = jax.nn.softmax(self.gate(x_GSM))
        best_GSE = jax.nn.one_hot(gates_GSE.argmax(-1), num)
        place_GSE = (jnp.cumsum(best_GSE, axis=1) - 1) * best_GSE
        slots_GSC = jax.nn.one_hot(place_GSE.sum(-1).astype(jnp.int32), capacity)
        sent_GSEC = best_GSE[..., None] * slots_GSC[:, :, None]
        with hxla.split():
            x_EGCM = jnp.einsum("gsec,gsm->egcm", sent_GSEC, x_GSM)
            x_EGCH = jax.nn.gelu(jnp.einsum("egcm,emh->egch", x_EGCM, self.up[...]))
            y_EGCM = jnp.einsum("egch,ehm->egcm", x_EGCH, self.down[...])
        return jnp.einsum("gsec,egcm->gsm", sent_GSEC * gates_GSE[..., None], y_EGCM)


class Layer(nnx.Module):
    """Attention, then experts."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(size.model, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(size.heads, size.model, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(size.model, rngs=rngs)
        self.experts = Experts(size, rngs)

    def __call__(self, x_GSM: jax.Array) -> jax.Array:
        S = x_GSM.shape[1]
        mask = jnp.tril(jnp.ones((1, 1, S, S), bool))
        x_GSM = x_GSM + self.attention(self.norm1(x_GSM), mask=mask)
        return x_GSM + self.experts(self.norm2(x_GSM))


class Decoder(nnx.Module):
    """Tokens in, logits over the next one out."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.tok = nnx.Embed(size.vocabulary, size.model, rngs=rngs)
        self.layers = nnx.List([Layer(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.model, rngs=rngs)

    def __call__(self, tokens_GS: jax.Array) -> jax.Array:
        x_GSM = self.tok(tokens_GS)
        for layer in self.layers:
            x_GSM = layer(x_GSM)
        return self.tok.attend(self.norm(x_GSM))


def loss(model: Decoder, batch: dict) -> jax.Array:
    """Nats of each token."""
    text = batch["text"].astype(jnp.int32)
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
