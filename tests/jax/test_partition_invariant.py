"""Programs whose bits are the same however XLA partitions and fuses them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hxla
from support.inside.jax import partition_invariant

pytestmark = pytest.mark.optimized

GRANULES = 4
RNG = np.random.default_rng(0)
ROWS, TABLE = (RNG.normal(size=shape).astype(np.float32) for shape in ((24, 48), (16, 48)))
IDS = RNG.integers(0, 16, 24).astype(np.int32)
#: As for every program with exact sums; see `lower.compile`.
OPTIONS = {"xla_allow_excess_precision": False}


def mesh_of(num):
    return jax.make_mesh((num,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:num])


def written(function, mesh, zero=0):
    def gather(x, dim):
        free = [None if d == dim else P.UNCONSTRAINED for d in range(x.ndim)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*free)))

    return partition_invariant(function, zero, GRANULES, gather)


def mixed(rows, table, ids):
    """A norm, a softmax, lookups that meet, a loop, and what XLA likes to fuse and to rewrite."""
    x = rows * 1.7 + table[ids] * rows
    x = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-6)
    x = (
        jax.nn.gelu(x, approximate=False) / 3.7
        + jnp.tanh(x) * 0.3
        + jax.nn.logsumexp(x, axis=1)[:, None]
    )
    step = jax.checkpoint(lambda c, row: (c * 0.9 + row * row, jax.nn.softmax(c + row)))
    last, out = jax.lax.scan(step, x[0], x)
    return (out * out[:, ::-1]).sum() + (last**3).mean()


@functools.cache
def gradients(num, spec):
    mesh = mesh_of(num)

    def run(rows, table, ids, step):
        both = jax.value_and_grad(mixed, (0, 1))
        return written(both, mesh, jnp.minimum(step, 0))(rows, table, ids)

    place = lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    arrays = place(ROWS), place(TABLE), jax.device_put(IDS, NamedSharding(mesh, P()))
    compiled = jax.jit(run, compiler_options=OPTIONS).lower(*arrays, np.int32(1)).compile()
    return jax.tree.map(np.asarray, compiled(*arrays, np.int32(1))), compiled.as_text()


def test_bits_are_those_of_one_device():
    """The rows of lookups are cut, or their columns, over two devices or four."""
    (wanted, text) = gradients(1, ())
    assert not [line for line in text.splitlines() if " reduce(" in line and "f32" in line]
    for num, spec in ((2, (None, "tensor")), (4, ("tensor",))):
        found, _ = gradients(num, spec)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    plain = jax.jit(jax.value_and_grad(mixed, (0, 1)))(ROWS, TABLE, IDS)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (24, 5), (3, 12, 16)])
def test_sums_are_of_all_elements(shape):
    """Of integers, so exactly; also where granules do not divide a dimension."""
    x = RNG.integers(-1000, 1000, shape).astype(np.float32)
    run = jax.jit(written(lambda x: (x.sum(), x.sum(0), x.max(-1), x.min()), mesh_of(1)))
    wanted = x.sum(), x.sum(0), x.max(-1), x.min()
    for a, b in zip(run(x), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


REFUSED = {
    "dot_general": lambda x: x @ x.T,
    "conv_general_dilated": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "while": lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x + 1, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "reduce_prod": lambda x: x.prod(),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "random numbers": lambda x: x + jax.random.uniform(jax.random.key(0, impl="rbg"), x.shape),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_add_in_another_order_is_refused_with_its_line(name):
    with pytest.raises(hxla.PlanError, match=rf"{name}.* at .*test_partition_invariant.py:\d+"):
        jax.make_jaxpr(written(REFUSED[name], mesh_of(1)))(ROWS)
