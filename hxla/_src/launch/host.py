"""The machines whose devices a run uses: this one, and what any other has to do."""

import dataclasses
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Protocol

from ..cluster.cluster import Device
from .cleanup import start_janitor
from .environment import Environment
from .kept_state import left_folder
from .member import PINNED
from .output import Streams
from .ranks import LocalRanks, Ranks, RanksStart, StartProcess
from .throttle import own_cores, pack
from .warm import warm_up

_MEMORY = "/dev/shm"  # memory that outlives the process that wrote it
#: The notice of a device that is taken back without a deadline, as one that left the mesh file.
NOTICE_SECONDS = 600.0


class Host(Protocol):
    """A machine whose devices a run uses.

    Attributes:
        machine: Hosts of one machine share its cores.
        is_lost: Whether it is gone, with all that was kept there.
        notice_seconds: That it gives when its devices are asked back.
    """

    name: str
    machine: str
    is_lost: bool
    notice_seconds: float

    @property
    def cores(self) -> Sequence[int]:
        """Those that its processes may use."""

    @property
    def pinned(self) -> str:
        """What its processes have chosen for later generations; empty: nothing yet."""

    def start(self, start: RanksStart) -> Ranks:
        """Start its ranks of a generation."""

    def begin(self, ranks: Ranks, state: Sequence["KeptFolder"]) -> None:
        """Let members begin with a state, of which each folder has a part, or with none."""

    def forget(self, folder: str) -> None:
        """Let go of a state."""

    def state_folder(self, generation: int, rank: int) -> str:
        """Where a process leaves its state."""

    def close(self) -> None:
        """Let go of all, also of what was left in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptFolder:
    """A folder on a host, with a state or a part of one."""

    host: Host
    folder: str


class Carrying(Protocol):
    """A folder on its way from a host to another."""

    def arrived(self) -> bool | None:
        """Whether it has arrived; None: it is under way."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfferedDevice:
    """A device and its host."""

    host: Host
    device: Device


class Hosts(Protocol):
    """Where devices come from.

    Attributes:
        address: Of this machine, as the hosts reach it.
    """

    address: str

    def offered(self) -> Sequence[OfferedDevice]:
        """The devices that may be used, now.

        Raises:
            HxlaError: If that cannot be told.
        """

    def poll(self) -> bool:
        """Hear what the hosts have to say; whether one was found to be lost."""

    def carry(self, source: KeptFolder, target: KeptFolder) -> Carrying:
        """Begin to carry a folder from one host to another, where it appears whole."""

    def let_go(self, host: Host) -> None:
        """A device of a host was released, and none of its others is used."""

    def close(self) -> None:
        """Let go of all hosts."""


class LocalHost:
    """This machine: a host, and where devices come from if it is the only one.

    Args:
        keeps_state: Whether ranks are members of generations, which leave their state in memory.
        read_devices: The devices that may be used, now.

    Attributes:
        memory: The folder for that; None: there is none.
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
        """The devices that may be used, now."""
        return [OfferedDevice(host=self, device=device) for device in self._read_devices()]

    def poll(self) -> bool:
        """Its ranks write into memory that is read directly."""
        return False

    def carry(self, _source: KeptFolder, _target: KeptFolder) -> Carrying:
        """Never: there is no other host."""
        raise AssertionError("there is one host")

    def let_go(self, host: Host) -> None:
        """Nothing: it is kept until the end."""

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
        """Say what someone must clean up after a crash: a pid, a cgroup, `rm` and a folder."""
        self._janitor.write(f"{line}\n".encode())

    def close(self) -> None:
        """Let go of all, also of what was left in memory, and of what is still being received."""
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)
        self.note("done")
        self._janitor.close()


def cores_of(places: Sequence[OfferedDevice]) -> list[int | None]:
    """The core of each process that is held to a share of one; hosts of one machine share cores."""
    found: list[int | None] = [None] * len(places)
    for machine in {place.host.machine for place in places}:
        own = [k for k, p in enumerate(places) if p.host.machine == machine]
        own = [k for k in own if places[k].device.core_share is not None]
        shares = [places[k].device.core_share or 1.0 for k in own]
        if own:
            for k, core in zip(own, pack(shares, places[own[0]].host.cores), strict=True):
                found[k] = core
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceChanges:
    """How the devices that are offered differ from those that are known.

    Attributes:
        met: Those that were never offered before.
        usable: Those, and the ones that were asked back and are offered again.
        lost: Those whose host is gone.
        missing: Those that are not offered any more.
    """

    met: Sequence[str]
    usable: Sequence[str]
    lost: Sequence[str]
    missing: Sequence[str]


class KnownDevices:
    """The devices of a run, by the names that it gives them.

    Args:
        word: The first word of the names.

    Attributes:
        places: Those that may be used.
    """

    def __init__(self, word: str) -> None:
        self._word, self._names = word, itertools.count()
        self.places: dict[str, OfferedDevice] = {}
        self._numbers: dict[str, int] = {}  # on their hosts
        self._asked_back: set[str] = set()  # those that are no longer offered
        self._given_back: dict[str, OfferedDevice] = {}  # those that still are, and are not used

    def number(self, name: str) -> int:
        """Of a device on its host."""
        return self._numbers[name]

    def compare(self, offered: Sequence[OfferedDevice]) -> DeviceChanges:
        """Find known devices among those that are offered now, and name the others."""
        # Of devices that are alike those stay which are used, and those go which leave anyway.
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
        """Note that devices are not offered any more."""
        self._asked_back |= set(names)

    def release(self, name: str) -> Host | None:
        """Do without a device; returns its host, if it has no other."""
        given = self.places.pop(name, None)
        if given is None:
            return None
        if name not in self._asked_back:
            self._given_back[name] = given
        is_used = any(place.host is given.host for place in self.places.values())
        return None if is_used else given.host

    def _add(self, place: OfferedDevice) -> str:
        name = f"{self._word} {next(self._names)}"
        taken = {self._numbers[d] for d, p in self.places.items() if p.host is place.host}
        self.places[name] = place
        self._numbers[name] = next(k for k in itertools.count() if k not in taken)
        return name
