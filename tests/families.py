"""Small models of the families that rule sets are for, with the names that people give them."""

import pathlib
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
WIDTH, HEADS, VOCABULARY, LENGTH = 256, 8, 512, 16


def example(name):
    sys.path.insert(0, str(EXAMPLES))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(EXAMPLES))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs):
        self.patch_embed = nnx.Conv(3, WIDTH, (4, 4), 4, padding="VALID", rngs=rngs)
        self.pos_embedding = nnx.Param(jnp.zeros((1, 16, WIDTH)))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.fc1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.fc2 = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, image):
        x = self.patch_embed(image)
        x = x.reshape(x.shape[0], -1, WIDTH) + self.pos_embedding[...]
        x = x + self.attention(self.norm(x))
        x = x + self.fc2(jax.nn.gelu(self.fc1(self.norm(x))))
        return self.head(x.mean(1))


class T5Attention(nn.Module):
    @nn.compact
    def __call__(self, x, memory):
        def dense(name):
            return nn.Dense(WIDTH, use_bias=False, name=name)

        def heads(y):
            return y.reshape(*y.shape[:2], HEADS, -1)

        q, k, v = heads(dense("q")(x)), heads(dense("k")(memory)), heads(dense("v")(memory))
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return dense("o")(mixed)


class T5(nn.Module):
    def setup(self):
        self.shared = nn.Embed(VOCABULARY, WIDTH)
        self.encoder_attention = T5Attention(name="encoder/SelfAttention")
        self.wi = nn.Dense(4 * WIDTH, use_bias=False)
        self.wo = nn.Dense(WIDTH, use_bias=False)
        self.decoder_attention = T5Attention(name="decoder/EncDecAttention")
        self.lm_head = nn.Dense(VOCABULARY, use_bias=False)

    def __call__(self, tokens):
        x = self.shared(tokens)
        memory = x + self.encoder_attention(x, x)
        memory = memory + self.wo(nn.relu(self.wi(memory)))
        return self.lm_head(x + self.decoder_attention(x, memory))


class Translator(nnx.Module):
    """GNMT's shape: an LSTM reads, an LSTM with attention writes."""

    def __init__(self, rngs):
        self.src_embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.tgt_embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.encoder = nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.decoder = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.attention = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.projection = nnx.Linear(2 * WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        memory = self.encoder(self.src_embed(tokens))
        states = self.decoder(self.tgt_embed(tokens))
        weights = jax.nn.softmax(jnp.einsum("btc,bsc->bts", self.attention(states), memory))
        context = jnp.einsum("bts,bsc->btc", weights, memory)
        return self.projection(jnp.concatenate([states, context], -1))


def token_loss(model, batch):
    logits = model(batch["text"][:, :-1].astype(jnp.int32))
    labels = batch["text"][:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def image_loss(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def text(vocabulary=VOCABULARY):
    rows = np.random.default_rng(0).integers(0, vocabulary, (16, LENGTH + 1))
    return {"text": rows.astype(np.int32)}


def images(size):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(16, size, size, 3)).astype(np.float32)
    return {"image": image, "label": np.arange(16, dtype=np.int32)}


def gpt():
    model = example("gpt").GPT(nnx.Rngs(0), layers=1, length=LENGTH)
    return model, token_loss, text(256)


def bert():
    module = example("bert")
    return module.Bert(nnx.Rngs(0), layers=1), module.loss, text(256)


def resnet():
    module = example("resnet")
    return module.ResNet((1, 1), 32, 3, VOCABULARY, nnx.Rngs(0)), image_loss, images(16)


def experts():
    module = example("experts")
    size = module.Size(model=WIDTH, hidden=4 * WIDTH, heads=HEADS, layers=1)
    return module.Decoder(size, nnx.Rngs(0)), token_loss, text(256)


#: Rule set to a function that makes a model, its loss and a batch.
FAMILIES = {
    "decoder": gpt,
    "encoder": bert,
    "encoder_decoder": lambda: (T5(), token_loss, text()),
    "resnet": resnet,
    "vit": lambda: (VisionTransformer(nnx.Rngs(0)), image_loss, images(16)),
    "moe": experts,
    "lstm": lambda: (Translator(nnx.Rngs(0)), token_loss, text()),
}
