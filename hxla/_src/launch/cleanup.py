"""The end of processes with all that they started, also where their launcher was killed.

Python's own resource trackers, of which a process has one, unlink the semaphores and the shared
memory of processes that were killed, as a data loader's: once all who could use them are gone. So
they are ended last. The janitor runs this file by itself: only the standard library is imported.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

_PATIENCE_SECONDS = 2.0
_WAIT_SECONDS = 0.01
_TRACKER = b"multiprocessing.resource_tracker"
_REMOVE_SECONDS = 60.0  # for a folder into which files still come


def end_group(group: int) -> None:
    """End the processes of a group, and let their resource trackers clean up and end before.

    Args:
        group: Its number: that of the process that leads or led it.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while (members := _members(group)) and time.monotonic() < until:
        for pid in members:
            if not _is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_WAIT_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Those that have not ended."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, own, *_ = stat.read_text().rpartition(")")[2].split()
            if int(own) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def start_janitor() -> IO[bytes]:
    """A process that outlives the launcher and ends what it left: it reads until the pipe closes.

    A line is the number of a process that leads a group, a cgroup, or `rm` and a folder. The
    launcher that wrote `done` has ended its processes itself; others were killed. Folders go either
    way.
    """
    process = subprocess.Popen(
        [sys.executable, "-IS", __file__], bufsize=0, stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.wait()
    return process.stdin


def _clean_up(lines: Sequence[str]) -> None:
    if "done" not in lines:
        for line in lines:
            if line.isdigit():
                end_group(int(line))
        for line in lines:
            if line.startswith("/"):
                _remove(line, os.rmdir, _PATIENCE_SECONDS)
    for line in lines:
        if line.startswith("rm "):
            _remove(line[3:], shutil.rmtree, _REMOVE_SECONDS)


def _remove(path: str, how: Callable[[str], object], seconds: float) -> None:
    """A file may come while others go."""
    until = time.monotonic() + seconds
    while os.path.exists(path) and time.monotonic() < until:
        with contextlib.suppress(OSError):
            how(path)
        time.sleep(2 * _WAIT_SECONDS)


if __name__ == "__main__":
    if os.fork():  # an actor of Ray that ends kills its children
        os._exit(0)
    _clean_up(sys.stdin.read().split("\n"))
