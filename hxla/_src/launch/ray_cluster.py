"""A Ray cluster as the hosts of an elastic run."""

import logging
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence

import ray
from ray.util import get_placement_group
from ray.util.placement_group import PlacementGroup

from ..core.errors import HxlaError, LaunchError
from .host import NOTICE_SECONDS, Host, KeptFolder, OfferedDevice
from .output import Streams
from .ray_host import START_SECONDS, RayCarrying, RayHost, devices_of, draining

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
