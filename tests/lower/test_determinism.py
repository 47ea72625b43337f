"""Levels of determinism: what is promised on which devices, and by what operations of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.lower import _equations, dependent

pytestmark = pytest.mark.optimized


class Absolute(nnx.Module):
    """One number, whose gradient is a sign: nothing of it is rounded."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return jnp.abs(x - self.w)


def graph_of(model, loss, size=1):
    batch = {"x": jax.ShapeDtypeStruct((size,), "float32")}
    return hxla.trace(model, loss, batch)


def plan_on(graph, names, **sums):
    plan = hxla.make_plan(graph, len(names), batch_size=8 * len(names))
    devices = tuple(
        d.model_copy(update={"kind": k}) for d, k in zip(plan.devices, names, strict=True)
    )
    changed = plan.sums.model_copy(update=sums)
    return plan.replaced(devices=devices, sums=changed)


def linear(size=4):
    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    batch = {"x": jax.ShapeDtypeStruct((size, 4), "float32")}
    return hxla.trace(model, lambda model, batch: jnp.exp(model(batch["x"])).mean(-1), batch)


def test_like_devices_of_unlike_speeds_keep_d1_and_no_d2_for_the_products():
    graph = linear()
    found = hxla.determinism(graph, plan_on(graph, ["cpu@0.5", "cpu@1.0", "cpu"]))
    assert found.level == "D1"
    assert "any number of cpu devices" in str(found)
    assert "products" in str(found)
    assert "dot_general test_determinism.py:" in str(found)
    assert "functions, divisions and roots" in str(found)
    assert "exp test_determinism" in str(found)


def test_unlike_kinds_keep_d0_and_the_reason_names_the_operations():
    graph = linear()
    found = hxla.determinism(graph, plan_on(graph, ["A100", "V100"]))
    assert found.level == "D0"
    assert "A100 and V100 round unlike" in str(found)
    assert "dot_general" in str(found)


def test_float_sums_keep_d0():
    graph = linear()
    plan = plan_on(graph, ["cpu", "cpu"], kind="float")
    assert hxla.determinism(graph, plan).level == "D0"


def test_unlike_kinds_keep_d2_where_nothing_is_rounded_as_a_device_likes():
    graph = graph_of(Absolute(), lambda model, batch: model(batch["x"]))
    found = hxla.determinism(graph, plan_on(graph, ["A100", "V100"]))
    assert found.level == "D2"
    assert "whose kind is to stay" in str(found)
    # A sum over several examples is one of floats: its order is the card's.
    several = graph_of(Absolute(), lambda model, batch: model(batch["x"]), size=4)
    assert hxla.determinism(several, plan_on(several, ["A100", "V100"])).level == "D0"


def test_what_only_the_backward_pass_rounds_decides_too():
    def loss(model, batch):
        # Its gradient adds up what each copy of the number gets.
        return jnp.max(jnp.abs(batch["x"] - jnp.broadcast_to(model.w[...], (1, 3))), axis=-1)

    graph = graph_of(Absolute(), loss)
    assert hxla.determinism(graph, plan_on(graph, ["A100", "V100"])).level == "D0"


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: x + x, set()),
        (lambda x: jnp.maximum(x, -x)[::-1].astype(jnp.bfloat16), set()),
        (lambda x: x * x, set()),
        (lambda x: x * x + x, {"multiply-adds"}),
        (lambda x: (x * x).reshape(3, 1).T - x, {"multiply-adds"}),
        (lambda x: x * 0.25 + x, set()),
        (lambda x: x * 0.3 + x, {"multiply-adds"}),
        (lambda x: jnp.tanh(x), {"functions"}),
        (lambda x: x / x, {"functions"}),
        (lambda x: x @ x, {"products"}),
        (lambda x: x.sum(), {"sums"}),
        (lambda x: x.astype(jnp.int32).sum(), set()),
        (lambda x: x[:1].sum(), set()),
        (lambda x: jnp.zeros(3).at[jnp.array([0, 0, 1])].add(x), {"sums"}),
        (lambda x: jnp.fft.fft(x).real, {"others"}),
        (lambda x: jax.random.bits(jax.random.key(0), (3,)), set()),
    ],
)
def test_each_class_of_operations_is_told_apart(function, wanted):
    closed = jax.make_jaxpr(function)(jnp.ones(3))
    assert set(dependent(_equations(closed.jaxpr))) == wanted


def test_training_says_the_level_before_it_starts(capsys):
    data = {"x": np.ones((8, 4), np.float32)}
    hxla.train(
        hxla.Job(
            nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
            data,
            lambda model, batch: model(batch["x"])[:, 0] ** 2,
            optax.sgd(0.1),
            batch_size=8,
        ),
        microbatch_size=4,
        steps=1,
        mesh=models.mesh(data=2),
    )
    out = capsys.readouterr()
    assert "bits: devices of this kind give the same bits, in any number" in out.err
