"""Where the optimizer's state is: whole on every replica, or sharded over all, or over groups.

References:
    Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023,
    section 3.2.2 (hybrid sharding).
    Zhang et al., "MiCS: near-linear scaling for training gigantic model on public cloud", VLDB
    2022, sections 3.2 and 3.3 (partition groups, two-hop gradient synchronisation).
"""

import contextlib
import itertools
from collections.abc import Iterable, Sequence

from ..cluster.cluster import Cluster
from ..cluster.libraries import are_unlike, in_words
from ..cluster.transfers import ring_transfers, transfer_seconds
from ..core.errors import PlanError
from ..job.context import JobContext
from ..launch.member import own_member
from ..model.functional import leaf_names
from ..plan.ownership import SUMMED_STATE, Ownership, ownership
from ..plan.parts import ZERO_STAGES, Tier
from ..plan.plan import Plan
from .complete import placement_for
from .memory_candidates import Travel
from .offload import PART_ON_DEVICE, check_host, words


def groups_of_nodes(plan: Plan, cluster: Cluster) -> int:
    """As many groups as nodes, the copies of a node being one.

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


def with_shared_state(
    job: JobContext,
    plan: Plan,
    cluster: Cluster,
    stage: int,
    shares: tuple[int, ...],
    tier: Tier,
    shard_groups: int,
) -> Plan:
    """The plan with the optimizer's state shared out, as all stages of ZeRO but 0 have it.

    Args:
        plan: Of it, with the state whole on every copy.
        stage: Of ZeRO; that of the plan is 1, until it has the segments that others need.
        shares: Of each copy of a group, in lowest terms; empty: even.
        tier: Where the optimizer's state waits.
        shard_groups: Groups of copies that share it out.

    Raises:
        PlanError: If the settings ask for shares that these copies cannot have.
    """
    memory = job.settings.memory
    if not stage:
        if memory.shares not in ("auto", "even"):
            raise PlanError("memory.shares needs memory.zero of 1 to 3: set it, or leave them out")
        return plan
    if len(plan.replicas) == 1 and tier == "device" and memory.offload.optimizer is None:
        raise PlanError(
            f"memory.zero={stage}: one copy of the model has nobody to share with, leave it out"
        )
    model = job.functional(plan.microbatch_size)
    members = len(plan.replicas) // shard_groups
    granules = shares or (1,) * members
    own = shared_update(job, plan, granules)
    if tier != "device" and own.summed_state:
        raise PlanError(f"memory.offload.optimizer={tier!r}: {SUMMED_STATE}: use 'device'")
    names = leaf_names(model.trained)
    whole = tuple(n for n, owner in zip(names, own.shares.owners, strict=True) if owner is not None)
    optimizer_bytes: float = job.optimizer_bytes(plan.microbatch_size)
    optimizer_bytes *= 1 if tier == "device" else PART_ON_DEVICE
    largest = max(granules) / sum(granules)
    placement = placement_for(
        plan.parameters,
        plan.axis_sizes,
        plan.sums,
        optimizer_bytes * largest,
        [cluster.devices[d.rank] for d in plan.devices],
    ).model_copy(
        update={
            "zero": 1,
            "shares": shares,
            "shard_groups": shard_groups,
            "whole": whole,
            "optimizer": tier,
        }
    )
    said = _words(own, whole, names, shares, stage)
    if shard_groups > 1:
        said.append(
            f"the copies are {shard_groups} groups of {members}: those of a group share the state "
            "out, and every group has all of it"
        )
    if job.settings.optimizer.num_apply_groups > 1:
        said.append("optimizer.num_apply_groups: not used, a copy updates only what it owns")
    found = plan.replaced(placement=placement, reasons=(*plan.reasons, *said))
    if tier == "device":
        return found
    if tier == "host":
        check_host(job, found, cluster)
    return found.replaced(reasons=(*found.reasons, words(job, found, cluster, tier)))


def shared_update(job: JobContext, plan: Plan, granules: tuple[int, ...]) -> Ownership:
    """Which copy of a group would update what, with so many granules each."""
    return ownership(job.traced_update(plan.microbatch_size), granules)


def could_share(plan: Plan) -> bool:
    """Whether there are copies of one device, all of whose gradients travel whole."""
    return len(plan.replicas) > 1 and not plan.axes and not plan.sums.sparse


def _may_share(plan: Plan) -> bool:
    """Whether copies may share state out although nobody asked for it."""
    if not plan.axes:
        return could_share(plan)
    return plan.pipeline is None and cut_copies_may_share(plan)


def cut_copies_may_share(plan: Plan) -> bool:
    """The same of copies that several devices cut.

    They have other bits where they share, which the next generation of an elastic job might not.
    """
    is_one = len(plan.replicas) == 1
    return not (is_one or plan.is_uneven or plan.sums.sparse or own_member() is not None)


def group_options(job: JobContext, plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The numbers of groups of copies, sharing the state out, that the settings leave open.

    Args:
        plan: Of it, with the state whole on every copy.

    Raises:
        PlanError: If they ask for groups that these copies do not make.
    """
    asked, shares = job.settings.memory.shard_groups, job.settings.memory.shares
    num = len(plan.replicas)
    if isinstance(asked, int):
        if asked > 1 and (num % asked or num == asked):
            raise PlanError(
                f"memory.shard_groups={asked}: {num} copies of the model do not make so many "
                "groups of equal size, of two or more: use another number, or leave it out"
            )
        found: tuple[int, ...] = (asked,)
    elif asked == "nodes":
        try:
            found = (groups_of_nodes(plan, cluster),)
        except PlanError as error:
            raise PlanError(
                f"memory.shard_groups='nodes': {error}: use a number, or leave it out"
            ) from error
    else:
        found = (1,)
        if _may_share(plan) and plan.sums.over == "device" and isinstance(shares, str):
            with contextlib.suppress(PlanError):  # nodes that make no groups
                found = (1, groups_of_nodes(plan, cluster))
    if not isinstance(shares, str) and len(shares) != num // found[0]:
        of = f" in each of {found[0]} groups" if found[0] > 1 else ""
        raise PlanError(
            f"memory.shares: {len(shares)} for {num // found[0]} copies of the model{of}: give one "
            "each"
        )
    return found


