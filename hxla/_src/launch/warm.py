"""Processes with their imports done: forked from one that did them and has touched no device."""

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

#: It imports what a script does anyway, which initialises no backend.
_SERVER = "hxla._src.launch.fork_server"
_SET_CHILD_SUBREAPER = 36  # of prctl
_NOT_KNOWN = 255  # an exit code that nobody is left to tell


class WarmProcess:
    """A process that runs a script, as the launcher sees it.

    Args:
        core: The core that it may use; None: all.
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
        return self._code_of_orphan(os.WNOHANG) if code == _NOT_KNOWN else code

    def join(self) -> None:
        self._process.join()
        if self._process.exitcode == _NOT_KNOWN and self._orphaned_code is None:
            self._code_of_orphan(0)

    def _code_of_orphan(self, options: int) -> int | None:
        """The exit code once the fork server is gone: the process is then this one's child."""
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # it has ended before, or is handed over just now
            return None if pathlib.Path("/proc", str(self.pid)).exists() else _NOT_KNOWN
        if pid:
            self._orphaned_code = os.waitstatus_to_exitcode(status)
        return self._orphaned_code


class CoordinationProcess:
    """The coordination service of a generation: its end and errors are not the launcher's."""

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
        """End it, with its port."""
        self._process.kill()
        self._process.join()
        self._lives.close()


def warm_up() -> None:
    """Start the process from which others are forked, and its imports; wait for neither."""
    _context()
    forkserver.ensure_running()


def _context() -> Any:
    if sys.platform == "linux":
        # Processes outlive the one that they were forked from, and then are this one's.
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_SERVER])
    return context


def _serve(address: str, num_processes: int, launcher: Connection) -> None:
    from ..jax.coordination import (
        serve,  # with jax, which its fork server has and a launcher needs not
    )

    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)  # whatever it says of members is known already
    os.dup2(nowhere, 2)
    service = serve(address, num_processes)
    if service is not None:
        # The parent lives for as long as this process does; only the launcher has the other end.
        launcher.poll(None)
    os._exit(0)


def _file(connection: Connection) -> IO[bytes]:
    number = os.dup(connection.fileno())
    connection.close()
    return os.fdopen(number, "rb", buffering=0)


def _end_with(launcher: int) -> None:
    """In a thread: the launcher's end is this process's."""
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        select.select([os.pidfd_open(launcher)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _run(
    command: list[str], env: dict[str, str], core: int | None, out: Connection, err: Connection
) -> None:
    """In the process."""
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
    from .join import run_script
    from .member import own_member

    member = own_member()
    if member is not None and env.get(WAITS_VARIABLE):
        member.wait_before_devices()
    run_script(command)
    atexit._run_exitfuncs()  # noqa: SLF001 (a forked process has no other way)
    sys.stdout.flush()
    os._exit(0)
