"""Programs that other devices take over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support.inside.jax import lowered_for, num_compilations, portable
from support.tiers import rows

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

X = np.random.default_rng(0).normal(size=(24, 24)).astype(np.float32)

PROGRAMS = {
    "dot": lambda x: jnp.sin(x @ x.T),
    "convolution": lambda x: jax.lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
    "sums and exponentials": lambda x: jax.nn.softmax(x).sum(0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "lapack": lambda x: jnp.linalg.cholesky(x @ x.T + 24 * jnp.eye(24)),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "loop": lambda x: jax.lax.fori_loop(0, x[0, 0].astype(int) + 3, lambda _, y: jnp.sin(y @ x), x),
    "branch": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "random": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
    "scatter": lambda x: jnp.zeros(24).at[x[0].astype(int)].add(x[1]),
    "integers": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32).sum(),
}


def loaded(lowered, devices):
    """What XLA made, on other devices; nothing is compiled again."""
    compiled = lowered.compile()
    before = num_compilations()
    found = portable(compiled).on(devices)
    assert num_compilations() == before
    return found


def compiled_again(lowered, devices):
    """The same text, compiled for other devices; nothing is traced again."""
    return lowered_for(lowered, devices).compile()


both_ways = pytest.mark.parametrize("way", [loaded, compiled_again])


@both_ways
@pytest.mark.parametrize("name", rows(PROGRAMS, "dot", "lapack", "loop"))
def test_a_program_gives_the_same_bits_elsewhere(name, way):
    first, *_, last = jax.devices()
    lowered = jax.jit(PROGRAMS[name]).lower(jax.device_put(X, first))
    there = way(lowered, [last])(jax.device_put(X, last))
    assert there.devices() == {last}
    np.testing.assert_array_equal(lowered.compile()(jax.device_put(X, first)), there)


@pytest.mark.parametrize("name", ["dot", "sums and exponentials", "loop"])
def test_a_program_that_outlives_jaxs_cache_is_compiled_again_elsewhere(name, tmp_path):
    """It was read from the cache, which is then taken away; loaded, it would fail when it runs."""
    from jax.experimental.compilation_cache import compilation_cache

    first, *_, last = jax.devices()
    x, own = jax.device_put(X, first), jax.jit(PROGRAMS[name])
    names = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
    before = [getattr(jax.config, each) for each in names]
    seconds = "jax_persistent_cache_min_compile_time_secs"
    least = getattr(jax.config, seconds)
    try:
        for each, value in zip((*names, seconds), (True, str(tmp_path), 0), strict=True):
            jax.config.update(each, value)
        compilation_cache.reset_cache()
        wanted = np.asarray(own.lower(x).compile()(x))
        jax.clear_caches()
        own.lower(x).compile()
    finally:
        for each, value in zip((*names, seconds), (*before, least), strict=True):
            jax.config.update(each, value)
        compilation_cache.reset_cache()
    lowered = own.lower(x)
    assert portable(lowered.compile()) is None
    there = compiled_again(lowered, [last])(jax.device_put(X, last))
    np.testing.assert_array_equal(there, wanted)


@both_ways
def test_what_was_donated_is_gone_there_too(way):
    first, *_, last = jax.devices()
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    lowered = add.lower(*[jax.device_put(X, first)] * 2)
    x, y = (jax.device_put(X, last) for _ in range(2))
    np.testing.assert_array_equal(way(lowered, [last])(x, y), X + X)
    assert x.is_deleted()
    assert not y.is_deleted()


@both_ways
def test_a_program_without_arguments_knows_its_devices(way):
    first, *_, last = jax.devices()
    here = jax.sharding.SingleDeviceSharding(first)
    lowered = jax.jit(lambda: jnp.zeros(3), out_shardings=here).lower()
    assert way(lowered, [last])().devices() == {last}


def mesh(devices):
    return Mesh(
        np.array(devices).reshape(2, 2), ("stage", "tensor"), axis_types=(AxisType.Auto,) * 2
    )


@both_ways
def test_collectives_go_between_the_devices_that_took_over(way):
    here, there = mesh(jax.devices()[:4]), mesh(jax.devices()[:3:-1])

    def run(x):
        shifted = jax.lax.ppermute(x, "stage", [(0, 1), (1, 0)])
        return shifted + 10 * jax.lax.axis_index("stage") + jax.lax.psum(x, "tensor")

    spec = P("stage", "tensor")
    mapped = jax.shard_map(run, mesh=here, in_specs=spec, out_specs=spec)
    x = jax.device_put(X, NamedSharding(here, spec))
    lowered = jax.jit(mapped).lower(x)
    moved = jax.device_put(X, NamedSharding(there, spec))
    found = way(lowered, there.devices.flat[:].tolist())(moved)
    np.testing.assert_array_equal(lowered.compile()(x), found)
    assert found.sharding == moved.sharding


@both_ways
def test_a_layout_that_vmap_has_rewritten_moves_too(way):
    here, there = mesh(jax.devices()[:4]), mesh(jax.devices()[:3:-1])
    row = NamedSharding(here, P("tensor"))

    def run(x):
        laid_out = jax.vmap(lambda y: jax.lax.with_sharding_constraint(jnp.sin(y), row))(x)
        return laid_out @ x

    spec = P("stage", None)
    lowered = jax.jit(run).lower(jax.device_put(X, NamedSharding(here, spec)))
    moved = jax.device_put(X, NamedSharding(there, spec))
    found = way(lowered, there.devices.flat[:].tolist())(moved)
    assert found.sharding.device_set == moved.sharding.device_set
    own = lowered.compile()(jax.device_put(X, NamedSharding(here, spec)))
    np.testing.assert_array_equal(own, found)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_program_that_calls_python_is_bound_to_its_devices(ordered):
    def run(x):
        jax.debug.print("{}", x.sum(), ordered=ordered)
        return x

    lowered = jax.jit(run).lower(X)
    assert lowered_for(lowered, jax.devices()[-1:]) is None
    assert portable(lowered.compile()) is None
