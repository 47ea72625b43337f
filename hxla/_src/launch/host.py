"""Hosts of a run's devices, this machine as one, and the ranks of a generation on all of them.

Ranks are started, polled, judged and stopped together.
"""

import dataclasses
import itertools
import os
import pathlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ..cluster.cluster import Cluster, Device
from ..cluster.mesh_file import dump_cluster
from ..core.types import EXIT_PREEMPTED
from .channel import PINNED, Report, Standing, Status
from .cleanup import start_janitor
from .ending import HOPELESS_SECONDS, RunEnding, Verdict, judge
from .environment import Environment
from .membership import Generation, left_folder
from .output import Streams
from .ranks import CoordinationProcess, LocalRanks, Ranks, RanksStart, Seat, StartProcess, warm_up
from .throttle import own_cores, pack

_MEMORY = "/dev/shm"  # survives the end of its writer
#: Notice of a device without a deadline, such as one that is no longer in the mesh file.
NOTICE_SECONDS = 600.0


class Host(Protocol):
    """A machine whose devices a run uses.

    Attributes:
        machine: Name of the machine; hosts of one machine share its cores.
        is_lost: Whether the host is gone, with all states on it.
        notice_seconds: Notice before its devices are taken back.
    """

    name: str
    machine: str
    is_lost: bool
    notice_seconds: float

    @property
    def cores(self) -> Sequence[int]:
        """The cores for its processes."""

    @property
    def pinned(self) -> str:
        """Choices of its processes for later generations, as JSON; empty without any."""

    def start(self, start: RanksStart) -> Ranks:
        """Start its ranks of a generation."""

    def begin(self, ranks: Ranks, state: Sequence["KeptFolder"]) -> None:
        """Let members begin, with a state whose parts are in the folders, if any."""

    def forget(self, folder: str) -> None:
        """Remove a state."""

    def state_folder(self, generation: int, rank: int) -> str:
        """The folder for a process's last state."""

    def close(self) -> None:
        """Release everything, including states in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptFolder:
    """A folder on a host with a state or a part of one."""

    host: Host
    folder: str


class Carrying(Protocol):
    """The transfer of a folder between hosts."""

    def arrived(self) -> bool | None:
        """Whether the transfer succeeded; None while it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferedDevice:
    """A device and its host."""

    host: Host
    device: Device


class Hosts(Protocol):
    """The source of a run's devices.

    Attributes:
        address: Address of this machine, as the hosts reach it.
    """

    address: str

    def offered(self) -> Sequence[OfferedDevice]:
        """The devices that may be used now.

        Raises:
            HxlaError: If they are not known.
        """

    def poll(self) -> bool:
        """Poll reports of the hosts; returns whether a host was lost."""

    def carry(self, source: KeptFolder, target: KeptFolder) -> Carrying:
        """Start an atomic transfer of a folder between hosts."""

    def let_go(self, host: Host) -> None:
        """Release a host, none of whose devices is used any more."""

    def close(self) -> None:
        """Close all hosts."""


class LocalHost:
    """This machine as a host, and as the source of devices if it is the only one.

    Args:
        keeps_state: Whether ranks are members of generations, which leave their state in memory.
        read_devices: Returns the devices that may be used now.

    Attributes:
        memory: The folder for states; None without `keeps_state`.
    """

    name = machine = "this machine"
    is_lost = False
    notice_seconds = NOTICE_SECONDS
    address = "127.0.0.1"

    def __init__(
        self,
        start_process: StartProcess,
        environment: Environment,
        streams: Streams,
        *,
        keeps_state: bool,
        read_devices: Callable[[], Sequence[Device]] = tuple,
    ):
        self._start_process, self._environment = start_process, environment
        self._streams, self._read_devices = streams, read_devices
        self.cores: Sequence[int] = own_cores()
        self._janitor = start_janitor()
        self.memory: str | None = None
        if keeps_state:
            parent = _MEMORY if os.path.isdir(_MEMORY) else None
            self.memory = tempfile.mkdtemp(prefix=f"hxla-elastic-{os.getpid()}-", dir=parent)
            self.note(f"rm {self.memory}")
            warm_up()

    @property
    def pinned(self) -> str:
        try:
            return pathlib.Path(self.memory, PINNED).read_text() if self.memory else ""
        except FileNotFoundError:
            return ""

    def offered(self) -> Sequence[OfferedDevice]:
        """The devices that may be used now."""
        return [OfferedDevice(host=self, device=device) for device in self._read_devices()]

    def poll(self) -> bool:
        """Does nothing, as reports are read directly from memory."""
        return False

    def carry(self, _source: KeptFolder, _target: KeptFolder) -> Carrying:
        """Not called, as there is no other host."""
        raise AssertionError("there is one host")

    def let_go(self, host: Host) -> None:
        """Does nothing, as this host stays until the end."""

    def start(self, start: RanksStart) -> LocalRanks:
        return LocalRanks(
            start, self._start_process, self._environment, self.memory, self._streams, self.note
        )

    def begin(self, ranks: Ranks, state: Sequence[KeptFolder]) -> None:
        ranks.order(begins=True, state=[one.folder for one in state])

    def forget(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def state_folder(self, generation: int, rank: int) -> str:
        assert self.memory is not None
        return left_folder(self.memory, generation, rank)

    def note(self, line: str) -> None:
        """Register a pid, a cgroup, or `rm` and a folder for clean-up after a crash."""
        self._janitor.write(f"{line}\n".encode())

    def close(self) -> None:
        """Remove states from memory, also unfinished ones, and end the clean-up process."""
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)
        self.note("done")
        self._janitor.close()


