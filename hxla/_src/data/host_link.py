"""How the processes of a host find the one that does something for all, and ask it.

They are of one user and one job, so what they send each other is pickled. What is large travels as
file descriptors of shared memory.
"""

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

from ..core.errors import DataError
from ..jax.coordination import LostReaderError, claim, num_processes

_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")
_MOST_FDS = 250  # of a message, by Linux
_LOST = (
    "the process that reads the data for this host is gone: see what it said last; "
    "data.share=false lets each process read for itself"
)

Answer = tuple[dict[str, Any], Sequence[int]]  # the descriptors are closed once they were sent


class Asker:
    """The side that asks.

    Args:
        address: Of the side that answers.
    """

    def __init__(self, address: str):
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        weakref.finalize(self, self._socket.close)
        try:
            self._socket.connect(address)
        except OSError as error:
            raise LostReaderError(_LOST) from error

    def ask(self, *request: Any) -> tuple[dict[str, Any], list[int]]:
        """Ask, and wait for the answer; its file descriptors are the caller's to close.

        Raises:
            DataError: What the other side raised.
            LostReaderError: If it is gone, or failed by an error of the user's own.
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
    """Find the process of this host that is the first to call this.

    Args:
        what: Name of what it does; each process calls this equally often.
        answer: Called by threads with what others ask, if it is this process.

    Returns:
        What asks it, or None if it is this process.
    """
    if sys.platform != "linux" or num_processes() == 1:
        return None
    address = f"\0hxla-data-{secrets.token_hex(16)}"  # in no folder: it ends with the process
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    found = claim(f"{what} of {_host()}", address)
    if found != address:
        listener.close()
        return Asker(found)
    _in_background(_serve, listener, answer)
    return None


def _host() -> str:
    """This kernel, and the part of it in which abstract sockets are seen."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"


def _in_background(work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True, name="hxla-data").start()


def _serve(listener: socket.socket, answer: Callable[..., Answer]) -> None:
    """Answer the other processes of this user, until this one ends."""
    while True:
        asker, _ = listener.accept()
        peer = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] == os.getuid():
            _in_background(answer_all, asker, answer)
        else:
            asker.close()


def answer_all(asker: socket.socket, answer: Callable[..., Answer]) -> None:
    """Answer until the other side ends."""
    with asker:
        while True:
            fds: Sequence[int] = ()
            try:
                request, _ = receive(asker)
                try:
                    told, fds = answer(*request)
                except Exception as error:
                    told = _told(error)
                send(asker, told, fds)
            except (EOFError, OSError):
                return
            finally:
                for fd in fds:
                    os.close(fd)


def _told(error: Exception) -> dict[str, Any]:
    """An error for the other processes; the one that reads raises it itself, and is to blame."""
    if isinstance(error, DataError):
        return {"error": str(error)}
    return {"failed": f"reading the data for this host failed: {type(error).__name__}: {error}"}


def send(to: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send a message with file descriptors.

    Raises:
        OSError: If the other side is gone.
    """
    data = pickle.dumps(message)
    head = _LENGTH.pack(len(data))
    sent = socket.send_fds(to, [head], list(fds)) if fds else to.send(head)
    to.sendall(head[sent:] + data)


def receive(source: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message and its file descriptors.

    Raises:
        EOFError: If the other side is gone.
        OSError: Likewise.
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
