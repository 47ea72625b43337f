"""Models of experts without a capacity, with the routers that people write."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hxla

WIDTH, HIDDEN = 8, 10


def top_1(x, probs, up, down):
    """Rows are sorted by expert and sorted back."""
    best = probs.argmax(-1)
    order = jnp.argsort(best, stable=True)
    sizes = jnp.bincount(best, length=probs.shape[1])
    hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], up, sizes))
    rows = jax.lax.ragged_dot(hidden, down, sizes)
    return rows[jnp.argsort(order)] * probs.max(-1, keepdims=True)


def top_2(x, probs, up, down):
    """Rows are sorted by expert and added to their tokens, with weights."""
    weights, best = jax.lax.top_k(probs, 2)
    best = best.reshape(-1)
    order = jnp.argsort(best, stable=True)
    sizes = jnp.bincount(best, length=probs.shape[1])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order // 2], up, sizes))
    rows = jax.lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // 2].add(rows)


def top_2_back(x, probs, up, down):
    """Two halves of hidden columns; rows are sorted back, then weighted and added."""
    weights, best = jax.lax.top_k(probs, 2)
    best = best.reshape(-1)
    order = jnp.argsort(best, stable=True)
    sizes = jnp.bincount(best, length=probs.shape[1])
    gate, hidden = jnp.split(jax.lax.ragged_dot(jnp.repeat(x, 2, 0)[order], up, sizes), 2, axis=1)
    rows = jax.lax.ragged_dot(jax.nn.silu(gate) * hidden, down[:, : HIDDEN // 2], sizes)
    rows = jnp.zeros_like(rows).at[order].set(rows).reshape(len(x), 2, -1)
    return jnp.einsum("tkd,tk->td", rows, weights)


def expert_choice(x, probs, up, down):
    """Every expert takes its best tokens: equal groups, and no sort."""
    num = 2 * len(x) // probs.shape[1]
    weights, best = jax.lax.top_k(probs.T, num)
    hidden = jax.nn.silu(jnp.einsum("ecd,edh->ech", x[best], up))
    rows = jnp.einsum("ech,ehd->ecd", hidden, down) * weights[..., None]
    return jnp.zeros_like(x).at[best].add(rows)


def scattered(x, probs, up, down):
    """Rows are put into a buffer with room for all tokens at each expert."""
    best = probs.argmax(-1)
    chosen = jax.nn.one_hot(best, probs.shape[1], dtype=jnp.int32)
    place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1) - 1
    sent = jnp.zeros((probs.shape[1], *x.shape), x.dtype).at[best, place].add(x)
    hidden = jax.nn.relu(jnp.einsum("ecd,edh->ech", sent, up))
    rows = jnp.einsum("ech,ehd->ecd", hidden, down)
    return rows[best, place] * probs.max(-1, keepdims=True)


ROUTERS = {
    f.__name__.replace("_", " "): f for f in (top_1, top_2, top_2_back, expert_choice, scattered)
}


class Dropless(nnx.Module):
    """A layer of experts between two linear layers, with a loss that balances them."""

    def __init__(self, rngs, router, num):
        def normal(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.5)

        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.router, self.up, self.down = (
            nnx.Linear(WIDTH, num, rngs=rngs),
            normal(num, WIDTH, HIDDEN),
            normal(num, HIDDEN, WIDTH),
        )
        self.name = router

    def __call__(self, x):
        x = self.embed(x)
        logits = self.router(x)
        with hxla.split():
            made = ROUTERS[self.name](x, nnx.softmax(logits), self.up[...], self.down[...])
        return x + made, auxiliary(logits)


class LinenDropless(nn.Module):
    router: str
    num: int

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.5)
        x = nn.Dense(WIDTH)(x)
        logits = nn.Dense(self.num)(x)
        up = self.param("up", normal, (self.num, WIDTH, HIDDEN))
        down = self.param("down", normal, (self.num, HIDDEN, WIDTH))
        return x + ROUTERS[self.router](x, nn.softmax(logits), up, down), auxiliary(logits)


def auxiliary(logits):
    """The load-balancing loss and the router's z-loss (Fedus et al., 2022; Zoph et al., 2022)."""
    probs = jax.nn.softmax(logits)
    counts = jnp.bincount(probs.argmax(-1), length=probs.shape[1]) / len(probs)
    balance = probs.shape[1] * (counts * probs.mean(0)).sum()
    return 0.01 * balance + 0.001 * (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()


def loss(model, batch):
    made, extra = model(batch["x"])
    return ((made - batch["y"]) ** 2).mean() + extra


def tokens(num=64):
    x = np.random.default_rng(0).normal(size=(num, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, ::-1]).copy()}


#: For models without annotations.
RULES = hxla.RuleSet(
    name="experts", rules=(hxla.Rule(path="(^|/)(up|down)$", axes=("expert", "", "")),)
)
