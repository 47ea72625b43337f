"""What the host does in a step on a GPU: counted in a session on the CPU that goes a GPU's way."""

from typing import Any
from unittest import mock

import jax
import numpy as np

import hxla
from support import models
from support.inside.lower import _compile, _step_program


def host_calls(job: hxla.Job, size: int, **wishes: Any) -> tuple[int, int]:
    """Calls of compiled programs in a steady step, and the host arrays that it gives to devices.

    The step is that of a large state: several programs, and no wait for its decisions.

    Args:
        size: Examples of a microbatch.
    """
    calls: list[int] = []
    run, put = jax.stages.Compiled.__call__, jax.device_put

    def arrays(tree: Any) -> int:
        return sum(isinstance(x, np.ndarray) and x.size > 0 for x in jax.tree.leaves(tree))

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(arrays((arguments, named)))
        return run(self, *arguments, **named)

    def counted_put(x: Any, *more: Any, **named: Any) -> Any:
        puts.append(arrays(x))
        return put(x, *more, **named)

    puts: list[int] = []
    with (
        mock.patch.object(_compile, "_WAITING", frozenset()),
        mock.patch.object(_step_program, "_MOST_BYTES", 0),
        job.open(
            job.plan(microbatch_size=size, mesh=models.mesh(data=1), **wishes), quiet=True
        ) as session,
    ):
        for _ in range(2):
            session.step()
        with (
            mock.patch.object(jax.stages.Compiled, "__call__", counted),
            mock.patch.object(jax, "device_put", counted_put),
        ):
            session.step()
    return len(calls), sum(calls) + sum(puts)
