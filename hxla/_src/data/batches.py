"""An iterable of global batches, read in order, with a position for checkpoints.

The position is text. Nothing is pickled, so reading a checkpoint runs no code of it.

`HostBatches` is an iterable that one process of a host reads for all. The first process that needs
a batch is the reader: it alone iterates, with the data's loader processes. The others request
batches over a Unix socket. They get the shared memory of a global batch and the position after it.
So each of them copies its microbatches, and can save a complete state.
"""

import base64
import functools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import jax
import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree
from .checks import as_arrays, check_alike, leading_dimension
from .host_link import Answer, Asker, arrays_at, link, place_arrays

#: Methods that get and set a position, of Grain, and of torchdata and Hugging Face.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_MARK = "hxla:"  # the key's prefix in a dictionary for a type that JSON lacks


class Position:
    """The position of an iterator over the user's data.

    Args:
        data: An iterable. It or its iterator may have `get_state` and `set_state`, or
            `state_dict` and `load_state_dict`.
    """

    def __init__(self, data: Iterable[PyTree]):
        self._data = data
        self._opened: Iterator[PyTree] | None = None
        self._refused = ""

    @property
    def _iterator(self) -> Iterator[PyTree]:
        if self._opened is None:  # late, since many iterators start to load ahead
            self._opened = iter(self._data)
        return self._opened

    def read(self) -> PyTree:
        """The next batch."""
        return next(self._iterator)

    def state(self) -> str | None:
        """The position as text for `go_to`; None if the iterator has none."""
        methods = self._methods
        if methods is None or self._refused:
            return None
        _, (get, _), _ = methods
        try:
            return to_text(get())
        except TypeError as error:
            self._refused = str(error)
            return None

    @property
    def problem(self) -> str:
        """Why there is no state; empty if there is one."""
        if self._refused:
            return f"its state has {self._refused}, which a checkpoint cannot store"
        if self._methods is None:
            return "it has neither get_state and set_state nor state_dict and load_state_dict"
        return ""

    def go_to(self, state: str) -> None:
        """Continue from a state.

        Raises:
            DataError: If the iterator does not accept it.
        """
        methods = self._methods
        if methods is None:
            raise DataError("the state of an iterator was saved, but " + self.problem)
        owner, (_, put), name = methods
        try:
            put(from_text(state))
        except Exception as error:
            raise DataError(
                f"data: {type(owner).__name__}.{name} does not accept the saved state: "
                f"{type(error).__name__}: {error}; resume with the data of the first run, or use "
                "another checkpoint_dir"
            ) from error
        if owner is self._data and owner is not self._opened:
            self._opened = None  # the next iterator starts there

    def begin_anew(self) -> bool:
        """Go back to the first batch; returns whether the data can be iterated again."""
        if self._opened is self._data:
            return False
        self._opened = None
        return True

    @property
    def _methods(self) -> tuple[Any, tuple[Callable[..., Any], Callable[..., Any]], str] | None:
        for owner in (self._iterator, self._data):
            for get, put in _METHODS:
                if callable(getattr(owner, get, None)) and callable(getattr(owner, put, None)):
                    return owner, (getattr(owner, get), getattr(owner, put)), put
        return None


def to_text(state: Any) -> str:
    """A state as JSON, with bytes, tuples, NumPy's arrays and keys of any type.

    Raises:
        TypeError: With the class of any other value.
    """
    return json.dumps(_encoded(state))


def from_text(text: str) -> Any:
    """The inverse of `to_text`."""
    return _decoded(json.loads(text))


def _encoded(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "OV":
        data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
        kind = "array" if isinstance(x, np.ndarray) else "scalar"
        return {_MARK + kind: [x.dtype.str, list(x.shape), data]}
    if type(x) in (type(None), bool, int, float, str):
        return x
    if type(x) is list:
        return [_encoded(v) for v in x]
    if type(x) is tuple:
        return {_MARK + "tuple": [_encoded(v) for v in x]}
    if isinstance(x, bytes | bytearray):
        return {_MARK + "bytes": base64.b64encode(x).decode()}
    if isinstance(x, dict):
        if all(type(k) is str and not k.startswith(_MARK) for k in x):
            return {k: _encoded(v) for k, v in x.items()}
        return {_MARK + "items": [[_encoded(k), _encoded(v)] for k, v in x.items()]}
    raise TypeError(f"a {type(x).__module__}.{type(x).__qualname__}")


def _decoded(x: Any) -> Any:
    if isinstance(x, list):
        return [_decoded(v) for v in x]
    if not isinstance(x, dict):
        return x
    [key, *others] = x or [""]
    if others or not key.startswith(_MARK):
        return {k: _decoded(v) for k, v in x.items()}
    value = x[key]
    match key.removeprefix(_MARK):
        case "tuple":
            return tuple(_decoded(v) for v in value)
        case "bytes":
            return base64.b64decode(value)
        case "items":
            return {_decoded(k): _decoded(v) for k, v in value}
    dtype, shape, data = value
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    return array if key == _MARK + "array" else array[()]


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
