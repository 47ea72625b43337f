"""Models whose mode, keys and sown losses are their author's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .attention import TOKENS, VOCABULARY, WIDTH, text
from .convolutions import PICTURES, Block, classify
from .generative import SIZE, VECTORS
from .row import Row


class Tuned(nnx.Module):
    """Fine-tuning: BatchNorm with the statistics of other data, and a new head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.block = Block(8, rngs)
        self.block.norm.mean[...] += 0.1
        self.block.norm.use_running_average = True
        self.dropout = nnx.Dropout(0.5, deterministic=True)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(self.block(self.stem(x)).mean((1, 2))))


class SownExperts(nn.Module):
    """V-MoE: what keeps experts busy is sown into a collection of its own."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        probs = nn.softmax(nn.Dense(4, use_bias=False, name="router")(x))
        gate = jax.nn.one_hot(probs.argmax(-1), 4) * probs
        self.sow("losses", "busy", (probs**2).sum(-1))
        y = nn.relu(nn.DenseGeneral((4, WIDTH), name="up")(x))
        return nn.Dense(VOCABULARY, name="head")(x + jnp.einsum("bted,bte->btd", y, gate))


def sown(model, batch):
    logits = model(batch["tokens"][:, :-1])
    values = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return values + 0.01 * model.variables["losses"]["busy"][0]


class Denoiser(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.inward = nnx.Linear(SIZE + 1, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.outward = nnx.Linear(16, SIZE, rngs=rngs)

    def __call__(self, x, time, rngs):
        h = nnx.gelu(self.inward(jnp.concatenate([x, time[:, None]], -1)))
        return self.outward(self.dropout(h, rngs=rngs))


def denoised(model, batch, key):
    """Diffusion: times and noise from the key of the microbatch, dropout from the call."""
    x, (first, second, third) = batch["x"], jax.random.split(key, 3)
    time = jax.random.uniform(first, (len(x),))
    noise = jax.random.normal(second, x.shape)
    mixed = jnp.sqrt(1 - time)[:, None] * x + jnp.sqrt(time)[:, None] * noise
    return ((model(mixed, time, nnx.Rngs(third)) - noise) ** 2).mean(-1)


ROWS = {
    "fine-tuning": Row(make=Tuned, loss=classify, data=PICTURES, cut=["block/conv/"]),
    "linen sown losses": Row(
        make=SownExperts, loss=sown, data=TOKENS, inputs=text, sown=("losses",), cut=["head/"]
    ),
    "diffusion": Row(
        make=Denoiser, loss=denoised, data=VECTORS, by_microbatch=True, keyed=True, cut=["inward/"]
    ),
}
