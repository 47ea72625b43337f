"""Small models whose tokens several devices share, as rows of a zoo, and models that refuse it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from support.zoo.row import BATCH, Row

VOCABULARY, WIDTH, HEADS, LENGTH, SOURCE = 14, 8, 4, 16, 8
_RNG = np.random.default_rng(2)


def numbers(*shape):
    return _RNG.normal(size=(2 * BATCH, *shape)).astype(np.float32)


def words(length, least=0):
    return _RNG.integers(least, VOCABULARY, (2 * BATCH, length)).astype(np.int32)


TEXT = {
    "tokens": words(LENGTH + 1),
    "weights": _RNG.random((2 * BATCH, LENGTH)).astype(np.float32),
}
#: Zeros at the end are padding; packed rows have several documents.
PADDED = {
    "tokens": np.where(
        np.arange(LENGTH) < _RNG.integers(5, LENGTH, (2 * BATCH, 1)), words(16, 1), 0
    ),
    "labels": words(LENGTH),
    "documents": np.sort(_RNG.integers(0, 3, (2 * BATCH, LENGTH))).astype(np.int32),
}
PAIRS = {"source": words(SOURCE), "tokens": words(LENGTH + 1)}
SIGNALS = {"signal": numbers(LENGTH, 3), "class": np.arange(2 * BATCH, dtype=np.int32) % 4}

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def weighted(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return cross_entropy(logits, batch["tokens"][:, 1:]), batch["weights"]


def next_token(model, batch):
    return cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])


def labelled(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"])


class Feed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class GPTBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.feed = Feed(rngs)

    def __call__(self, x, mask):
        return self.feed(x + self.attention(self.norm(x), mask=mask))


class GPT(nnx.Module):
    """Causal, learned positions, the embedding tied to the output, dropout."""

    def __init__(self, rngs, length=LENGTH, dropout=0.0):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(length, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([GPTBlock(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        x, mask = self.dropout(x), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(x)


def rotated(x_BTHD):
    half = x_BTHD.shape[-1] // 2
    angle = jnp.arange(x_BTHD.shape[1])[:, None, None] / 100 ** (jnp.arange(half) / half)
    a, b = x_BTHD[..., :half], x_BTHD[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class LlamaBlock(nnx.Module):
    def __init__(self, rngs, groups=2, window=None):
        self.groups, self.window = groups, window
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm, size = nnx.RMSNorm(WIDTH, rngs=rngs), groups * WIDTH // HEADS
        self.query, self.out = dense(WIDTH, WIDTH), dense(WIDTH, WIDTH)
        self.key, self.value = dense(WIDTH, size), dense(WIDTH, size)
        self.feed = Feed(rngs)

    def __call__(self, x):
        split = lambda y, n: y.reshape(*y.shape[:2], n, -1)  # noqa: E731
        y = self.norm(x)
        q, k = split(self.query(y), HEADS), split(self.key(y), self.groups)
        window = None if self.window is None else (self.window, 0)
        out = jax.nn.dot_product_attention(
            rotated(q),
            rotated(k),
            split(self.value(y), self.groups),
            is_causal=True,
            local_window_size=window,
        )
        return self.feed(x + self.out(out.reshape(x.shape)))


class Llama(nnx.Module):
    """Grouped queries, rotations, perhaps a sliding window, perhaps a scan over layers."""

    def __init__(self, rngs, window=None):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([LlamaBlock(rngs, window=window) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BertBlock(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(HEADS, name="attention")(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dropout(0.1, deterministic=not self.train)(y)
        y = nn.gelu(nn.Dense(2 * WIDTH, name="up")(nn.LayerNorm()(x)))
        y = nn.Dense(WIDTH, name="down")(y)
        return x + nn.Dropout(0.1, deterministic=not self.train)(y), None


class Bert(nn.Module):
    """Linen: padding masks of both sides, dropout."""

    @nn.compact
    def __call__(self, tokens, train=True):
        x, is_word = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens), tokens > 0
        mask = nn.make_attention_mask(is_word, is_word)
        for i in range(2):
            x, _ = BertBlock(train, name=f"block{i}")(x, mask)
        return nn.Dense(VOCABULARY, name="head")(x)


class LinenScanned(nn.Module):
    """A causal decoder whose layers are stacked, and run again in the backward."""

    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        layers = nn.scan(
            nn.remat(BertBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=2,
        )
        x, _ = layers(train, name="layers")(x, nn.make_causal_mask(tokens))
        return nn.Dense(VOCABULARY, name="head")(x)


class Packed(nnx.Module):
    """Tokens read those of their document only."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([GPTBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, batch):
        x, of = self.embed(batch["tokens"]), batch["documents"]
        for block in self.blocks:
            x = block(x, (of[:, None, :, None] == of[:, None, None, :]))
        return self.head(x)


def packed(model, batch):
    return cross_entropy(model(batch), batch["labels"])


