"""The user's arrays of an NNX model, which leave the devices while a session is open.

A session has the parameters on its devices, and the user's would only be a second copy there. So
meanwhile the model's variables have NumPy arrays with the same numbers.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..core.types import PyTree
from .plain_arrays import is_key

#: Variables that no call of a model writes, and those that one may write.
_READ: Any = nnx.Param
_WRITTEN: Any = nnx.Not(nnx.Any(nnx.Param, nnx.RngState))


class GivenArrays:
    """The initial arrays of an NNX module.

    Args:
        module: The user's module.
        trees: Trees with its present arrays. Arrays that the user puts in later are not read.
    """

    def __init__(self, module: nnx.Module, trees: PyTree):
        self._module = module
        self._leaves, self._treedef = jax.tree.flatten(trees)

    def read(self) -> PyTree:
        """The trees of initial arrays, in host memory while a session is open."""
        return jax.tree.unflatten(self._treedef, self._leaves)

    @contextlib.contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Keep the arrays in host memory.

        At the end each variable that still has such an array gets one as it had before. Variables
        that were trained keep their new arrays.
        """
        moved = _Moved()
        self._leaves = list(map(moved.shared, self._leaves))
        self._change(_READ, moved.shared)
        self._change(_WRITTEN, moved.copied)
        moved.free()
        try:
            yield
        finally:
            self._change(_READ, moved.back)
            self._change(_WRITTEN, moved.back)
            self._leaves = list(map(moved.known_back, self._leaves))

    def _change(self, which: Any, change: Callable[[Any], Any]) -> None:
        state = nnx.state(self._module, which)
        nnx.update(self._module, jax.tree.map(change, state))


class _Moved:
    """Arrays that moved to host memory, and how each was on its device."""

    def __init__(self) -> None:
        self._hosts: dict[int, tuple[jax.Array, np.ndarray]] = {}  # by id of the array
        self._origins: dict[int, tuple[np.ndarray, Any, bool]] = {}  # by id of the host's
        self._back: dict[int, Any] = {}  # by id of the host's

    def shared(self, x: Any) -> Any:
        """An array in host memory, read only; the same one for the same array."""
        if id(x) not in self._hosts:
            host = self.copied(x)
            if host is x:
                return x
            host.flags.writeable = False
            self._hosts[id(x)] = x, host
        return self._hosts[id(x)][1]

    def copied(self, x: Any) -> Any:
        """An array in host memory, which may be written; keys and others unchanged."""
        is_here = isinstance(x, jax.Array) and not x.is_deleted() and x.is_fully_addressable
        if not is_here or is_key(x):
            return x
        host = np.array(x)  # a view of an array in a CPU's memory would keep the array
        self._origins[id(host)] = host, x.sharding, x.committed
        return host

    def free(self) -> None:
        """Let go of the arrays on devices."""
        self._hosts.clear()

    def back(self, x: Any) -> Any:
        """An array as it was before; others unchanged."""
        if id(x) in self._origins and id(x) not in self._back:
            self._back[id(x)] = _placed(*self._origins[id(x)])
        return self._back.get(id(x), x)

    def known_back(self, x: Any) -> Any:
        """An array as it was before, if `back` made it; others unchanged."""
        return self._back.get(id(x), x)


def _placed(host: np.ndarray, sharding: jax.sharding.Sharding, is_committed: bool) -> Any:
    try:
        return jax.device_put(host.copy(), sharding if is_committed else None)
    except jax.errors.JaxRuntimeError as error:
        warnings.warn(
            f"an array of the model stays in host memory, its device has no room: {error}",
            stacklevel=2,
        )
        return host
