"""Who writes to a folder of checkpoints: one session at a time, by a lock on a file of the folder.

The lock is `flock`'s, which an open file has and not a process, so two sessions of one process
exclude each other too; the kernel drops it when the process ends, however it ends. On NFS Linux
makes of it a lock of the file's bytes on the server (since 2.6.12), so hosts exclude each other; of
a host that is lost the server drops it after its lease. Where locks stay on each host (NFS with
`nolock` or `local_lock`, some file systems in user space), jobs of unlike hosts do not.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import pathlib
import socket
import time
import weakref
from collections.abc import Callable
from typing import IO

import jax

from ..core.errors import CheckpointError
from ..launch.channel import JOB_VARIABLE

OWNER = "hxla-owner.json"
_POLL_SECONDS = 0.05
# A former generation of the same job has ended, but for one that is lost with its host.
_LEASE_SECONDS = 100.0
_WRITE_SECONDS = 2.0  # at most, from a lock to what is written of its owner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """What is written of a session that has a folder.

    Attributes:
        host: The name of the machine of its first process.
        start: When it took the folder, in ISO 8601.
        job: Of `hxla run --elastic`; empty: none.
    """

    host: str
    pid: int
    start: str
    job: str

    @classmethod
    def here(cls) -> "Owner":
        """This process, now."""
        start = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        job = os.environ.get(JOB_VARIABLE, "")
        return cls(host=socket.gethostname(), pid=os.getpid(), start=start, job=job)


class FolderOwner:
    """A folder that is written to, until `close` or the end of the process.

    Attributes:
        notes: That the folder cannot be locked, in words, if so.

    Args:
        folder: Made if it is not there.
        gather: Name and text to the texts of all processes, of which the first takes the folder.

    Raises:
        CheckpointError: If it cannot be written, or another session has it: with the host, the
            process and the start of that one.
    """

    def __init__(self, folder: pathlib.Path, gather: Callable[[str, str], tuple[str, ...]]):
        self._path = folder / OWNER
        self._file: IO[str] | None = None
        self.notes: tuple[str, ...] = ()
        problem = self._take() if jax.process_index() == 0 else ""
        try:
            [problem, *_] = gather("checkpoint folder", problem)
            if problem:
                raise CheckpointError(problem)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "FolderOwner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None and not self._file.closed:  # as in a forked process
            with contextlib.suppress(OSError):  # of a folder that is gone
                if _is_at(self._path, self._file):
                    self._path.unlink()
            self._file.close()

    def _take(self) -> str:
        """Returns why the folder cannot be taken, if so."""
        own, folder = Owner.here(), self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._locked(own)
            _close_in_children(self._file)
            self._file.truncate(0)
            self._file.write(json.dumps(dataclasses.asdict(own)))
            self._file.flush()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return (
                f"checkpoint_dir {folder} cannot be written: {error.strerror}; choose another "
                "folder or change its permissions"
            )
        return ""

    def _locked(self, own: Owner) -> IO[str]:
        began, folder = time.monotonic(), self._path.parent
        while True:
            file = _opened(self._path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    other = _read(file)
                if time.monotonic() - began >= _patience_seconds(other, own):
                    raise CheckpointError(_refusal(folder, other, own)) from None
                time.sleep(_POLL_SECONDS)
                continue
            except OSError as error:
                why = f"{folder} cannot be locked ({error.strerror})"
                self.notes = (f"{why}: that a second job writes there would not be noticed",)
            if _is_at(self._path, file):
                return file
            file.close()  # its owner has removed it meanwhile


def _opened(path: pathlib.Path) -> IO[str]:
    """The file, made if it is not there, and for writing: else NFS does not lock it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


def _close_in_children(file: IO[str]) -> None:
    """A process that is forked from this one, and may outlive it, does not have the lock."""
    found = weakref.ref(file)

    def close() -> None:
        inherited = found()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


def _is_at(path: pathlib.Path, file: IO[str]) -> bool:
    """Whether a file is that of a path, which others would lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:  # it is gone, or NFS no longer knows it
        return False


def _read(file: IO[str]) -> Owner | None:
    """What is written of an owner; None while it is being written."""
    try:
        return Owner(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def _patience_seconds(other: Owner | None, own: Owner) -> float:
    if other is None:
        return _WRITE_SECONDS
    return _LEASE_SECONDS if own.job and other.job == own.job else 0.0


def _refusal(folder: pathlib.Path, other: Owner | None, own: Owner) -> str:
    who, remedy = "one that has not said which it is", "wait until it ends, or end it"
    if other is not None:
        who = f"process {other.pid} on {other.host}, since {other.start}"
        if (other.pid, other.host) == (own.pid, own.host):
            who += ", as this process is called too"
            remedy = "close that session"
    return (
        f"checkpoint_dir {folder} is that of another session: {who}; {remedy}, or use another "
        "checkpoint_dir"
    )
