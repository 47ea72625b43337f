"""The end of a process with all that it started, which leaves no names in shared memory.

Python's own resource trackers, of which a process has one, unlink the semaphores and the shared
memory of processes that were killed, as a data loader's: once all who could use them are gone. So
they are ended last. The janitor runs this text by itself: only the standard library is imported.
"""

import contextlib
import os
import pathlib
import signal
import time

_PATIENCE_SECONDS = 2.0
_WAIT_SECONDS = 0.01
_TRACKER = b"multiprocessing.resource_tracker"


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
