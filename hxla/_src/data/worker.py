"""A process that makes examples; `python -m hxla._src.data.worker FD ...` starts one per FD.

The first worker unpickles the data; the others are forked from it right after, so memory that is
only read is shared. Each ends when its socket closes, however its parent process ends.
"""

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import DataError
from .host_link import Answer, answer_all, place_arrays, receive

_MOST_CHARACTERS = 2000  # of a traceback


def work(sockets: Sequence[socket.socket]) -> None:
    """Serve one of the sockets, and fork a process for each of the others."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job, which may continue
        signal.signal(number, signal.SIG_IGN)
    current, *others = sockets
    (path, data), _ = receive(current)
    sys.path[:] = path
    problem, reader = "", None
    try:
        reader = pickle.loads(data)
    except Exception:
        problem = traceback.format_exc()[-_MOST_CHARACTERS:]
    for i, other in enumerate(others):
        if not os.fork():
            current.close()
            for later in others[i + 1 :]:
                later.close()
            current = other
            break
        other.close()

    def answer(indices: np.ndarray) -> Answer:
        if problem:
            raise DataError(f"data.workers: the data cannot be unpickled in a process:\n{problem}")
        table, fd, _ = place_arrays(_take(reader, indices))
        return {"table": table}, [fd]

    answer_all(current, answer)
    os._exit(0)  # exit handlers of the data must not run once per worker


def _take(reader: Any, indices: np.ndarray) -> Any:
    try:
        return reader.take(indices)
    except DataError:
        raise
    except Exception as error:
        trace = traceback.format_exc()[-_MOST_CHARACTERS:]
        raise DataError(
            f"data: {type(error).__name__}: {error}, in a worker process:\n{trace}"
        ) from error


if __name__ == "__main__":
    work([socket.socket(fileno=int(fd)) for fd in sys.argv[1:]])
