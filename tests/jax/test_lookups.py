"""Gradients of tables that are only looked up are rows: those of the whole gradient, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.inside.jax import as_function, lookups_of

HEIGHT, WIDTH = 64, 3
TABLE = np.random.default_rng(0).normal(size=(HEIGHT, WIDTH)).astype(np.float32)
TWICE = np.array([[5, 63, 5, 0], [9, 5, 63, 9]], np.int32)
OUTSIDE = np.array([[5, 64, -1, 0], [1000, 5, -64, -65]], np.int32)


def mixed(rows):
    """A number to which each row adds another gradient."""
    rows = rows.astype(jnp.float32).reshape(-1, WIDTH)
    return (jnp.sin(rows) * jnp.arange(1.0, rows.shape[0] + 1)[:, None]).sum()


READS = {
    "take": lambda table, at: jnp.take(table, at, axis=0),
    "index": lambda table, at: table[at],
    "clip": lambda table, at: jnp.take(table, at, axis=0, mode="clip"),
    "narrow": lambda table, at: table.astype(jnp.bfloat16)[at],
    "jitted": jax.jit(lambda table, at: table[at]),
}


@pytest.mark.parametrize("at", [TWICE, OUTSIDE], ids=["twice", "outside"])
@pytest.mark.parametrize("read", READS)
def test_rows_are_those_of_the_whole_gradient(read, at):
    def loss(table, at):
        rows = READS[read](table, at)
        return mixed(jnp.nan_to_num(rows))

    closed = jax.make_jaxpr(loss)(TABLE, at)
    found = lookups_of(closed, {0: HEIGHT})
    program, [more] = as_function(found.closed), found.zeros()
    value, indices = jax.jit(program)(TABLE, at, more)
    assert value == jax.jit(loss)(TABLE, at)

    def rows_of(more):
        (cotangent,) = jax.grad(lambda x: program(TABLE, at, *x)[0])([more])
        return found.rows([indices], [cotangent])

    [rows] = jax.jit(rows_of)(more)
    places = np.asarray(rows.places)
    inside = places[places < HEIGHT]
    assert len(set(inside)) == len(inside)
    assert list(places) == sorted(places)
    assert not np.asarray(rows.values)[places == HEIGHT].any()
    whole = np.zeros_like(TABLE)
    whole[inside] = np.asarray(rows.values, np.float32)[places < HEIGHT]
    np.testing.assert_array_equal(whole, jax.jit(jax.grad(loss))(TABLE, at))


def summed(table, at):
    return mixed(table[at]) + table.sum()


def twice(table, at):
    return mixed(table[at]) + mixed(table[at + 1])


def one(table, at):
    return mixed(table[at[0, 0]])  # a slice


def columns(table, at):
    return table[:, at[0, 0]].sum()


def in_a_scan(table, at):
    return jax.lax.scan(lambda sum, i: (sum + mixed(table[i]), None), 0.0, at)[0]


@pytest.mark.parametrize("loss", [summed, twice, one, columns, in_a_scan])
def test_tables_that_are_read_otherwise_are_left_alone(loss):
    assert lookups_of(jax.make_jaxpr(loss)(TABLE, TWICE), {0: HEIGHT}) is None


def test_a_lookup_of_too_many_rows_is_left_alone():
    closed = jax.make_jaxpr(lambda table, at: mixed(table[at]))(TABLE, TWICE)
    assert lookups_of(closed, {0: TWICE.size}) is not None
    assert lookups_of(closed, {0: TWICE.size - 1}) is None
