"""The ranks of a generation on all its hosts: started, heard, judged and stopped together."""

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
        address: Of this machine, as the hosts reach it.
        job: A name of the job that no other one has.
        are_members: Whether the generation may have a successor, to which they leave their state;
            their coordination service is then in none of them, but in a process of its own.

    Attributes:
        standings: In the order of ranks, as they were last heard.
        reports: By rank the last one that the authority knows of.
        ended: The ranks whose end it knows of.
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
        self.generation, self._streams = generation, streams
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
        self._on_hosts = []
        for host in hosts.values():
            here = {rank: seat for rank, seat in enumerate(seats) if places[rank].host is host}
            self._on_hosts.append((host, host.start(dataclasses.replace(start, seats=here))))
        self.hosts = [place.host.name for place in places]
        ranks = range(len(places))
        self.standings: Sequence[Standing] = [Standing(rank=r, status=Status()) for r in ranks]
        self.reports = dict.fromkeys(ranks, Report())
        self.ended = set[int]()

    @property
    def pids(self) -> dict[str, int]:
        """Processes by device."""
        pids = {rank: pid for _, ranks in self._on_hosts for rank, pid in ranks.pids.items()}
        return {device: pids[rank] for rank, device in enumerate(self.generation.members)}

    @property
    def has_joined(self) -> bool:
        """Whether any of its ranks began."""
        return any(report.is_joined for report in self.reports.values())

    def hear(self) -> Sequence[Standing]:
        """What is known of each rank now."""
        every = [standing for _, ranks in self._on_hosts for standing in ranks.standings()]
        self.standings = sorted(every, key=lambda standing: standing.rank)
        return self.standings

    def begin(self, state: Sequence[KeptFolder]) -> None:
        """Let members begin with a state, of which each folder has a part, or with none."""
        for host, ranks in self._on_hosts:
            host.begin(ranks, state)

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all members."""
        for _, ranks in self._on_hosts:
            ranks.order(**changes)

    def quieten(self, spared: int | None = None) -> None:
        for _, ranks in self._on_hosts:
            ranks.quieten(spared)

    def change_shares(self, shares: Sequence[float | None]) -> None:
        for _, ranks in self._on_hosts:
            ranks.change_shares(shares)

    def kill(self, number: int = signal.SIGKILL, ranks: Collection[int] | None = None) -> None:
        """Send a signal to ranks that run, and to what they started; None: to all."""
        for _, here in self._on_hosts:
            here.kill([rank for rank in here.pids if ranks is None or rank in ranks], number)

    def judge(self, ending: RunEnding, now: float) -> None:
        """Find the rank that failed first, if any has, and end the others.

        Args:
            now: By `time.monotonic`; infinity: nobody will say any more.
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
        # Once asked to end, a process may die of the signal; an error is still one.
        judged = [s for s in self.standings if ending.asked is None or s.status.state == "failed"]
        verdict = judge(judged, now)
        if verdict is not None:
            grace = ending.grace_seconds if verdict.can_leave else HOPELESS_SECONDS
            self.fail(ending, verdict, grace)

    def fail(self, ending: RunEnding, verdict: Verdict, grace_seconds: float) -> None:
        """Say which rank has failed, and end the others."""
        ending.fail(verdict, grace_seconds, time.monotonic())
        who = self.generation.members[verdict.rank]
        self._streams.say(f"{who} {verdict.reason}; ending the job")
        # One that stood still has nothing to say of it either.
        self.quieten(spared=verdict.rank if verdict.can_leave else None)
        self.kill(signal.SIGTERM)

    def kill_late(self, ending: RunEnding) -> None:
        """End those that do not end in time."""
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

    def close(self, *, shows_held: bool, kept: Collection[str]) -> None:
        """End what is left, and let go of ports, cgroups, pipes and folders that are not kept."""
        for _, ranks in self._on_hosts:
            ranks.close(shows_held=shows_held, kept=kept)
        if self._service is not None:
            self._service.close()
