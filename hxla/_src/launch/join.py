"""Join the processes of a job; `python -m hxla._src.launch script.py` runs a script in one."""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence

import jax

from ..cluster.kinds import LOCAL_CLIENTS_VARIABLE
from ..core.errors import LaunchError
from ..core.keywords import keep_whole
from ..core.types import EXIT_INTERRUPTED, EXIT_PREEMPTED
from ..jax.coordination import (
    client,
    connect,
    entries,
    is_lost_peer,
    leave_sigterm_alone,
    put,
)
from ..jax.devices import keep_local
from .channel import (
    ENDED,
    GENERATION_VARIABLE,
    LOGS_VARIABLE,
    Channel,
    RankStatuses,
    Status,
    own_channel,
    text_of,
)
from .environment import cluster_in_sight
from .output import last_words, show

_SIGNAL_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # exit codes without a saved state
_STAY_SECONDS = 2.0  # for other ranks to end by themselves
_SAME_SECONDS = 0.15  # for lower ranks to fail with the same error
_LAST_SECONDS = 0.1  # for their end after they have announced it
_PREFIX = "hxla/beat/"  # of keys of the coordination service


class ServiceStatuses:
    """The statuses of ranks in the coordination service, for processes on several machines."""

    def tell(self, rank: int, status: Status) -> None:
        """Write the status of this process's rank."""
        put(f"{_PREFIX}{rank}", text_of(status))

    def statuses(self) -> dict[int, Status]:
        """The written statuses, by rank."""
        return {
            int(key.rpartition("/")[2]): Status(**json.loads(text))
            for key, text in entries(_PREFIX).items()
        }


def check_is_there(rank: int) -> None:
    """Refuse to wait for a rank whose script has ended.

    Raises:
        LaunchError: If the script has ended.
    """
    every: RankStatuses = own_channel() or ServiceStatuses()
    if every.statuses().get(rank, Status()).has_ended:
        raise LaunchError(f"rank {rank} {ENDED}")


def _joined() -> bool:
    return client() is not None


def uninitialised_cluster() -> str | None:
    """The job that this process has not joined yet, in words; None without one."""
    if _joined():
        return None
    number = os.environ.get("HXLA_NUM_PROCESSES", "1")
    if number != "1":
        return f"hxla run with {number} processes"
    return cluster_in_sight()


def join() -> None:
    """Join the job of this process; does nothing under plain `python script.py`.

    Under `hxla run` the process has joined already. Under Slurm, Open MPI or Kubernetes, whose
    cluster `jax.distributed.initialize()` detects, call this before anything uses a device.

    Raises:
        LaunchError: If the processes do not find each other, or if devices without a common library
            communicate through their hosts and `JAX_PLATFORMS` does not name `cpu` first.

    Example:
        >>> import hxla
        >>> hxla.join()
    """
    if _joined():
        return
    number = int(os.environ.get("HXLA_NUM_PROCESSES", "1"))
    if os.environ.get(LOCAL_CLIENTS_VARIABLE) == "1":
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms.split(",")[0] != "cpu":
            raise LaunchError(
                f"{LOCAL_CLIENTS_VARIABLE}=1 is for devices that share no library for collectives "
                f"and meet in their hosts: JAX_PLATFORMS={platforms!r} must name cpu first, such "
                "as cpu,cuda"
            )
        keep_local()
    try:
        if number > 1:
            address = os.environ["HXLA_COORDINATOR"]
            if GENERATION_VARIABLE in os.environ:
                connect(address, number, int(os.environ["HXLA_PROCESS_ID"]))
                return
            leave_sigterm_alone()
            jax.distributed.initialize(
                address,
                number,
                int(os.environ["HXLA_PROCESS_ID"]),
                # hxla's watchdog reports earlier, with step and phase.
                heartbeat_timeout_seconds=100,
                # The service has no authentication, so only this machine may reach it.
                coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address),
            )
        elif cluster_in_sight() or _in_kubernetes_job():
            leave_sigterm_alone()
            jax.distributed.initialize()
            atexit.register(_publish_end)  # before jax waits for other processes
    except RuntimeError as error:
        raise LaunchError(
            f"the processes of the job did not find each other: {error}\ncall hxla.join() before "
            "anything else uses JAX, and see that the coordinator's address can be reached"
        ) from error


def _publish_end() -> None:
    with contextlib.suppress(Exception):  # the service is gone with process 0
        _change(ServiceStatuses(), jax.process_index(), has_ended=True)


