"""Elastic jobs as processes of their own, on this machine or on a Ray cluster."""

import collections
import contextlib
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from ..cluster.cluster import Cluster, Device
from ..cluster.mesh_file import dump_cluster
from ..core.errors import HxlaError, ScheduleError
from ..launch.environment import describe
from ..launch.ray_cluster import connect
from ..launch.ray_host import devices_of, draining, label_of, name_of
from .device_proposals import ExecutorTime
from .live_jobs import LiveJob
from .live_run import Fleet, Places

_END_SECONDS = 30.0
_MOST_TIMES = 64  # of all its devices, the recent ones


class JobFleet(Fleet, Protocol):
    """Where devices come from, and how `hxla run --elastic` is told of them."""

    def options(self, path: str) -> Sequence[str]:
        """Options of `hxla run` for a job whose devices a file says."""

    def text(self, places: Places) -> str:
        """What is in that file when devices are a job's own."""

    def place(self, event: Mapping[str, Any]) -> str:
        """What the fleet calls the device that an event `Placed` names."""


class MeshFleet:
    """The devices of a mesh file, which is read again when it changes.

    Args:
        path: Of it, or the name of a built-in one.
        kinds: Devices of other kinds are refused.
        say: Told why a changed file is not used.

    Raises:
        ScheduleError: If the file is not one of these devices.
        MeshError: If it is wrong.
    """

    def __init__(self, path: str, kinds: Sequence[str], say: Callable[[str], None]):
        self._path, self._kinds, self._say = path, tuple(kinds), say
        self._wrong = ""
        self._alike: dict[str, Device] = {}  # one of each label that was ever there
        self._num = self._read()

    def offered(self) -> Mapping[str, tuple[str, int]]:
        """Devices of one label are alike, so it is their name."""
        try:
            self._num, self._wrong = self._read(), ""
        except HxlaError as error:
            if str(error) != self._wrong:  # once, not at every look
                self._wrong = str(error)
                self._say(f"devices stay as they are: {error}")
        return {label: (label, num) for label, num in self._num.items()}

    def keep(self, names: Collection[str]) -> None:
        """Nothing: a mesh file's devices are the jobs' alone."""

    def options(self, path: str) -> Sequence[str]:
        """Options of `hxla run` for a job whose devices a file says."""
        return "--mesh", path

    def text(self, places: Places) -> str:
        """A mesh file of some of the devices."""
        devices = [self._alike[label] for label in self._kinds for _ in range(places[label])]
        return dump_cluster(Cluster(name="scheduled", devices=tuple(devices)))

    def place(self, event: Mapping[str, Any]) -> str:
        """The label."""
        return str(event["label"])

    def _read(self) -> Places:
        num, alike = Places(), dict[str, Device]()
        for device in describe(self._path, None):
            if device.kind != "cpu":
                raise ScheduleError(
                    f"{self._path} has {device.kind}: a mesh file does not say which card is "
                    "whose, so it shares out CPU devices only; give --ray for GPUs"
                )
            if device.label not in self._kinds:
                raise ScheduleError(
                    f"{self._path} has {device.label}, and the jobs have seconds on "
                    f"{', '.join(self._kinds)}"
                )
            if alike.setdefault(device.label, device) != device:
                raise ScheduleError(f"{self._path}: devices {device.label} differ in other figures")
            num[device.label] += 1
        self._alike |= alike
        return num


