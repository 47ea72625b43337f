"""An iterator over the user's data, and its position as text that goes into a checkpoint.

Nothing is pickled: whoever reads a checkpoint runs no code of it.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree

#: What keeps a position, in the words of Grain and in those of torchdata and Hugging Face.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
_MARK = "hxla:"  # of a dictionary that stands for what JSON has not


class Position:
    """Where an iterator over the user's data is.

    Args:
        data: Whatever `iter` takes. Its iterator, or it itself, may have `get_state` and
            `set_state`, or `state_dict` and `load_state_dict`.
    """

    def __init__(self, data: Iterable[PyTree]):
        self._data = data
        self._opened: Iterator[PyTree] | None = None
        self._refused = ""

    @property
    def _iterator(self) -> Iterator[PyTree]:
        if self._opened is None:  # only now, for many begin to load ahead
            self._opened = iter(self._data)
        return self._opened

    def read(self) -> PyTree:
        """The next batch."""
        return next(self._iterator)

    def state(self) -> str | None:
        """What `go_to` takes to come back here; None if the iterator cannot say."""
        found = self._keeper
        if found is None or self._refused:
            return None
        _, (get, _), _ = found
        try:
            return to_text(get())
        except TypeError as error:
            self._refused = str(error)
            return None

    @property
    def problem(self) -> str:
        """Why there is no state, in words; empty if there is one."""
        if self._refused:
            return f"its state holds {self._refused}, which a checkpoint cannot keep"
        if self._keeper is None:
            return "it has neither get_state and set_state nor state_dict and load_state_dict"
        return ""

    def go_to(self, state: str) -> None:
        """Go on from a state.

        Raises:
            DataError: If the iterator does not take it.
        """
        found = self._keeper
        if found is None:
            raise DataError("the state of an iterator was saved, but " + self.problem)
        owner, (_, put), name = found
        try:
            put(from_text(state))
        except Exception as error:
            raise DataError(
                f"data: {type(owner).__name__}.{name} does not take the state that was saved: "
                f"{type(error).__name__}: {error}; resume with the data of the first run, or use "
                "another checkpoint_dir"
            ) from error
        if owner is self._data and owner is not self._opened:
            self._opened = None  # the next iterator begins there

    def begin_anew(self) -> bool:
        """Go back to the first batch; returns whether the data can be iterated again."""
        if self._opened is self._data:
            return False
        self._opened = None
        return True

    @property
    def _keeper(self) -> tuple[Any, tuple[Callable[..., Any], Callable[..., Any]], str] | None:
        for owner in (self._iterator, self._data):
            for get, put in _METHODS:
                if callable(getattr(owner, get, None)) and callable(getattr(owner, put, None)):
                    return owner, (getattr(owner, get), getattr(owner, put)), put
        return None


def to_text(state: Any) -> str:
    """A state as JSON, with bytes, tuples, NumPy's arrays and keys of any kind.

    Raises:
        TypeError: With the class of what is something else.
    """
    return json.dumps(_plain(state))


def from_text(text: str) -> Any:
    """What `to_text` was given."""
    return _whole(json.loads(text))


def _plain(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind not in "OV":
        data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
        kind = "array" if isinstance(x, np.ndarray) else "scalar"
        return {_MARK + kind: [x.dtype.str, list(x.shape), data]}
    if type(x) in (type(None), bool, int, float, str):
        return x
    if type(x) is list:
        return [_plain(v) for v in x]
    if type(x) is tuple:
        return {_MARK + "tuple": [_plain(v) for v in x]}
    if isinstance(x, bytes | bytearray):
        return {_MARK + "bytes": base64.b64encode(x).decode()}
    if isinstance(x, dict):
        if all(type(k) is str and not k.startswith(_MARK) for k in x):
            return {k: _plain(v) for k, v in x.items()}
        return {_MARK + "items": [[_plain(k), _plain(v)] for k, v in x.items()]}
    raise TypeError(f"a {type(x).__module__}.{type(x).__qualname__}")


def _whole(x: Any) -> Any:
    if isinstance(x, list):
        return [_whole(v) for v in x]
    if not isinstance(x, dict):
        return x
    [key, *others] = x or [""]
    if others or not key.startswith(_MARK):
        return {k: _whole(v) for k, v in x.items()}
    value = x[key]
    match key.removeprefix(_MARK):
        case "tuple":
            return tuple(_whole(v) for v in value)
        case "bytes":
            return base64.b64decode(value)
        case "items":
            return {_whole(k): _whole(v) for k, v in value}
    dtype, shape, data = value
    array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
    return array if key == _MARK + "array" else array[()]
