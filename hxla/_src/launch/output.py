"""The output of a job's processes, line by line, and the error that ended one of them."""

import contextlib
import dataclasses
import os
import pathlib
import re
import runpy
import secrets
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from typing import IO

from ..core.errors import HxlaError

# Errors in XLA's log are followed by stack traces: a process that loses another prints dozens of
# such lines. Time stamps are those of absl (E1122 12:34:40) and of TSL (2026-11-22 ...).
_XLA_LOG = re.compile(
    rb"[EF]\d{4} \d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [EF] |\*\*\* |terminate called|"
    rb"Fatal Python error"
)
_LOGS = "hxla-run-"
_CHATTER = re.compile(rb"\[Gloo\] Rank \d+ is connected to")
#: Begins a line of hxla, which rank 0 says for all ranks.
SAID = b"\x1e"
#: In the environment of a launched process: the columns of the launcher's terminal, or 0.
LIVE_VARIABLE = "HXLA_LIVE"
_NUM_KEPT = 10  # folders, including that of this job
_DELAY_SECONDS = 1.2  # within it a failure that explains such lines is judged


def terminal_columns() -> int:
    """The width of the terminal that shows standard error; 0 where there is none."""
    if not sys.stderr.isatty():
        return 0
    asked = os.environ.get("COLUMNS", "")
    try:
        return int(asked) if asked.isdigit() else os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 80


def append_log(folder: pathlib.Path, rank: int, text: bytes) -> None:
    """Append to the log of a rank."""
    with contextlib.suppress(OSError):  # a full disk loses log lines only
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"rank-{rank}.log").open("ab") as file:
            file.write(text)


class Logs:
    """A log folder for noise, which is made with its first line.

    The folders of the last ten jobs are kept.
    """

    def __init__(self) -> None:
        name = f"{_LOGS}{os.getpid()}-{secrets.token_hex(3)}"
        self.folder = pathlib.Path(tempfile.gettempdir()) / name
        _remove_old(self.folder.parent)

    @property
    def has_lines(self) -> bool:
        """Whether anything was logged."""
        return self.folder.is_dir()


def _remove_old(parent: pathlib.Path) -> None:
    """Remove this user's folders of ended jobs, except the newest."""
    folders = []
    with os.scandir(parent) as entries:
        for entry in entries:
            pid = entry.name.removeprefix(_LOGS).partition("-")[0]
            if entry.name.startswith(_LOGS) and pid.isdigit():
                with contextlib.suppress(OSError):  # another process removes it too
                    status = entry.stat(follow_symlinks=False)
                    is_users = status.st_uid == os.getuid() and entry.is_dir(follow_symlinks=False)
                    if is_users and not pathlib.Path("/proc", pid).exists():
                        folders.append((status.st_mtime, entry.path))
    for _, path in sorted(folders, reverse=True)[_NUM_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


class Output:
    """Writes lines of all ranks to one stream.

    Args:
        lock: Shared by all streams, so that lines stay whole.

    Attributes:
        lost: The error after which nothing can be written; None without one.
    """

    def __init__(self, stream: IO[bytes], lock: threading.Lock):
        self._stream, self._lock = stream, lock
        self.lost: Exception | None = None
        self.is_terminal = stream.isatty()

    def write(self, line: bytes) -> None:
        """Write whole lines; without a reader they are dropped, and no process blocks."""
        with self._lock:
            if self.lost is not None:
                return
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError) as error:
                self.lost = error
                # A rest in the buffer would raise another error at the end of Python.
                with contextlib.suppress(OSError, ValueError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self._stream.fileno())
                    os.close(nowhere)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """The streams and the log folder for the output of processes."""

    out: Output
    err: Output
    logs: Logs

    @classmethod
    def over(cls, out: IO[bytes], err: IO[bytes]) -> "Streams":
        """The streams of a run, over the standard output and error of its launcher."""
        lock = threading.Lock()
        return cls(out=Output(out, lock), err=Output(err, lock), logs=Logs())

    def say(self, text: str) -> None:
        """Write a line of the launcher."""
        self.err.write(f"hxla: {text}\n".encode())


