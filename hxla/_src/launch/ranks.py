"""The ranks of a generation on one host, from their start to their end.

Cold ones begin with Python. Warm ones are forked from a server that has imported everything and
used no device.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

from ..cluster.cluster import Device
from .channel import (
    CHANNEL_VARIABLE,
    GENERATION_VARIABLE,
    JOB_VARIABLE,
    LOGS_VARIABLE,
    MEMORY_VARIABLE,
    NEIGHBOURS_VARIABLE,
    PINNED,
    WAITS_VARIABLE,
    Order,
    Report,
    Standing,
    Status,
    new_channel,
)
from .cleanup import end_group
from .environment import Environment
from .membership import folders_of
from .output import Forwarder, Streams
from .throttle import Throttle, make_throttle

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


_FORWARD_SECONDS = 2.0  # for the last output


class Process(Protocol):
    """A process that leads a process group."""

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that killed it."""

    def join(self) -> None:
        """Wait for its end."""


#: Starts a process with an environment, on one core or (None) on all.
StartProcess = Callable[[Mapping[str, str], int | None], Process]


class ColdProcess:
    """A new Python process."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], core: int | None):
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid, self.stdout, self.stderr = (
            self._process.pid,
            self._process.stdout,
            self._process.stderr,
        )
        if core is not None:
            os.sched_setaffinity(self.pid, {core})

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def join(self) -> None:
        self._process.wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """The device and core of a rank.

    Attributes:
        place: Index of the device on its host.
        core: The core for the process; None for all.
    """

    device: Device
    place: int
    core: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RanksStart:
    """The start of a generation's ranks on a host.

    Attributes:
        job: A unique name of the job.
        num_processes: Number of processes of the generation, on all hosts.
        seats: The seats on this host, by rank.
        mesh: The text of the mesh file.
        pinned: Choices of earlier generations, as `hxla._src.launch.channel.pin` writes them.
    """

    job: str
    generation: int
    num_processes: int
    address: str
    seats: Mapping[int, Seat]
    mesh: str
    pinned: str


class Ranks(Protocol):
    """The ranks of a generation on a host."""

    @property
    def pids(self) -> Mapping[int, int]:
        """Pids by rank."""

    def standings(self) -> Sequence[Standing]:
        """The standing of each rank."""

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all ranks."""

    def quieten(self, spared: int | None = None) -> None:
        """Log further output of all ranks but one, which only reports another's failure."""

    def change_shares(self, shares: Sequence[float | None]) -> None:
        """Change the core shares of the ranks."""

    def kill(self, ranks: Collection[int], number: int) -> None:
        """Send a signal to running ranks and their children."""

    def close(self, *, shows_delayed: bool, kept: Collection[str] = ()) -> None:
        """End all processes, and remove their folders except `kept`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Started:
    process: Process
    out: Forwarder
    err: Forwarder
    throttle: Throttle | None


class LocalRanks:
    """Ranks on this host.

    Args:
        memory: The folder for states of members; None if ranks are no members and get signals only.
        note: Called with each pid and folder to clean up after a crash.
    """

    def __init__(
        self,
        start: RanksStart,
        start_process: StartProcess,
        environment: Environment,
        memory: str | None,
        streams: Streams,
        note: Callable[[str], None],
    ):
        self._start_process, self._streams, self._note = start_process, streams, note
        self._memory, self._generation = memory, start.generation
        # An elastic run may have more ranks later.
        self._is_alone = memory is None and start.num_processes == 1
        self._order = Order()
        self._channel, path = new_channel(start.num_processes)
        self._ranks: dict[int, _Started] = {}
        self._ended_at: dict[int, float] = {}
        mesh, env = "", {CHANNEL_VARIABLE: path, LOGS_VARIABLE: str(streams.logs.folder)}
        if memory is not None:
            mesh = _write_member_files(start, memory)
            env |= {
                GENERATION_VARIABLE: str(start.generation),
                JOB_VARIABLE: start.job,
                MEMORY_VARIABLE: memory,
                NEIGHBOURS_VARIABLE: str(len(start.seats)),
            }
        env["HXLA_COORDINATOR"] = start.address
        env["HXLA_NUM_PROCESSES"] = str(start.num_processes)
        try:
            for rank, seat in start.seats.items():
                of_device = environment(rank, seat.device, seat.place, mesh)
                self._start(rank, seat, of_device | env | {"HXLA_PROCESS_ID": str(rank)})
        except BaseException:
            self.close(shows_delayed=True)
            raise

    def _start(self, rank: int, seat: Seat, env: Mapping[str, str]) -> None:
        process = self._start_process(env, seat.core)
        self._note(str(process.pid))
        throttle, share = None, seat.device.core_share
        if share is not None:
            throttle, how = make_throttle(process.pid, 1000 * self._generation + rank, share)
            if (folder := getattr(throttle, "folder", None)) is not None:
                self._note(str(folder))
            if self._memory is None:
                self._streams.say(f"rank {rank} has {share:g} of core {seat.core}, by {how}")
        self._ranks[rank] = _Started(
            process=process,
            out=Forwarder(rank, process.stdout, self._streams.out, None, is_alone=self._is_alone),
            err=Forwarder(
                rank, process.stderr, self._streams.err, self._streams.logs, is_alone=self._is_alone
            ),
            throttle=throttle,
        )

    @property
    def pids(self) -> dict[int, int]:
        return {rank: one.process.pid for rank, one in self._ranks.items()}

    def standings(self) -> list[Standing]:
        """The standing of each rank; also shows delayed lines without a failure."""
        return [self._standing(rank, time.monotonic()) for rank in self._ranks]

    def _standing(self, rank: int, now: float) -> Standing:
        self._ranks[rank].err.release(now)
        # The exit code first, as an ended process sends no further messages.
        code = self._ranks[rank].process.exit_code
        return Standing(
            rank=rank,
            status=self._channel.read(Status, rank),
            report=self._channel.read(Report, rank),
            code=code,
            ended_at=0.0 if code is None else self._ended_at.setdefault(rank, now),
        )

    def order(self, **changes: object) -> None:
        self._order = dataclasses.replace(self._order, **changes)  # type: ignore[arg-type]
        for rank in self._ranks:
            self._channel.tell(rank, self._order)

    def quieten(self, spared: int | None = None) -> None:
        for rank, one in self._ranks.items():
            if rank != spared:
                one.err.quieten()

    def change_shares(self, shares: Sequence[float | None]) -> None:
        for rank, one in self._ranks.items():
            share = shares[rank]
            if one.throttle is not None and share is not None:
                one.throttle.set_share(share)

    def kill(self, ranks: Collection[int], number: int) -> None:
        for rank in ranks:
            process = self._ranks[rank].process
            if process.exit_code is not None:
                continue
            if number == signal.SIGKILL:
                end_group(process.pid)
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(process.pid, number)
                    os.killpg(process.pid, signal.SIGCONT)
                except ProcessLookupError:  # a new fork does not yet lead a group
                    os.kill(process.pid, number)

    def close(self, *, shows_delayed: bool, kept: Collection[str] = ()) -> None:
        self.kill(self._ranks, signal.SIGKILL)
        for one in self._ranks.values():
            one.process.join()
            end_group(one.process.pid)  # its children
        for one in self._ranks.values():
            for forwarder in (one.out, one.err):
                forwarder.join(_FORWARD_SECONDS, shows_delayed=shows_delayed)
            if one.throttle is not None:
                one.throttle.close()
        self._channel.close()
        if self._memory is not None:
            for folder in folders_of(self._memory, self._generation):
                if folder not in kept:  # incomplete, or never reported
                    shutil.rmtree(folder, ignore_errors=True)


def _write_member_files(start: RanksStart, memory: str) -> str:
    """Write the mesh file and earlier choices for members; returns the path of the mesh file."""
    mesh, pinned = (
        pathlib.Path(memory, name) for name in (f"mesh-{start.generation}.toml", PINNED)
    )
    mesh.write_text(start.mesh)
    if start.pinned and not pinned.exists():
        pinned.write_text(start.pinned)
    return str(mesh)
