"""The processes of one generation, on one host and on all."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ..cluster.cluster import Device
from .control_channel import (
    GENERATION_VARIABLE,
    JOB_VARIABLE,
    MAILBOX_VARIABLE,
    MEMORY_VARIABLE,
    NEIGHBOURS_VARIABLE,
    Order,
    Report,
    folders_of,
    new_mailbox,
)
from .member import PINNED
from .membership import Generation
from .output import Forwarder, Logs, Output
from .status_page import BOARD_VARIABLE, LOGS_VARIABLE, Post, new_board
from .throttle import Throttle, make_throttle
from .warm import CoordinationProcess, WarmProcess

#: What a process for a device gets besides its place in the generation, by the device, its place on
#: its host and the path of the mesh file.
Environment = Callable[[Device, int, str], dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a process of a generation runs.

    Attributes:
        place: Of the device on its host.
        core: The core that it may use; None: all.
    """

    device: Device
    place: int
    core: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkersStart:
    """What a host needs to know to start its processes of a generation.

    Attributes:
        job: A name of the job that no other one has.
        num_processes: The processes of the generation, on all hosts.
        seats: Those on this host, by rank.
        mesh: The text of the mesh file.
        pinned: What generations before have chosen, as `hxla._src.launch.member.pin` writes it.
    """

    job: str
    generation: int
    num_processes: int
    address: str
    seats: Mapping[int, Seat]
    mesh: str
    pinned: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Where what processes print goes."""

    out: Output
    err: Output
    logs: Logs


class Workers(Protocol):
    """Processes of a generation, as the authority's side sees them; ranks are the generation's."""

    @property
    def pids(self) -> Mapping[int, int]:
        """Processes by rank."""

    def report(self, rank: int) -> Report:
        """What a process said last."""

    def post(self, rank: int) -> Post:
        """Where a process is."""

    def exit_code(self, rank: int) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all of them."""

    def quieten(self) -> None:
        """From here on they only say that another is gone: that goes to the log."""

    def release(self) -> None:
        """Show what was held for so long that no failure explains it."""

    def kill(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to those that run, and to what they started."""

    def close(self, *, shows_held: bool, kept: Collection[str] = ()) -> None:
        """End what is left, and let go of what they wrote, but of the folders that are kept."""


class LocalWorkers:
    """Processes on this host, from their start until the last one ended.

    Args:
        command: A script and its arguments.
        memory: The folder in which they leave their state.
        streams: Where what they print goes.
        note: Called with each pid and each folder that someone must clean up after a crash.
    """

    def __init__(
        self,
        start: WorkersStart,
        command: Sequence[str],
        environment: Environment,
        memory: str,
        streams: Streams,
        note: Callable[[str], None],
    ):
        mesh = pathlib.Path(memory, f"mesh-{start.generation}.toml")
        mesh.write_text(start.mesh)
        pinned = pathlib.Path(memory, PINNED)
        if start.pinned and not pinned.exists():
            pinned.write_text(start.pinned)
        self._memory, self._generation = memory, start.generation
        self._order = Order()
        self._board, board_path = new_board(start.num_processes)
        self._mailbox, path = new_mailbox(start.num_processes)
        self._processes: dict[int, WarmProcess] = {}
        self._forwarders: list[tuple[Forwarder, Forwarder]] = []
        self._throttles: list[Throttle] = []
        for rank, seat in start.seats.items():
            env = {
                **environment(seat.device, seat.place, str(mesh)),
                "HXLA_COORDINATOR": start.address,
                "HXLA_NUM_PROCESSES": str(start.num_processes),
                "HXLA_PROCESS_ID": str(rank),
                BOARD_VARIABLE: board_path,
                LOGS_VARIABLE: str(streams.logs.folder),
                MAILBOX_VARIABLE: path,
                GENERATION_VARIABLE: str(start.generation),
                JOB_VARIABLE: start.job,
                MEMORY_VARIABLE: memory,
                NEIGHBOURS_VARIABLE: str(len(start.seats)),
            }
            process = WarmProcess(command, env, seat.core)
            note(str(process.pid))
            self._processes[rank] = process
            share = seat.device.core_share
            if share is not None:
                throttle, _ = make_throttle(process.pid, 1000 * start.generation + rank, share)
                self._throttles.append(throttle)
                folder = getattr(throttle, "folder", None)
                if folder is not None:
                    note(str(folder))
            self._forwarders.append(
                (
                    Forwarder(rank, process.stdout, streams.out, None),
                    Forwarder(rank, process.stderr, streams.err, streams.logs),
                )
            )

    @property
    def pids(self) -> dict[int, int]:
        """Processes by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def report(self, rank: int) -> Report:
        """What a process said last."""
        return self._mailbox.report(rank)

    def post(self, rank: int) -> Post:
        """Where a process is."""
        return self._board.posts().get(rank, Post())

    def exit_code(self, rank: int) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self._processes[rank].exit_code

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all of them."""
        self._order = dataclasses.replace(self._order, **changes)  # type: ignore[arg-type]
        for rank in self._processes:
            self._mailbox.give(rank, self._order)

    def quieten(self) -> None:
        """From here on they only say that another is gone: that goes to the log."""
        for _, errors in self._forwarders:
            errors.quieten()

    def release(self) -> None:
        """Show what was held for so long that no failure explains it."""
        for _, errors in self._forwarders:
            errors.release(time.monotonic())

    def kill(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to those that run, and to what they started."""
        for rank in ranks:
            process = self._processes[rank]
            if process.exit_code is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it has just been forked, and leads no group yet
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)

    def close(self, *, shows_held: bool, kept: Collection[str] = ()) -> None:
        """End what is left, and let go of what they wrote, but of the folders that are kept."""
        self.kill(list(self._processes), signal.SIGKILL)
        for process, pair in zip(self._processes.values(), self._forwarders, strict=True):
            process.join()
            with contextlib.suppress(ProcessLookupError):  # what it had started
                os.killpg(process.pid, signal.SIGKILL)
            for forwarder in pair:
                forwarder.join(2.0, shows_held=shows_held)
        for throttle in self._throttles:
            throttle.close()
        for folder in folders_of(self._memory, self._generation):
            if folder not in kept:  # half written, or nobody was told any more
                shutil.rmtree(folder, ignore_errors=True)


