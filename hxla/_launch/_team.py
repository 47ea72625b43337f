"""The processes of one generation, on all hosts."""

import signal
from collections.abc import Collection, Mapping, Sequence

from .._elastic._membership import Generation
from ._board import Post
from ._mailbox import Report
from ._warm import CoordinationProcess
from ._workers import Workers


class Team:
    """The processes of a generation, from their start until the last one ended.

    Args:
        generation: Which.
        workers: Its processes on each host, by the host's name.
        hosts: Of its members, by rank.
        service: Its coordinator, if it has one.

    Attributes:
        generation: Which.
        workers: As given.
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