def _change(statuses: RankStatuses | None, rank: int, **changes: object) -> Status:
    """Change the status of this process's rank, and publish it if there is a channel."""
    before = Status() if statuses is None else statuses.statuses().get(rank, Status())
    now = dataclasses.replace(before, moved_at=time.monotonic(), **changes)  # type: ignore[arg-type]
    if statuses is not None:
        statuses.tell(rank, now)
    return now


def _in_kubernetes_job() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ


def _die_with_launcher() -> None:
    launcher = os.environ.get("HXLA_LAUNCHER_PID")
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):  # it died before the call
            os._exit(1)


def run_joined(work: Callable[[], None]) -> None:
    """Join the job, work, and end with the exit code of the work."""
    _die_with_launcher()
    keep_whole()  # `show` writes all of an error into a log
    channel, rank = own_channel(), int(os.environ.get("HXLA_PROCESS_ID", "0"))
    code: int | str | None = 0
    try:
        _change(channel, rank, phase="joining")
        join()
        _change(channel, rank, phase="script")
        work()
        if _change(channel, rank, has_ended=True).state != "left":
            _change(channel, rank, state="finished")
    except SystemExit as stop:
        code = stop.code or 0
        _publish_exit(channel, rank, code)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        _change(channel, rank, state="left", note="Ctrl-C", has_ended=True)
        if channel is None:
            print("hxla: interrupted", file=sys.stderr)
    except BaseException as error:
        code = 1
        is_victim = is_lost_peer(error)
        note = last_words(error)
        _change(channel, rank, state="victim" if is_victim else "failed", note=note)
        is_shown = not is_victim and not _is_shown_by_another(channel, rank, note)
        show(error, rank, os.environ.get(LOGS_VARIABLE), is_shown=is_shown)
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(OSError):  # the output may have no reader
        sys.stdout.flush()
        sys.stderr.flush()
    if channel is not None and code == 0 and channel.read(Status, rank).state == "left":
        _wait_for_others(channel, rank, seconds=float("inf"))
    elif channel is not None and code and rank == 0:
        _wait_for_others(channel, rank, seconds=_STAY_SECONDS)
    if code:
        # An orderly shutdown would wait at a barrier for processes that may never come.
        os._exit(code)


def _is_shown_by_another(channel: Channel | None, rank: int, note: str) -> bool:
    """Whether a lower rank fails with the same error, and so shows it."""
    until = time.monotonic() + _SAME_SECONDS
    while channel is not None and time.monotonic() < until:
        lower = [status for other, status in channel.statuses().items() if other < rank]
        if any((status.state, status.note) == ("failed", note) for status in lower):
            return True
        if all(status.state not in ("starting", "running") for status in lower):
            break
        time.sleep(0.01)
    return False


def _publish_exit(channel: Channel | None, rank: int, code: int | str | None) -> None:
    """Publish the end of a script by `sys.exit`; other ranks show whether it was too early."""
    if channel is None:
        return
    was_preempted = channel.read(Status, rank).state == "preempted"
    if code == EXIT_PREEMPTED or (was_preempted and code in _SIGNAL_CODES):
        _change(channel, rank, state="preempted")
    elif code:
        note = code.strip() if isinstance(code, str) else f"sys.exit({code})"
        _change(
            channel, rank, state="failed", note=note, exit_code=1 if isinstance(code, str) else code
        )
    elif _change(channel, rank, has_ended=True).state != "finished":
        _change(channel, rank, state="left", note="sys.exit(0)")


def _wait_for_others(channel: Channel, rank: int, *, seconds: float) -> None:
    """Keep rank 0's coordination service and open sockets alive until other ranks end.

    Otherwise these would print further errors before they end. The launcher limits the wait.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        others = [status for other, status in channel.statuses().items() if other != rank]
        if all(status.state not in ("starting", "running") for status in others):
            break
        time.sleep(0.02)
    if rank == 0 and len(channel.statuses()) > 1:
        time.sleep(_LAST_SECONDS)


def run_as_main(command: Sequence[str]) -> None:
    """Run a script, or after `-m` a module, with its arguments like Python."""
    if command[0] == "-m":
        sys.argv, sys.path[0] = list(command[1:]), os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def run_script(command: Sequence[str]) -> None:
    """Join the job, and run a script with its arguments as `__main__`."""
    run_joined(functools.partial(run_as_main, command))
