"""Hold processes to a share of a core, to make a mixed cluster of one machine."""

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from .._core._errors import LaunchError

_PERIOD_MICROSECONDS = 20_000  # short, so that a share holds within a microbatch
_PREFIX = "hxla-"


class Throttle(Protocol):
    """Holds one process group to a share of a core."""

    def set_share(self, share: float) -> None:
        """Change the share."""

    def close(self) -> None:
        """Lift the limit and remove what was made for it."""


class CgroupV1:
    """`cpu.cfs_quota_us` of a cgroup of the v1 cpu controller."""

    def __init__(self, parent: pathlib.Path, name: str, pid: int):
        self.folder = parent / name
        self.folder.mkdir()
        (self.folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
        (self.folder / "cgroup.procs").write_text(str(pid))

    def set_share(self, share: float) -> None:
        """Change the share; 1 lifts the limit."""
        quota = -1 if share >= 1 else int(share * _PERIOD_MICROSECONDS)
        (self.folder / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        """Remove the cgroup, once its processes are gone."""
        remove_cgroup(self.folder)


class CgroupV2(CgroupV1):
    """`cpu.max` of a cgroup of the unified hierarchy."""

    def __init__(self, parent: pathlib.Path, name: str, pid: int):
        self.folder = parent / name
        self.folder.mkdir()
        (self.folder / "cgroup.procs").write_text(str(pid))

    def set_share(self, share: float) -> None:
        """Change the share; 1 lifts the limit."""
        quota = "max" if share >= 1 else str(int(share * _PERIOD_MICROSECONDS))
        (self.folder / "cpu.max").write_text(f"{quota} {_PERIOD_MICROSECONDS}")


class DutyCycle:
    """Stops and continues the process group, where no cgroup may be written."""

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


def remove_cgroup(folder: pathlib.Path) -> None:
    """Remove a cgroup; its processes may take a moment to be gone."""
    for _ in range(50):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


def cgroup_parent() -> tuple[type[CgroupV1], pathlib.Path] | None:
    """Where a cgroup with a CPU limit may be made, and of which kind; None if nowhere."""
    places: list[tuple[type[CgroupV1], pathlib.Path, str]] = []
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct"):
                place = pathlib.Path("/sys/fs/cgroup") / mount / relative
                places.append((CgroupV1, place, "cpu.cfs_quota_us"))
        elif not controllers:
            for mount in (".", "unified"):
                place = pathlib.Path("/sys/fs/cgroup") / mount / relative
                places.append((CgroupV2, place, "cpu.max"))
    for kind, place, knob in places:
        probe = place / f"{_PREFIX}{os.getpid()}-probe"
        try:
            probe.mkdir()
        except OSError:
            continue
        try:
            if os.access(probe / knob, os.W_OK):
                return kind, place
        finally:
            probe.rmdir()
    return None


def remove_stale(parent: pathlib.Path) -> None:
    """Remove the cgroups of launchers that are gone."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not pathlib.Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def make_throttle(pid: int, rank: int, share: float) -> tuple[Throttle, str]:
    """Hold a process (leader of its group) to a share of a core.

    Returns:
        The throttle, and which mechanism it is and why, in words.
    """
    place = cgroup_parent()
    throttle: Throttle
    if place is None:
        throttle, how = DutyCycle(pid), "a stop/continue cycle, for no cgroup may be written"
    else:
        kind, parent = place
        remove_stale(parent)
        throttle = kind(parent, f"{_PREFIX}{os.getpid()}-{rank}", pid)
        how = f"a cgroup {'v1' if kind is CgroupV1 else 'v2'} quota"
    throttle.set_share(share)
    return throttle, how


def pack(shares: Sequence[float], cores: Sequence[int]) -> list[int]:
    """A core for each share, no core above 1 (first fit, largest share first).

    Raises:
        LaunchError: If they do not fit, with the numbers.
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
