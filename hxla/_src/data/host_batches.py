"""An iterable that one process of a host reads for all.

The first process that needs a batch is the reader: it alone iterates, with the data's loader
processes. The others request batches over a Unix socket. They get the shared memory of a global
batch and the position after it. So each of them copies its microbatches, and can save a complete
state.
"""

import functools
import os
import threading
from typing import Any

import jax
import numpy as np

from ..core.types import PyTree
from .batches import AS_IT_COMES, Batches
from .host_link import Answer, Asker, link
from .shared_arrays import arrays_at, place_arrays

_MOST_STATES = 64  # more than the batches that are loaded ahead


class HostBatches:
    """A source that reads in one process of each host.

    Args:
        batches: Read here if this process is the reader.
        is_shared: Whether another process may be the reader.
    """

    num_examples: int | None = None
    order = AS_IT_COMES

    def __init__(self, batches: Batches, *, is_shared: bool = True):
        self._batches, self._is_shared = batches, is_shared
        self.num_batches = batches.num_batches
        self._num_begun = 0

    def fetch(self, step: int, positions: np.ndarray) -> PyTree:
        """Examples at positions of the global batch of a step."""
        return jax.tree.map(lambda x: x[positions], self._side.batch(step))

    def repeat(self) -> None:
        """Start another pass over the data after each one."""
        self._batches.repeat()

    def example(self) -> PyTree:
        """One example."""
        return self.fetch(0, np.arange(1))

    def sample(self, _size: int) -> PyTree | None:
        """None: an iterable has no random access."""
        return None

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known; never blocks."""
        return self._side.state(step)

    def begin(self, step: int, state: str | None) -> str:
        """Go to the first step of a session, once for all processes of the host."""
        self._num_begun += 1
        return self._side.begin(self._num_begun, step, state)

    @functools.cached_property
    def _side(self) -> "_Reader | _Client":
        reader = _Reader(self._batches)
        asker = link("batches", reader.answer) if self._is_shared else None
        return reader if asker is None else _Client(asker)


class _Reader:
    """The process that reads for the host."""

    def __init__(self, batches: Batches):
        self._batches = batches
        self._begun = 0, ""
        self._placed: dict[int, tuple[PyTree, Any, int]] = {}
        self._lock = threading.Lock()

    def batch(self, step: int) -> PyTree:
        """The global batch of a step."""
        return self._batches.batch(step)

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known."""
        return self._batches.state(step)

    def begin(self, number: int, step: int, state: str | None) -> str:
        """Go to the first step of a session, unless a process has begun it already."""
        with self._lock:
            if number > self._begun[0]:
                self._begun = number, self._batches.begin(step, state)
            return self._begun[1]

    def answer(self, what: str, *arguments: Any) -> Answer:
        """Answer another process."""
        return (self._answer_begin if what == "begin" else self._answer_batch)(*arguments)

    def _answer_begin(self, number: int, step: int, state: str | None) -> Answer:
        return {"note": self.begin(number, step, state)}, []

    def _answer_batch(self, step: int) -> Answer:
        with self._lock:
            batch = self._batches.batch(step)
            known = self._placed.get(step)
            if known is None or known[0] is not batch:
                table, fd, arrays = place_arrays(batch)
                self._batches.replace(step, batch, arrays)
                if known is not None:
                    os.close(known[2])
                self._placed[step] = known = arrays, table, fd
                for old in [k for k in self._placed if not self._batches.has(k)]:
                    os.close(self._placed.pop(old)[2])
            table, fd = known[1], os.dup(known[2])
        return {"table": table, "state": self._batches.state(step + 1)}, [fd]


class _Client:
    """A process that requests batches from the reader."""

    def __init__(self, asker: Asker):
        self._ask = asker.ask
        self._states: dict[int, str | None] = {}

    def batch(self, step: int) -> PyTree:
        """The global batch of a step, read-only."""
        answer, [fd] = self._ask("batch", step)
        try:
            arrays = arrays_at(answer["table"], fd)
        finally:
            os.close(fd)
        for old in [k for k in self._states if k < step - _MOST_STATES]:
            del self._states[old]
        if answer["state"] is not None:
            self._states[step + 1] = answer["state"]
        return arrays

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known."""
        return self._states.get(step)

    def begin(self, number: int, step: int, state: str | None) -> str:
        """Let the reader go to the first step of a session."""
        self._states = {step: state}
        answer, _ = self._ask("begin", number, step, state)
        return str(answer["note"])
