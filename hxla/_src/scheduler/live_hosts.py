"""Elastic jobs as separate processes, on this machine or on a Ray cluster."""

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
from ..launch.ray_cluster import connect, devices_of, draining, label_of, name_of
from .job_files import LiveJob
from .live_run import Fleet, Places
from .policies import ExecutorTime

_END_SECONDS = 30.0
_MOST_TIMES = 64  # of all devices of a job


class JobFleet(Fleet, Protocol):
    """A source of devices that can describe them to `hxla run --elastic`."""

    def options(self, path: str) -> Sequence[str]:
        """Options of `hxla run` for a job whose devices are listed in a file."""

    def text(self, places: Places) -> str:
        """The content of that file for some devices."""

    def place(self, event: Mapping[str, Any]) -> str:
        """The fleet's name for the device of an event `Placed`."""


class MeshFleet:
    """The devices of a mesh file, which is read again when it changes.

    Args:
        path: Of the file, or the name of a built-in one.
        kinds: Devices of other kinds are refused.
        say: Called with the reason why a changed file is not used.

    Raises:
        ScheduleError: If the file has other devices.
        MeshError: If the file is wrong.
    """

    def __init__(self, path: str, kinds: Sequence[str], say: Callable[[str], None]):
        self._path, self._kinds, self._say = path, tuple(kinds), say
        self._wrong = ""
        self._alike: dict[str, Device] = {}  # one device of each label ever seen
        self._num = self._read()

    def offered(self) -> Mapping[str, tuple[str, int]]:
        """Devices of one label are alike, so it is their name."""
        try:
            self._num, self._wrong = self._read(), ""
        except HxlaError as error:
            if str(error) != self._wrong:  # once, not at every poll
                self._wrong = str(error)
                self._say(f"devices stay as they are: {error}")
        return {label: (label, num) for label, num in self._num.items()}

    def keep(self, names: Collection[str]) -> None:
        """Nothing to do: only these jobs use the devices of a mesh file."""

    def options(self, path: str) -> Sequence[str]:
        """Options of `hxla run` for a job whose devices are listed in a file."""
        return "--mesh", path

    def text(self, places: Places) -> str:
        """A mesh file of these devices."""
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
                    f"{self._path} has {device.kind}: a mesh file cannot assign single cards to "
                    "jobs, so only CPU devices are shared out; give --ray for GPUs"
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
    """A job under `hxla run --elastic`, which follows a file of devices.

    Args:
        folder: For the job's files: its output, its events, its devices.
        note: Called with the pid, so that a janitor can end it after a crash of this process.
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
        self._log.unlink(missing_ok=True)  # of an earlier start
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
        """Assign devices to the job; a reader never sees half of the file."""
        part = self._devices.with_suffix(".part")
        part.write_text(self._fleet.text(places))
        part.rename(self._devices)

    @property
    def used(self) -> Places:
        """The devices that the job has not released."""
        return Places(self._placed[device] for device in self._used)

    def hear(self) -> None:
        """Read new events."""
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
        """Recent times of microbatches, with the fleet's names of the devices."""
        return tuple(self._times)

    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask the job to save a checkpoint after the current step, and to end."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End the job, whatever it is doing; its janitor ends its children."""
        self.stop()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_LOOK_SECONDS = 0.5  # between questions to the cluster


class RayFleet:
    """The nodes of a Ray cluster with one device each.

    A node that Ray drains is taken from its job, like a dead one. Nodes with several devices are
    reported once and left out, because a job gets whole nodes and policies count devices. A
    placement group reserves each node of a job. The actor of the next job runs in the same group,
    so that nobody else gets the node in between. The groups end with this process.

    Args:
        address: Of the cluster, as `ray.init` takes it.
        kinds: Nodes with devices of other kinds are left out.
        say: Called with the nodes that are left out.

    Raises:
        LaunchError: If there is no such cluster.
    """

    def __init__(self, address: str, kinds: Sequence[str], say: Callable[[str], None]):
        connect(address)
        self._address, self._kinds, self._say = address, tuple(kinds), say
        self._looked_at = float("-inf")
        # Ray's descriptions of all nodes ever used, by name.
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[str, tuple[str, PlacementGroup]] = {}  # with their names
        self._left_out: set[str] = set()
        self._there: dict[str, tuple[str, int]] = {}

    def offered(self) -> Mapping[str, tuple[str, int]]:
        """The kind of each node, by its name."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_SECONDS:
            try:
                self._there = self._look()
            except ray.exceptions.RayError as error:
                self._say(f"devices stay as they are: the Ray cluster does not answer: {error}")
            self._looked_at = time.monotonic()
        return self._there

    def keep(self, names: Collection[str]) -> None:
        """Keep a placement group on each of these nodes, and on no others."""
        for name in self._groups.keys() - set(names):
            _, group = self._groups.pop(name)
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster is gone
                remove_placement_group(group)
        for name in set(names) - self._groups.keys():
            node = self._nodes[name]
            group_name = f"hxla-{node['NodeID']}-{secrets.token_hex(4)}"
            group = placement_group(
                [devices_of(node)],
                name=group_name,
                bundle_label_selector=[{"ray.io/node-id": node["NodeID"]}],
            )
            self._groups[name] = group_name, group

    def options(self, path: str) -> Sequence[str]:
        """Options of `hxla run` for a job whose nodes are listed in a file."""
        return "--ray", self._address, "--nodes", path

    def text(self, places: Places) -> str:
        """The IDs of nodes and the names of their placement groups."""
        return "".join(f"{self._nodes[p]['NodeID']} {self._groups[p][0]}\n" for p in places)

    def place(self, event: Mapping[str, Any]) -> str:
        """The name of the device's node."""
        return str(event["host"])

    def close(self) -> None:
        """Disconnect from the cluster."""
        ray.shutdown()

    def _look(self) -> dict[str, tuple[str, int]]:
        nodes, drained = {}, draining()
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
            nodes[name] = kind, 1
        return nodes
