"""What generates or compares: keys, codebooks, pairs within a batch, gradients inside a loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .row import BATCH, Row

SIZE, LATENT = 12, 4
_RNG = np.random.default_rng(3)
VECTORS = {
    "x": _RNG.normal(size=(2 * BATCH, SIZE)).astype(np.float32),
    "y": _RNG.normal(size=(2 * BATCH, SIZE)).astype(np.float32),
}


class Vae(nnx.Module):
    """Draws its latents by a stream of its own."""

    def __init__(self, rngs):
        self.encoder = nnx.Linear(SIZE, 16, rngs=rngs)
        self.mean, self.spread = (nnx.Linear(16, LATENT, rngs=rngs) for _ in range(2))
        self.decoder1 = nnx.Linear(LATENT, 16, rngs=rngs)
        self.decoder2 = nnx.Linear(16, SIZE, rngs=rngs)
        self.rngs = nnx.Rngs(noise=1)

    def __call__(self, x):
        h = nnx.relu(self.encoder(x))
        mean, spread = self.mean(h), self.spread(h)
        latent = mean + jnp.exp(0.5 * spread) * jax.random.normal(self.rngs.noise(), mean.shape)
        return self.decoder2(nnx.relu(self.decoder1(latent))), mean, spread


def evidence(model, batch):
    out, mean, spread = model(batch["x"])
    distance = ((out - batch["x"]) ** 2).sum(-1)
    divergence = -0.5 * (1 + spread - mean**2 - jnp.exp(spread)).sum(-1)
    return 0.1 * (distance + divergence), {"divergence": divergence}


class Codebook(nnx.Module):
    """VQ-VAE: the nearest code, gradients straight through, the codes a moving average."""

    def __init__(self, rngs, num=8):
        self.encoder = nnx.Linear(SIZE, LATENT, rngs=rngs)
        self.decoder = nnx.Linear(LATENT, SIZE, rngs=rngs)
        self.codes = nnx.Variable(jax.random.normal(rngs.params(), (num, LATENT)))
        self.seen = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        z = self.encoder(x)
        codes = self.codes[...]
        chosen = jnp.argmin(((z[:, None] - codes) ** 2).sum(-1), -1)
        onehot = jax.nn.one_hot(chosen, len(codes))
        mean = onehot.T @ z / jnp.maximum(onehot.sum(0), 1)[:, None]
        used = onehot.any(0)[:, None]
        moved = jnp.where(used, 0.9 * codes + 0.1 * mean, codes)
        self.codes[...] = jax.lax.stop_gradient(moved)
        self.seen[...] += 1
        nearest = codes[chosen]
        commitment = ((z - jax.lax.stop_gradient(nearest)) ** 2).mean(-1)
        return self.decoder(z + jax.lax.stop_gradient(nearest - z)), commitment


def quantized(model, batch):
    out, commitment = model(batch["x"])
    return ((out - batch["x"]) ** 2).mean(-1) + 0.25 * commitment


class Towers(nnx.Module):
    """CLIP: two towers and a temperature."""

    def __init__(self, rngs):
        self.left, self.right = (nnx.Linear(SIZE, 8, rngs=rngs) for _ in range(2))
        self.scale = nnx.Param(jnp.float32(1.0))

    def __call__(self, x, y):
        unit = lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True)  # noqa: E731
        return jnp.exp(self.scale[...]) * unit(self.left(x)) @ unit(self.right(y)).T


def contrast(model, batch):
    """Negatives are the other examples of the microbatch."""
    logits = model(batch["x"], batch["y"])
    labels = jnp.arange(len(logits))
    cross = optax.softmax_cross_entropy_with_integer_labels
    return (cross(logits, labels) + cross(logits.T, labels)).mean() / 2


class Field(nnx.Module):
    """A physics-informed network: the loss differentiates the model by its input."""

    def __init__(self, rngs):
        self.layer1, self.layer2 = nnx.Linear(2, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.layer2(jnp.sin(2 * self.layer1(x)))))[..., 0]


def residual(model, batch):
    x = batch["x"][:, :2]
    slope = jax.vmap(jax.grad(model))(x)
    return (slope[:, 0] + 0.5 * slope[:, 1] - model(x)) ** 2 + (model(0 * x) - 1) ** 2


class Tied(nnx.Module):
    """One layer used twice, and its transpose on the way out."""

    def __init__(self, rngs):
        self.inward = nnx.Linear(SIZE, 16, rngs=rngs)
        self.shared = nnx.Linear(16, 16, rngs=rngs)
        self.again = self.shared

    def __call__(self, x):
        x = nnx.tanh(self.shared(nnx.tanh(self.inward(x))))
        return nnx.tanh(self.again(x)) @ self.inward.kernel[...].T


def restore(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


@jax.custom_vjp
def rounded(x):
    return jnp.round(x * 8) / 8


rounded.defvjp(lambda x: (rounded(x), x), lambda x, g: (jnp.where(abs(x) < 1, g, 0),))


class Quantized(nnx.Module):
    """Weights on a grid, with a gradient rule of one's own."""

    def __init__(self, rngs):
        self.layer1, self.layer2 = (
            nnx.Linear(SIZE, 16, rngs=rngs),
            nnx.Linear(16, SIZE, rngs=rngs),
        )

    def __call__(self, x):
        for layer in (self.layer1, self.layer2):
            x = nnx.tanh(x) @ rounded(layer.kernel[...]) + layer.bias[...]
        return x


ROWS = {
    "vae": Row(
        make=lambda: Vae(nnx.Rngs(0)),
        loss=evidence,
        data=VECTORS,
        by_microbatch=True,
        cut=["encoder/"],
    ),
    "codebook": Row(
        make=lambda: Codebook(nnx.Rngs(0)),
        loss=quantized,
        data=VECTORS,
        by_microbatch=True,
        cut=["decoder/"],
    ),
    "contrastive": Row(
        make=lambda: Towers(nnx.Rngs(0)),
        loss=contrast,
        data=VECTORS,
        by_microbatch=True,
        cut=["left/"],
    ),
    "physics": Row(make=lambda: Field(nnx.Rngs(0)), loss=residual, data=VECTORS, cut=["layer2/"]),
    "tied": Row(make=lambda: Tied(nnx.Rngs(0)), loss=restore, data=VECTORS, cut=["again/"]),
    "custom_vjp": Row(
        make=lambda: Quantized(nnx.Rngs(0)), loss=restore, data=VECTORS, cut=["layer1/"]
    ),
}
