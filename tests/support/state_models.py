"""Models with every kind of state that is no parameter, the right values from plain JAX beside."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BATCH, STEPS, NUM = 16, 2, 32
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(NUM, 8)).astype(np.float32),
    "y": RNG.normal(size=(NUM, 4)).astype(np.float32),
    "id": RNG.permutation(NUM),
}
MERGE = {"rows": "sum", "moments": "sum", "seen": "max", "best": "max", "worst": "min"}
AVERAGED = ("mean", "turning")
INITIAL = {
    # Only read.
    "phases": jnp.exp(1j * jnp.arange(4.0)),
    "mask": jnp.array([0, -jnp.inf, jnp.nan, -0.0]),
    "codes": jnp.arange(-2, 2).astype(jnp.int4),
    "scale": jnp.arange(1, 5).astype(jnp.float8_e4m3fn),
    # The same in all microbatches.
    "steps": jnp.int32(0),
    "ready": jnp.array(False),
    "turn": jnp.complex64(1),
    "limit": jnp.float32(jnp.inf),
    # As `MERGE` says.
    "rows": jnp.int32(0),
    "moments": jnp.zeros(8),
    "seen": jnp.zeros(NUM, bool),
    "best": jnp.full(8, -10.0),
    "worst": jnp.array(100, jnp.int16),
    # Averages.
    "mean": jnp.zeros(8),
    "turning": jnp.zeros(8, jnp.complex64),
}


def step(old, x, ids):
    """What a call makes of each variable that it changes."""
    return {
        "steps": old["steps"] + 1,
        "ready": jnp.array(True),
        "turn": old["turn"] * 1j,
        "limit": jnp.where(old["ready"], old["limit"], 2.0),
        "rows": old["rows"] + len(x),
        "moments": old["moments"] + (x**2).sum(0),
        "seen": old["seen"].at[ids].set(True),
        "best": jnp.maximum(old["best"], x.max(0)),
        "worst": jnp.minimum(old["worst"], (10 * x).min().astype(jnp.int16)),
        "mean": 0.9 * old["mean"] + 0.1 * x.mean(0),
        "turning": 0.9 * old["turning"] + 0.1 * (1j * x).mean(0),
    }


def combined(y, old):
    finite = jnp.where(jnp.isfinite(old["mask"]), old["mask"], 1)
    numbers = old["codes"].astype(jnp.float32) + finite
    return (y * old["phases"] * old["turn"]).real * old["scale"].astype(jnp.float32) + numbers


class InNnx(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)
        for name, value in INITIAL.items():
            setattr(self, name, nnx.Variable(value))

    def __call__(self, x, ids):
        y = self.down(jnp.tanh(self.up(x)))
        old = {name: getattr(self, name)[...] for name in INITIAL}
        for name, value in step(old, x, ids).items():
            getattr(self, name)[...] = value
        return combined(y, old)


class InLinen(nn.Module):
    @nn.compact
    def __call__(self, x, ids):
        y = nn.Dense(4, name="down")(jnp.tanh(nn.Dense(8, name="up")(x)))
        kept = {
            name: self.variable("kept", name, lambda value=value: value)
            for name, value in INITIAL.items()
        }
        old = {name: own.value for name, own in kept.items()}
        if not self.is_initializing():
            for name, value in step(old, x, ids).items():
                kept[name].value = value
        return combined(y, old)


def loss(model, batch):
    return ((model(batch["x"], batch["id"]) - batch["y"]) ** 2).mean(-1)


def batches():
    return [{k: v[i : i + BATCH] for k, v in DATA.items()} for i in range(0, NUM, BATCH)]


def by_plain_nnx(model):
    """Losses and state of plain Flax, one call a step with the whole batch."""
    optimizer, losses = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param), []
    gradient = nnx.jit(nnx.value_and_grad(lambda model, batch: loss(model, batch).mean()))
    for batch in batches():
        value, grads = gradient(model, batch)
        optimizer.update(model, grads)
        losses.append(float(value))
    return losses, {name: getattr(model, name)[...] for name in INITIAL}


def by_plain_linen(module, variables):
    tx, losses = optax.sgd(0.01), []
    params, kept = variables["params"], variables["kept"]
    state = tx.init(params)

    def mean(params, kept, batch):
        variables = {"params": params, "kept": kept}
        out, left = module.apply(variables, batch["x"], batch["id"], mutable=["kept"])
        return ((out - batch["y"]) ** 2).mean(), left["kept"]

    gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))
    for batch in batches():
        (value, kept), grads = gradient(params, kept, batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, kept


def check(found, right):
    """Averages are near, everything else is the same to the last bit."""
    for name in INITIAL:
        a, b = np.asarray(found[name]), np.asarray(right[name])
        assert a.dtype == b.dtype, name
        if name in (*AVERAGED, "moments"):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert a.tobytes() == b.tobytes(), (name, a, b)
