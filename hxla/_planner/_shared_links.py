"""What transfers of a plan take on the devices that it is placed on, sharing network cards.

The search knows kinds of devices and not their places, so that it counts of the transfers at the
same time only those of one tensor-parallel group. Here every copy counts.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from .._cluster._cluster import Cluster
from .._cluster._transfers import Send, ring_transfers, transfer_seconds
from ._chain import Chain, Staging
from ._chain_tables import Tables, reductions, times_with_edges

Ranks = tuple[int, ...]  # devices of one tensor-parallel group
Copies = Sequence[Sequence[Ranks]]  # of each copy of the model, the group of each stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The least that transfers of a placed plan take.

    Attributes:
        send_seconds: Per sort of replicas, of one transfer over each boundary between stages, one
            way: of the slowest replica of the sort.
        reduction_seconds: Per stage, of the reduction of its gradients over replicas.
    """

    send_seconds: tuple[tuple[float, ...], ...]
    reduction_seconds: tuple[float, ...]


def copies_of(staging: Staging, places: Sequence[Sequence[Ranks]]) -> list[list[Ranks]]:
    """The devices of each copy: of each kind the next that are free, stage by stage.

    Args:
        staging: Which kinds hold the stages of how many copies.
        places: Per kind, its tensor-parallel groups in order.
    """
    free = [iter(groups) for groups in places]
    return [[next(free[kind]) for kind in kinds] for kinds in _kinds_of(staging)]


def placements(
    staging: Staging, places: Sequence[Sequence[Ranks]], cluster: Cluster
) -> Iterator[list[list[Ranks]]]:
    """Ways to place the copies, that of `copies_of` first.

    A copy in one node sends over no card between its stages; one stage of several copies in a node
    leaves it as one ring. Which is better depends on what is sent and what is summed. So copies are
    placed in blocks of 1, 2, 4 and so on: a block, or each stage of one, in one node if any has
    room for it.

    Args:
        staging: Which kinds hold the stages of how many copies.
        places: Per kind, its tensor-parallel groups in order.
        cluster: That the ranks are of.
    """
    plain = copies_of(staging, places)
    yield plain
    if (
        len(staging.cuts) == 1
        or len({cluster.devices[r].node for own in plain for (r, *_) in own}) == 1
    ):
        return
    seen = [plain]
    powers = (2**k for k in range((len(plain) - 1).bit_length()))
    for at_once, whole in itertools.product((*powers, len(plain)), (True, False)):
        copies = _in_blocks(_kinds_of(staging), places, cluster, at_once, whole)
        if copies not in seen:
            seen.append(copies)
            yield copies


def _kinds_of(staging: Staging) -> list[tuple[int, ...]]:
    return [replica.groups for replica in staging.replicas for _ in range(replica.count)]


def _in_blocks(
    kinds: Sequence[tuple[int, ...]],
    places: Sequence[Sequence[Ranks]],
    cluster: Cluster,
    at_once: int,
    whole: bool,
) -> list[list[Ranks]]:
    """Copies in blocks of so many, each block's devices of a kind in one node, or each stage's."""
    free: list[dict[int, list[Ranks]]] = []
    for groups in places:
        by_node: dict[int, list[Ranks]] = {}
        for ranks in groups:
            by_node.setdefault(cluster.devices[ranks[0]].node, []).append(ranks)
        free.append(by_node)

    def take(kind: int, num: int) -> Iterator[Ranks]:
        with_room = [own for own in free[kind].values() if len(own) >= num]
        for own in with_room[:1] or list(free[kind].values()):
            while own and num:
                yield own.pop(0)
                num -= 1

    out: list[list[Ranks]] = []
    for first in range(0, len(kinds), at_once):
        stages = list(zip(*kinds[first : first + at_once], strict=True))
        block = list(itertools.chain(*stages))
        if whole:
            taken = {kind: take(kind, block.count(kind)) for kind in dict.fromkeys(block)}
            by_stage = [[next(taken[kind]) for kind in stage] for stage in stages]
        else:
            by_stage = []
            for stage in stages:
                taken = {kind: take(kind, stage.count(kind)) for kind in dict.fromkeys(stage)}
                by_stage.append([next(taken[kind]) for kind in stage])
        out += map(list, zip(*by_stage, strict=True))
    return out


