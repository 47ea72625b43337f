"""The processes of one generation."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence

from .._elastic._membership import Generation
from ._board import BOARD_VARIABLE, LOGS_VARIABLE, Post, new_board
from ._mailbox import (
    GENERATION_VARIABLE,
    MAILBOX_VARIABLE,
    MEMORY_VARIABLE,
    Order,
    Report,
    new_mailbox,
)
from ._output import Forwarder, Logs, Output
from ._throttle import Throttle, make_throttle
from ._warm import CoordinationProcess, WarmProcess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a process of a generation runs.

    Attributes:
        device: The device's name.
        env: Environment variables of its own.
        core: The core that it may use; None: all.
        core_share: The share of that core that it is held to, or None.
        throttle_id: A number that no other process has, for its cgroup.
    """

    device: str
    env: Mapping[str, str]
    core: int | None
    core_share: float | None
    throttle_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams:
    """Where what processes print goes."""

    out: Output
    err: Output
    logs: Logs


class Team:
    """The processes of a generation, from their start until the last one ended.

    Args:
        generation: Which.
        seats: One for each member, by rank.
        command: A script and its arguments.
        memory: The folder in which members leave their state.
        streams: Where what they print goes.
        note: Called with each pid and each folder that someone must clean up after a crash.

    Attributes:
        generation: Which.
        exits: By device, the exit codes of those that ended and were told.
        ordered: What its processes were told to do.
        told: By device what was told of its last report.
    """

    def __init__(
        self,
        generation: Generation,
        seats: Sequence[Seat],
        command: Sequence[str],
        memory: str,
        streams: Streams,
        note: Callable[[str], None],
    ):
        self.generation = generation
        self.exits: dict[str, int] = {}
        self.ordered = Order()
        self.told: dict[str, Report] = dict.fromkeys(generation.members, Report())
        num, address = len(seats), f"127.0.0.1:{generation.port}"
        self._service = CoordinationProcess(address, num) if num > 1 else None
        if self._service is not None:
            note(str(self._service.pid))
        self._board, board_path = new_board(num)
        self._mailbox, path = new_mailbox(num)
        self._processes: list[WarmProcess] = []
        self._forwarders: list[tuple[Forwarder, Forwarder]] = []
        self._throttles: list[Throttle] = []
        for rank, seat in enumerate(seats):
            env = {
                **seat.env,
                "HXLA_COORDINATOR": address,
                "HXLA_NUM_PROCESSES": str(num),
                "HXLA_PROCESS_ID": str(rank),
                BOARD_VARIABLE: board_path,
                LOGS_VARIABLE: str(streams.logs.folder),
                MAILBOX_VARIABLE: path,
                GENERATION_VARIABLE: str(generation.number),
                MEMORY_VARIABLE: memory,
            }
            process = WarmProcess(command, env, seat.core)
            note(str(process.pid))
            self._processes.append(process)
            if seat.core_share is not None:
                throttle, _ = make_throttle(process.pid, seat.throttle_id, seat.core_share)
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
    def pids(self) -> dict[str, int]:
        """Processes by device."""
        pids = (process.pid for process in self._processes)
        return dict(zip(self.generation.members, pids, strict=True))

    @property
    def has_joined(self) -> bool:
        """Whether any of its processes began."""
        return any(report.is_joined for report in self.told.values())

    def report(self, device: str) -> Report:
        """What a member said last."""
        return self._mailbox.report(self._rank(device))

    def post(self, device: str) -> Post:
        """Where a member is."""
        return self._board.posts().get(self._rank(device), Post())

    def exit_code(self, device: str) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self._processes[self._rank(device)].exit_code

    def order(self, order: Order) -> None:
        """Tell all members what to do."""
        self.ordered = order
        for rank in range(len(self._processes)):
            self._mailbox.give(rank, order)

    def quieten(self) -> None:
        """From here on members only say that another is gone: that goes to the log."""
        for _, errors in self._forwarders:
            errors.quieten()

    def release(self, now: float) -> None:
        """Show what was held for so long that no failure explains it."""
        for _, errors in self._forwarders:
            errors.release(now)

    def kill(self, devices: Sequence[str] | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to members that run, and to what they started."""
        for device in self.generation.members if devices is None else devices:
            process = self._processes[self._rank(device)]
            if process.exit_code is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # it has just been forked, and leads no group yet
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, number)

    def close(self, *, shows_held: bool) -> None:
        """End what is left, and let go of ports, cgroups and pipes."""
        self.kill()
        for process, pair in zip(self._processes, self._forwarders, strict=True):
            process.join()
            with contextlib.suppress(ProcessLookupError):  # what it had started
                os.killpg(process.pid, signal.SIGKILL)
            for forwarder in pair:
                forwarder.join(2.0, shows_held=shows_held)
        for throttle in self._throttles:
            throttle.close()
        if self._service is not None:
            self._service.close()

    def _rank(self, device: str) -> int:
        return self.generation.members.index(device)
