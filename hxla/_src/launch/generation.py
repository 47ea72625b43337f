"""The ranks of a generation on all its hosts: started, polled, judged and stopped together."""

import dataclasses
import signal
import time
from collections.abc import Collection, Sequence

from ..cluster.cluster import Cluster
from ..cluster.mesh_file import dump_cluster
from ..core.types import EXIT_PREEMPTED
from .channel import Report, Standing, Status
from .ending import HOPELESS_SECONDS, RunEnding, Verdict, judge
from .host import KeptFolder, KnownDevices, cores_of
from .membership import Generation
from .output import Streams
from .ranks import RanksStart, Seat
from .warm import CoordinationProcess


class GenerationRanks:
    """The ranks of a generation, from their start until the last one ended.

    Args:
        address: Address of this machine, as the hosts reach it.
        job: A unique name of the job.
        are_members: Whether the generation may have a successor, for which ranks leave their state.
            Its coordination service is then a separate process, not in rank 0.

    Attributes:
        standings: The last standings, in the order of ranks.
        reports: The last report of each rank that the authority knows.
        ended: The ranks whose end the authority knows.
    """

    def __init__(
        self,
        generation: Generation,
        devices: KnownDevices,
        streams: Streams,
        *,
        address: str,
        job: str,
        are_members: bool,
    ):
        self.generation, self._streams, self._are_members = generation, streams, are_members
        places = [devices.places[name] for name in generation.members]
        alone = [place.device.model_copy(update={"node": 0}) for place in places]
        seats = [
            Seat(device=place.device, place=devices.number(name), core=core)
            for name, place, core in zip(generation.members, places, cores_of(places), strict=True)
        ]
        hosts = {place.host.name: place.host for place in places}
        start = RanksStart(
            job=job,
            generation=generation.number,
            num_processes=len(places),
            address=f"{address}:{generation.port}",
            seats={},
            mesh=dump_cluster(Cluster(name="elastic", devices=tuple(alone))),
            pinned=next((host.pinned for host in hosts.values() if host.pinned), ""),
        )
        self._service: CoordinationProcess | None = None
        if are_members and len(places) > 1:
            self._service = CoordinationProcess(start.address, len(places))
        self._host_ranks = []
        for host in hosts.values():
            here = {rank: seat for rank, seat in enumerate(seats) if places[rank].host is host}
            self._host_ranks.append((host, host.start(dataclasses.replace(start, seats=here))))
        self.hosts = [place.host.name for place in places]
        ranks = range(len(places))
        self.standings: Sequence[Standing] = [Standing(rank=r, status=Status()) for r in ranks]
        self.reports = dict.fromkeys(ranks, Report())
        self.ended = set[int]()

    @property
    def pids(self) -> dict[str, int]:
        """Pids by device."""
        pids = {rank: pid for _, ranks in self._host_ranks for rank, pid in ranks.pids.items()}
        return {device: pids[rank] for rank, device in enumerate(self.generation.members)}

    @property
    def has_joined(self) -> bool:
        """Whether any of its ranks has joined."""
        return any(report.is_joined for report in self.reports.values())

    @property
    def trains(self) -> bool:
        """Whether any of its ranks is in a step."""
        statuses = (standing.status for standing in self.standings)
        return any(status.state == "running" and status.step >= 0 for status in statuses)

    def hear(self) -> Sequence[Standing]:
        """Poll the standing of each rank."""
        every = [standing for _, ranks in self._host_ranks for standing in ranks.standings()]
        self.standings = sorted(every, key=lambda standing: standing.rank)
        return self.standings

    def begin(self, state: Sequence[KeptFolder]) -> None:
        """Let members begin, with a state whose parts are in the folders, if any."""
        for host, ranks in self._host_ranks:
            host.begin(ranks, state)

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all members."""
        for _, ranks in self._host_ranks:
            ranks.order(**changes)

    def quieten(self, spared: int | None = None) -> None:
        for _, ranks in self._host_ranks:
            ranks.quieten(spared)

    def change_shares(self, shares: Sequence[float | None]) -> None:
        for _, ranks in self._host_ranks:
            ranks.change_shares(shares)

    def kill(self, number: int = signal.SIGKILL, ranks: Collection[int] | None = None) -> None:
        """Send a signal to running ranks and their children; None for all ranks."""
        for _, here in self._host_ranks:
            here.kill([rank for rank in here.pids if ranks is None or rank in ranks], number)

    def judge(self, ending: RunEnding, now: float) -> None:
        """Find the rank that failed first, if any, and end the others.

        Args:
            now: By `time.monotonic`; infinity if no more messages will come.
        """
        if ending.verdict is not None:
            return
        if ending.asked is None and any(
            s.code == EXIT_PREEMPTED or (s.code is not None and s.status.state == "preempted")
            for s in self.standings
        ):
            ending.follow(time.monotonic())
        if ending.num_interrupts:
            return
        # After a signal of the user only errors count, as processes may die of the signal.
        judged = [s for s in self.standings if ending.asked is None or s.status.state == "failed"]
        verdict = judge(judged, now)
        if verdict is not None:
            grace = ending.grace_seconds if verdict.can_leave else HOPELESS_SECONDS
            self.fail(ending, verdict, grace)

    def fail(self, ending: RunEnding, verdict: Verdict, grace_seconds: float) -> None:
        """Report the failed rank, and end the others; one that is alone is reported at the end."""
        ending.fail(verdict, grace_seconds, time.monotonic())
        if self._are_members or len(self.generation.members) > 1:
            self._streams.say(
                f"{self.generation.members[verdict.rank]} {verdict.reason}; ending the job"
            )
        # A stuck rank has nothing to report.
        self.quieten(spared=verdict.rank if verdict.can_leave else None)
        self.kill(signal.SIGTERM)

    def kill_late(self, ending: RunEnding) -> None:
        """Kill ranks that do not end in time."""
        now = time.monotonic()
        late = [
            standing
            for standing in self.standings
            if standing.code is None and now > ending.patience_until(standing.status)
        ]
        for standing in late if ending.verdict is None else ():
            who, where = self.generation.members[standing.rank], standing.status.where
            grace = f"{ending.grace_seconds:g} s"
            self._streams.say(f"{who} did not end within {grace}, {where}: killed")
        if late:
            self.kill(ranks={standing.rank for standing in late})

    def close(self, *, shows_delayed: bool, kept: Collection[str]) -> None:
        """End all processes, and release ports, cgroups, pipes and folders except `kept`."""
        for _, ranks in self._host_ranks:
            ranks.close(shows_delayed=shows_delayed, kept=kept)
        if self._service is not None:
            self._service.close()
