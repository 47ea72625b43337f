"""Routes: arrays of any dtype between devices that shard them in unlike ways, bit for bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hxla import testing
from support.inside.lower import Padding, Route, RouteEnd

SHAPES = [(8, 3), (7, 5), (6, 4), (), (0, 4), (5,), (4, 2)]
DTYPES = ["float32", "float32", "bfloat16", "int32", "float32", "bool", "uint8"]


def arrays():
    rng = np.random.default_rng(0)
    return [
        np.asarray(rng.integers(0, 2 if dtype == "bool" else 100, shape)).astype(jnp.dtype(dtype))
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def on(first, **axes):
    """The sharding of each array on consecutive devices, cut where sizes divide."""
    num = int(np.prod(list(axes.values()))) if axes else 1
    devices = jax.devices()[first : first + num]
    if not axes:
        return [SingleDeviceSharding(devices[0]) for _ in SHAPES], [Padding()] * len(SHAPES)
    mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
    names = [(name, size) for name, size in axes.items() if name != "data"]
    shardings, paddings = [], []
    for shape in SHAPES:
        spec, padding = P(), Padding()
        for name, size in names:
            dim = next((d for d, n in enumerate(shape) if n and n % size == 0), None)
            if dim is not None:
                spec = P(*[None] * dim, name)
            elif shape and shape[0] > size:
                most, rest = divmod(shape[0], size)
                parts = tuple(most + (k < rest) for k in range(size))
                spec, padding = P(name), Padding((parts, *[()] * (len(shape) - 1)))
        shardings.append(NamedSharding(mesh, spec))
        paddings.append(padding)
    return shardings, paddings


WAYS = {
    "one to two": ((0, {}), (1, {"tensor": 2})),
    "two to one": ((0, {"tensor": 2}), (2, {})),
    "copies to shards": ((0, {"data": 2}), (2, {"tensor": 2})),
    "shards to copies": ((0, {"tensor": 2}), (2, {"data": 3})),
    "two to three": ((0, {"tensor": 2}), (2, {"tensor": 3})),
    "all three to one of them": ((0, {"device": 3}), (1, {})),
    "one of three to all": ((2, {}), (0, {"device": 3})),
    "all three to two of them": ((0, {"device": 3}), (1, {"tensor": 2})),
    "two of three to all": ((1, {"data": 2}), (0, {"device": 3})),
}


def places(first, axes):
    each = zip(arrays(), *on(first, **axes), strict=True)
    return [
        RouteEnd(shape=padding.like(x).shape, dtype=x.dtype, sharding=where, padding=padding)
        for x, where, padding in each
    ]


@pytest.mark.parametrize("way", WAYS)
def test_arrays_arrive_bit_for_bit(way):
    (first, axes), (to, to_axes) = WAYS[way]
    sources, targets = places(first, axes), places(to, to_axes)
    used = {d for place in (*sources, *targets) for d in place.sharding.device_set}
    route = Route(sorted(used, key=lambda d: d.id), sources, targets)
    route.compiled = route.lower().compile()
    testing.assert_collectives(route.compiled, all_gather=0, all_reduce=0, all_to_all=0)
    given = [
        jax.device_put(place.padding.pad(x), place.sharding)
        for x, place in zip(arrays(), sources, strict=True)
    ]
    for x, place, got in zip(arrays(), targets, route.run(given), strict=True):
        assert got.sharding == place.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(place.padding.pad(x)))


def test_a_device_gets_the_rows_that_it_lacks_only():
    one = SingleDeviceSharding(jax.devices()[0])
    three = NamedSharding(on(0, device=3)[0][0].mesh, P("device"))
    whole, third = (RouteEnd(shape=(6, 4), dtype=np.float32, sharding=s) for s in (one, three))
    text = Route(jax.devices()[:3], [whole], [third]).lower().compile().as_text()
    assert text.count("collective-permute(") == 2
    assert "u32[8]" in text  # two of six rows of four


def test_devices_may_have_any_order():
    one = SingleDeviceSharding(jax.devices()[0])
    x = np.arange(6, dtype=np.float32)
    for devices in itertools.permutations(jax.devices()[:3]):
        third = NamedSharding(Mesh(np.array(devices), ("device",)), P("device"))
        source, target = (RouteEnd(shape=(6,), dtype=x.dtype, sharding=s) for s in (one, third))
        route = Route(jax.devices()[:3], [source], [target])
        route.compiled = route.lower().compile()
        [got] = route.run([jax.device_put(x, one)])
        np.testing.assert_array_equal(np.asarray(got), x)
