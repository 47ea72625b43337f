"""What the processes of a job print, line by line, and the error that ended one of them."""

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

# XLA's own log, whose errors are followed by stack traces: a process that loses another prints
# dozens of lines of it. Time stamps are those of absl (E1122 12:34:40) and of TSL (2026-11-22 ...).
_LOG_OF_XLA = re.compile(
    rb"[EF]\d{4} \d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [EF] |\*\*\* |terminate called|"
    rb"Fatal Python error"
)
_LOGS = "hxla-run-"
_NUM_KEPT = 10  # with that of the job that begins
_HOLD_SECONDS = 1.2  # by which a failure that explains such lines was judged


def append_log(folder: pathlib.Path, rank: int, text: bytes) -> None:
    """Append to the log of a rank."""
    with contextlib.suppress(OSError):  # a full disk loses noise and nothing else
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / f"rank-{rank}.log").open("ab") as file:
            file.write(text)


class Logs:
    """A folder for what would bury the line that matters; it is there once it holds something.

    The folders of the last ten jobs are kept.
    """

    def __init__(self) -> None:
        name = f"{_LOGS}{os.getpid()}-{secrets.token_hex(3)}"
        self.folder = pathlib.Path(tempfile.gettempdir()) / name
        _remove_old(self.folder.parent)

    @property
    def said(self) -> bool:
        """Whether there is anything in it."""
        return self.folder.is_dir()


def _remove_old(parent: pathlib.Path) -> None:
    """Remove this user's folders of ended jobs, except the newest."""
    found = []
    with os.scandir(parent) as entries:
        for entry in entries:
            pid = entry.name.removeprefix(_LOGS).partition("-")[0]
            if entry.name.startswith(_LOGS) and pid.isdigit():
                with contextlib.suppress(OSError):  # another process removes it too
                    told = entry.stat(follow_symlinks=False)
                    own = told.st_uid == os.getuid() and entry.is_dir(follow_symlinks=False)
                    if own and not pathlib.Path("/proc", pid).exists():
                        found.append((told.st_mtime, entry.path))
    for _, path in sorted(found, reverse=True)[_NUM_KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


class Output:
    """Writes lines of all ranks to one stream.

    Args:
        lock: Of all streams, so that lines stay whole.

    Attributes:
        lost: Why nothing can be written any more; None: it can.
    """

    def __init__(self, stream: IO[bytes], lock: threading.Lock):
        self._stream, self._lock = stream, lock
        self.lost: Exception | None = None
        self.is_terminal = stream.isatty()

    def write(self, line: bytes) -> None:
        """Write whole lines; without a reader they are lost, and no process waits for one."""
        with self._lock:
            if self.lost is not None:
                return
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError) as error:
                self.lost = error
                # What is left in the buffer would be an error of its own when Python ends.
                with contextlib.suppress(OSError, ValueError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self._stream.fileno())
                    os.close(nowhere)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Where what processes print goes."""

    out: Output
    err: Output
    logs: Logs

    @classmethod
    def over(cls, out: IO[bytes], err: IO[bytes]) -> "Streams":
        """Those of a run, over the standard output and error of its launcher."""
        lock = threading.Lock()
        return cls(out=Output(out, lock), err=Output(err, lock), logs=Logs())

    def say(self, text: str) -> None:
        """A line of the launcher."""
        self.err.write(f"hxla: {text}\n".encode())


class Forwarder:
    """Passes on what a rank prints to one stream, each line with the rank before it.

    Args:
        logs: For what is kept out of the way; None for standard output, which never is.
    """

    def __init__(self, rank: int, pipe: IO[bytes], output: Output, logs: Logs | None):
        self._rank, self._pipe, self._output, self._logs = rank, pipe, output, logs
        self._is_quiet = False
        self._held: list[bytes] = []
        self._held_since = 0.0
        self._change = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_seconds: float, *, shows_held: bool) -> None:
        """Until everything was passed on; what is still held is shown, or logged."""
        self._thread.join(timeout_seconds)
        if not shows_held:
            self.quieten()
        self.release(now=float("inf"))

    def quieten(self) -> None:
        """From here on this rank only says that another has failed: that goes to its log."""
        with self._change:
            self._is_quiet = self._logs is not None
            self._log(b"".join(self._held))
            self._held = []

    def release(self, now: float) -> None:
        """Show what was held for so long that no failure explains it."""
        with self._change:
            if self._held and now - self._held_since > _HOLD_SECONDS:
                held, self._held = self._held, []
                for line in held:
                    self._show(line)

    def _run(self) -> None:
        """One line after another; one that ends in a carriage return is live, replaced later."""
        pending = b""
        while chunk := os.read(self._pipe.fileno(), 65536):
            *lines, pending = re.split(rb"(?<=[\r\n])", pending + chunk)
            for line in lines:
                self._pass_on(line)
        if pending:
            self._pass_on(pending + b"\n")

    def _pass_on(self, line: bytes) -> None:
        with self._change:
            if self._is_quiet:
                self._log(line)
            elif self._logs is not None and (self._held or _LOG_OF_XLA.match(line)):
                self._held_since = self._held_since if self._held else time.monotonic()
                self._held.append(line)
            else:
                self._show(line)

    def _show(self, line: bytes) -> None:
        terminal = self._output.is_terminal
        live = terminal and line.endswith(b"\r")
        clear = b"\r\x1b[2K" if terminal else b""
        self._output.write(clear + f"[{self._rank}] ".encode() + line[:-1] + b"\n" * (not live))

    def _log(self, text: bytes) -> None:
        if text and self._logs is not None:
            append_log(self._logs.folder, self._rank, text)


_PACKAGE = str(pathlib.Path(__file__).parents[2]) + os.sep
_HIDDEN = ("<frozen runpy>", runpy.__file__)
_LIBRARIES = tuple(sysconfig.get_paths().values())


def last_words(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    first, _, rest = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}{' ...' if rest else ''}" if first else repr(error)


def show(error: BaseException, rank: int, logs: str | None, *, is_victim: bool) -> None:
    """Print an error that ends a process.

    Args:
        logs: Folder for the whole of it; None: everything is printed.
        is_victim: Whether it only says that another process has ended: then nothing is printed.
    """
    whole = "".join(traceback.format_exception(error))
    if logs is None:
        sys.stderr.write(whole)
        return
    append_log(pathlib.Path(logs), rank, whole.encode())
    if not is_victim:
        told = traceback.TracebackException.from_exception(error)
        is_told = isinstance(error, HxlaError)
        if is_told and not _has_own_frames(told.__cause__):  # its message says all that matters
            told.__cause__ = told.__context__ = None
        _leave_out_our_own(told, is_ours=not is_told)
        sys.stderr.write("".join(told.format()))


def _has_own_frames(told: traceback.TracebackException | None) -> bool:
    """Whether the user's own code takes part in an error."""
    if told is None:
        return False
    hidden = (_PACKAGE, *_HIDDEN, *_LIBRARIES)
    return any(not frame.filename.startswith(hidden) for frame in told.stack)


def _leave_out_our_own(told: traceback.TracebackException, *, is_ours: bool) -> None:
    """Keep frames of the script and of other libraries, and where hxla itself failed."""
    frames = list(told.stack)
    kept = [f for f in frames if not f.filename.startswith((_PACKAGE, *_HIDDEN))]
    if is_ours and frames and frames[-1].filename.startswith(_PACKAGE):
        kept.append(frames[-1])
    told.stack[:] = kept or frames
    for other in (told.__cause__, told.__context__):
        if other is not None:
            _leave_out_our_own(other, is_ours=is_ours)
