"""Plans on their devices: seconds of transfers that share network cards, and better places.

The search knows kinds of devices and not their places, so it counts only the transfers of one
tensor-parallel group as simultaneous. Here every replica counts: replicas begin their steps one
after another, so each sends alone, and their reductions share the cards.

The cut and the counts of the search suit transfers that share nothing. Here the devices stay, and
cut and counts follow their transfers.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..cluster.cluster import (
    CardWay,
    Cluster,
    NetworkCard,
    Send,
    cards_passed,
    ring_transfers,
    transfer_seconds,
)
from .apportionment import best_counts
from .chain import (
    Chain,
    ReplicaSort,
    Staging,
    Tables,
    fill_and_period,
    reductions,
    tables,
    tail_seconds,
    times_with_edges,
)
from .cuts import neighbours

Ranks = tuple[int, ...]  # devices of one tensor-parallel group
Copies = Sequence[Sequence[Ranks]]  # per replica and stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundaryTransfer:
    """One microbatch of one replica over a boundary between stages.

    Attributes:
        seconds: Of its activations or their gradients, while no other replica sends.
        card_seconds: Seconds of both on each card, of a node in a direction.
    """

    seconds: float
    card_seconds: Mapping[CardWay, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The least seconds of a placed plan's transfers.

    Attributes:
        send_seconds: Per sort of replicas, one transfer over each boundary between stages, one way,
            of the slowest replica.
        reduction_seconds: Per stage, the reduction of its gradients over replicas.
        crossings: Per replica and boundary.
    """

    send_seconds: tuple[tuple[float, ...], ...]
    reduction_seconds: tuple[float, ...]
    crossings: tuple[tuple[BoundaryTransfer, ...], ...]


@dataclasses.dataclass(frozen=True)
class Way:
    """How the replicas of a plan take devices of a kind.

    Attributes:
        block: Replicas that take devices together; 0: each alone, the next free ones.
        whole: Whether one node is to hold the whole block; else each stage of the block.
    """

    block: int
    whole: bool


NEXT = Way(0, whole=False)


def copies_in(
    staging: Staging,
    places: Sequence[Sequence[Ranks]],
    cluster: Cluster,
    ways: Sequence[Way],
) -> list[list[Ranks]]:
    """The devices of each replica.

    Args:
        places: Per kind, its tensor-parallel groups in order.
        ways: Per kind.
    """
    kinds = [replica.groups for replica in staging.replicas for _ in range(replica.count)]
    out: list[dict[int, Ranks]] = [{} for _ in kinds]
    for kind, (groups, way) in enumerate(zip(places, ways, strict=True)):
        for slots, taken in _taken(kinds, kind, groups, cluster, way):
            for (copy, stage), ranks in zip(slots, taken, strict=False):
                out[copy][stage] = ranks
    return [[stages[i] for i in range(len(stages))] for stages in out]


def _taken(
    kinds: Sequence[Sequence[int]],
    kind: int,
    groups: Sequence[Ranks],
    cluster: Cluster,
    way: Way,
) -> Iterator[tuple[list[tuple[int, int]], Iterable[Ranks]]]:
    """(replica, stage) pairs of one kind, and the devices that they take together."""
    if not way.block:
        each = ((copy, stage) for copy, row in enumerate(kinds) for stage in range(len(row)))
        yield [x for x in each if kinds[x[0]][x[1]] == kind], groups
        return
    free: dict[int, list[Ranks]] = {}
    for ranks in groups:
        free.setdefault(cluster.devices[ranks[0]].node, []).append(ranks)
    for first in range(0, len(kinds), way.block):
        block = range(first, min(first + way.block, len(kinds)))
        stages = [
            [(copy, stage) for copy in block if kinds[copy][stage] == kind]
            for stage in range(len(kinds[0]))
        ]
        for slots in [list(itertools.chain(*stages))] if way.whole else stages:
            yield slots, list(_take_groups(free, len(slots)))


def _take_groups(free: Mapping[int, list[Ranks]], num: int) -> Iterator[Ranks]:
    """The next `num` groups, from one node if any has room."""
    with_room = [groups for groups in free.values() if len(groups) >= num]
    for groups in with_room[:1] or list(free.values()):
        while groups and num:
            yield groups.pop(0)
            num -= 1


