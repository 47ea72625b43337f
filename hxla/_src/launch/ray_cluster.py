"""A Ray cluster as the hosts of an elastic run.

Each host has an actor, whose children are the processes of a job. The actor owns the host's memory
pages, cgroups, pipes and states. The run polls it for reports, and states travel through Ray's
object store if the next members are on another host.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import ray
from ray.util import get_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ..cluster.cluster import Device
from ..core.errors import HxlaError, LaunchError
from .channel import Standing, Status
from .environment import describe, elastic_environment, num_gpus
from .host import NOTICE_SECONDS, Host, KeptFolder, LocalHost, OfferedDevice
from .membership import left_folder
from .output import Streams
from .ranks import LocalRanks, Ranks, RanksStart, WarmProcess

#: Node label: the share of a core of each of its CPU devices.
CORE_SHARE = "core-share"
_MODEL = "accelerator_type:"  # prefix of Ray's resource for a known GPU model


def name_of(node: str) -> str:
    """A node's name in a run, from its ID."""
    return f"node {node[:8]}"


def devices_of(node: Mapping[str, Any]) -> dict[str, float]:
    """The resources of an actor or placement group for all devices of a node."""
    return {kind: num for kind in ("CPU", "GPU") if (num := node["Resources"].get(kind))}


def label_of(node: Mapping[str, Any]) -> tuple[str, int]:
    """The kind of a node's devices, as in `Device.label`, and their number."""
    resources = node["Resources"]
    if resources.get("GPU"):
        models = [key.partition(":")[2] for key in resources if key.startswith(_MODEL)]
        return (models or ["GPU"])[0], int(resources["GPU"])
    share = node.get("Labels", {}).get(CORE_SHARE)
    device = Device(kind="cpu", core_share=float(share) if share else None)
    return device.label, int(resources.get("CPU", 0))


def draining() -> dict[str, int]:
    """Nodes that Ray drains, with the deadline in milliseconds since 1970; 0 without one.

    Ray has no public call for this; its trainer uses the same one.
    """
    from ray._private.state import state

    return dict(state.get_draining_nodes())


#: For actors, and for the fork server.
START_SECONDS = 120.0
_END_SECONDS = 30.0
_KILLED = -9
# Concurrency groups of slow calls, beside which an agent is polled. Reading waits for nothing, so
# hosts that exchange states never deadlock.
_READ, _STATE, _COPY = "read", "state", "copy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The devices and cores of a host, and its folder for states."""

    devices: tuple[Device, ...]
    cores: tuple[int, ...]
    memory: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
    """The reports of a host since the last poll.

    Attributes:
        at_seconds: `time.monotonic` of that host.
    """

    out: bytes = b""
    err: bytes = b""
    ranks: Mapping[int, Sequence[Standing]] = dataclasses.field(default_factory=dict)
    pinned: str = ""
    at_seconds: float = 0.0


class _Lines:
    """A stream that keeps its bytes until `take`."""

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
    """Starts processes on a host and reports on them, as a Ray actor.

    Args:
        command: A Python script and its arguments, as this host finds them.
        num_cpus: Number of CPU devices, used without GPUs.
        core_share: Share of a core for each CPU device; None for all of it.
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
        self._received: dict[int, list[str]] = {}  # folders of the first state, by generation

    def facts(self) -> Facts:
        """The devices of this host."""
        assert self._host.memory is not None
        return Facts(devices=self._devices, cores=tuple(self._host.cores), memory=self._host.memory)

    def hear(self) -> Heard:
        """The reports since the last call."""
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
        """Let processes begin with a state whose parts are on several hosts."""
        received = [self._received_folder(generation, k) for k in range(len(others))]
        self._received[generation] = received
        for folder, state in zip(received, others, strict=True):
            self.receive(folder, [state])
        self.call(generation, "order", begins=True, state=[*folders, *received])

    def receive(self, folder: str, state: Sequence[Any]) -> None:
        """Write files from another host into a folder, atomically.

        Args:
            state: A list with the reference of the files, so that only this call waits for them.
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
        """Remove a state."""
        self._host.forget(folder)

    def close_ranks(self, generation: int, shows_delayed: bool, kept: Collection[str]) -> None:
        """End the ranks of a generation, and remove its folders except `kept`."""
        self._received.pop(generation, None)
        ranks = self._ranks.pop(generation, None)
        if ranks is not None:
            ranks.close(shows_delayed=shows_delayed, kept=kept)

    def close(self) -> Heard:
        """End all processes; returns the last reports."""
        for number in list(self._ranks):
            self.close_ranks(number, True, ())
        self._host.close()
        return self.hear()

    def _received_folder(self, generation: int, part: int) -> str:
        return f"{self._host.state_folder(generation, part)}-received"


