"""The lock of a folder of checkpoints: one session at a time writes there.

It is `flock` on a file of the folder. The lock belongs to the open file, so two sessions of one
process exclude each other too. The kernel releases it however the process ends. On NFS it is a lock
on the server (since Linux 2.6.12), so hosts exclude each other; after the loss of a host the server
releases it with its lease. Locks that are local to each host do not exclude jobs on other hosts:
NFS with `nolock` or `local_lock`, and some file systems in user space.
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
# How long an earlier generation of the same job may still have the lock, if its host was lost.
_LEASE_SECONDS = 100.0
_WRITE_SECONDS = 2.0  # at most, between a lock and the owner's entry in the file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """The session that has locked a folder, as written in its file.

    Attributes:
        host: Of its first process.
        start: Time of the lock, in ISO 8601.
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
    """The lock of a folder, until `close` or the end of the process.

    Attributes:
        notes: A note for the user if the folder cannot be locked.

    Args:
        folder: Created if missing.
        gather: Name and text to the texts of all processes, of which the first locks the folder.

    Raises:
        CheckpointError: If the folder cannot be written, or another session has it: with that
            session's host, process and start.
    """

    def __init__(self, folder: pathlib.Path, gather: Callable[[str, str], tuple[str, ...]]):
        self._path = folder / OWNER
        self._file: IO[str] | None = None
        self.notes: tuple[str, ...] = ()
        problem = self._acquire() if jax.process_index() == 0 else ""
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
        """Release the folder."""
        if self._file is not None and not self._file.closed:  # as in a forked process
            with contextlib.suppress(OSError):  # the folder may be gone
                if _is_at(self._path, self._file):
                    self._path.unlink()
            self._file.close()

    def _acquire(self) -> str:
        """Lock the folder; returns the problem, or ''."""
        owner, folder = Owner.here(), self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._locked_file(owner)
            _close_in_children(self._file)
            self._file.truncate(0)
            self._file.write(json.dumps(dataclasses.asdict(owner)))
            self._file.flush()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return (
                f"checkpoint_dir {folder} cannot be written: {error.strerror}; choose another "
                "folder or change its permissions"
            )
        return ""

    def _locked_file(self, owner: Owner) -> IO[str]:
        began, folder = time.monotonic(), self._path.parent
        while True:
            file = _opened(self._path)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    other = _read(file)
                if time.monotonic() - began >= _patience_seconds(other, owner):
                    raise CheckpointError(_refusal(folder, other, owner)) from None
                time.sleep(_POLL_SECONDS)
                continue
            except OSError as error:
                why = f"{folder} cannot be locked ({error.strerror})"
                self.notes = (f"{why}: a second job that writes there is not detected",)
            if _is_at(self._path, file):
                return file
            file.close()  # its owner removed it meanwhile


def _opened(path: pathlib.Path) -> IO[str]:
    """The lock file, created if missing; open for writing, which NFS locks need."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")


def _close_in_children(file: IO[str]) -> None:
    """Close the file in forked processes, which may outlive this one with its lock."""
    reference = weakref.ref(file)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


def _is_at(path: pathlib.Path, file: IO[str]) -> bool:
    """Whether a path still leads to this open file, which other sessions would lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:  # it is gone, or a stale NFS handle
        return False


def _read(file: IO[str]) -> Owner | None:
    """The owner in a lock file; None during its write."""
    try:
        return Owner(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def _patience_seconds(other: Owner | None, owner: Owner) -> float:
    if other is None:
        return _WRITE_SECONDS
    return _LEASE_SECONDS if owner.job and other.job == owner.job else 0.0


def _refusal(folder: pathlib.Path, other: Owner | None, owner: Owner) -> str:
    who, remedy = "its process is not known yet", "wait until it ends, or end it"
    if other is not None:
        who = f"process {other.pid} on {other.host}, since {other.start}"
        if (other.pid, other.host) == (owner.pid, owner.host):
            who += ", the same number and host as this process"
            remedy = "close that session"
    return (
        f"checkpoint_dir {folder} is used by another session: {who}; {remedy}, or use another "
        "checkpoint_dir"
    )
