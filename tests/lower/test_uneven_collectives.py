"""Collectives of an uneven split: small arrays travel together, large ones alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from support.inside.lower import Cut, _uneven_collectives

SIZES = (3, 1, 2)
CUTS = [Cut(0, SIZES, "x"), Cut(1, SIZES, "x"), Cut(0, SIZES, "x")]
RNG = np.random.default_rng(0)
#: Of each device, in two dtypes.
WHOLE = [
    RNG.normal(size=(3, 6, 4)).astype(np.float32),
    RNG.normal(size=(3, 2, 6)).astype(jnp.bfloat16),
    RNG.normal(size=(3, 6, 5)).astype(np.float32),
]


@pytest.fixture(params=["together", "alone"], autouse=True)
def large(request, monkeypatch):
    if request.param == "alone":
        monkeypatch.setattr(_uneven_collectives, "_LARGE", 1)
    return request.param


def on_devices(run, arrays):
    """What each of three devices returns, and the compiled program."""
    mesh = jax.make_mesh((3,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])

    def local(arrays):
        out = run([x[0] for x in arrays], _uneven_collectives.first_token())
        return jax.tree.map(lambda x: x[None], out)

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    compiled = mapped.lower(arrays).compile()
    return jax.tree.map(np.asarray, compiled(arrays)), compiled.as_text()


def shards(x, cut):
    """The shards of a whole array, padded."""
    pieces = np.split(x, cut.offsets[1:], axis=cut.dim)
    return np.stack([np.asarray(cut.widened(jnp.asarray(p))) for p in pieces])


def test_shards_are_gathered_without_padding(large):
    own = [shards(x[0], cut) for x, cut in zip(WHOLE, CUTS, strict=True)]
    (found, token), text = on_devices(
        lambda arrays, token: _uneven_collectives.all_gather(arrays, CUTS, token), own
    )
    for x, wanted in zip(found, WHOLE, strict=True):
        np.testing.assert_array_equal(x, np.stack([wanted[0]] * 3))
    assert not token.any()
    assert len(re.findall(r" all-gather\(", text)) == {"together": 2, "alone": 3}[large]


def test_each_device_gets_its_part_of_the_sum():
    (found, token), _ = on_devices(
        lambda arrays, token: _uneven_collectives.reduce_scatter(arrays, CUTS, token), WHOLE
    )
    for x, each, cut in zip(found, WHOLE, CUTS, strict=True):
        wanted = shards(each.astype(np.float32).sum(0), cut)
        np.testing.assert_allclose(x.astype(np.float32), wanted, rtol=2e-2, atol=1e-2)
    assert not token.any()


def test_what_is_no_number_stays_in_its_array():
    arrays = [np.full((3, 4), np.nan, np.float32), np.full((3, 5), np.inf, np.float32), WHOLE[2]]
    (found, token), _ = on_devices(
        lambda arrays, token: _uneven_collectives.added(arrays, token, "x"), arrays
    )
    assert np.isnan(found[0]).all()
    assert np.isposinf(found[1]).all()
    np.testing.assert_allclose(found[2][0], WHOLE[2].sum(0), rtol=1e-6)
    assert not token.any()
