"""Sequences by attention: decoders, encoders, experts, scanned layers, adapters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .row import BATCH, Row

VOCABULARY, WIDTH, LENGTH = 24, 16, 6
_RNG = np.random.default_rng(1)
TOKENS = {
    "tokens": _RNG.integers(0, VOCABULARY, (2 * BATCH, LENGTH + 1)).astype(np.int32),
    "mask": _RNG.random((2 * BATCH, LENGTH)) < 0.7,
}


def masked(model, batch):
    """Next tokens, with a mask: weights differ from microbatch to microbatch."""
    logits = model(batch["tokens"][:, :-1])
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return values, batch["mask"].astype(jnp.float32)


def next_token(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])


class Decoder(nnx.Module):
    """GPT: causal, learned positions, the embedding tied to the output."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[...]
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(tokens))
        x = x + self.down(nnx.gelu(self.up(self.norm2(x))))
        return self.embed.attend(x)


class Grouped(nnx.Module):
    """LLaMA: grouped queries, rotations, RMSNorm, SwiGLU; a cache that training leaves alone."""

    def __init__(self, rngs, heads=4, groups=2):
        self.heads, self.groups, size = heads, groups, WIDTH // heads
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.query, self.out = dense(WIDTH, WIDTH), dense(WIDTH, WIDTH)
        self.key, self.value = dense(WIDTH, groups * size), dense(WIDTH, groups * size)
        self.norm1, self.norm2 = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.gate, self.up = dense(WIDTH, 2 * WIDTH), dense(WIDTH, 2 * WIDTH)
        self.down, self.head = dense(2 * WIDTH, WIDTH), dense(WIDTH, VOCABULARY)
        self.cached_key = nnx.Cache(jnp.zeros((1, LENGTH, groups, size)))
        self.cache_index = nnx.Cache(jnp.int32(0))

    def rotated(self, x_BTHD):
        half = x_BTHD.shape[-1] // 2
        angle = jnp.arange(x_BTHD.shape[1])[:, None, None] / 100 ** (jnp.arange(half) / half)
        a, b = x_BTHD[..., :half], x_BTHD[..., half:]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(self, x):
        split = lambda y, n: y.reshape(*y.shape[:2], n, -1)  # noqa: E731
        q, k = split(self.query(x), self.heads), split(self.key(x), self.groups)
        out = jax.nn.dot_product_attention(
            self.rotated(q), self.rotated(k), split(self.value(x), self.groups), is_causal=True
        )
        return self.out(out.reshape(x.shape))

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        return self.head(x + self.down(nnx.silu(self.gate(y)) * self.up(y)))


class Encoder(nn.Module):
    """BERT in Linen, with dropout: keys come from the microbatch."""

    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        y = nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        y = nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(WIDTH, name="down")(nn.gelu(y)))
        return nn.Dense(VOCABULARY, name="head")(x)


class Dropped(nnx.Module):
    """Dropout in NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.dropout(nnx.relu(self.hidden(self.embed(tokens)))))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Scanned(nnx.Module):
    """Layers stacked by `nnx.vmap`, run by `nnx.scan`, made again in the backward by `remat`."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        make = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(0), 4))
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(tokens), self.layers))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(y)), None


class LinenScanned(nn.Module):
    """The same in Linen, with the layers' axis in front."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        layers = nn.scan(
            nn.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=4
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(VOCABULARY, name="head")(x)


class Experts(nnx.Module):
    """Each token goes to one expert; the model returns what keeps them busy beside its logits."""

    def __init__(self, rngs, num=4):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, num, use_bias=False, rngs=rngs)
        normal = jax.random.normal
        self.up = nnx.Param(0.2 * normal(rngs.params(), (num, WIDTH, 2 * WIDTH)))
        self.down = nnx.Param(0.2 * normal(rngs.params(), (num, 2 * WIDTH, WIDTH)))
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        probs = jax.nn.softmax(self.router(x))
        gate = jax.nn.one_hot(probs.argmax(-1), probs.shape[-1]) * probs
        y = jnp.einsum("btd,edh->bteh", x, self.up[...])
        y = jnp.einsum("bteh,ehd,bte->btd", nnx.relu(y), self.down[...], gate)
        busy = (probs**2).sum(-1)
        return self.head(x + y), busy


def routed(model, batch):
    logits, busy = model(batch["tokens"][:, :-1])
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return values + 0.01 * busy


class Adapted(nnx.Module):
    """LoRA: the trunk is frozen."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        make = lambda i, o: nnx.LoRALinear(i, o, lora_rank=2, rngs=rngs)  # noqa: E731
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.up, self.down = make(WIDTH, 2 * WIDTH), make(2 * WIDTH, WIDTH)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


class Logical(nn.Module):
    """Names for dimensions, as MaxText has them: boxes in the tree of parameters."""

    @nn.compact
    def __call__(self, tokens):
        named = lambda *names: nn.with_logical_partitioning(  # noqa: E731
            nn.initializers.lecun_normal(), names
        )
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=named("vocab", "embed"), name="embed")(
            tokens
        )
        y = nn.Dense(2 * WIDTH, kernel_init=named("embed", "mlp"), name="up")(x)
        x = x + nn.Dense(WIDTH, kernel_init=named("mlp", "embed"), name="down")(nn.gelu(y))
        return nn.Dense(VOCABULARY, name="head")(x)


def text(batch):
    return (batch["tokens"][:, :-1],)


ROWS = {
    "gpt": Row(make=lambda: Decoder(nnx.Rngs(0)), loss=masked, data=TOKENS, cut=["up/"]),
    "llama": Row(
        make=lambda: Grouped(nnx.Rngs(0)), loss=next_token, data=TOKENS, cut=["gate/", "up/"]
    ),
    "linen bert": Row(
        make=Encoder,
        loss=next_token,
        data=TOKENS,
        inputs=text,
        by_microbatch=True,
        cut=["up/"],
    ),
    "dropout": Row(
        make=lambda: Dropped(nnx.Rngs(0)),
        loss=next_token,
        data=TOKENS,
        by_microbatch=True,
        cut=["hidden/"],
    ),
    "nnx.scan": Row(make=Scanned, loss=next_token, data=TOKENS, cut=["head/"], chain="one scan"),
    "nn.scan": Row(
        make=LinenScanned,
        loss=next_token,
        data=TOKENS,
        inputs=text,
        cut=["head/"],
        chain="one scan",
    ),
    "experts": Row(make=lambda: Experts(nnx.Rngs(0)), loss=routed, data=TOKENS, cut=["head/"]),
    "lora": Row(
        make=Adapted,
        loss=masked,
        data=TOKENS,
        trainable=nnx.LoRAParam,
        wrt=nnx.LoRAParam,
        cut=["up/"],
    ),
    "linen head": Row(
        make=Logical, loss=masked, data=TOKENS, inputs=text, trainable="head/", wrt="head",
        cut=["up/"],
    ),
    "logical axes": Row(make=Logical, loss=next_token, data=TOKENS, inputs=text, cut=["up/"]),
}  # fmt: skip
