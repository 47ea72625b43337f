"""An iterable that the processes of a host read once, together.

The first of them to ask for a batch reads for all: it alone iterates, with whatever loader
processes the data starts. The others ask it over a Unix socket and get the memory of a global
batch, of which they copy their own microbatches, and the position after it, so that each of them
can leave a whole state behind.
"""

import functools
import os
import pathlib
import pickle
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._core._errors import DataError
from .._core._types import PyTree
from .._jax import _coordination
from .._jax._lost_peers import LostReaderError
from ._batches import Batches
from ._shared_arrays import arrays_at, place_arrays

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")


class HostBatches:
    """A source that reads in one process of each host.

    Args:
        own: That reads, if it is this process.
        is_shared: Whether another one may.
    """

    num_examples: int | None = None

    def __init__(self, own: Batches, *, is_shared: bool = True):
        self._own, self._is_shared = own, is_shared
        self._num_begun = 0

    def fetch(self, step: int, positions: np.ndarray) -> PyTree:
        """Examples at positions of the global batch of a step."""
        return jax.tree.map(lambda x: x[positions], self._side.batch(step))

    def example(self) -> PyTree:
        """One example."""
        return self.fetch(0, np.arange(1))

    def state(self, step: int) -> str | None:
        """The position before the batch of a step, if it is known; waits for nobody."""
        return self._side.state(step)

    def begin(self, step: int, state: str | None) -> str:
        """Go to the first step of a session; whichever process of the host is first does it."""
        self._num_begun += 1
        return self._side.begin(self._num_begun, step, state)

    @functools.cached_property
    def _side(self) -> "_Reader | _Asker":
        can_share = sys.platform == "linux" and self._is_shared
        reader = _Reader(self._own)
        if not can_share or _coordination.num_processes() == 1:
            return reader
        address = f"\0hxla-data-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen()
        found = _coordination.claim(f"data of {_host()}", address)
        if found == address:
            threading.Thread(
                target=reader.serve, args=(listener,), daemon=True, name="hxla-data"
            ).start()
            return reader
        listener.close()
        return _Asker(found)


def _host() -> str:
    """This kernel, and the part of it in which abstract sockets are seen."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


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

    def serve(self, listener: socket.socket) -> None:
        """Answer the other processes of this user, until this one ends."""
        while True:
            asker, _ = listener.accept()
            peer = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(peer)[1] != os.getuid():
                asker.close()
                continue
            threading.Thread(
                target=self._answer, args=(asker,), daemon=True, name="hxla-data"
            ).start()

    def _answer(self, asker: socket.socket) -> None:
        with asker:
            while True:
                try:
                    what, *arguments = pickle.loads(_receive(asker)[0])
                except (EOFError, OSError):
                    return  # it ended
                ask: Callable[..., tuple[Any, list[int]]]
                ask = self._begin if what == "begin" else self._give
                try:
                    answer, fds = ask(*arguments)
                except Exception as error:
                    answer, fds = _told(error), []
                try:
                    _send(asker, pickle.dumps(answer), fds)
                except OSError:
                    return
                finally:
                    for fd in fds:
                        os.close(fd)

    def _begin(self, number: int, step: int, state: str | None) -> tuple[Any, list[int]]:
        return {"note": self.begin(number, step, state)}, []

    def _give(self, step: int) -> tuple[Any, list[int]]:
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
        address: Of the side that reads.
    """

    def __init__(self, address: str):
        self._lock = threading.Lock()
        self._states: dict[int, str | None] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(address)
        except OSError as error:
            raise LostReaderError(_LOST) from error

    def batch(self, step: int) -> PyTree:
        """The global batch of a step, to be read only."""
        answer, [fd] = self._ask("batch", step)
        try:
            arrays = arrays_at(answer["table"], fd)
        finally:
            os.close(fd)
        # A run does not go back by more than what is loaded ahead.
        old = [k for k in self._states if k < step - _MOST_STATES]
        for k in old:
            self._states.pop(k, None)
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

    def _ask(self, *request: Any) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                _send(self._socket, pickle.dumps(request), [])
                data, fds = _receive(self._socket)
            except (EOFError, OSError) as error:
                raise LostReaderError(_LOST) from error
        answer = pickle.loads(data)
        if "error" in answer:
            raise DataError(answer["error"])
        return answer, fds


_MOST_STATES = 64
_LOST = (
    "the process that reads the data for this host is gone: see what it said last; "
    "data.share=false lets each process read for itself"
)


def _told(error: Exception) -> dict[str, str]:
    """An error for the other processes; the one that reads raises it itself."""
    if isinstance(error, DataError):
        return {"error": str(error)}
    return {"error": f"reading the data for this host failed: {type(error).__name__}: {error}"}


def _send(to: socket.socket, data: bytes, fds: list[int]) -> None:
    head = _LENGTH.pack(len(data))
    sent = socket.send_fds(to, [head], fds) if fds else to.send(head)
    to.sendall(head[sent:] + data)


def _receive(source: socket.socket) -> tuple[bytes, list[int]]:
    head, fds, _, _ = socket.recv_fds(source, _LENGTH.size, 1)
    if not head:
        raise EOFError
    head += _exactly(source, _LENGTH.size - len(head))
    return _exactly(source, *_LENGTH.unpack(head)), list(fds)


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