def leave_main_module() -> None:
    """Keep processes that an actor forks from running Ray's main module again."""
    vars(sys.modules["__main__"]).pop("__file__", None)


_Agent: Any = cast(Any, ray.remote)(concurrency_groups=dict.fromkeys((_READ, _STATE, _COPY), 1))(
    HostAgent
)


class RayRanks:
    """Ranks of a generation on a node of a Ray cluster.

    Args:
        pids: Reference of pids by rank; None if the node is lost.
    """

    def __init__(self, host: "RayHost", generation: int, ranks: Sequence[int], pids: Any):
        self._host, self.generation, self._asked = host, generation, pids
        self._pids: Mapping[int, int] = dict.fromkeys(ranks, 0)

    @property
    def pids(self) -> Mapping[int, int]:
        """Pids by rank on their host; zeros if it was lost before it reported them."""
        if self._asked is not None:
            with self._host.losing():
                self._pids = ray.get(self._asked, timeout=START_SECONDS)
            self._asked = None
        return self._pids

    def standings(self) -> list[Standing]:
        """The standing of each rank; times are of this machine's clock."""
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
        raise AssertionError("the core share of a node is its label")

    def kill(self, ranks: Collection[int], number: int) -> None:
        if ranks:
            self._host.tell("call", self.generation, "kill", list(ranks), int(number))

    def close(self, *, shows_delayed: bool, kept: Collection[str] = ()) -> None:
        self._host.tell("close_ranks", self.generation, shows_delayed, set(kept))


class RayHost:
    """A node of a Ray cluster, by the actor on it.

    Args:
        group: The placement group that reserves the node for the run; None without one.
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
        """Its devices; none until its actor runs, which waits while others use the node."""
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
        """Whether its actor has started."""
        return self._facts is not None

    @property
    def cores(self) -> Sequence[int]:
        return () if self._facts is None else self._facts.cores

    @property
    def pinned(self) -> str:
        return self.heard.pinned

    def poll(self) -> bool:
        """Poll its reports; returns whether the host is lost."""
        if self._hearing is None or self.is_lost or not ray.wait([self._hearing], timeout=0)[0]:
            return False
        with self.losing():
            self._hear(ray.get(self._hearing))
            self._hearing = self._agent.hear.remote()
        return self.is_lost

    def start(self, start: RanksStart) -> RayRanks:
        """Start its ranks of a generation; on a lost host they count as ended."""
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
            begin = self._agent.begin.options(concurrency_group=_STATE)
            begin.remote(ranks.generation, here, others)

    def reading(self, folder: str) -> Any:
        """The reference of the files of a state, read in the background."""
        return self._agent.read_state.options(concurrency_group=_READ).remote(folder)

    def receiving(self, folder: str, state: Any) -> Any:
        """The reference of a background write of a state into a folder."""
        receive = self._agent.receive.options(concurrency_group=_COPY)
        return receive.remote(folder, [state])

    def forget(self, folder: str) -> None:
        self.tell("forget", folder)

    def state_folder(self, generation: int, rank: int) -> str:
        assert self._facts is not None
        return left_folder(self._facts.memory, generation, rank)

    def tell(self, method: str, *arguments: object, **named: object) -> None:
        """Call a method of the actor without waiting."""
        with self.losing():
            getattr(self._agent, method).remote(*arguments, **named)

    def close(self) -> None:
        """End all processes, remove states from memory, and take the last reports."""
        until = time.monotonic() + _END_SECONDS
        # The pending poll may have lines that later answers do not repeat.
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
        late = time.monotonic() - heard.at_seconds  # offset of the two machines' clocks
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
        """Mark the host as lost on errors of a missing actor."""
        try:
            yield
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError:
            self.is_lost = True


class RayCarrying:
    """The transfer of a folder between nodes through Ray's object store."""

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
        # Without fetching the state to this machine.
        if not ray.wait([waits_for], timeout=0, fetch_local=False)[0]:
            return None
        try:
            if self._written is None:
                self._written = self._target.receiving(self._copy, self._state)
                return None
            ray.get(self._written)
        except ray.exceptions.RayError:  # the folder or a host is gone
            return False
        return True