class Translator(nnx.Module):
    """Two sequences of unlike lengths: an encoder, and a decoder that reads both."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.encoder, self.decoder = GPTBlock(rngs), GPTBlock(rngs)
        self.cross = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, source, tokens):
        known = self.encoder(self.embed(source), None)
        x = self.decoder(self.embed(tokens), nnx.make_causal_mask(tokens))
        return self.head(x + self.cross(x, known, known))


def translated(model, batch):
    logits = model(batch["source"], batch["tokens"][:, :-1])
    return cross_entropy(logits, batch["tokens"][:, 1:])


class Classifier(nnx.Module):
    """Numbers in, a class of each whole sequence out: a mean and a maximum over tokens."""

    def __init__(self, rngs):
        self.inward = nnx.Linear(3, WIDTH, rngs=rngs)
        self.block = GPTBlock(rngs)
        self.head = nnx.Linear(2 * WIDTH, 4, rngs=rngs)

    def __call__(self, signal):
        x = self.block(self.inward(signal), None)
        return self.head(jnp.concatenate([x.mean(1), x.max(1)], -1))


def classified(model, batch):
    return cross_entropy(model(batch["signal"]), batch["class"])


class Normalized(nnx.Module):
    """BatchNorm: statistics over examples and tokens."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.feed = Feed(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.feed(self.norm(self.embed(tokens))))


def inputs(batch):
    tokens = batch["tokens"]
    return (tokens[:, :-1] if tokens.shape[1] > LENGTH else tokens,)


ROWS = {
    "gpt": Row(make=lambda: GPT(nnx.Rngs(0)), loss=weighted, data=TEXT),
    "dropout": Row(
        make=lambda: GPT(nnx.Rngs(0), dropout=0.2), loss=next_token, data=TEXT, by_microbatch=True
    ),
    "llama": Row(make=lambda: Llama(nnx.Rngs(0)), loss=next_token, data=TEXT),
    "window": Row(make=lambda: Llama(nnx.Rngs(0), window=3), loss=weighted, data=TEXT),
    "linen bert": Row(make=Bert, loss=labelled, data=PADDED, inputs=inputs, by_microbatch=True),
    "linen scan": Row(
        make=LinenScanned, loss=next_token, data=TEXT, inputs=inputs, by_microbatch=True
    ),
    "packed": Row(make=lambda: Packed(nnx.Rngs(0)), loss=packed, data=PADDED),
    "translator": Row(make=lambda: Translator(nnx.Rngs(0)), loss=translated, data=PAIRS),
    "classifier": Row(make=lambda: Classifier(nnx.Rngs(0)), loss=classified, data=SIGNALS),
    "batch norm": Row(
        make=lambda: Normalized(nnx.Rngs(0)), loss=next_token, data=TEXT, by_microbatch=True
    ),
}


class Around(nnx.Module):
    """A layer between an embedding and a head."""

    def __init__(self, make):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layer = make(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.layer(self.embed(tokens)))


def fused(x):
    """cuDNN's attention, of one head."""
    q = x.astype(jnp.bfloat16)[:, :, None]
    out = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
    return out[:, :, 0].astype(jnp.float32)


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.Linear(LENGTH, LENGTH, rngs=rngs)

    def __call__(self, x):
        return x + self.mix(x.swapaxes(1, 2)).swapaxes(1, 2)


def shifted(model, batch):
    logits = model(batch["tokens"][:, 1:])
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 2:])


def flattened(model, batch):
    logits = model(batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:]
    return cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)).mean()


#: A model, its loss, and what the refusal says.
REFUSED = {
    "lstm": (
        lambda: Around(lambda rngs: nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))),
        next_token,
        r"scan in .*reads the tokens one after another: a loop over tokens, such as an LSTM",
    ),
    "convolution": (
        lambda: Around(lambda rngs: nnx.Conv(WIDTH, WIDTH, 3, padding="CAUSAL", rngs=rngs)),
        next_token,
        r"reads several tokens at once",
    ),
    "running sum": (
        lambda: Around(lambda rngs: lambda x: jnp.cumsum(x, 1)),
        next_token,
        "cumsum in .*reads several tokens at once",
    ),
    "shifted logits": (
        lambda: GPT(nnx.Rngs(0)),
        shifted,
        r"slice in .*shift the tokens of the batch before the model reads them",
    ),
    "flattened": (
        lambda: GPT(nnx.Rngs(0)),
        flattened,
        "reshape in .*keep examples and tokens in dimensions apart",
    ),
    "fused attention": (
        lambda: Around(lambda rngs: fused),
        next_token,
        "dot_product_attention_fwd_wrapper in .*leave implementation='cudnn' out",
    ),
    "mixer": (
        lambda: Around(Mixer),
        next_token,
        r"no dimension of the batch is known to be one of tokens \(the batch has int32\[2,17\]",
    ),
}
