"""Hosts of a Ray cluster: an actor on each, whose children are the processes of a job.

What is kept on a host (pages of memory, cgroups, pipes, states) stays the actor's; the run asks it
what there is to hear, and states travel through Ray's object store where the next members are on
another host.
"""

import contextlib
import dataclasses
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .._cluster._cluster import Device
from ._board import Post
from ._environment import describe, elastic_environment, num_gpus
from ._host import NOTICE_SECONDS, KeptFolder, LocalHost
from ._mailbox import Report, left_folder
from ._output import Logs, Output
from ._workers import Environment, LocalWorkers, Streams, Workers, WorkersStart

#: Of actors, and of the process from which others are forked.
START_SECONDS = 120.0
_END_SECONDS = 10.0
_KILLED = -9
#: Label of a node: what of a core each of its CPU devices may use.
CORE_SHARE = "core-share"
_STATE = "state"  # the concurrency group that may wait for a state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Of a host.

    Attributes:
        devices: That it has.
        cores: That its processes may use.
        memory: The folder in which they leave their state.
    """

    devices: tuple[Device, ...]
    cores: tuple[int, ...]
    memory: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard:
    """What there is to hear of a host.

    Attributes:
        out: What its processes printed since.
        err: And their errors.
        workers: By generation and rank the report, the post and the exit code of a process.
        pinned: What they have chosen for later generations.
        at_seconds: By `time.monotonic` of that host.
    """

    out: bytes = b""
    err: bytes = b""
    workers: Mapping[int, Mapping[int, tuple[Report, Post, int | None]]] = dataclasses.field(
        default_factory=dict
    )
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
        folder: The working directory of the job.
        num_cpus: The devices that it has, if it has no GPU.
        core_share: What of a core each of them may use; None: all.
    """

    def __init__(
        self, command: Sequence[str], folder: str, num_cpus: int, core_share: float | None
    ):
        os.chdir(folder)
        # A process that is forked would run the main module, which is Ray's own, once more.
        vars(sys.modules["__main__"]).pop("__file__", None)
        if num_gpus():
            self._devices = describe(None, None)
        else:
            self._devices = (Device(kind="cpu", core_share=core_share),) * num_cpus
        self._out, self._err = _Lines(), _Lines()
        lock = threading.Lock()
        streams = Streams(
            out=Output(self._out, lock, lambda _: None),  # type: ignore[arg-type]
            err=Output(self._err, lock, lambda _: None),  # type: ignore[arg-type]
            logs=Logs(),
        )
        environment: Environment = elastic_environment(self._devices)
        self._host = LocalHost(command, environment, streams)
        self._workers: dict[int, LocalWorkers] = {}

    def facts(self) -> Facts:
        """What is here."""
        return Facts(devices=self._devices, cores=tuple(self._host.cores), memory=self._host.memory)

    def hear(self) -> Heard:
        """What there is to hear since the last time."""
        for own in self._workers.values():
            own.release()
        return Heard(
            workers={
                number: {
                    rank: (own.report(rank), own.post(rank), own.exit_code(rank))
                    for rank in own.pids
                }
                for number, own in self._workers.items()
            },
            pinned=self._host.pinned,
            out=self._out.take(),
            err=self._err.take(),
            at_seconds=time.monotonic(),
        )

    def start(self, start: WorkersStart) -> dict[int, int]:
        """Start processes; returns their pids by rank."""
        self._workers[start.generation] = own = self._host.start(start)
        return own.pids

    def order(self, generation: int, changes: Mapping[str, object]) -> None:
        """Change fields of the `Order` of processes."""
        if generation in self._workers:
            self._workers[generation].order(**changes)

    def begin(
        self, generation: int, folders: Sequence[str], *states: tuple[Mapping[str, np.ndarray]]
    ) -> None:
        """Let processes begin with a state of which there are parts on other hosts.

        Args:
            generation: Theirs.
            folders: Of the parts that are here.
            states: The files of the others.
        """
        received = pathlib.Path(_received(self._host.memory, generation))
        received.mkdir()
        found = list(folders)
        for k, (files,) in enumerate(states):
            folder = received / str(k)
            folder.mkdir()
            for name, data in files.items():
                data.tofile(folder / name)
            found.append(str(folder))
        self.order(generation, {"begins": True, "state": found})

    def read_state(self, folder: str) -> tuple[Mapping[str, np.ndarray]]:
        """The files of a state that a process left here."""
        files = pathlib.Path(folder).iterdir()
        return ({file.name: np.fromfile(file, np.uint8) for file in files},)

    def forget(self, folder: str) -> None:
        """Let go of a state."""
        self._host.forget(folder)

    def quieten(self, generation: int) -> None:
        """From here on processes only say that another is gone."""
        self._workers[generation].quieten()

    def kill(self, generation: int, ranks: Sequence[int], number: int) -> None:
        """Send a signal to processes."""
        self._workers[generation].kill(ranks, number)

    def close_workers(self, generation: int, shows_held: bool) -> None:
        """End processes of a generation."""
        own = self._workers.pop(generation, None)
        if own is not None:
            own.close(shows_held=shows_held)
        self._host.forget(_received(self._host.memory, generation))

    def close(self) -> Heard:
        """End all; returns what was still to be heard."""
        for number in list(self._workers):
            self.close_workers(number, shows_held=True)
        self._host.close()
        return self.hear()


