"""Limit processes to a share of a core, to emulate a mixed cluster on one machine."""

import contextlib
import math
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence

from ..core.errors import LaunchError

_PERIOD_MICROSECONDS = 20_000  # shorter than a microbatch
_MOST_PERIOD_MICROSECONDS = 1_000_000  # bounds of Linux
_LEAST_QUOTA_MICROSECONDS = 1_000
_PREFIX = "hxla-"


class Cgroup:
    """A cgroup with a CPU quota, by the v1 cpu controller or the unified hierarchy (v2)."""

    def __init__(self, folder: pathlib.Path, version: int, pid: int):
        self.folder = folder
        self._version = version
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(pid))

    def set_share(self, share: float) -> None:
        """Change the share; 1 removes the limit."""
        quota, period = quota_and_period(share)
        if self._version == 1:
            # Without a quota any period is allowed.
            for name, value in (("quota", -1), ("period", period), ("quota", quota)):
                (self.folder / f"cpu.cfs_{name}_us").write_text(str(value))
        else:
            (self.folder / "cpu.max").write_text(f"{'max' if quota < 0 else quota} {period}")

    @staticmethod
    def share_of(folder: pathlib.Path, version: int) -> float:
        """The share of an existing cgroup."""
        if version == 1:
            quota, period = ((folder / f"cpu.cfs_{x}_us").read_text() for x in ("quota", "period"))
        else:
            quota, period = (folder / "cpu.max").read_text().split()
        return 1.0 if quota.strip() in ("-1", "max") else int(quota) / int(period)

    def close(self) -> None:
        """Remove the cgroup, once its processes have ended."""
        for _ in range(50):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)
            else:
                return


def quota_and_period(share: float) -> tuple[int, int]:
    """Quota and period in microseconds; a quota of -1 is no limit.

    The period is the shortest, from 20 ms on, for which Linux accepts the quota of the share.
    """
    if share >= 1:
        return -1, _PERIOD_MICROSECONDS
    period = max(_PERIOD_MICROSECONDS, math.ceil(_LEAST_QUOTA_MICROSECONDS / share))
    period = min(period, _MOST_PERIOD_MICROSECONDS)
    return max(round(share * period), _LEAST_QUOTA_MICROSECONDS), period


class DutyCycle:
    """Stops and continues a process group, if no cgroup may be written."""

    def __init__(self, pid: int):
        self._pid = pid
        self._share = 1.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set_share(self, share: float) -> None:
        """Change the share; 1 lets the process run."""
        self._share = share

    def _run(self) -> None:
        period = _PERIOD_MICROSECONDS / 1e6
        with contextlib.suppress(ProcessLookupError):
            while not self._end.is_set():
                share = self._share
                if share >= 1:
                    time.sleep(period)
                    continue
                os.killpg(self._pid, signal.SIGCONT)
                time.sleep(share * period)
                os.killpg(self._pid, signal.SIGSTOP)
                time.sleep((1 - share) * period)

    def close(self) -> None:
        """End the cycle and let the process run."""
        self._end.set()
        self._thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGCONT)


Throttle = Cgroup | DutyCycle  # limits a process group to a share of a core


def cgroup_parent() -> tuple[int, pathlib.Path] | None:
    """Version and folder for new cgroups with a CPU limit; None if there is no such folder."""
    root = pathlib.Path("/sys/fs/cgroup")
    places: list[tuple[int, pathlib.Path, str]] = []
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if "cpu" in controllers.split(","):
            places += [(1, root / x / relative, "cpu.cfs_quota_us") for x in ("cpu", "cpu,cpuacct")]
        elif not controllers:
            places += [(2, root / x / relative, "cpu.max") for x in (".", "unified")]
    for version, place, knob in places:
        probe = place / f"{_PREFIX}{os.getpid()}-probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        try:
            if os.access(probe / knob, os.W_OK):
                return version, place
        finally:
            probe.rmdir()
    return None


def remove_stale(parent: pathlib.Path) -> None:
    """Remove the cgroups of ended launchers."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not pathlib.Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def make_throttle(pid: int, rank: int, share: float) -> tuple[Throttle, str]:
    """Limit a process group to a share of a core.

    Args:
        pid: The leader of the group.

    Returns:
        The throttle, and its mechanism in words.
    """
    place = cgroup_parent()
    throttle: Throttle
    if place is None:
        throttle, how = DutyCycle(pid), "a stop/continue cycle, for no cgroup may be written"
    else:
        version, parent = place
        remove_stale(parent)
        throttle = Cgroup(parent / f"{_PREFIX}{os.getpid()}-{rank}", version, pid)
        how = f"a cgroup v{version} quota"
    throttle.set_share(share)
    return throttle, how


def own_cores() -> list[int]:
    """The cores for this process, least used by other jobs first."""
    taken = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    place = cgroup_parent()
    if place is not None:
        version, parent = place
        for folder in parent.glob(f"{_PREFIX}*-*"):
            # An ended process uses nothing.
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int((folder / "cgroup.procs").read_text().split()[0])
                cores = os.sched_getaffinity(pid) & taken.keys()
                for core in cores:
                    taken[core] += Cgroup.share_of(folder, version) / len(cores)
    return sorted(taken, key=lambda core: taken[core])


def pack(shares: Sequence[float], cores: Sequence[int]) -> list[int]:
    """A core for each share, at most 1 in total per core (first fit, largest share first).

    Raises:
        LaunchError: If the shares do not fit, with the numbers.
    """
    free = dict.fromkeys(cores, 1.0)
    chosen = [-1] * len(shares)
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = next((c for c, room in free.items() if room >= shares[i] - 1e-9), None)
        if core is None:
            raise LaunchError(
                f"core shares {list(shares)} sum to {sum(shares):g} and do not fit on "
                f"{len(cores)} cores: use fewer devices or smaller shares"
            )
        free[core] -= shares[i]
        chosen[i] = core
    return chosen