def traffic_of(
    chain: Chain, staging: Staging, copies: Copies, cluster: Cluster, *, reduce_factor: float
) -> Traffic:
    """Transfers of a plan, those that happen at once sharing the cards of their nodes.

    Copies of the model are in step: over one boundary all of them send at once, and all devices of
    a tensor-parallel group. At the end of a step all stages reduce their gradients at once, in
    rings of one device of every copy.

    Args:
        chain: That is cut.
        staging: Its cut.
        copies: Where it runs.
        cluster: That the ranks are of.
        reduce_factor: Bytes that a reduction moves per byte of gradient and direction, in units of
            a float32 all-reduce; 0: do not predict it, it was measured.
    """
    num_stages, num_layers = len(staging.cuts), len(chain.output_bytes)
    ends = (*staging.cuts[1:], num_layers)
    sent = [
        _per_copy(copies, cluster, stage, chain.output_bytes[ends[stage] - 1])
        for stage in range(num_stages - 1)
    ]
    first, send_seconds = 0, []
    for replica in staging.replicas:
        own = range(first, first + replica.count)
        send_seconds.append(tuple(max(row[i] for i in own) if own else 0.0 for row in sent))
        first += replica.count
    n = len(copies)
    of_stages = [
        sum(chain.groups[staging.replicas[0].groups[stage]].parameter_bytes[a:b])
        for stage, (a, b) in enumerate(zip(staging.cuts, ends, strict=True))
    ]
    rings: list[tuple[int, list[Send]]] = [
        (stage, ring_transfers(cluster, ranks, 2 * (n - 1) / n * reduce_factor * num_bytes))
        for stage, num_bytes in enumerate(of_stages)
        for ranks in zip(*(copy[stage] for copy in copies), strict=True)
        if reduce_factor
    ]
    times = iter(
        transfer_seconds(cluster, list(itertools.chain(*(transfers for _, transfers in rings))))
    )
    reductions = [0.0] * num_stages
    for stage, transfers in rings:
        own_times = (next(times) or 0.0 for _ in transfers)
        reductions[stage] = max(reductions[stage], max(own_times, default=0.0))
    return Traffic(send_seconds=tuple(send_seconds), reduction_seconds=tuple(reductions))


def _per_copy(copies: Copies, cluster: Cluster, stage: int, num_bytes: float) -> list[float]:
    """Of each copy, what sending the outputs of a stage to the next takes while all copies do."""
    pairs = [list(zip(copy[stage], copy[stage + 1], strict=True)) for copy in copies]
    transfers = [
        Send(sender=a, receiver=b, num_bytes=num_bytes)
        for a, b in itertools.chain.from_iterable(pairs)
    ]
    times = iter(transfer_seconds(cluster, transfers))
    return [max(next(times) or 0.0 for _ in own) for own in pairs]


def shared_fill_and_period(
    t: Tables, cuts: Sequence[int], kinds: Sequence[int], one_way: Sequence[float]
) -> tuple[float, float]:
    """Seconds of a copy's first microbatch and of each further one (`fill_and_period`).

    Args:
        t: Of the chain.
        cuts: First layer of each stage.
        kinds: Of each stage's device.
        one_way: The least that a transfer over each boundary takes.
    """
    crossed = zip(cuts[1:], itertools.pairwise(kinds), one_way, strict=True)
    edges = [max(float(t.cross[cut, *pair]), 2 * sent) for cut, pair, sent in crossed]
    return times_with_edges(t, cuts, kinds, edges)


def shared_step_seconds(t: Tables, staging: Staging, traffic: Traffic) -> float:
    """The search's closed formula of a step (`step_seconds`), no transfer faster than is said.

    Args:
        t: Of the chain.
        staging: Its cut.
        traffic: Of the staging.
    """
    cuts, ends = staging.cuts, (*staging.cuts[1:], t.num_layers)
    slowest = update = 0.0
    for replica, one_way in zip(staging.replicas, traffic.send_seconds, strict=True):
        fill, period = shared_fill_and_period(t, cuts, replica.groups, one_way)
        slowest = max(slowest, fill + (replica.num_microbatches - 1) * period)
        stages = zip(replica.groups, cuts, ends, strict=True)
        update = max(update, *(float(t.update[s]) for s in stages))
    least = reductions(t, cuts, staging.replicas)
    return slowest + max(*least, *traffic.reduction_seconds) + update
