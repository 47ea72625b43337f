"""Join the processes of a job; `python -m hxla._launch script.py` runs a script in one."""

import ctypes
import functools
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

import jax

from .._core._errors import LaunchError
from .._jax import _coordination

_TASK_COUNTS = {
    "Slurm": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
}


def _joined() -> bool:
    return _coordination.client() is not None


def cluster_in_sight() -> str | None:
    """A batch system's job of several processes that this one is part of, in words."""
    if "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        for name, variable in _TASK_COUNTS.items():
            number = os.environ.get(variable, "1")
            if number.isdigit() and int(number) > 1:
                return f"{name} with {number} tasks"
    return None


def uninitialised_cluster() -> str | None:
    """The job that this process should have joined and has not, or None."""
    if _joined():
        return None
    number = os.environ.get("HXLA_NUM_PROCESSES", "1")
    if number != "1":
        return f"hxla run with {number} processes"
    return cluster_in_sight()


def join() -> None:
    """Join the job that this process is part of; does nothing under plain `python script.py`.

    Inside `hxla run` the launcher has done it already. Inside Slurm, Open MPI or Kubernetes, where
    `jax.distributed.initialize()` finds its own cluster, call this before anything uses a device.

    Raises:
        LaunchError: If the processes do not find each other.

    Example:
        >>> import hxla
        >>> hxla.join()
    """
    if _joined():
        return
    number = int(os.environ.get("HXLA_NUM_PROCESSES", "1"))
    try:
        if number > 1:
            jax.distributed.initialize(
                os.environ["HXLA_COORDINATOR"],
                number,
                int(os.environ["HXLA_PROCESS_ID"]),
                # Our own watchdog speaks first, with the step and the phase.
                heartbeat_timeout_seconds=100,
            )
        elif cluster_in_sight() or _in_kubernetes_job():
            jax.distributed.initialize()
    except RuntimeError as error:
        raise LaunchError(
            f"the processes of the job did not find each other: {error}\ncall hxla.join() before "
            "anything else uses JAX, and see that the coordinator's address can be reached"
        ) from error


def _in_kubernetes_job() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ


def _die_with_the_launcher() -> None:
    launcher = os.environ.get("HXLA_LAUNCHER_PID")
    if launcher and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(launcher):  # it died before the call
            os._exit(1)


def run_joined(work: Callable[[], None]) -> None:
    """Join, work, and leave with the exit code of what was done."""
    _die_with_the_launcher()
    code: int | str | None = 0
    try:
        join()
        work()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # An orderly shutdown would wait at a barrier for processes that may never come.
        os._exit(code)


def run_as_main(command: Sequence[str]) -> None:
    """Run a script with its arguments as Python would."""
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def run_script(command: Sequence[str]) -> None:
    """Join, and run a script with its arguments as `__main__`."""
    run_joined(functools.partial(run_as_main, command))