# Ray namespace of the names of runs and placement groups.
_NAMESPACE = "hxla"
_REACH_SECONDS = 10.0


class RayHosts:
    """All nodes of a Ray cluster that have GPUs, or CPUs and no GPU.

    A node offers its devices once an actor that reserves all of them is placed, so the run waits
    for nodes in use. The devices of a node that Ray drains are asked back with its notice.

    Args:
        address: Address of the cluster, as for `ray.init`.
        nodes: File with the IDs of the nodes that may be used, one a line, read repeatedly. An ID
            may be followed by the placement group that reserves the node. None for all nodes.

    Raises:
        LaunchError: If the cluster or the file is missing.
    """

    def __init__(
        self,
        address: str,
        command: Sequence[str],
        streams: Streams,
        nodes: str | None = None,
    ):
        connect(address)
        self.address = ray.util.get_node_ip_address()
        self._command, self._streams, self._file = command, streams, nodes
        self._allowed: Mapping[str, str] | None = None  # placement groups by node
        self._hosts: dict[str, RayHost] = {}
        self._known: set[str] = set()  # nodes with an actor, even a failed one
        self._meet()
        asked = [host.asked for host in self._hosts.values()]
        if asked:  # present nodes begin together
            ray.wait(asked, num_returns=len(asked), timeout=START_SECONDS)
        else:
            streams.say("no node of the Ray cluster has devices yet: waiting")

    def offered(self) -> Sequence[OfferedDevice]:
        """The devices that may be used now.

        Raises:
            HxlaError: If the cluster does not answer.
        """
        try:
            drained = self._meet()
        except ray.exceptions.RayError as error:
            raise HxlaError(f"the Ray cluster does not answer: {error}") from None
        for node, until in drained.items():
            if node in self._hosts:
                left = until / 1000 - time.time() if until else NOTICE_SECONDS
                self._hosts[node].notice_seconds = max(left, 0.0)
        return [
            OfferedDevice(host=host, device=device)
            for node, host in self._hosts.items()
            for device in (() if node in drained or not self._allows(node) else host.devices)
        ]

    def poll(self) -> bool:
        return any([host.poll() for host in self._hosts.values()])

    def carry(self, source: KeptFolder, target: KeptFolder) -> RayCarrying:
        assert isinstance(source.host, RayHost)
        assert isinstance(target.host, RayHost)
        return RayCarrying(source.host, source.folder, target.host, target.folder)

    def let_go(self, host: Host) -> None:
        """Leave the node of a host, if it may no longer be used."""
        for node, other in list(self._hosts.items()):
            if other is host and not self._allows(node):
                self._leave(node)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        ray.shutdown()

    def _meet(self) -> dict[str, int]:
        """Start actors on new nodes; returns the nodes that Ray drains and their deadlines."""
        if self._file is not None:
            self._allowed = _read_nodes(self._file)
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        for name, host in list(self._hosts.items()):
            host.is_lost = host.is_lost or name not in nodes
            if host.is_lost:
                del self._hosts[name]
                # The actor or its group is gone, but the node may be usable again.
                if host.began or host.group is not None:
                    self._known.discard(name)
            elif not host.began and not self._allows(name):
                self._leave(name)
        for name, node in nodes.items():
            is_new = name not in self._known and self._allows(name)
            if not is_new or not devices_of(node):
                continue
            group: PlacementGroup | None = None
            if called := (self._allowed or {}).get(name):
                try:
                    group = get_placement_group(called)
                except ValueError:  # the group was removed, and the file will follow
                    continue
            self._hosts[name] = RayHost(node, self._command, self._streams, group)
            self._known.add(name)
        return draining()

    def _allows(self, node: str) -> bool:
        return self._allowed is None or node in self._allowed

    def _leave(self, node: str) -> None:
        self._known.discard(node)
        self._hosts.pop(node).close()


def connect(address: str) -> None:
    """Connect this process to a cluster.

    Raises:
        LaunchError: If there is no cluster.
    """
    try:
        _reach(address)
        ray.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise LaunchError(
            f"--ray {address}: {first}. Start a cluster with ray start --head, or give its address"
        ) from None


def _read_nodes(path: str) -> dict[str, str]:
    try:
        lines = [line.split() for line in pathlib.Path(path).read_text().splitlines()]
        return {words[0]: "".join(words[1:2]) for words in lines if words}
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--nodes {path} cannot be read: {error}") from None


def _reach(address: str) -> None:
    """Fail early on a missing cluster, which Ray tries to reach for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
