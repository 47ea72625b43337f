"""Hosts of a Ray cluster: an actor on each, whose children are the processes of a job.

What is kept on a host (pages of memory, cgroups, pipes, states) stays the actor's; the run asks it
what there is to hear, and states travel through Ray's object store where the next members are on
another host.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ..cluster.cluster import Device
from .channel import Standing, Status
from .environment import describe, elastic_environment, num_gpus
from .host import NOTICE_SECONDS, KeptFolder, LocalHost
from .kept_state import left_folder
from .output import Streams
from .ranks import LocalRanks, Ranks, RanksStart
from .warm import WarmProcess

#: Label of a node: what of a core each of its CPU devices may use.
CORE_SHARE = "core-share"
_MODEL = "accelerator_type:"  # of a resource that Ray gives nodes with GPUs it knows


def name_of(node: str) -> str:
    """What a run calls a node, of its ID."""
    return f"node {node[:8]}"


def devices_of(node: Mapping[str, Any]) -> dict[str, float]:
    """What an actor or a placement group asks for that is to have all devices of a node."""
    return {kind: num for kind in ("CPU", "GPU") if (num := node["Resources"].get(kind))}


def label_of(node: Mapping[str, Any]) -> tuple[str, int]:
    """The kind of a node's devices, as `Device.label` has it, and how many it has."""
    resources = node["Resources"]
    if resources.get("GPU"):
        models = [key.partition(":")[2] for key in resources if key.startswith(_MODEL)]
        return (models or ["GPU"])[0], int(resources["GPU"])
    share = node.get("Labels", {}).get(CORE_SHARE)
    device = Device(kind="cpu", core_share=float(share) if share else None)
    return device.label, int(resources.get("CPU", 0))


def draining() -> dict[str, int]:
    """Nodes that Ray drains, and until when in milliseconds since 1970; 0: it did not say.

    No public call tells; this is the one that Ray's own trainer asks.
    """
    from ray._private.state import state

    return dict(state.get_draining_nodes())


#: Of actors, and of the process from which others are forked.
START_SECONDS = 120.0
_END_SECONDS = 30.0
_KILLED = -9
# The concurrency groups of what may take long, beside which an agent is heard: reading waits for
# nobody, so hosts that take states from each other never wait in a circle.
_READ, _STATE, _COPY = "read", "state", "copy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Of a host."""

    devices: tuple[Device, ...]
    cores: tuple[int, ...]
    memory: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
    """What there is to hear of a host.

    Attributes:
        at_seconds: By `time.monotonic` of that host.
    """

    out: bytes = b""
    err: bytes = b""
    ranks: Mapping[int, Sequence[Standing]] = dataclasses.field(default_factory=dict)
    pinned: str = ""
    at_seconds: float = 0.0


class _Lines:
    """A stream that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._lock, self._kept = threading.Lock(), b""

    def write(self, text: bytes) -> None:
        with self._lock:
            self._kept += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def take(self) -> bytes:
        with self._lock:
            kept, self._kept = self._kept, b""
        return kept


class HostAgent:
    """On a host: starts processes, and says what is to be heard of them. Ray runs it as an actor.

    Args:
        command: A Python script and its arguments, where this host finds them.
        num_cpus: The devices that it has, if it has no GPU.
        core_share: What of a core each of them may use; None: all.
    """

    def __init__(
        self, command: Sequence[str], folder: str, num_cpus: int, core_share: float | None
    ):
        os.chdir(folder)
        leave_main_module()
        if num_gpus():
            self._devices = describe(None, None)
        else:
            self._devices = (Device(kind="cpu", core_share=core_share),) * num_cpus
        self._out, self._err = _Lines(), _Lines()
        self._host = LocalHost(
            functools.partial(WarmProcess, command),
            elastic_environment(self._devices),
            Streams.over(self._out, self._err),  # type: ignore[arg-type]
            keeps_state=True,
        )
        self._ranks: dict[int, LocalRanks] = {}
        self._received: dict[int, list[str]] = {}  # by generation: folders that it begins with

    def facts(self) -> Facts:
        """What is here."""
        assert self._host.memory is not None
        return Facts(devices=self._devices, cores=tuple(self._host.cores), memory=self._host.memory)

    def hear(self) -> Heard:
        """What there is to hear since the last time."""
        ranks = {number: one.standings() for number, one in self._ranks.items()}
        for number, standings in ranks.items():
            if all(standing.report.is_joined for standing in standings):
                for folder in self._received.pop(number, ()):
                    self.forget(folder)
        return Heard(
            ranks=ranks,
            pinned=self._host.pinned,
            out=self._out.take(),
            err=self._err.take(),
            at_seconds=time.monotonic(),
        )

    def start(self, start: RanksStart) -> dict[int, int]:
        """Start ranks; returns their pids."""
        self._ranks[start.generation] = self._host.start(start)
        return self._ranks[start.generation].pids

    def call(self, generation: int, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method of the ranks of a generation, if there are any."""
        if generation in self._ranks:
            getattr(self._ranks[generation], method)(*arguments, **named)

    def begin(self, generation: int, folders: Sequence[str], others: Sequence[Any]) -> None:
        """Let processes begin with a state of which there are parts on other hosts."""
        own = [self._received_folder(generation, k) for k in range(len(others))]
        self._received[generation] = own
        for folder, state in zip(own, others, strict=True):
            self.receive(folder, [state])
        self.call(generation, "order", begins=True, state=[*folders, *own])

    def receive(self, folder: str, state: Sequence[Any]) -> None:
        """Write files from another host into a folder, which appears whole.

        Args:
            state: The reference of the files: in a list, so that only this call waits for them.
        """
        files = ray.get(state[0])
        new = pathlib.Path(f"{folder}.part")
        new.mkdir()
        try:
            for name, data in files.items():
                data.tofile(new / name)
            new.rename(folder)
        except OSError:
            self.forget(str(new))
            raise

    def read_state(self, folder: str) -> Mapping[str, np.ndarray]:
        """The files of a state that a process left here."""
        return {file.name: np.fromfile(file, np.uint8) for file in pathlib.Path(folder).iterdir()}

    def forget(self, folder: str) -> None:
        """Let go of a state."""
        self._host.forget(folder)

    def close_ranks(self, generation: int, shows_held: bool, kept: Collection[str]) -> None:
        """End the ranks of a generation, and let go of its folders that are not kept."""
        self._received.pop(generation, None)
        ranks = self._ranks.pop(generation, None)
        if ranks is not None:
            ranks.close(shows_held=shows_held, kept=kept)

    def close(self) -> Heard:
        """End all; returns what was still to be heard."""
        for number in list(self._ranks):
            self.close_ranks(number, True, ())
        self._host.close()
        return self.hear()

    def _received_folder(self, generation: int, part: int) -> str:
        return f"{self._host.state_folder(generation, part)}-received"