def cores_of(places: Sequence[OfferedDevice]) -> list[int | None]:
    """The core of each process with a core share, packed over the hosts of each machine."""
    cores: list[int | None] = [None] * len(places)
    for machine in {place.host.machine for place in places}:
        indices = [k for k, p in enumerate(places) if p.host.machine == machine]
        indices = [k for k in indices if places[k].device.core_share is not None]
        shares = [places[k].device.core_share or 1.0 for k in indices]
        if indices:
            for k, core in zip(indices, pack(shares, places[indices[0]].host.cores), strict=True):
                cores[k] = core
    return cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceChanges:
    """The difference between offered and known devices.

    Attributes:
        met: Devices that are offered for the first time.
        usable: These, and devices that are offered again after they were asked back.
        lost: Devices whose host is gone.
        missing: Devices that are no longer offered.
    """

    met: Sequence[str]
    usable: Sequence[str]
    lost: Sequence[str]
    missing: Sequence[str]


class KnownDevices:
    """The devices of a run and their names.

    Args:
        word: The first word of the names.

    Attributes:
        places: The devices that may be used, by name.
    """

    def __init__(self, word: str) -> None:
        self._word, self._names = word, itertools.count()
        self.places: dict[str, OfferedDevice] = {}
        self._numbers: dict[str, int] = {}  # on their hosts
        self._asked_back: set[str] = set()  # devices that are no longer offered
        # Devices that are still offered, but not used.
        self._given_back: dict[str, OfferedDevice] = {}

    def number(self, name: str) -> int:
        """The number of a device on its host."""
        return self._numbers[name]

    def compare(self, offered: Sequence[OfferedDevice]) -> DeviceChanges:
        """Match offered devices with known ones, and name the others."""
        # Among equal devices used ones match first, and those that were asked back last.
        used = sorted(self.places, key=self._asked_back.__contains__)
        gone = {name: self.places[name] for name in used} | self._given_back
        met, usable = list[str](), list[str]()
        for place in offered:
            same = next((name for name, other in gone.items() if other == place), None)
            if same is None:
                met.append(self._add(place))
                usable.append(met[-1])
                continue
            del gone[same]
            if same in self._asked_back:
                self._asked_back.discard(same)
                usable.append(same)
        for name in self._given_back.keys() & gone.keys():
            del self._given_back[name], gone[name]
        lost = [name for name, place in gone.items() if place.host.is_lost]
        missing = [name for name in gone if name not in {*lost, *self._asked_back}]
        return DeviceChanges(met=met, usable=usable, lost=lost, missing=missing)

    def ask_back(self, names: Sequence[str]) -> None:
        """Mark devices as no longer offered."""
        self._asked_back |= set(names)

    def release(self, name: str) -> Host | None:
        """Release a device; returns its host if none of its other devices is used."""
        place = self.places.pop(name, None)
        if place is None:
            return None
        if name not in self._asked_back:
            self._given_back[name] = place
        is_used = any(other.host is place.host for other in self.places.values())
        return None if is_used else place.host

    def _add(self, place: OfferedDevice) -> str:
        name = f"{self._word} {next(self._names)}"
        taken = {self._numbers[d] for d, p in self.places.items() if p.host is place.host}
        self.places[name] = place
        self._numbers[name] = next(k for k in itertools.count() if k not in taken)
        return name


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