class GenerationProcesses:
    """The processes of a generation, from their start until the last one ended.

    Args:
        workers: Its processes on each host, by the host's name.
        hosts: Of its members, by rank.
        service: Its coordinator, if it has one.

    Attributes:
        exits: By device, the exit codes of those that ended and were told.
        told: By device what was told of its last report.
    """

    def __init__(
        self,
        generation: Generation,
        workers: Mapping[str, Workers],
        hosts: Sequence[str],
        service: CoordinationProcess | None,
    ):
        self.generation, self.workers = generation, workers
        self._hosts, self._service = hosts, service
        self.exits: dict[str, int] = {}
        self.told: dict[str, Report] = dict.fromkeys(generation.members, Report())

    @property
    def pids(self) -> dict[str, int]:
        """Processes by device."""
        found = {rank: pid for own in self.workers.values() for rank, pid in own.pids.items()}
        return {device: found[rank] for rank, device in enumerate(self.generation.members)}

    @property
    def has_joined(self) -> bool:
        """Whether any of its processes began."""
        return any(report.is_joined for report in self.told.values())

    def report(self, device: str) -> Report:
        """What a member said last."""
        rank = self._rank(device)
        return self._of(rank).report(rank)

    def post(self, device: str) -> Post:
        """Where a member is."""
        rank = self._rank(device)
        return self._of(rank).post(rank)

    def exit_code(self, device: str) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        rank = self._rank(device)
        return self._of(rank).exit_code(rank)

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all members."""
        for own in self.workers.values():
            own.order(**changes)

    def quieten(self) -> None:
        """From here on members only say that another is gone: that goes to the log."""
        for own in self.workers.values():
            own.quieten()

    def release(self) -> None:
        """Show what was held for so long that no failure explains it."""
        for own in self.workers.values():
            own.release()

    def kill(self, devices: Sequence[str] | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to members that run, and to what they started."""
        ranks = [self._rank(d) for d in (self.generation.members if devices is None else devices)]
        for host, own in self.workers.items():
            own.kill([rank for rank in ranks if self._hosts[rank] == host], number)

    def close(self, *, shows_held: bool, kept: Collection[str]) -> None:
        """End what is left, and let go of ports, cgroups, pipes and folders that are not kept."""
        for own in self.workers.values():
            own.close(shows_held=shows_held, kept=kept)
        if self._service is not None:
            self._service.close()

    def _rank(self, device: str) -> int:
        return self.generation.members.index(device)

    def _of(self, rank: int) -> Workers:
        return self.workers[self._hosts[rank]]
