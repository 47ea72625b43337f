"""Ends processes with all their children, also after their launcher was killed.

Python's resource tracker unlinks the semaphores and shared memory of killed processes, such as a
data loader's, after all their users have ended. So trackers are ended last. The janitor runs this
file as a script, so it imports the standard library only.
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
_REMOVE_SECONDS = 60.0  # for a folder that still gets files


def end_group(group: int) -> None:
    """End the processes of a group, after their resource trackers have cleaned up."""
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
    """Pids of a group's live processes."""
    pids = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(process_group) == group and state not in "ZX":
                pids.append(int(stat.parent.name))
    return pids


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _TRACKER in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def start_janitor() -> IO[bytes]:
    """Start a process that cleans up after the launcher; returns its input pipe.

    Each line is the pid of a group's leader, the folder of a cgroup, or `rm` and a folder. The
    process acts when the pipe closes. After a line `done` it removes folders only, as the launcher
    has ended its processes.
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
    """Remove a path, with retries as files may still be written."""
    until = time.monotonic() + seconds
    while os.path.exists(path) and time.monotonic() < until:
        with contextlib.suppress(OSError):
            how(path)
        time.sleep(2 * _WAIT_SECONDS)


if __name__ == "__main__":
    if os.fork():  # an actor of Ray that ends kills its children
        os._exit(0)
    _clean_up(sys.stdin.read().split("\n"))
