"""Parameters that are no real floats: frozen ones pass, complex ones train as two real parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import hxla
from support.tiers import rows
from support.training import train_with

RNG = np.random.default_rng(0)
DATA = {name: RNG.normal(size=(32, 8)).astype(np.float32) for name in "xy"}
WEIGHTS = RNG.normal(size=(8, 8, 2)).astype(np.float32)
FORMS = {
    "copies": {},
    "chain": {"config": {"memory": {"recompute": "boundaries", "segments": 2}}},
    "pipeline": {"stages": 2},
    "tensor": {"mesh": {"data": 1, "tensor": 2}, "rules": "decoder"},
    "zero 1": {"config": {"memory": {"zero": 1}}},
    "zero 3": {"config": {"memory": {"zero": 3, "segments": 2}}},
}


class Mixed(nnx.Module):
    """Quantised weights with factors of low rank, and a complex matrix or its two parts."""

    def __init__(self, in_parts=False):
        self.quantized = nnx.Param(jnp.asarray(np.arange(64).reshape(8, 8) - 32, jnp.int8))
        self.nibbles = nnx.Param(jnp.asarray(np.arange(64).reshape(8, 8) % 15 - 7, jnp.int4))
        self.phases = nnx.Param(jnp.exp(1j * jnp.arange(8.0)))
        self.a, self.b = (nnx.LoRAParam(jnp.full(s, 0.1)) for s in ((8, 2), (2, 8)))
        self.in_parts, parts = in_parts, jnp.asarray(WEIGHTS)
        complex_parts = jax.lax.complex(parts[..., 0], parts[..., 1])
        self.turn = nnx.LoRAParam(parts if in_parts else complex_parts)

    def __call__(self, x):
        turn = self.turn[...]
        if self.in_parts:
            turn = jax.lax.complex(turn[..., 0], turn[..., 1])
        y = jnp.tanh(x @ (self.quantized[...].astype(jnp.float32) / 32))
        y = y @ self.nibbles[...].astype(jnp.float32) / 8
        return (y @ turn * self.phases[...]).real + x @ self.a[...] @ self.b[...]


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def by_plain():
    model = Mixed(in_parts=True)
    optimizer, losses = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam), []
    wanted = nnx.DiffState(0, nnx.LoRAParam)
    gradient = nnx.jit(nnx.value_and_grad(lambda m, b: loss(m, b).mean(), argnums=wanted))
    for i in range(0, 32, 16):
        value, grads = gradient(model, {name: x[i : i + 16] for name, x in DATA.items()})
        optimizer.update(model, grads)
        losses.append(float(value))
    return model, losses


@pytest.mark.parametrize("form", rows(FORMS, "copies"))
def test_they_train_as_plain_jax_trains_two_real_parts(form):
    settings = dict(FORMS[form])
    config = {"cluster": {"visible_devices": [0, 1]}, **settings.pop("config", {})}
    result = train_with(
        Mixed(),
        DATA,
        loss,
        optax.adam(1e-2),
        batch_size=16,
        microbatch_size=4,
        steps=2,
        shuffle=False,
        trainable=nnx.LoRAParam,
        config=config,
        **settings,
    )
    plain, losses = by_plain()
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    own, turn = result.model, np.asarray(result.model.turn[...])
    np.testing.assert_allclose(np.stack([turn.real, turn.imag], -1), plain.turn[...], atol=1e-6)
    np.testing.assert_allclose(own.a[...], plain.a[...], atol=1e-6)
    for name in ("quantized", "nibbles", "phases"):
        a, b = (getattr(m, name)[...] for m in (own, plain))
        assert a.dtype == b.dtype
        assert bool((a == b).all())


def graph(model, **more):
    shapes = {name: jax.ShapeDtypeStruct((16, 8), "float32") for name in "xy"}
    job = hxla.Job(model, shapes, loss, optax.sgd(0.1), batch_size=16, **more)
    return job.graph(4)


def test_linen_has_them_too():
    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            ints = self.param("ints", lambda key: jnp.ones((8, 8), jnp.int8))
            turn = self.param("turn", lambda key: jnp.ones(8, jnp.complex64))
            return (nn.Dense(8)(x @ ints.astype(x.dtype)) * turn).real

    assert graph(Module(), trainable=["Dense_0", "turn"]).param_shapes[-1] == (8, 2)
    with pytest.raises(hxla.ConfigError, match=r"no gradient:\n  ints: int8\[8, 8\]\n.*trainable="):
        graph(Module())


def test_an_integer_that_is_to_be_trained_is_refused_by_name():
    with pytest.raises(hxla.ConfigError, match=r"nibbles: int4\[8, 8\]\n  quantized: int8\[8, 8\]"):
        graph(Mixed())
