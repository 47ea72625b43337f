"""A process that makes examples; `python -m hxla._src.data.worker FD ...` starts one per FD.

The first imports what the data needs and reads it once; the others are forked from it before it
does anything else, so what they only read is in memory once. Each ends when its socket closes, that
is with the process that it works for, however that ends.
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
from .host_link import Answer, answer_all, receive
from .shared_arrays import place_arrays

_MOST_CHARACTERS = 2000  # of a traceback


def work(sockets: Sequence[socket.socket]) -> None:
    """Serve one of the sockets, and fork a process for each of the others."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a job, which may still train on
        signal.signal(number, signal.SIG_IGN)
    own, *others = sockets
    (path, data), _ = receive(own)
    sys.path[:] = path
    problem, reader = "", None
    try:
        reader = pickle.loads(data)
    except Exception:
        problem = traceback.format_exc()[-_MOST_CHARACTERS:]
    for i, other in enumerate(others):
        if not os.fork():
            own.close()
            for later in others[i + 1 :]:
                later.close()
            own = other
            break
        other.close()

    def answer(indices: np.ndarray) -> Answer:
        if problem:
            raise DataError(f"data.workers: the data cannot be read in a process:\n{problem}")
        table, fd, _ = place_arrays(_made(reader, indices))
        return {"table": table}, [fd]

    answer_all(own, answer)
    os._exit(0)  # nothing of the data's own is to be cleaned up several times


def _made(reader: Any, indices: np.ndarray) -> Any:
    try:
        return reader.take(indices)
    except DataError:
        raise
    except Exception as error:
        said = traceback.format_exc()[-_MOST_CHARACTERS:]
        raise DataError(
            f"data: {type(error).__name__}: {error}, in a worker process:\n{said}"
        ) from error


if __name__ == "__main__":
    work([socket.socket(fileno=int(fd)) for fd in sys.argv[1:]])
