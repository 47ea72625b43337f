"""What jobs leave behind: processes, and states in shared memory."""

import pathlib
import time

from support.launched import PATIENCE_SECONDS

_SHARED_MEMORY = pathlib.Path("/dev/shm")
_LEFT_BEFORE = frozenset(_SHARED_MEMORY.glob("hxla-elastic-*"))


def left_in_memory():
    """Folders of states whose owner is gone, but those of runs before these tests."""
    folders = set(_SHARED_MEMORY.glob("hxla-elastic-*")) - _LEFT_BEFORE
    return [f for f in folders if not pathlib.Path("/proc", f.name.split("-")[2]).exists()]


def folders_of(pid):
    """What a launcher left in shared memory."""
    return list(_SHARED_MEMORY.glob(f"hxla-elastic-{pid}-*"))


def wait_until(is_so, what):
    """Until a condition holds; returns what it gave."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not (found := is_so()):
        assert time.monotonic() < until, what() if callable(what) else what
        time.sleep(0.02)
    return found


def wait_until_none(found=left_in_memory):
    """Until no file or folder is found: the janitor removes what is written while they go."""
    wait_until(lambda: not found(), lambda: [[f, *f.rglob("*")] for f in found()])


def started_by(pid):
    """The processes that a process started, and what those did."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            own = int(stat.parent.name)
            found += [own, *started_by(own)]
    return found


def wait_until_gone(pids):
    """Until none of some processes is there."""
    there = lambda: [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]  # noqa: E731
    wait_until(lambda: not there(), lambda: f"processes that are there: {there()}")
