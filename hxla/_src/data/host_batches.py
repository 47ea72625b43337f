"""An iterable that the processes of a host read once, together.

The first of them to ask for a batch reads for all: it alone iterates, with whatever loader
processes the data starts. The others ask it over a Unix socket and get the memory of a global
batch, of which they copy their own microbatches, and the position after it, so that each of them
can leave a whole state behind.
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

_MOST_STATES = 64  # a run does not go back by more than what is loaded ahead


class HostBatches:
    """A source that reads in one process of each host.

    Args:
        own: That reads, if it is this process.
        is_shared: Whether another one may.
    """

    num_examples: int | None = None
    order = AS_IT_COMES

    def __init__(self, own: Batches, *, is_shared: bool = True):
        self._own, self._is_shared = own, is_shared
        self.num_batches = own.num_batches
        self._num_begun = 0

    def fetch(self, step: int, positions: np.ndarray) -> PyTree:
        """Examples at positions of the global batch of a step."""
        return jax.tree.map(lambda x: x[positions], self._side.batch(step))

    def repeat(self) -> None:
        """Let another pass over the data follow each one."""
        self._own.repeat()

    def example(self) -> PyTree:
        """One example."""
        return self.fetch(0, np.arange(1))

    def sample(self, _size: int) -> PyTree | None:
        """None: what was read does not come back."""
        return None

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known; waits for nobody."""
        return self._side.state(step)

    def begin(self, step: int, state: str | None) -> str:
        """Go to the first step of a session; whichever process of the host is first does it."""
        self._num_begun += 1
        return self._side.begin(self._num_begun, step, state)

    @functools.cached_property
    def _side(self) -> "_Reader | _Asker":
        reader = _Reader(self._own)
        asker = link("batches", reader.answer) if self._is_shared else None
        return reader if asker is None else _Asker(asker)


class _Reader:
    """The side that reads."""

    def __init__(self, own: Batches):
        self._own = own
        self._begun = 0, ""
        self._placed: dict[int, tuple[PyTree, Any, int]] = {}
        self._lock = threading.Lock()

    def batch(self, step: int) -> PyTree:
        """The global batch of a step."""
        return self._own.batch(step)

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known."""
        return self._own.state(step)

    def begin(self, number: int, step: int, state: str | None) -> str:
        """Go to the first step of a session, if no process has done it for this one."""
        with self._lock:
            if number > self._begun[0]:
                self._begun = number, self._own.begin(step, state)
            return self._begun[1]

    def answer(self, what: str, *arguments: Any) -> Answer:
        """Answer another process."""
        return (self._begin if what == "begin" else self._give)(*arguments)

    def _begin(self, number: int, step: int, state: str | None) -> Answer:
        return {"note": self.begin(number, step, state)}, []

    def _give(self, step: int) -> Answer:
        with self._lock:
            batch = self._own.batch(step)
            known = self._placed.get(step)
            if known is None or known[0] is not batch:
                table, fd, arrays = place_arrays(batch)
                self._own.replace(step, batch, arrays)
                if known is not None:
                    os.close(known[2])
                self._placed[step] = known = arrays, table, fd
                for old in [k for k in self._placed if not self._own.has(k)]:
                    os.close(self._placed.pop(old)[2])
            table, fd = known[1], os.dup(known[2])
        return {"table": table, "state": self._own.state(step + 1)}, [fd]


class _Asker:
    """The side that asks.

    Args:
        asker: Of the side that reads.
    """

    def __init__(self, asker: Asker):
        self._ask = asker.ask
        self._states: dict[int, str | None] = {}

    def batch(self, step: int) -> PyTree:
        """The global batch of a step, to be read only."""
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
        """Let the other side go to the first step of a session."""
        self._states = {step: state}
        answer, _ = self._ask("begin", number, step, state)
        return str(answer["note"])