class JobProcess:
    """A job under `hxla run --elastic`, which does what a file of devices says.

    Args:
        fleet: Where its devices come from.
        places: Those that are its own.
        folder: For its files: what it prints, what happened, its devices.
        note: Called with its pid, which someone must end after a crash of this process.
    """

    def __init__(
        self,
        job: LiveJob,
        fleet: JobFleet,
        places: Places,
        folder: pathlib.Path,
        note: Callable[[str], None],
    ):
        self._fleet = fleet
        self._devices, self._log = folder / f"{job.name}.devices", folder / f"{job.name}.events"
        self._log.unlink(missing_ok=True)  # of a start before
        self._read_bytes = 0
        self._placed: dict[str, str] = {}
        self._used: set[str] = set()
        self.num_done: float | None = None
        self._times: collections.deque[ExecutorTime] = collections.deque(maxlen=_MOST_TIMES)
        self.give(places)
        command = [sys.executable, "-m", "hxla", "run", "--elastic"]
        command += [*fleet.options(str(self._devices)), "--events", str(self._log)]
        command += ["--min", str(job.job.min_devices), "--max", str(job.job.num_microbatches)]
        with (folder / f"{job.name}.log").open("ab") as printed:
            self._process = subprocess.Popen(
                [*command, *job.command],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the scheduler, which stops its jobs
            )
        note(str(self._process.pid))

    def give(self, places: Places) -> None:
        """From now on these devices are its own: the file is whole at any time."""
        part = self._devices.with_suffix(".part")
        part.write_text(self._fleet.text(places))
        part.rename(self._devices)

    @property
    def used(self) -> Places:
        """The devices that it has not released."""
        return Places(self._placed[device] for device in self._used)

    def hear(self) -> None:
        """Read the events that were written since."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for event in map(json.loads, whole.splitlines()):
            match event["what"]:
                case "Placed":
                    self._placed[event["device"]] = self._fleet.place(event)
                    self._used.add(event["device"])
                case "Offered":
                    self._used.add(event["device"])
                case "Release" | "Vanished":
                    self._used.discard(event["device"])
                case "Completed":
                    self.num_done = event["step"]
                    self._note_time(event)

    def _note_time(self, event: Mapping[str, Any]) -> None:
        if event["num_microbatches"]:
            executors = event["num_executors"]
            self._times.append(
                ExecutorTime(
                    kind=self._placed[event["device"]],
                    num_executors=executors,
                    num_microbatches=event["num_microbatches"] / executors,
                    seconds=event["busy_seconds"],
                )
            )

    @property
    def times(self) -> Sequence[ExecutorTime]:
        """What its devices took for microbatches lately, by the fleet's names for them."""
        return tuple(self._times)

    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self._process.poll()

    def stop(self) -> None:
        """Let it save a checkpoint after the step at hand, and end."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End it, whatever it is doing; what it started is ended by its own janitor."""
        self.stop()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_LOOK_SECONDS = 0.5  # between questions to the cluster


class RayFleet:
    """The nodes of a Ray cluster that have one device each.

    A node that Ray drains is taken from its job, as one that died. Others are told once and left
    out: a node is given as a whole, and policies count devices. Each node that a job has is held by
    a placement group, in which that job's actor runs and then the next one's, so that nobody comes
    in between; they end with this process.

    Args:
        address: Of the cluster, as `ray.init` takes it.
        kinds: Nodes with devices of other kinds are left out.
        say: Told which nodes are left out.

    Raises:
        LaunchError: If there is no such cluster.
    """

    def __init__(self, address: str, kinds: Sequence[str], say: Callable[[str], None]):
        connect(address)
        self._address, self._kinds, self._say = address, tuple(kinds), say
        self._looked_at = float("-inf")
        # As Ray tells of them, by their names: all that were ever used.
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[str, tuple[str, PlacementGroup]] = {}  # and what they are called
        self._left_out: set[str] = set()
        self._there: dict[str, tuple[str, int]] = {}

    def offered(self) -> Mapping[str, tuple[str, int]]:
        """Each node by its name."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_SECONDS:
            try:
                self._there = self._look()
            except ray.exceptions.RayError as error:
                self._say(f"devices stay as they are: the Ray cluster does not answer: {error}")
            self._looked_at = time.monotonic()
        return self._there

    def keep(self, names: Collection[str]) -> None:
        """A placement group for each of these nodes, and for no others."""
        for name in self._groups.keys() - set(names):
            _, group = self._groups.pop(name)
            with contextlib.suppress(ray.exceptions.RayError):  # it is gone with the cluster
                remove_placement_group(group)
        for name in set(names) - self._groups.keys():
            node = self._nodes[name]
            called = f"hxla-{node['NodeID']}-{secrets.token_hex(4)}"
            group = placement_group(
                [devices_of(node)],
                name=called,
                bundle_label_selector=[{"ray.io/node-id": node["NodeID"]}],
            )
            self._groups[name] = called, group

    def options(self, path: str) -> Sequence[str]:
        """Options of `hxla run` for a job whose nodes a file says."""
        return "--ray", self._address, "--nodes", path

    def text(self, places: Places) -> str:
        """The IDs of nodes, and the placement groups there."""
        return "".join(f"{self._nodes[p]['NodeID']} {self._groups[p][0]}\n" for p in places)

    def place(self, event: Mapping[str, Any]) -> str:
        """The name of the device's node."""
        return str(event["host"])

    def close(self) -> None:
        """Let go of the cluster."""
        ray.shutdown()

    def _look(self) -> dict[str, tuple[str, int]]:
        found, drained = {}, draining()
        for node in ray.nodes():
            name, (kind, num) = name_of(node["NodeID"]), label_of(node)
            if not node["Alive"] or node["NodeID"] in drained or not num:
                continue
            if num > 1 or kind not in self._kinds:
                if name not in self._left_out:
                    self._left_out.add(name)
                    self._say(
                        f"{name} with {num} {kind} is left out: the jobs use nodes of one "
                        f"{', one '.join(self._kinds)}"
                    )
                continue
            self._nodes[name] = node
            found[name] = kind, 1
        return found
