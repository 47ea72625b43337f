"""Groups of copies that each have all of the state, so that what is gathered stays inside a node.

References:
    Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023,
    section 3.2.2 (hybrid sharding).
    Zhang et al., "MiCS: near-linear scaling for training gigantic model on public cloud", VLDB
    2022, sections 3.2 and 3.3 (partition groups, two-hop gradient synchronisation).
"""

import itertools
from collections.abc import Iterable, Sequence

from .._cluster._cluster import Cluster
from .._cluster._transfers import ring_transfers, transfer_seconds
from .._core._errors import PlanError
from .._plan._plan import Plan
from ._memory_values import Travel


def groups_of_nodes(plan: Plan, cluster: Cluster) -> int:
    """As many groups as nodes, the copies of a node being one.

    Args:
        plan: Of a job.
        cluster: Its devices.

    Raises:
        PlanError: If the copies of the nodes are no such groups; the message says why.
    """
    nodes = [{cluster.devices[rank].node for rank in r.devices} for r in plan.replicas]
    if any(len(own) > 1 for own in nodes):
        raise PlanError("a copy of the model lies over several nodes")
    runs = [(node, len(list(own))) for node, own in itertools.groupby(own.pop() for own in nodes)]
    sizes = {size for _, size in runs}
    if len(runs) < 2:
        raise PlanError("all copies of the model are in one node")
    if len({node for node, _ in runs}) < len(runs):
        raise PlanError("the copies of a node do not follow each other")
    if len(sizes) > 1:
        raise PlanError(f"nodes have unlike numbers of copies, {_listed(size for _, size in runs)}")
    if sizes == {1}:
        raise PlanError("each node has one copy of the model only")
    kinds = {device.rank: device.arithmetic for device in plan.devices}
    of_copies = [tuple(kinds[rank] for rank in r.devices) for r in plan.replicas]
    [size] = sizes
    if any(of_copies[i] != of_copies[i % size] for i in range(len(of_copies))):
        raise PlanError("nodes have devices of unlike kinds, whose equal parts would drift apart")
    return len(runs)


def travel_of(plan: Plan, cluster: Cluster, groups: int) -> Travel:
    """What travels between the copies of a plan; no time where no link is described.

    Args:
        plan: Of a job.
        cluster: Its devices.
        groups: Of copies that share the state out.
    """
    num = len(plan.replicas)
    members = num // groups
    inside = [range(first, first + members) for first in range(0, num, members)]
    across = [range(first, num, members) for first in range(members)]
    whole = float(plan.parameter_bytes)
    return Travel(
        gather=_rings(plan, cluster, inside, whole),
        all_copies=_rings(plan, cluster, [range(num)], whole),
        across=_rings(plan, cluster, across, whole / members),
    )


def _rings(plan: Plan, cluster: Cluster, rings: Sequence[Iterable[int]], num_bytes: float) -> float:
    """Seconds until rings of copies have each gathered, or reduced and scattered, so many bytes.

    Those of all places of a copy are at once, too, and share their nodes' network cards.
    """
    transfers, hops = [], 0
    for ring in rings:
        copies = [plan.replicas[i].devices for i in ring]
        hops = max(hops, len(copies) - 1)
        size = num_bytes / len(copies) / len(copies[0])
        for ranks in zip(*copies, strict=True):
            transfers += ring_transfers(cluster, ranks, size)
    times = transfer_seconds(cluster, transfers)
    return hops * max((seconds for seconds in times if seconds is not None), default=0.0)


def _listed(numbers: Iterable[int]) -> str:
    found = [*map(str, numbers)]
    return ", ".join(found[:8]) + (" and more" if len(found) > 8 else "")
