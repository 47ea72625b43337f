"""Losses with constants that NumPy does not cast, empty operands, and gradient rules in rules."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.inside.jax import as_function
from support.tiers import rows

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


@jax.custom_vjp
def inner(x):
    return jnp.sin(x)


def no_rule(saved, grad):
    raise NotImplementedError("kernel differentiation is not supported")


inner.defvjp(lambda x: (jnp.sin(x), x), no_rule)


@jax.custom_vjp
def outer(x):
    return 2 * inner(x)


outer.defvjp(lambda x: (2 * inner(x), x), lambda x, grad: (2 * jnp.cos(x) * grad,))


@jax.custom_vjp
def outermost(x):
    return outer(x) + 1


outermost.defvjp(
    lambda x: (outer(x) + 1, x), lambda x, grad: (2 * jnp.cos(x) * grad + 0 * inner(x),)
)


def with_pairs(x):
    """A recurrence of first order, as in state-space models."""

    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return jax.lax.associative_scan(combine, (jnp.tanh(x), x), axis=1)[1]


ODD = {
    "a complex array": lambda x: (x * jnp.exp(1j * jnp.arange(8))).real,
    "complex scalars": lambda x: (x * (2 + 0j)).real + (x / 2j).imag,
    "a transform": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 1j, 8),
    "int4": lambda x: x * jnp.int4(2).astype(x.dtype) * jnp.arange(8).astype(jnp.int4).astype("f"),
    "float8": lambda x: x * jnp.float8_e4m3fn(2).astype(x.dtype),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * jnp.bfloat16(2)).astype(x.dtype),
    "an associative scan": lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),
    "one of pairs": with_pairs,
    "an empty part": lambda x: jnp.concatenate([x, x[:, :0]], 1) + x[:, :0].sum(),
    "an empty product": lambda x: x + x[:, :0] @ jnp.zeros((0, 8)) + (x[:0] * 2.0).sum(),
    "a rule in a rule": outer,
    "three of them": outermost,
}


class Net(nnx.Module):
    def __init__(self, call):
        self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.call = call

    def __call__(self, x):
        return self.down(self.call(self.up(x)))


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)


CASES = list(itertools.product(ODD, [None, "bf16"]))
QUICK = [
    ("a complex array", None),
    ("int4", None),
    ("complex scalars", "bf16"),
    ("one of pairs", "bf16"),
    ("an empty product", "bf16"),
    ("three of them", "bf16"),
]


@pytest.mark.parametrize("both", rows(CASES, *QUICK))
def test_an_odd_program_has_the_loss_and_the_gradient_of_plain_jax(both):
    case, precision = both
    model = Net(ODD[case])
    shapes = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
    job = hxla.Job(model, shapes, loss, optax.sgd(0.1), batch_size=16, precision=precision)
    graph, plan = job.graph(4), job.plan(microbatch_size=2)
    assert hxla.determinism(graph, plan).level in ("D1", "D2")
    program, params = as_function(graph.program), jax.tree.leaves(nnx.state(model, nnx.Param))
    key = jax.random.key(0)
    own = jax.jit(jax.value_and_grad(lambda own: program(*own, key, X)[0] / 4))
    value, grads = own(params)
    right, wanted = nnx.jit(nnx.value_and_grad(lambda m: loss(m, {"x": X}).mean()))(model)
    near = 1e-5 if precision is None else 0.05
    np.testing.assert_allclose(value, right, rtol=near)
    for a, b in zip(grads, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near * float(jnp.abs(b).max()))
