"""Worker processes that make the examples of random-access data, one set for each host.

The first training process of the host that needs an example starts them. The others request
examples from it, and get the shared memory that the workers filled.
"""

import concurrent.futures
import contextlib
import functools
import importlib
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import DataError
from ..core.types import PyTree
from .host_link import Answer, Asker, arrays_at, link, receive, send

_END_SECONDS = 5.0


class PooledExamples:
    """Examples that worker processes make.

    Args:
        reader: Makes examples; it is pickled.
    """

    def __init__(self, reader: Any, num_workers: int):
        self.num_examples: int | None = reader.num_examples
        self._reader, self._num_workers = reader, num_workers

    def example(self) -> PyTree:
        """One example, made in this process, for its shapes."""
        return self._reader.example()

    def take(self, indices: np.ndarray) -> PyTree:
        """Examples, stacked."""
        tables, fds = self._ask(np.asarray(indices))
        try:
            parts = [arrays_at(table, fd) for table, fd in zip(tables, fds, strict=True)]
        finally:
            for fd in fds:
                os.close(fd)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def _ask(self, indices: np.ndarray) -> tuple[list[Any], list[int]]:
        side = self._side
        if isinstance(side, Asker):
            answer, fds = side.ask(indices)
            return answer["tables"], fds
        return side.make(indices)

    @functools.cached_property
    def _side(self) -> "_Pool | Asker":
        pool = _Pool(self._reader, self._num_workers)
        return link("examples", pool.answer) or pool


def _pickled(reader: Any) -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise DataError(
            "data.workers needs cloudpickle, which sends the data to processes: "
            "pip install 'hxla[workers]', or leave data.workers at 0"
        ) from None
    try:
        return bytes(cloudpickle.dumps(reader))
    except Exception as error:
        raise DataError(
            "data.workers: the data cannot be sent to processes "
            f"({type(error).__name__}: {error}): open files and locks at its first use, or leave "
            "data.workers at 0"
        ) from error


class _Pool:
    """The workers, in the process that started them."""

    def __init__(self, reader: Any, num_workers: int):
        self._reader, self._num_workers = reader, num_workers
        self._lock = threading.Lock()
        self._threads = concurrent.futures.ThreadPoolExecutor(num_workers, "hxla-workers")

    @functools.cached_property
    def _idle(self) -> "queue.SimpleQueue[socket.socket]":
        """Sockets of idle workers."""
        pickled = _pickled(self._reader)
        pairs = [socket.socketpair() for _ in range(self._num_workers)]
        theirs = [b.fileno() for _, b in pairs]
        process = subprocess.Popen(
            [sys.executable, "-m", "hxla._src.data.worker", *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},  # cards are for the training processes
        )
        idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for ours, theirs_end in pairs:
            theirs_end.close()
            idle.put(ours)
        weakref.finalize(self, _end, [ours for ours, _ in pairs], process)
        with contextlib.suppress(OSError):  # the next request reports that the worker ended
            send(pairs[0][0], (sys.path, pickled))
        return idle

    def answer(self, indices: np.ndarray) -> Answer:
        """Answer another process of this host."""
        tables, fds = self.make(indices)
        return {"tables": tables}, fds

    def make(self, indices: np.ndarray) -> tuple[list[Any], list[int]]:
        """Examples in consecutive parts: tables of arrays, and file descriptors of the memory.

        Raises:
            DataError: As raised by the data.
        """
        parts = np.array_split(indices, min(self._num_workers, len(indices)))
        with self._lock:
            idle = self._idle
        futures = [self._threads.submit(_ask, idle, part) for part in parts]
        concurrent.futures.wait(futures)
        failed = next((future.exception() for future in futures if future.exception()), None)
        if failed is not None:
            for future in futures:
                if not future.exception():
                    os.close(future.result()[1])
            raise failed
        results = [future.result() for future in futures]
        return [table for table, _ in results], [fd for _, fd in results]


def _end(sockets: Sequence[socket.socket], process: "subprocess.Popen[bytes]") -> None:
    """End the workers, each after its current examples."""
    for end in sockets:
        end.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ask(idle: "queue.SimpleQueue[socket.socket]", indices: np.ndarray) -> tuple[Any, int]:
    worker = idle.get()
    try:
        send(worker, (indices,))
        answer, fds = receive(worker)
    except (EOFError, OSError):
        raise DataError(
            "data.workers: a worker process ended while it made examples "
            f"{indices[0]} to {indices[-1]}: it ran out of memory, or the data ended it"
        ) from None
    finally:
        idle.put(worker)
    if "error" in answer:
        raise DataError(answer["error"])
    return answer["table"], fds[0]
