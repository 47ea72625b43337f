"""Tracers without a sharding say so at once, as they do since jax 0.12.

NNX asks each random stream for the sharding of its count before it makes a key. Older tracers then
looked through the whole program for where they come from, to say it in an error that nobody reads:
the shapes of a model, and a loss with dropout, took a time that is quadratic in the layers. A GPT
of 96 of them with dropout is traced in 2.7 seconds instead of 9.4.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from jax._src import core


def _absent(tracer: Any) -> NoReturn:
    raise AttributeError(f"The 'sharding' attribute is not available on {tracer._error_repr()}.")


@contextlib.contextmanager
def brief_absence() -> Iterator[None]:
    """Inside, tracers do not look for where they come from when they are asked for a sharding."""
    tracer: Any = core.Tracer
    before = tracer.sharding
    if "_origin_msg" not in before.fget.__code__.co_names:
        yield
        return
    tracer.sharding = property(_absent)
    try:
        yield
    finally:
        tracer.sharding = before