def ways_of(num_copies: int) -> list[Way]:
    """The next devices first, then blocks.

    A replica in one node sends over no card between its stages; one stage of several replicas in a
    node leaves it as one ring. Which is better depends on the bytes sent and reduced. So replicas
    are placed in blocks of 1, 2, 4 and so on: a block, or each of its stages, in one node if any
    has room.
    """
    powers = (2**k for k in range((num_copies - 1).bit_length()))
    blocks = itertools.product((*powers, num_copies), (True, False))
    return [NEXT, *(Way(block, whole=whole) for block, whole in blocks)]


def placements(
    staging: Staging, places: Sequence[Sequence[Ranks]], cluster: Cluster
) -> Iterator[tuple[tuple[Way, ...], list[list[Ranks]]]]:
    """Ways to place the replicas, the same for all kinds, `NEXT` first.

    Args:
        places: Per kind, its tensor-parallel groups in order.
    """
    nexts = (NEXT,) * len(places)
    first = copies_in(staging, places, cluster, nexts)
    yield nexts, first
    used = {cluster.devices[rank].node for copy in first for (rank, *_) in copy}
    if len(staging.cuts) == 1 or len(used) == 1:
        return
    seen = [first]
    for way in ways_of(len(first)):
        ways = (way,) * len(places)
        copies = copies_in(staging, places, cluster, ways)
        if copies not in seen:
            seen.append(copies)
            yield ways, copies


def traffic_of(
    chain: Chain, staging: Staging, copies: Copies, cluster: Cluster, *, reduce_factor: float
) -> Traffic:
    """Transfers of a plan; simultaneous ones share the cards of their nodes.

    Over a boundary all devices of a tensor-parallel group send at once, replicas one after another
    (`starts`). At the end of a step all stages reduce their gradients at once, in rings of one
    device of every replica.

    Args:
        reduce_factor: Bytes that a reduction moves per byte of gradient and direction, in units of
            a float32 all-reduce; 0: not predicted, because it was measured.
    """
    num_stages, num_layers = len(staging.cuts), len(chain.output_bytes)
    ends = (*staging.cuts[1:], num_layers)
    sent_bytes = [chain.output_bytes[end - 1] for end in ends[:-1]]
    card_of = functools.cache(cluster.network_card)
    known: dict[Any, BoundaryTransfer] = {}  # by nodes and bytes: many are equal
    nodes = [[[cluster.devices[r].node for r in ranks] for ranks in copy] for copy in copies]
    crossings: list[list[BoundaryTransfer]] = []
    for copy, at in zip(copies, nodes, strict=True):
        crossings.append([])
        for stage, num_bytes in enumerate(sent_bytes):
            key = tuple(zip(at[stage], at[stage + 1], strict=True)), num_bytes
            if key not in known:
                pairs = list(zip(copy[stage], copy[stage + 1], strict=True))
                known[key] = _boundary_transfer(cluster, card_of, pairs, *key)
            crossings[-1].append(known[key])
    rest, send_seconds = iter(crossings), []
    for replica in staging.replicas:
        same = list(itertools.islice(rest, replica.count))
        each = ([copy[i].seconds for copy in same] for i in range(num_stages - 1))
        send_seconds.append(tuple(max(seconds, default=0.0) for seconds in each))
    n = len(copies)
    stage_bytes = [
        sum(chain.groups[staging.replicas[0].groups[stage]].parameter_bytes[a:b])
        for stage, (a, b) in enumerate(zip(staging.cuts, ends, strict=True))
    ]
    rings: list[tuple[int, list[Send]]] = [
        (stage, ring_transfers(cluster, ranks, 2 * (n - 1) / n * reduce_factor * num_bytes))
        for stage, num_bytes in enumerate(stage_bytes)
        for ranks in zip(*(copy[stage] for copy in copies), strict=True)
        if reduce_factor
    ]
    times = iter(
        transfer_seconds(cluster, list(itertools.chain(*(transfers for _, transfers in rings))))
    )
    reductions = [0.0] * num_stages
    for stage, transfers in rings:
        ring_seconds = (next(times) or 0.0 for _ in transfers)
        reductions[stage] = max(reductions[stage], max(ring_seconds, default=0.0))
    return Traffic(
        send_seconds=tuple(send_seconds),
        reduction_seconds=tuple(reductions),
        crossings=tuple(map(tuple, crossings)),
    )