class Forwarder:
    """Forwards a stream of a rank, line by line.

    Args:
        logs: For noise in standard error; None for standard output.
        is_alone: Whether there are no other ranks. Otherwise the rank stands before each line that
            is not of hxla.
    """

    def __init__(
        self, rank: int, pipe: IO[bytes], output: Output, logs: Logs | None, *, is_alone: bool
    ):
        self._rank, self._pipe, self._output, self._logs = rank, pipe, output, logs
        self._name = b"" if is_alone else f"[{rank}] ".encode()
        self._is_quiet = False
        self._delayed: list[bytes] = []
        self._delayed_since = 0.0
        self._change = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float, *, shows_delayed: bool) -> None:
        """Wait until everything is forwarded; delayed lines are shown or logged."""
        self._thread.join(timeout_seconds)
        if not shows_delayed:
            self.quieten()
        self.release(now=float("inf"))

    def quieten(self) -> None:
        """Log all further lines, which only report that another rank has failed."""
        with self._change:
            self._is_quiet = self._logs is not None
            self._log(b"".join(self._delayed))
            self._delayed = []

    def release(self, now: float) -> None:
        """Show lines that no failure has explained within the delay."""
        with self._change:
            if self._delayed and now - self._delayed_since > _DELAY_SECONDS:
                lines, self._delayed = self._delayed, []
                for line in lines:
                    self._show(line)

    def _run(self) -> None:
        """Forward line by line; one that ends in a carriage return is replaced by the next."""
        pending = b""
        while chunk := os.read(self._pipe.fileno(), 65536):
            *lines, pending = re.split(rb"(?<=[\r\n])", pending + chunk)
            for line in lines:
                self._pass_on(line)
        if pending:
            self._pass_on(pending + b"\n")

    def _pass_on(self, line: bytes) -> None:
        if _CHATTER.match(line):
            return
        with self._change:
            if line.startswith(SAID):
                self._show(line)
            elif self._is_quiet:
                self._log(line)
            elif self._logs is not None and (self._delayed or _XLA_LOG.match(line)):
                self._delayed_since = self._delayed_since if self._delayed else time.monotonic()
                self._delayed.append(line)
            else:
                self._show(line)

    def _show(self, line: bytes) -> None:
        terminal = self._output.is_terminal
        live = terminal and line.endswith(b"\r")
        clear = b"\r\x1b[2K" if terminal else b""
        name = b"" if line.startswith(SAID) else self._name
        self._output.write(clear + name + line[:-1].lstrip(SAID) + b"\n" * (not live))

    def _log(self, text: bytes) -> None:
        if text and self._logs is not None:
            append_log(self._logs.folder, self._rank, text)


_PACKAGE = str(pathlib.Path(__file__).parents[2]) + os.sep
_HIDDEN = ("<frozen runpy>", runpy.__file__)
_LIBRARIES = tuple(sysconfig.get_paths().values())


def last_words(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    first, _, rest = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}{' ...' if rest else ''}" if first else repr(error)


def show(error: BaseException, rank: int, logs: str | None, *, is_shown: bool) -> None:
    """Print an error that ends a process.

    Args:
        logs: Folder for the full traceback; None prints all of it.
        is_shown: Whether to print it; one that another rank reports too is only logged.
    """
    whole = "".join(traceback.format_exception(error))
    if logs is None:
        sys.stderr.write(whole)
        return
    append_log(pathlib.Path(logs), rank, whole.encode())
    if is_shown:
        shown = traceback.TracebackException.from_exception(error)
        is_hxla_error = isinstance(error, HxlaError)
        if is_hxla_error and not _has_user_frames(shown.__cause__):  # its message is complete
            shown.__cause__ = shown.__context__ = None
        _drop_internal_frames(shown, is_ours=not is_hxla_error)
        for frame in shown.stack if is_hxla_error else ():  # the message names the argument
            frame.colno = frame.end_colno = None
        sys.stderr.write("".join(shown.format()))


def _has_user_frames(shown: traceback.TracebackException | None) -> bool:
    """Whether an error has frames of the user's code."""
    if shown is None:
        return False
    hidden = (_PACKAGE, *_HIDDEN, *_LIBRARIES)
    return any(not frame.filename.startswith(hidden) for frame in shown.stack)


def _drop_internal_frames(shown: traceback.TracebackException, *, is_ours: bool) -> None:
    """Keep frames of the script and other libraries, and the last one if hxla failed."""
    frames = list(shown.stack)
    kept = [f for f in frames if not f.filename.startswith((_PACKAGE, *_HIDDEN))]
    if is_ours and frames and frames[-1].filename.startswith(_PACKAGE):
        kept.append(frames[-1])
    shown.stack[:] = kept or frames
    for other in (shown.__cause__, shown.__context__):
        if other is not None:
            _drop_internal_frames(other, is_ours=is_ours)
