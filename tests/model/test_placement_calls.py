"""A model that places its arrays itself is refused in one line, with the line of the call."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import hxla
from support import models

ONE, TWO, ROWS = models.mesh(rows=1), models.mesh(rows=2), P("rows")
EXPLICIT = jax.make_mesh(
    (2,), ("rows",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,)
)


def mapped(x, **mesh):
    return jax.shard_map(jnp.sin, in_specs=ROWS, out_specs=ROWS, **mesh)(x)


def constrained(x, where):
    return jax.lax.with_sharding_constraint(x, where)


def ambiguous(x):
    x = reshard(x, NamedSharding(EXPLICIT, P(None, "rows")))
    return x @ x.mT


def in_a_scan(x):
    return jax.lax.scan(lambda x, _: (constrained(x, NamedSharding(TWO, ROWS)), None), x, None, 2)[
        0
    ]


def in_a_branch(x):
    return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: mapped(x, mesh=TWO), x)


def in_a_jit(x):
    return jax.jit(lambda x: constrained(x, NamedSharding(TWO, ROWS)))(x)


CALLS = {
    "shard_map": (lambda x: mapped(x, mesh=TWO), "jax.shard_map", mapped),
    "shard_map over one device": (lambda x: mapped(x, mesh=ONE), "jax.shard_map", mapped),
    "shard_map without a mesh": (mapped, "a call that places arrays", mapped),
    "shard_map in a branch": (in_a_branch, "jax.shard_map", mapped),
    "a constraint": (
        lambda x: constrained(x, NamedSharding(TWO, ROWS)),
        "jax.lax.with_sharding_constraint",
        constrained,
    ),
    "a constraint over one device": (
        lambda x: constrained(x, NamedSharding(ONE, ROWS)),
        "jax.lax.with_sharding_constraint",
        constrained,
    ),
    "a constraint without a mesh": (
        lambda x: constrained(x, ROWS),
        "a call that places arrays",
        constrained,
    ),
    "a constraint in a scan": (in_a_scan, "jax.lax.with_sharding_constraint", constrained),
    "a constraint in a jit": (in_a_jit, "jax.lax.with_sharding_constraint", constrained),
    "reshard": (lambda x: reshard(x, NamedSharding(EXPLICIT, ROWS)), "jax.sharding.reshard", None),
    "arrays of an explicit mesh": (
        ambiguous,
        "a call that places arrays",
        None,
    ),
    "device_put over two devices": (
        lambda x: jax.device_put(x, NamedSharding(TWO, ROWS)),
        "jax.device_put",
        None,
    ),
}


class Net(nnx.Module):
    def __init__(self, call):
        self.linear, self.call = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), call

    def __call__(self, x):
        return self.call(self.linear(x))


def traced(call):
    batch = {"x": jax.ShapeDtypeStruct((4, 8), "float32")}
    return hxla.trace(Net(call), lambda model, batch: model(batch["x"]).mean(-1), batch)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_places_arrays_is_refused_with_its_line_and_the_remedy(name):
    call, shown, place = CALLS[name]
    with pytest.raises(hxla.LossError, match=f"^the model uses {shown} at .*rules=") as caught:
        traced(call)
    assert "\n" not in str(caught.value)
    file, line = str(caught.value).split(" at ", 1)[1].split(": ", 1)[0].rsplit(":", 1)
    assert file == __file__
    first = (place or call).__code__.co_firstlineno
    assert 0 <= int(line) - first <= 2


def test_a_model_may_move_an_array_to_the_host_and_back():
    device, host = jax.memory.Space.Device, jax.memory.Space.Host
    traced(lambda x: jax.device_put(jax.device_put(x, host), device))
