"""The cache of compiled programs that the tests share."""

import jax
import jax.numpy as jnp
import numpy as np


def run(x):
    return jnp.tanh(x @ x).sum(0)


def test_a_device_finds_what_another_has_compiled(tmp_path, every_program_is_cached):
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    own = jax.jit(run)
    found, counts = [], []
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compilation_cache.reset_cache()
        for device in jax.devices()[:3]:
            found.append(np.asarray(own(jax.device_put(x, device))))
            counts.append(len(list(tmp_path.glob("*-cache"))))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    assert counts == [1, 1, 1]
    np.testing.assert_array_equal(found, [found[0]] * 3)
