"""An iterable of global batches, read in order, with a position for checkpoints."""

import threading
from collections.abc import Iterable, Iterator, Sized

import jax
import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree
from .checks import as_arrays, check_alike, leading_dimension
from .position import Position

AS_IT_COMES = "as it comes"  # the order of examples that nothing shuffles


class Batches:
    """An iterable of global batches; the last ones read are kept.

    Batches are read ahead of the step, so iterator states are kept too: one for each step that may
    be the next when a checkpoint is written.

    Args:
        batch_size: Examples of a global batch.
        num_kept: Batches that may be fetched again: those loaded ahead, and the current one, from
            which a rebalance fetches other ids.
    """

    num_examples: int | None = None

    def __init__(self, data: Iterable[PyTree], batch_size: int, num_kept: int = 4):
        self._position = Position(data)
        #: Of a pass over the data; None: without a length, or not repeatable.
        self.num_batches = (
            None if isinstance(data, Iterator) or not isinstance(data, Sized) else len(data)
        )
        self._repeats = False
        self._batch_size, self._num_kept = batch_size, num_kept
        self._next = 0
        self._kept: dict[int, PyTree] = {}
        self._states: dict[int, str | None] = {}
        self._failure: Exception | None = None
        self._first: PyTree = None  # shapes of the first batch
        self._lock = threading.Lock()

    def fetch(self, step: int, positions: np.ndarray) -> PyTree:
        """Examples at positions of the global batch of a step."""
        return jax.tree.map(lambda x: x[positions], self.batch(step))

    def example(self) -> PyTree:
        """One example."""
        return self.fetch(0, np.arange(1))

    def batch(self, step: int) -> PyTree:
        """The global batch of a step.

        Raises:
            DataError: If the data ends too early or is malformed. The data's exceptions pass
                through, and are raised again in later calls.
        """
        with self._lock:
            if step in self._kept:  # even after a failure of reading ahead
                return self._kept[step]
            if self._failure is not None:
                raise self._failure
            if step < self._next and step not in self._kept:
                self._go_back(step)
            try:
                while self._next <= step:
                    self._read(step)
            except Exception as error:
                self._failure = error
                raise
            return self._kept[step]

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known.

        Takes no lock: a process that is told to leave may be blocked in its data.
        """
        return self._states.get(step)

    def begin(self, step: int, state: str | None) -> str:
        """Go to the first step of a session by its state, or later by reading up to it.

        Returns:
            A note for the user, or ''.

        Raises:
            DataError: If the iterator does not accept the state.
        """
        with self._lock:
            self._failure = None
            if state is not None:
                self._position.go_to(state)
                # The first batch shows the shapes of an example.
                self._kept = {k: v for k, v in self._kept.items() if not k and step}
                self._next, self._states = step, {step: state}
                return f"data: continues at global batch {step} from the state of its iterator"
            why = self._position.problem
            if step:
                why = why or "the checkpoint has no state of it"
                return f"data: {step} global batches are read again and skipped: {why}"
            return (
                f"data: a resumed run would read and skip the first batches: {why}" if why else ""
            )

    def repeat(self) -> None:
        """Start another pass over the data after each one."""
        self._repeats = self.num_batches is not None

    def _next_batch(self) -> PyTree:
        try:
            return self._position.read()
        except StopIteration:
            if not self._repeats or not self._next:
                raise
        assert self.num_batches is not None
        if left := self._next % self.num_batches:
            raise DataError(
                f"data has length {self.num_batches}, but a pass ended after {left} global "
                "batches: pass steps, not epochs"
            )
        self._position.begin_anew()
        return self._position.read()

    def _go_back(self, step: int) -> None:
        if not self._position.begin_anew():
            raise DataError(
                f"batch {step} of the data was read before, and an iterator cannot go back: pass "
                "an iterable that can start again, such as a Grain dataset or a class with __iter__"
            )
        self._next, self._kept, self._states = 0, {}, {}

    def _read(self, step: int) -> None:
        """Read the next batch, in order to reach the batch of a step."""
        if self._next not in self._states:
            self._states[self._next] = self._position.state()
        try:
            tree = self._next_batch()
        except StopIteration:
            raise DataError(
                f"the data is too short: it ended after {self._next} global batches, and step "
                f"{step + 1} needs one more; use fewer steps or more data"
            ) from None
        name = f"global batch {self._next}"
        batch = as_arrays(tree, name)
        size = leading_dimension(batch, name)
        if size != self._batch_size:
            raise DataError(
                f"{name} has {size} examples, batch_size is {self._batch_size}: iterables must "
                "yield whole global batches"
            )
        if self._first is None:
            self._first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        check_alike(batch, name, self._first, "the first")
        oldest = self._next - self._num_kept
        # The first batch shows the shapes of an example, and initialises Linen modules.
        self._kept = {k: v for k, v in self._kept.items() if not k or k > oldest}
        self._kept[self._next] = batch
        self._next += 1
        states = self._states | {self._next: self._position.state()}
        self._states = {k: v for k, v in states.items() if k > oldest}

    def replace(self, step: int, batch: PyTree, shared: PyTree) -> None:
        """Replace a batch by equal arrays in shared memory, if it is still kept."""
        with self._lock:
            if self._kept.get(step) is batch:
                self._kept[step] = shared

    def has(self, step: int) -> bool:
        """Whether the batch of a step is kept."""
        return step in self._kept


class NoPosition:
    """The position of random-access data, which is the step alone."""

    num_batches: int | None = None

    def repeat(self) -> None:
        """Random access has no passes."""

    def state(self, _step: int) -> str | None:
        """None: the step is the position."""
        return None

    def begin(self, _step: int, _state: str | None) -> str:
        """Random access needs no start; there is no note."""
        return ""