def _received(memory: str, generation: int) -> str:
    return f"{memory}/received-{generation}"


_Agent: Any = cast(Any, ray.remote)(concurrency_groups={_STATE: 1})(HostAgent)


class RayWorkers:
    """Processes of a generation on a node of a Ray cluster.

    Args:
        host: The node.
        generation: Its number.
        ranks: Its processes.
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

    def report(self, rank: int) -> Report:
        """What a process said last."""
        return self._heard(rank)[0]

    def post(self, rank: int) -> Post:
        """Where a process is; times are those of this machine's clock."""
        return self._heard(rank)[1]

    def exit_code(self, rank: int) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return _KILLED if self._host.is_lost else self._heard(rank)[2]

    def order(self, **changes: object) -> None:
        """Change fields of the `Order` of all of them."""
        self._host.tell("order", self.generation, changes)

    def quieten(self) -> None:
        """From here on they only say that another is gone: that goes to the log."""
        self._host.tell("quieten", self.generation)

    def release(self) -> None:
        """Nothing: its host does that itself when it is heard."""

    def kill(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to those that run, and to what they started."""
        if ranks:
            self._host.tell("kill", self.generation, list(ranks), int(number))

    def close(self, *, shows_held: bool) -> None:
        """End what is left."""
        self._host.tell("close_workers", self.generation, shows_held)

    def _heard(self, rank: int) -> tuple[Report, Post, int | None]:
        return self._host.heard.workers.get(self.generation, {}).get(rank, (Report(), Post(), None))


def name_of(node: str) -> str:
    """What a run calls a node, of its ID."""
    return f"node {node[:8]}"


class RayHost:
    """A node of a Ray cluster, by the actor on it.

    Args:
        node: Of `ray.nodes()`.
        command: A Python script and its arguments.
        streams: Where what is printed goes.

    Attributes:
        heard: The newest of it.
    """

    def __init__(self, node: Mapping[str, Any], command: Sequence[str], streams: Streams):
        resources = node["Resources"]
        self.name, self.machine = name_of(node["NodeID"]), str(node["NodeManagerHostname"])
        self.is_lost, self.notice_seconds = False, NOTICE_SECONDS
        self.heard, self._streams = Heard(), streams
        num_cpus, share = int(resources.get("CPU", 0)), node.get("Labels", {}).get(CORE_SHARE)
        self._agent: Any = _Agent.options(
            num_cpus=num_cpus,
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
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
                self._streams.err.write(f"hxla: {self.name} gives no devices: {why}\n".encode())
        return () if self._facts is None or self.is_lost else self._facts.devices

    @property
    def began(self) -> bool:
        """Whether its actor was ever heard."""
        return self._facts is not None

    @property
    def cores(self) -> Sequence[int]:
        """Those that its processes may use."""
        return () if self._facts is None else self._facts.cores

    @property
    def pinned(self) -> str:
        """What its processes have chosen for later generations; empty: nothing yet."""
        return self.heard.pinned

    def poll(self) -> bool:
        """Hear what it has to say; whether it was found to be lost."""
        if self._hearing is None or self.is_lost or not ray.wait([self._hearing], timeout=0)[0]:
            return False
        with self.losing():
            self._hear(ray.get(self._hearing))
            self._hearing = self._agent.hear.remote()
        return self.is_lost

    def start(self, start: WorkersStart) -> RayWorkers:
        """Start its processes of a generation; those of a host that is lost have ended at once."""
        pids = None
        with self.losing():
            pids = self._agent.start.remote(start)
        return RayWorkers(self, start.generation, list(start.seats), pids)

    def begin(self, workers: Workers, state: Sequence[KeptFolder]) -> None:
        """Let processes begin with a state, of which each folder has a part, or with none."""
        here = [one.folder for one in state if one.host is self]
        if len(here) == len(state):
            workers.order(begins=True, state=here)
            return
        assert isinstance(workers, RayWorkers)
        with self.losing():
            others = [
                one.host._agent.read_state.remote(one.folder)
                for one in state
                if isinstance(one.host, RayHost) and one.host is not self
            ]
            own = self._agent.begin.options(concurrency_group=_STATE)
            own.remote(workers.generation, here, *others)

    def forget(self, folder: str) -> None:
        """Let go of a state."""
        self.tell("forget", folder)

    def state_folder(self, generation: int, rank: int) -> str:
        """Where a process leaves its state."""
        assert self._facts is not None
        return left_folder(self._facts.memory, generation, rank)

    def tell(self, method: str, *arguments: object) -> None:
        """Call a method of the actor and wait for nothing."""
        with self.losing():
            getattr(self._agent, method).remote(*arguments)

    def close(self) -> None:
        """Let go of all, also of what was left in memory."""
        with self.losing():
            self._hear(ray.get(self._agent.close.remote(), timeout=_END_SECONDS))
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._agent)

    def _hear(self, heard: Heard) -> None:
        late = time.monotonic() - heard.at_seconds  # between the clocks of two machines
        workers = {
            number: {
                rank: (report, dataclasses.replace(post, moved_at=post.moved_at + late), code)
                for rank, (report, post, code) in own.items()
            }
            for number, own in heard.workers.items()
        }
        self.heard = dataclasses.replace(heard, workers=workers)
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