def stages_to_try(job: JobContext, plan: Plan) -> tuple[int, ...]:
    """The stages of ZeRO that the settings leave open, the one that changes least first.

    Unlike devices have at least the first; over the host there is no third.

    Args:
        plan: Of it, with the state whole on every copy.

    Raises:
        PlanError: If unlike devices are to update everything each.
    """
    asked, kinds = job.settings.memory.zero, [device.kind for device in plan.devices]
    offload = job.settings.memory.offload.optimizer
    least = int(are_unlike(kinds) or offload is not None)
    if offload is not None and asked == 0:
        raise PlanError(
            f"memory.zero=0: memory.offload.optimizer={offload!r} updates part after part, as "
            "ZeRO's stages do, so that no bit depends on where the state is: leave it out or set "
            "it to 1"
        )
    if least and asked == 0:
        raise PlanError(
            f"memory.zero=0: {in_words(kinds)} would each round the whole update in its own way, "
            "and the copies of the model drift apart: leave it out or set it to 1"
        )
    if asked is not None or not _may_share(plan):
        return (asked or least,)
    return ZERO_STAGES[least:] if plan.sums.over == "device" else ZERO_STAGES[least:-1]


def _words(
    own: Ownership, whole: Sequence[str], names: Sequence[str], shares: Sequence[int], stage: int
) -> list[str]:
    ratio = ":".join(map(str, shares)) if shares else "even shares"
    what = ("", ", the sums of gradients", ", the sums of gradients and the parameters")[stage - 1]
    said = [f"ZeRO stage {stage}: each copy has its share of the optimizer's state{what}, {ratio}"]
    domains = own.update.domain_of[: own.num_params]
    if len(names) > 1 and len(set(domains)) == 1 and whole:
        said.append(
            "the optimizer ties all parameters together, as one that branches over all of them "
            "does, so one copy owns all of its state"
        )
    elif whole:
        shown = ", ".join(whole[:4]) + (f" and {len(whole) - 4} more" if len(whole) > 4 else "")
        said.append(f"the optimizer treats these as a whole, each has one owner: {shown}")
    return said
