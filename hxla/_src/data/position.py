"""An iterator over the user's data, and its position as text for a checkpoint.

Nothing is pickled, so reading a checkpoint runs no code of it.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree

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
