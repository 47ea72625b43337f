"""What tracers say when they are asked for a sharding."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.interpreters.partial_eval import DynamicJaxprTracer

import hxla
from support.inside.jax import brief_absence
from support.inside.model import as_module


def asked(x):
    with pytest.raises(AttributeError, match="'sharding' attribute is not available") as error:
        _ = x.sharding
    assert not hasattr(x, "sharding")
    return str(error.value)


def test_it_is_said_in_brief_and_only_meanwhile():
    said = []

    def run(x):
        said.append(asked(jnp.sin(x)))
        with brief_absence():
            said.append(asked(jnp.sin(x)))
        said.append(asked(jnp.sin(x)))
        return x

    jax.make_jaxpr(run)(jnp.ones(3))
    before, within, after = said
    assert before == after
    assert before.startswith(within)


def test_a_concrete_array_has_one():
    with brief_absence():
        assert jnp.ones(3).sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(5)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.dropout(layer(x))
        return x


def test_nobody_looks_where_the_parts_of_a_model_come_from(monkeypatch):
    looked = []
    monkeypatch.setattr(
        DynamicJaxprTracer, "_origin_msg", lambda self: looked.append(self) or "", raising=False
    )
    shapes, _ = as_module(lambda: Deep(nnx.Rngs(0)))
    assert shapes.layers[4].kernel.shape == (4, 4)
    batch = {"x": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    graph = hxla.trace(shapes, lambda model, batch: (model(batch["x"]) ** 2).mean(-1), batch)
    assert "random" in str(graph.program)
    assert not looked
