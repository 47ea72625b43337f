"""Processes forked from a server that has imported everything and used no device."""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import select
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import IO, Any

from .channel import WAITS_VARIABLE

#: Imports the modules of a usual script, without initialising a backend.
_SERVER = "hxla._src.launch.fork_server"
_SET_CHILD_SUBREAPER = 36  # of prctl
_UNKNOWN_CODE = 255  # exit code after the end of the fork server


class WarmProcess:
    """A forked process that runs a script.

    Args:
        core: The core for the process; None for all.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], core: int | None):
        context = _context()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        self._process: Any = context.Process(
            target=_run, args=(list(command), dict(env), core, *(w for _, w in ends)), daemon=False
        )
        self._process.start()
        for _, written in ends:
            written.close()
        self.stdout, self.stderr = (_file(read) for read, _ in ends)
        self.pid: int = self._process.pid or 0
        self._orphaned_code: int | None = None

    @property
    def exit_code(self) -> int | None:
        if self._orphaned_code is not None:
            return self._orphaned_code
        code: int | None = self._process.exitcode
        return self._code_of_orphan(os.WNOHANG) if code == _UNKNOWN_CODE else code

    def join(self) -> None:
        self._process.join()
        if self._process.exitcode == _UNKNOWN_CODE and self._orphaned_code is None:
            self._code_of_orphan(0)

    def _code_of_orphan(self, options: int) -> int | None:
        """The exit code after the end of the fork server, when the process is this one's child."""
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # it ended before, or becomes a child just now
            return None if pathlib.Path("/proc", str(self.pid)).exists() else _UNKNOWN_CODE
        if pid:
            self._orphaned_code = os.waitstatus_to_exitcode(status)
        return self._orphaned_code


class CoordinationProcess:
    """The coordination service of a generation, in a process apart from the launcher."""

    def __init__(self, address: str, num_processes: int):
        context = _context()
        read, self._lives = context.Pipe(duplex=False)
        self._process: Any = context.Process(
            target=_serve, args=(address, num_processes, read), daemon=False
        )
        self._process.start()
        read.close()
        self.pid: int = self._process.pid or 0

    def close(self) -> None:
        """End the service and free its port."""
        self._process.kill()
        self._process.join()
        self._lives.close()


def warm_up() -> None:
    """Start the fork server and its imports, without waiting."""
    _context()
    forkserver.ensure_running()


def _context() -> Any:
    if sys.platform == "linux":
        # Processes outlive the fork server, and then become this one's children.
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_SERVER])
    return context


def _serve(address: str, num_processes: int, launcher: Connection) -> None:
    from ..jax.coordination import (
        serve,  # imports jax, which a launcher does not need
    )

    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # its messages about members are known already
    os.dup2(nowhere, 2)
    service = serve(address, num_processes)
    if service is not None:
        # The parent is the fork server; only the launcher has the other end of the pipe.
        launcher.poll(None)
    os._exit(0)


def _file(connection: Connection) -> IO[bytes]:
    number = os.dup(connection.fileno())
    connection.close()
    return os.fdopen(number, "rb", buffering=0)


def _end_with(launcher: int) -> None:
    """End this process with the launcher; runs in a thread."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(launcher)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _run(
    command: list[str], env: dict[str, str], core: int | None, out: Connection, err: Connection
) -> None:
    """Run a script in the forked process."""
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # the script's choice
    for ended_by in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ended_by, signal.SIG_DFL)
    for connection, number in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if core is not None:
        os.sched_setaffinity(0, {core})
    launcher = int(env.pop("HXLA_LAUNCHER_PID"))
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    from .channel import own_member
    from .join import run_script

    member = own_member()
    if member is not None and env.get(WAITS_VARIABLE):
        member.wait_before_devices()
    run_script(command)
    atexit._run_exitfuncs()  # noqa: SLF001 (a forked process has no other way)
    sys.stdout.flush()
    os._exit(0)
