"""Settings of JAX for a while."""

import contextlib

import jax


@contextlib.contextmanager
def in_force(**settings):
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
