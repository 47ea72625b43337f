"""Initial arrays in groups: the same bits as together, from few programs."""

import functools

import jax
import numpy as np
import pytest
from flax import linen, nnx

from support import shared_state
from support.inside.jax import apart
from support.inside.model import _functional
from support.large_net import Net

compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def of_nnx():
    return nnx.split(Net(16, 5, nnx.Rngs(3)))[1]


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        for _ in range(5):
            x = linen.relu(linen.Dense(16)(x))
        return x


def of_linen():
    return Dense().init(jax.random.key(3), np.ones((2, 16), np.float32))


TABLE = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)


def tied():
    """Arrays of one drawing, one that closes over numbers, one twice, and a number."""
    own, other = jax.numpy.split(jax.random.normal(jax.random.key(1), (8, 4)), 2)
    return [own, other, jax.numpy.asarray(TABLE) * 2, own, 1.0]


@pytest.mark.parametrize(
    ("make", "num_groups", "num_programs"),
    [
        pytest.param(of_nnx, 23, 6, marks=pytest.mark.slow),
        (of_linen, 10, 2),
        (tied, 3, 3),
    ],
)
def test_arrays_made_apart_are_those_made_together(make, num_groups, num_programs):
    closed = jax.make_jaxpr(make)()
    together = compiled(lambda: jax.tree.leaves(make()))()
    groups = apart(closed, [], range(len(together)))
    found, programs = {}, {}
    for group in groups:
        run = programs.setdefault(group.like, compiled(group.run))
        found |= zip(group.places, run(group.operands), strict=True)
    for k, x in enumerate(together):
        np.testing.assert_array_equal(found[k], x)
    assert (len(groups), len(programs)) == (num_groups, num_programs)
    [one] = apart(closed, [], range(len(together)), 1 << 20)
    assert sorted(one.places) == [*range(len(together))]


@pytest.mark.slow
def test_a_model_begins_with_the_same_bits_however_it_is_spread(monkeypatch):
    def begun(own, plan):
        with own.open(plan, steps=1) as session:
            return jax.tree.leaves(session.gather(session.state.params))

    own = shared_state.shared(1)
    together = begun(own, shared_state.planned(own, 2))
    monkeypatch.setattr(_functional, "_LARGE_BYTES", 64)
    own = shared_state.shared(3, shares=[4, 2, 1])
    each = begun(own, shared_state.planned(own, 3, (2, 0, 6)))
    assert len(each) == len(together)
    for x, y in zip(each, together, strict=True):
        np.testing.assert_array_equal(x, y)