def leave_main_module() -> None:
    """In an actor: a process that is forked would run the main module, Ray's own, once more."""
    vars(sys.modules["__main__"]).pop("__file__", None)


_Agent: Any = cast(Any, ray.remote)(concurrency_groups=dict.fromkeys((_READ, _STATE, _COPY), 1))(
    HostAgent
)


class RayRanks:
    """Ranks of a generation on a node of a Ray cluster.

    Args:
        pids: Reference of their pids by rank; None: the node is lost.
    """

    def __init__(self, host: "RayHost", generation: int, ranks: Sequence[int], pids: Any):
        self._host, self.generation, self._asked = host, generation, pids
        self._pids: Mapping[int, int] = dict.fromkeys(ranks, 0)

    @property
    def pids(self) -> Mapping[int, int]:
        """Processes by rank, on their host; zeros where it was lost before it told."""
        if self._asked is not None:
            with self._host.losing():
                self._pids = ray.get(self._asked, timeout=START_SECONDS)
            self._asked = None
        return self._pids

    def standings(self) -> list[Standing]:
        """What is known of each rank; times are those of this machine's clock."""
        heard = {one.rank: one for one in self._host.heard.ranks.get(self.generation, ())}
        every = [heard.get(rank, Standing(rank=rank, status=Status())) for rank in self._pids]
        if self._host.is_lost:
            every = [dataclasses.replace(one, code=_KILLED) for one in every]
        return every

    def order(self, **changes: object) -> None:
        self._host.tell("call", self.generation, "order", **changes)

    def quieten(self, spared: int | None = None) -> None:
        self._host.tell("call", self.generation, "quieten", spared)

    def change_shares(self, _shares: Sequence[float | None]) -> None:
        raise AssertionError("the share of a node is a label of it")

    def kill(self, ranks: Collection[int], number: int) -> None:
        if ranks:
            self._host.tell("call", self.generation, "kill", list(ranks), int(number))

    def close(self, *, shows_held: bool, kept: Collection[str] = ()) -> None:
        self._host.tell("close_ranks", self.generation, shows_held, set(kept))