def _boundary_transfer(
    cluster: Cluster,
    card_of: Callable[[int], NetworkCard | None],
    pairs: Sequence[tuple[int, int]],
    nodes: Sequence[tuple[int, int]],
    num_bytes: float,
) -> BoundaryTransfer:
    """The transfer of one replica over one boundary, by its devices and their nodes."""
    card_seconds: dict[CardWay, float] = {}
    for (a, b), num in collections.Counter(nodes).items():
        for card, way in (*cards_passed(card_of, a, b), *cards_passed(card_of, b, a)):
            seconds = num * num_bytes / card.bytes_per_second
            card_seconds[way] = card_seconds.get(way, 0.0) + seconds
    sends = [Send(sender=a, receiver=b, num_bytes=num_bytes) for a, b in pairs]
    return BoundaryTransfer(
        seconds=max(seconds or 0.0 for seconds in transfer_seconds(cluster, sends)),
        card_seconds=card_seconds,
    )


def starts(traffic: Traffic, seconds: Sequence[float]) -> list[float]:
    """Start of each replica; those that share a card over one boundary start one after another.

    Replicas that start together send together, each with a share of the card, and stay in step. If
    their starts differ by the longest shared transfer, each has the card alone once its pipeline is
    full, as long as the card has time for all (`busiest_card_seconds`); compare the simulation in
    `tests/choose/test_card_replay.py`. The slowest replicas start first; the number of transfers
    between starts is a greedy colouring.

    Args:
        seconds: Per replica, of all its microbatches.
    """
    passed = [
        {(boundary, way): x.seconds for boundary, x in enumerate(row) for way in x.card_seconds}
        for row in traffic.crossings
    ]
    numbers = collections.Counter(itertools.chain(*passed))
    shared = (x for ways in passed for way, x in ways.items() if numbers[way] > 1)
    apart = max(shared, default=0.0)
    start_seconds = [0.0] * len(passed)
    taken: dict[tuple[int, CardWay], set[int]] = {}
    for i in sorted(range(len(passed)), key=lambda i: (-seconds[i], i)):
        others = set().union(*(taken.get(way, ()) for way in passed[i]))
        slot = next(slot for slot in itertools.count() if slot not in others)
        start_seconds[i] = apart * slot
        for way in passed[i]:
            taken.setdefault(way, set()).add(slot)
    return start_seconds


def busiest_card_seconds(staging: Staging, traffic: Traffic) -> float:
    """Seconds of activations and their gradients on the busiest card."""
    busy: dict[CardWay, float] = {}
    counts = (r.num_microbatches for r in staging.replicas for _ in range(r.count))
    for num, crossings in zip(counts, traffic.crossings, strict=True):
        for x in crossings:
            for way, seconds in x.card_seconds.items():
                busy[way] = busy.get(way, 0.0) + num * seconds
    return max(busy.values(), default=0.0)


def shared_fill_and_period(
    t: Tables, cuts: Sequence[int], kinds: Sequence[int], one_way: Sequence[float]
) -> tuple[float, float]:
    """Seconds of a replica's first microbatch and of each further one (`fill_and_period`).

    Args:
        cuts: First layer of each stage.
        one_way: The least seconds of a transfer over each boundary.
    """
    crossed = zip(cuts[1:], itertools.pairwise(kinds), one_way, strict=True)
    edges = [max(float(t.cross[cut, *pair]), 2 * sent) for cut, pair, sent in crossed]
    return times_with_edges(t, cuts, kinds, edges)


def copy_seconds(
    t: Tables, staging: Staging, traffic: Traffic
) -> tuple[list[float], list[list[float]]]:
    """Per sort, seconds of a replica's microbatches, and the start of each replica."""
    seconds = []
    for replica, one_way in zip(staging.replicas, traffic.send_seconds, strict=True):
        fill, period = shared_fill_and_period(t, staging.cuts, replica.groups, one_way)
        seconds.append(fill + (replica.num_microbatches - 1) * period)
    each = zip(seconds, staging.replicas, strict=True)
    begun = iter(starts(traffic, [busy for busy, r in each for _ in range(r.count)]))
    return seconds, [list(itertools.islice(begun, r.count)) for r in staging.replicas]


def shared_step_seconds(t: Tables, staging: Staging, traffic: Traffic) -> float:
    """The search's closed formula of a step (`step_seconds`) with the transfers of `traffic`."""
    cuts, ends = staging.cuts, (*staging.cuts[1:], t.num_layers)
    each = zip(*copy_seconds(t, staging, traffic), strict=True)
    ends_of_copies = [busy + max(begun, default=0.0) for busy, begun in each]
    slowest = max(busiest_card_seconds(staging, traffic), *ends_of_copies)
    update = max(
        float(t.update[stage])
        for replica in staging.replicas
        for stage in zip(replica.groups, cuts, ends, strict=True)
    )
    least = reductions(t, cuts, staging.replicas)
    return slowest + max(*least, *traffic.reduction_seconds) + update


