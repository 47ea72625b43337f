"""The nodes of a Ray cluster, shared out among elastic jobs."""

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup

from .._launch._ray_cluster import connect
from .._launch._ray_nodes import devices_of, draining, label_of, name_of
from ._live_run import Places

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