class RayHost:
    """A node of a Ray cluster, by the actor on it.

    Args:
        group: The placement group that holds the node for it; None: nobody does.
    """

    def __init__(
        self,
        node: Mapping[str, Any],
        command: Sequence[str],
        streams: Streams,
        group: PlacementGroup | None,
    ):
        devices = devices_of(node)
        self.name, self.machine = name_of(node["NodeID"]), str(node["NodeManagerHostname"])
        self.is_lost, self.notice_seconds = False, NOTICE_SECONDS
        self.heard, self._streams, self.group = Heard(), streams, group
        num_cpus, share = int(devices.get("CPU", 0)), node.get("Labels", {}).get(CORE_SHARE)
        strategy: Any = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        if group is not None:
            strategy = PlacementGroupSchedulingStrategy(group)
        self._agent: Any = _Agent.options(
            num_cpus=num_cpus, num_gpus=devices.get("GPU", 0), scheduling_strategy=strategy
        ).remote(list(command), os.getcwd(), num_cpus, float(share) if share else None)
        self.asked = self._agent.facts.remote()
        self._facts: Facts | None = None
        self._hearing: Any = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that it has; none while its actor has not begun, as where others use the node."""
        if self._facts is None and not self.is_lost and ray.wait([self.asked], timeout=0)[0]:
            try:
                self._facts = ray.get(self.asked)
                self._hearing = self._agent.hear.remote()
            except ray.exceptions.RayError as error:
                self.is_lost = True
                why = str(error).strip().splitlines()[-1]
                self._streams.say(f"{self.name} gives no devices: {why}")
        return () if self._facts is None or self.is_lost else self._facts.devices

    @property
    def began(self) -> bool:
        """Whether its actor was ever heard."""
        return self._facts is not None

    @property
    def cores(self) -> Sequence[int]:
        return () if self._facts is None else self._facts.cores

    @property
    def pinned(self) -> str:
        return self.heard.pinned

    def poll(self) -> bool:
        """Hear what it has to say; whether it was found to be lost."""
        if self._hearing is None or self.is_lost or not ray.wait([self._hearing], timeout=0)[0]:
            return False
        with self.losing():
            self._hear(ray.get(self._hearing))
            self._hearing = self._agent.hear.remote()
        return self.is_lost

    def start(self, start: RanksStart) -> RayRanks:
        """Start its ranks of a generation; those of a host that is lost have ended at once."""
        pids = None
        with self.losing():
            pids = self._agent.start.remote(start)
        return RayRanks(self, start.generation, list(start.seats), pids)

    def begin(self, ranks: Ranks, state: Sequence[KeptFolder]) -> None:
        here = [one.folder for one in state if one.host is self]
        if len(here) == len(state):
            ranks.order(begins=True, state=here)
            return
        assert isinstance(ranks, RayRanks)
        with self.losing():
            others = [
                one.host.reading(one.folder)
                for one in state
                if isinstance(one.host, RayHost) and one.host is not self
            ]
            own = self._agent.begin.options(concurrency_group=_STATE)
            own.remote(ranks.generation, here, others)

    def reading(self, folder: str) -> Any:
        """The reference of the files of a state, which are read meanwhile."""
        return self._agent.read_state.options(concurrency_group=_READ).remote(folder)

    def receiving(self, folder: str, state: Any) -> Any:
        """The reference of nothing: a state of a reference is written into a folder meanwhile."""
        own = self._agent.receive.options(concurrency_group=_COPY)
        return own.remote(folder, [state])

    def forget(self, folder: str) -> None:
        self.tell("forget", folder)

    def state_folder(self, generation: int, rank: int) -> str:
        assert self._facts is not None
        return left_folder(self._facts.memory, generation, rank)

    def tell(self, method: str, *arguments: object, **named: object) -> None:
        """Call a method of the actor and wait for nothing."""
        with self.losing():
            getattr(self._agent, method).remote(*arguments, **named)

    def close(self) -> None:
        """Let go of all, also of what was left in memory; what it still has to say is heard."""
        until = time.monotonic() + _END_SECONDS
        # Being asked already, it has perhaps told what the next answer will not say again.
        answers = [] if self._hearing is None else [self._hearing]
        if self.began:
            with self.losing():
                answers.append(self._agent.close.remote())
        for answer in answers:
            try:
                self._hear(ray.get(answer, timeout=max(until - time.monotonic(), 0)))
            except ray.exceptions.RayActorError:
                self.is_lost = True
            except ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[-1]
                self._streams.say(
                    f"{self.name} has not ended its processes within {_END_SECONDS:g} s, and "
                    f"what they printed last may be missing: {why}"
                )
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._agent)

    def _hear(self, heard: Heard) -> None:
        late = time.monotonic() - heard.at_seconds  # between the clocks of two machines
        ranks = {
            number: [
                dataclasses.replace(
                    one,
                    status=dataclasses.replace(one.status, moved_at=one.status.moved_at + late),
                    ended_at=one.ended_at + late,
                )
                for one in standings
            ]
            for number, standings in heard.ranks.items()
        }
        self.heard = dataclasses.replace(heard, ranks=ranks)
        for text, stream in ((heard.out, self._streams.out), (heard.err, self._streams.err)):
            if text:
                stream.write(text)

    @contextlib.contextmanager
    def losing(self) -> Iterator[None]:
        """Whatever fails inside because the actor is gone says that it is lost."""
        try:
            yield
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError:
            self.is_lost = True


class RayCarrying:
    """A folder on its way from a node to another, through Ray's object store."""

    def __init__(self, source: RayHost, folder: str, target: RayHost, copy: str):
        self._target, self._copy = target, copy
        self._state: Any = None
        self._written: Any = None
        with source.losing():
            self._state = source.reading(folder)

    def arrived(self) -> bool | None:
        waits_for = self._written or self._state
        if self._target.is_lost or waits_for is None:
            return False
        # Without a copy on this machine.
        if not ray.wait([waits_for], timeout=0, fetch_local=False)[0]:
            return None
        try:
            if self._written is None:
                self._written = self._target.receiving(self._copy, self._state)
                return None
            ray.get(self._written)
        except ray.exceptions.RayError:  # the folder was let go, or a host is gone
            return False
        return True