_NEAR = 1.02  # times the best plan known: a descent may overtake it
_NEAR_BY_KIND = 1.1  # the same for a descent over `Way`s
_TRANSFERS = 5_000  # to look at: a plan on many devices gets fewer trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedStaging:
    """A plan on its devices.

    Attributes:
        staging: Cut, counts, and kinds of the stages.
        copies: The devices of each replica, in the order of the staging's replicas.
        traffic: The least seconds of its transfers.
        step_seconds: The closed formula of its step, with those transfers.
    """

    staging: Staging
    copies: Copies
    traffic: Traffic
    step_seconds: float


class DevicePlacement:
    """Places the plans of a search on the devices where they share network cards least.

    Args:
        places: Alternative to the groups of devices of every kind.
        reduce_factor: See `traffic_of`.
    """

    def __init__(
        self,
        *,
        chains: Mapping[Any, Chain],
        places: Mapping[Any, Sequence[Sequence[Ranks]]],
        cluster: Cluster,
        reduce_factor: float,
    ):
        self.known: dict[tuple[Any, Staging], PlacedStaging] = {}
        self._chains = chains
        self._places = places
        self._cluster = cluster
        self._factor = reduce_factor
        self._tables: dict[Any, Tables] = {}

    def place(self, key: Any, staging: Staging, fastest: float) -> Staging:
        """The plan on its devices, with the counts and cut that suit its transfers.

        Args:
            fastest: Seconds of the best plan known; plans far from it are not improved.
        """
        chain, cluster = self._chains[key], self._cluster
        if key not in self._tables:
            self._tables[key] = tables(chain)
        t = self._tables[key]
        best: PlacedStaging | None = None
        for ways, copies in placements(staging, self._places[key], cluster):
            candidate = placed(chain, t, staging, copies, cluster, reduce_factor=self._factor)
            if best is None or candidate.step_seconds < best.step_seconds * (1 - 1e-9):
                best, chosen = candidate, ways
                if best.step_seconds == staging.step_seconds:
                    break  # no other placement is faster
        assert best is not None
        if staging.step_seconds < best.step_seconds < fastest * _NEAR_BY_KIND:
            best = self._by_kind(key, best, chosen)
        if staging.step_seconds < best.step_seconds < fastest * _NEAR:
            best = improved(chain, t, best, cluster, reduce_factor=self._factor)
        staged = dataclasses.replace(best.staging, step_seconds=best.step_seconds)
        self.known[key, staged] = dataclasses.replace(best, staging=staged)
        return staged

    def _by_kind(self, key: Any, best: PlacedStaging, ways: tuple[Way, ...]) -> PlacedStaging:
        """The same plan with another `Way` for some kinds of devices, by descent."""
        chain, t, places = self._chains[key], self._tables[key], self._places[key]
        kinds = {k for replica in best.staging.replicas for k in replica.groups}
        if len(kinds) == 1:
            return best
        num_left = _TRANSFERS // _num_transfers(best)
        tried = {ways}
        is_better = True
        while is_better:
            is_better = False
            for kind, way in itertools.product(sorted(kinds), ways_of(len(best.copies))):
                other = (*ways[:kind], way, *ways[kind + 1 :])
                if other in tried:
                    continue
                if num_left <= 0:
                    return best
                num_left -= 1
                tried.add(other)
                copies = copies_in(best.staging, places, self._cluster, other)
                candidate = placed(
                    chain, t, best.staging, copies, self._cluster, reduce_factor=self._factor
                )
                if candidate.step_seconds < best.step_seconds * (1 - 1e-9):
                    best, ways, is_better = candidate, other, True
        return best


def _num_transfers(plan: PlacedStaging) -> int:
    """About the transfers over all boundaries."""
    return sum(len(ranks) for copy in plan.copies for ranks in copy)


def placed(
    chain: Chain,
    t: Tables,
    staging: Staging,
    copies: Copies,
    cluster: Cluster,
    *,
    reduce_factor: float,
) -> PlacedStaging:
    """A plan on the devices in `copies`; for `reduce_factor` see `traffic_of`."""
    traffic = traffic_of(chain, staging, copies, cluster, reduce_factor=reduce_factor)
    seconds = shared_step_seconds(t, staging, traffic)
    # If transfers share nothing, the time is that of the search, to the last bit.
    is_slower = seconds > staging.step_seconds * (1 + 1e-9)
    return PlacedStaging(
        staging=staging,
        copies=copies,
        traffic=traffic,
        step_seconds=seconds if is_slower else staging.step_seconds,
    )


