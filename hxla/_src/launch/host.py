"""The machines whose devices an elastic run uses, and this one."""

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Protocol

from ..cluster.cluster import Device
from .cleanup import start_janitor
from .control_channel import left_folder
from .member import PINNED
from .throttle import own_cores, pack
from .warm import warm_up
from .workers import Environment, LocalWorkers, Streams, Workers, WorkersStart

_MEMORY = "/dev/shm"  # memory that outlives the process that wrote it
#: The notice of a device that is taken back without a deadline, as one that left the mesh file.
NOTICE_SECONDS = 600.0


class Host(Protocol):
    """A machine whose devices an elastic run uses.

    Attributes:
        name: Of it, in this run.
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

    def start(self, start: WorkersStart) -> Workers:
        """Start its processes of a generation."""

    def begin(self, workers: Workers, state: Sequence["KeptFolder"]) -> None:
        """Let processes begin with a state, of which each folder has a part, or with none."""

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
    """This machine.

    Args:
        command: A Python script and its arguments.
        streams: Where what processes print goes.

    Attributes:
        memory: The folder in which processes leave their state.
    """

    name = machine = "this machine"
    is_lost = False
    notice_seconds = NOTICE_SECONDS

    def __init__(self, command: Sequence[str], environment: Environment, streams: Streams):
        self._command, self._environment, self._streams = command, environment, streams
        self.cores: Sequence[int] = own_cores()
        self._janitor = start_janitor()
        parent = _MEMORY if os.path.isdir(_MEMORY) else None
        self.memory = tempfile.mkdtemp(prefix=f"hxla-elastic-{os.getpid()}-", dir=parent)
        self.note(f"rm {self.memory}")
        warm_up()

    @property
    def pinned(self) -> str:
        """What its processes have chosen for later generations; empty: nothing yet."""
        try:
            return pathlib.Path(self.memory, PINNED).read_text()
        except FileNotFoundError:
            return ""

    def start(self, start: WorkersStart) -> LocalWorkers:
        """Start its processes of a generation."""
        return LocalWorkers(
            start, self._command, self._environment, self.memory, self._streams, self.note
        )

    def begin(self, workers: Workers, state: Sequence[KeptFolder]) -> None:
        """Let processes begin with a state, of which each folder has a part, or with none."""
        workers.order(begins=True, state=[one.folder for one in state])

    def forget(self, folder: str) -> None:
        """Let go of a state."""
        shutil.rmtree(folder, ignore_errors=True)

    def state_folder(self, generation: int, rank: int) -> str:
        """Where a process leaves its state."""
        return left_folder(self.memory, generation, rank)

    def note(self, line: str) -> None:
        """Say what someone must clean up after a crash: a pid, a cgroup, `rm` and a folder."""
        self._janitor.write(f"{line}\n".encode())

    def close(self) -> None:
        """Let go of all, also of what was left in memory, and of what is still being received."""
        shutil.rmtree(self.memory, ignore_errors=True)
        self.note("done")
        self._janitor.close()


class ThisMachine:
    """This machine as the only host.

    Args:
        read_devices: The devices that may be used, now.
    """

    address = "127.0.0.1"

    def __init__(self, host: LocalHost, read_devices: Callable[[], Sequence[Device]]):
        self._host, self._read = host, read_devices

    def offered(self) -> Sequence[OfferedDevice]:
        """The devices that may be used, now."""
        return [OfferedDevice(host=self._host, device=device) for device in self._read()]

    def poll(self) -> bool:
        """Its processes write into memory that is read directly."""
        return False

    def carry(self, source: KeptFolder, target: KeptFolder) -> Carrying:
        """Never: there is no other host."""
        raise AssertionError("there is one host")

    def let_go(self, host: Host) -> None:
        """Nothing: it is kept until the end."""

    def close(self) -> None:
        """Let go of it."""
        self._host.close()


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
