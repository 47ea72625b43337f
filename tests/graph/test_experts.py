"""Which operations of a trace belong to a layer of experts without a capacity."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import hxla
from support.dropless import HIDDEN, WIDTH, Dropless, loss, tokens

SHAPES = {"up": (4, WIDTH, HIDDEN), "down": (4, HIDDEN, WIDTH)}


class Layer(nnx.Module):
    """Products of two matrices of each expert, with a function of rows between them."""

    def __init__(self, between):
        self.up, self.down = (nnx.Param(jnp.ones(shape)) for shape in SHAPES.values())
        self.between = between

    def __call__(self, x):
        sizes = jnp.full(4, len(x) // 4, jnp.int32)
        rows = self.between(jax.lax.ragged_dot(x, self.up[...], sizes))
        return jax.lax.ragged_dot(rows, self.down[...], sizes)


def names(model, loss, batch):
    return [op.name for op in hxla.trace(model, loss, batch).ops]


def of_layer(between):
    return names(
        Layer(between), lambda model, batch: (model(batch["x"]) ** 2).mean(), {"x": tokens()["x"]}
    )


@pytest.mark.parametrize("router", ["top 1", "top 2", "top 2 back"])
def test_a_layer_of_experts_is_one_operation(router):
    found = names(Dropless(nnx.Rngs(0), router, 4), loss, tokens())
    assert found.count("experts") == 1
    assert "ragged_dot_general" not in found


@pytest.mark.parametrize(
    "between",
    [jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.tanh, lambda x: x * jnp.arange(1.0, HIDDEN + 1)],
)
def test_what_is_row_by_row_belongs_to_it(between):
    assert of_layer(between).count("experts") == 1


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),  # no derivative at zero
        lambda x: x - x.mean(0),  # of all experts' rows
        lambda x: jnp.cumsum(x, axis=0),
    ],
)
def test_what_is_not_is_computed_of_all_rows(between):
    assert of_layer(between).count("experts") == 2
