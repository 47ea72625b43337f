"""Requests from the processes of a host to the one that serves them all.

They belong to one user and one job, so messages are pickled. Arrays are sent as file descriptors of
shared memory.

The memory is anonymous, and processes send each other its file descriptor. Without a name, the
memory is freed however its processes end, and it does not count against the size of /dev/shm.
"""

import mmap
import os
import pathlib
import pickle
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree
from ..jax.coordination import LostReaderError, claim, num_processes

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")
_MOST_FDS = 250  # Linux's limit for one message
_LOST = (
    "the process that reads the data for this host is gone: see its last output; "
    "data.share=false lets each process read for itself"
)

Answer = tuple[dict[str, Any], Sequence[int]]  # descriptors are closed after sending


class Asker:
    """The client's end of a link."""

    def __init__(self, address: str):
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        weakref.finalize(self, self._socket.close)
        try:
            self._socket.connect(address)
        except OSError as error:
            raise LostReaderError(_LOST) from error

    def ask(self, *request: Any) -> tuple[dict[str, Any], list[int]]:
        """Send a request and wait for the answer; the caller closes its file descriptors.

        Raises:
            DataError: As raised by the server.
            LostReaderError: If the server is gone, or the user's code failed there.
        """
        with self._lock:
            try:
                send(self._socket, request)
                answer, fds = receive(self._socket)
            except (EOFError, OSError) as error:
                raise LostReaderError(_LOST) from error
        if "error" in answer:
            raise DataError(answer["error"])
        if "failed" in answer:
            raise LostReaderError(answer["failed"])
        return answer, fds


def link(what: str, answer: Callable[..., Answer]) -> Asker | None:
    """Link to the server: the first process of this host that calls this.

    Args:
        what: Name of the service; each process calls this equally often.
        answer: Called by threads with requests, if this process is the server.

    Returns:
        The client's end, or None in the server.
    """
    if sys.platform != "linux" or num_processes() == 1:
        return None
    address = f"\0hxla-data-{secrets.token_hex(16)}"  # abstract: it ends with the process
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    server = claim(f"{what} of {_host()}", address)
    if server != address:
        listener.close()
        return Asker(server)
    _in_background(_serve, listener, answer)
    return None


def _host() -> str:
    """This kernel and network namespace, in which abstract sockets are visible."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def _in_background(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="hxla-data").start()


def _serve(listener: socket.socket, answer: Callable[..., Answer]) -> None:
    """Answer other processes of this user until this process ends."""
    while True:
        asker, _ = listener.accept()
        peer = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] == os.getuid():
            _in_background(answer_all, asker, answer)
        else:
            asker.close()


def answer_all(asker: socket.socket, answer: Callable[..., Answer]) -> None:
    """Answer a client's requests until it ends."""
    with asker:
        while True:
            fds: Sequence[int] = ()
            try:
                request, _ = receive(asker)
                try:
                    reply, fds = answer(*request)
                except Exception as error:
                    reply = _error_reply(error)
                send(asker, reply, fds)
            except (EOFError, OSError):
                return
            finally:
                for fd in fds:
                    os.close(fd)


def _error_reply(error: Exception) -> dict[str, Any]:
    """An error as a reply: data errors are raised again, others are reported as the server's."""
    if isinstance(error, DataError):
        return {"error": str(error)}
    return {"failed": f"reading the data for this host failed: {type(error).__name__}: {error}"}


def send(to: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a message with file descriptors.

    Raises:
        OSError: If the peer is gone.
    """
    data = pickle.dumps(message)
    head = _LENGTH.pack(len(data))
    sent = socket.send_fds(to, [head], list(fds)) if fds else to.send(head)
    to.sendall(head[sent:] + data)


def receive(source: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message and its file descriptors.

    Raises:
        EOFError: If the peer has closed the socket.
        OSError: If the connection is broken.
    """
    head, fds, _, _ = socket.recv_fds(source, _LENGTH.size, _MOST_FDS)
    if not head:
        raise EOFError
    head += _exactly(source, _LENGTH.size - len(head))
    return pickle.loads(_exactly(source, *_LENGTH.unpack(head))), list(fds)


def _exactly(source: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


_ALIGNMENT = 64  # bytes

#: Dtype, shape and offset of each array, in the tree of the batch.
Table = PyTree


def place_arrays(tree: PyTree) -> tuple[Table, int, PyTree]:
    """Copy arrays into new shared memory.

    Returns:
        The table of the arrays, the file descriptor of the memory, and the new arrays.
    """
    leaves, treedef = jax.tree.flatten(tree)
    rows, end = [], 0
    for leaf in leaves:
        rows.append((leaf.dtype, leaf.shape, end))
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    table = jax.tree.unflatten(treedef, [_Row(row) for row in rows])
    fd = os.memfd_create("hxla-data")
    os.ftruncate(fd, max(end, 1))
    arrays = _arrays(table, mmap.mmap(fd, max(end, 1)))
    for place, leaf in zip(jax.tree.leaves(arrays), leaves, strict=True):
        place[...] = leaf
    return table, fd, arrays


def arrays_at(table: Table, fd: int) -> PyTree:
    """Read-only arrays in the memory of a file descriptor, which may be closed afterwards."""
    return _arrays(table, mmap.mmap(fd, 0, prot=mmap.PROT_READ))


class _Row:
    """A leaf of a table."""

    def __init__(self, row: tuple[np.dtype[Any], tuple[int, ...], int]):
        self.row = row


def _arrays(table: Table, memory: mmap.mmap) -> PyTree:
    data = np.frombuffer(memory, np.uint8)

    def array(leaf: _Row) -> np.ndarray:
        dtype, shape, begin = leaf.row
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return data[begin : begin + size].view(dtype).reshape(shape)

    return jax.tree.map(array, table)
