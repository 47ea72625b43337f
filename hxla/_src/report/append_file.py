"""A text file that a run appends to, and a resumed run continues."""

import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from ..core.errors import ConfigError
from ..core.files import set_aside

#: From a line to whether it is kept; None: it does not tell.
IsKept = Callable[[bytes], bool | None]

_BLOCK_BYTES = 1 << 16


class AppendFile:
    """Appends lines, each in one `write`, so that a kill costs at most the last one.

    Args:
        path: Its folder is made if it is not there.
        goes_on: Whether the run continues the file's; otherwise an earlier file is renamed.
        is_kept: Whether a line of an earlier run, and all before it, are still true; None: this
            line does not tell. A torn last line and all from the first that is not true on are cut.

    Attributes:
        earlier: The new path of an earlier run's file; None if there was none.

    Raises:
        ConfigError: If the file cannot be written.
    """

    def __init__(self, path: pathlib.Path, *, goes_on: bool, is_kept: IsKept):
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.earlier: pathlib.Path | None = None
            if path.exists():
                if goes_on:
                    _cut(path, is_kept)
                else:
                    self.earlier = set_aside(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written to {path.parent}: {error.strerror or error} "
                f"({error.filename or path}). Give a folder that this user may write to"
            ) from error

    def append(self, text: str) -> None:
        """Append text that ends with a line.

        Raises:
            ConfigError: If the file can no longer be written (a full disk).
        """
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise ConfigError(
                f"{self._path} can no longer be written: {error.strerror or error}. "
                "Make room and resume from the last checkpoint"
            ) from error

    def replace(self, text: str) -> None:
        """Replace everything, by one rename."""
        self._file.close()
        new = self._path.with_name(self._path.name + ".part")
        self._file = new.open("wb", buffering=0)
        self.append(text)
        new.rename(self._path)

    def close(self) -> None:
        """Close the file. More calls do nothing."""
        self._file.close()


def _cut(path: pathlib.Path, is_kept: IsKept) -> None:
    """Cut the end of a file off."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        for begin, line in _from_the_end(file):
            is_true = line.endswith(b"\n") and _is_true(is_kept, line)
            if is_true:
                break
            if is_true is False:
                end = begin
        file.truncate(end)


def _is_true(is_kept: IsKept, line: bytes) -> bool | None:
    """Whether a line is kept; one that is no record, such as a header, is."""
    try:
        return is_kept(line)
    except (ValueError, KeyError, TypeError):
        return True


def _from_the_end(file: Any) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their places, the last one first."""
    place, rest = file.seek(0, os.SEEK_END), b""
    while place:
        begin = max(0, place - _BLOCK_BYTES)
        file.seek(begin)
        first, *lines = (file.read(place - begin) + rest).splitlines(keepends=True)
        end = begin + len(first) + sum(map(len, lines))
        for line in reversed(lines):
            end -= len(line)
            yield end, line
        place, rest = begin, first
    if rest:
        yield 0, rest