def improved(
    chain: Chain, t: Tables, start: PlacedStaging, cluster: Cluster, *, reduce_factor: float
) -> PlacedStaging:
    """Counts and a cut that suit a plan's transfers, by descent; never a slower plan.

    A move shifts one boundary between stages, or several neighbours together, by a layer. The
    microbatches are then dealt out by each replica's time among all transfers. The devices stay.
    """

    def dealt(cuts: tuple[int, ...]) -> PlacedStaging | None:
        return _with_cuts(chain, t, cuts, best, cluster, reduce_factor)

    best = start
    num_left = _TRANSFERS // _num_transfers(start)
    again = dealt(best.staging.cuts)
    if again is not None and again.step_seconds < best.step_seconds:
        best = again
    is_better = True
    while is_better:
        is_better = False
        for cuts in neighbours(best.staging.cuts, t.num_layers):
            if num_left <= 0:
                return best
            num_left -= 1
            candidate = dealt(cuts)
            if candidate is not None and candidate.step_seconds < best.step_seconds * (1 - 1e-9):
                best, is_better = candidate, True
                break
    return best


def _with_cuts(
    chain: Chain,
    t: Tables,
    cuts: tuple[int, ...],
    known: PlacedStaging,
    cluster: Cluster,
    reduce_factor: float,
) -> PlacedStaging | None:
    """A plan's devices with another cut, and the best counts for it; None: it does not fit."""
    kinds = [r.groups for r in known.staging.replicas for _ in range(r.count)]
    limits = {
        row: _most_microbatches(t, cuts, row, chain.num_microbatches)
        for row in dict.fromkeys(kinds)
    }
    if sum(limits[row] for row in kinds) < chain.num_microbatches:
        return None
    alone = [ReplicaSort(groups=row, count=1, num_microbatches=1) for row in kinds]
    staging = Staging(cuts=cuts, replicas=tuple(alone), step_seconds=0.0)
    traffic = traffic_of(chain, staging, known.copies, cluster, reduce_factor=reduce_factor)
    times = [
        shared_fill_and_period(t, cuts, row, sent)
        for row, sent in zip(kinds, traffic.send_seconds, strict=True)
    ]
    counts = best_counts(
        chain.num_microbatches,
        [period for _, period in times],
        [fill - period for fill, period in times],
        [limits[row] for row in kinds],
    )
    if not all(counts):
        return None  # a replica without work would leave its devices idle
    each = list(zip(kinds, counts, traffic.send_seconds, strict=True))
    order = sorted(range(len(each)), key=each.__getitem__)
    sorts, sent = [], []
    for (groups, num, times_sent), same in itertools.groupby(order, key=each.__getitem__):
        sorts.append(ReplicaSort(groups=groups, count=len(list(same)), num_microbatches=num))
        sent.append(times_sent)
    alone_times = [(fill_and_period(t, cuts, r.groups), r.num_microbatches) for r in sorts]
    seconds = max(fill + (num - 1) * period for (fill, period), num in alone_times)
    staging = Staging(
        cuts=cuts,
        replicas=tuple(sorts),
        step_seconds=seconds + tail_seconds(t, cuts, sorts),
    )
    traffic = dataclasses.replace(
        traffic,
        send_seconds=tuple(sent),
        crossings=tuple(traffic.crossings[i] for i in order),
    )
    return PlacedStaging(
        staging=staging,
        copies=[known.copies[i] for i in order],
        traffic=traffic,
        step_seconds=max(staging.step_seconds, shared_step_seconds(t, staging, traffic)),
    )


def _most_microbatches(
    t: Tables, cuts: Sequence[int], kinds: Sequence[int], num_microbatches: int
) -> int:
    """The most microbatches of a replica that fit its memory (0: none)."""
    num, ends = len(cuts), (*cuts[1:], t.num_layers)
    stages = tuple(np.array(x) for x in (kinds, cuts, ends))
    after = np.arange(num, 0, -1)
    for most in (num_microbatches, *range(min(num - 1, num_microbatches), 0, -1)):
        memory_bytes = t.state_bytes[stages] + np.minimum(after, most) * t.stash_bytes[stages]
        if (memory_bytes <= t.memory[stages[0]]).all():
            return most
    return 0
