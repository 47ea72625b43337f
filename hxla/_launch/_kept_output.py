"""What a run without a terminal printed, kept for whoever reads it later."""

import collections
import dataclasses
import threading
from typing import IO, cast

from ._output import Logs, Output
from ._workers import Streams

_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputPart:
    """Part of what was printed.

    Attributes:
        pieces: For each piece whether it was an error's, and its text.
        first: The number of the first piece; those before that were asked for are no longer kept.
    """

    pieces: tuple[tuple[bool, bytes], ...]
    first: int

    @property
    def end(self) -> int:
        """The number of the piece that comes after."""
        return self.first + len(self.pieces)


class KeptOutput:
    """Both streams of a run in the order in which it wrote, the last megabyte of them.

    Attributes:
        streams: To write to.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: collections.deque[tuple[bool, bytes]] = collections.deque()
        self._first = self._num_bytes = 0
        lock = threading.Lock()
        out, err = (cast(IO[bytes], _Side(self, is_error)) for is_error in (False, True))
        self.streams = Streams(
            out=Output(out, lock, lambda _: None),
            err=Output(err, lock, lambda _: None),
            logs=Logs(),
        )

    def add(self, is_error: bool, text: bytes) -> None:
        """Keep a piece, and let go of the oldest ones."""
        with self._lock:
            self._pieces.append((is_error, text))
            self._num_bytes += len(text)
            while self._num_bytes > _MOST_BYTES and len(self._pieces) > 1:
                self._num_bytes -= len(self._pieces.popleft()[1])
                self._first += 1

    def read(self, since: int) -> OutputPart:
        """What is kept from the piece of a number on."""
        with self._lock:
            skipped = max(since - self._first, 0)
            return OutputPart(pieces=tuple(self._pieces)[skipped:], first=max(since, self._first))


class _Side:
    """One stream."""

    def __init__(self, kept: KeptOutput, is_error: bool):
        self._kept, self._is_error = kept, is_error

    def write(self, text: bytes) -> None:
        self._kept.add(self._is_error, text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False
