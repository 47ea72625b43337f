"""Virtual devices: which devices each TaskGraph gets.

References:
    Whale, USENIX ATC 2022, section 3.2.1 (virtual devices from device counts; nested data
    parallelism; replicas within a node).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from ..core.errors import PlanError
from ..model.annotations import Kind

DeviceLayout = Literal["auto", "all", "host"] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The devices that a TaskGraph asks for.

    Attributes:
        device_count: Devices of one copy of the TaskGraph; None: all devices.
        copies: Of the TaskGraph (`replicate(n)` around a `split`).
    """

    kind: Kind
    device_count: int | None
    copies: int = 1
    label: str = ""

    @property
    def num_devices(self) -> int | None:
        """Devices of all copies of the TaskGraph."""
        return None if self.device_count is None else self.device_count * self.copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualDevices:
    """Devices of every TaskGraph in every replica.

    Attributes:
        devices: For each replica and TaskGraph the numbers of its devices in the cluster.
    """

    devices: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_replicas(self) -> int:
        """Replicas of the whole model: nested data parallelism."""
        return len(self.devices)

    def replica(self, index: int) -> tuple[int, ...]:
        """All devices of one replica, in order."""
        return tuple(dict.fromkeys(d for task in self.devices[index] for d in task))


def assign_devices(
    requests: Sequence[Request],
    num_devices: int,
    *,
    nodes: Sequence[int] | None = None,
    share: bool = False,
    prefer_intra_node: bool = True,
    layout: DeviceLayout = "auto",
) -> VirtualDevices:
    """Give devices to TaskGraphs in order.

    A TaskGraph without a device count uses the devices of the whole replica. If the devices are a
    multiple of the TaskGraphs' counts together, there are that many replicas.

    Args:
        requests: For each TaskGraph, in the order of execution.
        nodes: Devices on each node, in order; None: one node.
        share: Whether TaskGraphs use the same devices instead of one set each.
        prefer_intra_node: Keep a replica on one node where the nodes' sizes allow it; otherwise
            its devices are spread over nodes in turn.
        layout: Where replicas are placed: `auto`, on all devices; `all`, one replica over all of
            them; `host`, inside each node; or inside lists of devices.

    Raises:
        PlanError: If the devices are no multiple of the request, with the counts that fit.
    """
    sizes = list(nodes or [num_devices])
    if sum(sizes) != num_devices:
        raise PlanError(f"nodes {sizes} have {sum(sizes)} devices, not {num_devices}")
    if layout != "auto":
        return _in_groups(requests, _layout_groups(layout, sizes), share, one_copy=layout == "all")
    asked = [r.num_devices for r in requests if r.num_devices is not None]
    if not asked:
        need = num_devices
    elif share:
        need = math.lcm(*asked)
    else:
        need = sum(asked)
    if need > num_devices or num_devices % need:
        listed = _listed(requests)
        fitting = [k * need for k in range(1, 5)]
        how = "together (they share devices)" if share else "one after another"
        hint = ""
        if not share and len(asked) > 1 and num_devices % math.lcm(*asked) == 0:
            hint = "; or let them share devices: config cluster.share_devices = true"
        raise PlanError(
            f"{num_devices} devices do not fit the TaskGraphs ({listed}), which need {need} {how}: "
            f"use {', '.join(map(str, fitting))}, ... devices{hint}"
        )
    replicas = []
    for order in _groups(sizes, need, prefer_intra_node):
        tasks, start = [], 0
        for r in requests:
            count = r.num_devices
            if count is None or share:
                tasks.append(tuple(order))
            else:
                tasks.append(tuple(order[start : start + count]))
                start += count
        replicas.append(tuple(tasks))
    return VirtualDevices(devices=tuple(replicas))


def _listed(requests: Sequence[Request]) -> str:
    return ", ".join(f"{r.label or r.kind}: {r.num_devices or 'all'}" for r in requests)


def _layout_groups(layout: DeviceLayout, sizes: Sequence[int]) -> list[list[int]]:
    num_devices = sum(sizes)
    if layout == "all":
        return [list(range(num_devices))]
    if layout == "host":
        if len(set(sizes)) > 1:
            raise PlanError(
                f"cluster.layout='host' needs hosts of one size, these have {list(sizes)} devices: "
                "give lists of devices, or leave some out with cluster.visible_devices"
            )
        ends = itertools.accumulate(sizes)
        return [list(range(end - n, end)) for end, n in zip(ends, sizes, strict=True)]
    assert not isinstance(layout, str)
    groups = [list(g) for g in layout]
    named = sorted(d for g in groups for d in g)
    if named != list(range(num_devices)) or len({len(g) for g in groups}) != 1:
        raise PlanError(
            f"cluster.layout={groups} must name each of the {num_devices} devices once, in lists "
            "of one length; leave devices out with cluster.visible_devices"
        )
    return groups


def _in_groups(
    requests: Sequence[Request], groups: Sequence[Sequence[int]], share: bool, *, one_copy: bool
) -> VirtualDevices:
    """The same placement within each group."""
    inside = assign_devices(requests, len(groups[0]), share=share)
    if one_copy and inside.num_replicas > 1:
        asked = _listed(requests)
        raise PlanError(
            f"cluster.layout='all' is one replica over {len(groups[0])} devices, but its "
            f"TaskGraphs ({asked}) make {inside.num_replicas}: give no counts, or use layout='auto'"
        )
    return VirtualDevices(
        devices=tuple(
            tuple(tuple(group[d] for d in task) for task in replica)
            for group in groups
            for replica in inside.devices
        )
    )


def _groups(sizes: Sequence[int], need: int, prefer_intra_node: bool) -> list[list[int]]:
    """Devices of each replica."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    on_node = [list(range(s, s + n)) for s, n in zip(starts, sizes, strict=True)]
    if not prefer_intra_node:
        longest = max(sizes)
        order = [node[i] for i in range(longest) for node in on_node if i < len(node)]
        return [order[i : i + need] for i in range(0, len(order), need)]
    groups, rest = [], []
    for node in on_node:
        whole = len(node) // need * need
        groups += [node[i : i + need] for i in range(0, whole, need)]
        rest += node[whole:]
    groups += [rest[i : i + need] for i in range(0, len(rest), need)]
    return sorted(groups)
