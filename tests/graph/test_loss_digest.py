"""The digest of a traced loss: what computes the same has the same one, in every process."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hxla
from support.inside.graph import loss_digest
from support.launched import own_environment

TABLE = np.arange(6, dtype=np.float32)
BATCH = {"x": jax.ShapeDtypeStruct((4, 6), "float32"), "w": jax.ShapeDtypeStruct((4,), "float32")}


class Net(nnx.Module):
    def __init__(self, *, rate=0.1):
        self.layer = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.seen = nnx.Variable(jnp.zeros(()))
        self.rate = rate

    def __call__(self, x):
        self.seen[...] += self.rate
        return self.layer(x)


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (cube(primals[0]), 3 * primals[0] ** 2 * tangents[0]))


def loss(model, batch):
    return (cube(model(batch["x"])) * TABLE).mean(-1)


def the_same_by_another_name(model, batch):
    # On other lines, with a product that nothing needs.
    unused = model.layer(batch["x"]) @ jnp.ones(6)
    del unused
    powers = cube(model.layer(batch["x"]))
    return (powers * TABLE).mean(-1)


def with_metrics(model, batch):
    found = loss(model, batch)
    return found, {"largest": hxla.metric(found.max(), "max"), "mean": found}


def another_constant(model, batch):
    return (cube(model(batch["x"])) * (TABLE + 1)).mean(-1)


def another_number(model, batch):
    return (cube(model(batch["x"])) * TABLE).mean(-1) * 2.0


def another_function(model, batch):
    return (model(batch["x"]) ** 2 * TABLE).mean(-1)


def other_weights(model, batch):
    return loss(model, batch), batch["w"]


def of(given, model=None):
    return loss_digest(hxla.trace(model or Net(), given, BATCH))


def test_metrics_and_what_only_looks_another_do_not_count():
    assert of(loss) == of(with_metrics)
    assert of(lambda m, batch: (cube(m(batch["x"])) * TABLE.copy()).mean(-1)) == of(loss)

    def silent(model, batch):
        return (cube(model.layer(batch["x"])) * TABLE).mean(-1)

    assert of(the_same_by_another_name) == of(silent)


@pytest.mark.parametrize(
    "other", [another_constant, another_number, another_function, other_weights]
)
def test_what_computes_something_else_has_another(other):
    assert of(other) != of(loss)


def test_what_becomes_of_other_variables_counts():
    assert of(loss, Net(rate=0.2)) != of(loss)


@pytest.mark.slow
def test_it_is_the_same_in_another_process():
    code = "from graph.test_loss_digest import loss, of\nprint(of(loss))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=own_environment() | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [of(loss)]
