"""Plans on their devices: what transfers take that share network cards, and better places.

The search knows kinds of devices and not their places, so that it counts of the transfers at the
same time only those of one tensor-parallel group. Here every copy counts: they begin their steps
one after another, so that each sends alone, and their sums share the cards.

The search knows kinds of devices and not their places: its cut and its counts are those that suit
transfers which share nothing. Here the devices stay, and the rest follows their transfers.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..cluster.cluster import Cluster, NetworkCard
from ..cluster.transfers import CardWay, Send, cards_passed, ring_transfers, transfer_seconds
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
from .counts import best_counts

Ranks = tuple[int, ...]  # devices of one tensor-parallel group
Copies = Sequence[Sequence[Ranks]]  # of each copy of the model, the group of each stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundaryTransfer:
    """One microbatch of one copy over a boundary between stages.

    Attributes:
        seconds: Of its activations or their gradients, while no other copy sends.
        card_seconds: What each card that it passes, of a node in a direction, is busy with both.
    """

    seconds: float
    card_seconds: Mapping[CardWay, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The least that transfers of a placed plan take.

    Attributes:
        send_seconds: Per sort of replicas, of one transfer over each boundary between stages, one
            way: of the slowest replica of the sort.
        reduction_seconds: Per stage, of the reduction of its gradients over replicas.
        crossings: Per copy, of each boundary.
    """

    send_seconds: tuple[tuple[float, ...], ...]
    reduction_seconds: tuple[float, ...]
    crossings: tuple[tuple[BoundaryTransfer, ...], ...]


@dataclasses.dataclass(frozen=True)
class Way:
    """How the copies of a plan take devices of a kind.

    Attributes:
        block: Copies that take them together; 0: each by itself, the next that are free.
        whole: Whether all that a block takes is to be in one node; else of each stage.
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
    """The devices of each copy.

    Args:
        staging: Which kinds hold the stages of how many copies.
        places: Per kind, its tensor-parallel groups in order.
        cluster: That the ranks are of.
        ways: Per kind.
    """
    kinds = [replica.groups for replica in staging.replicas for _ in range(replica.count)]
    out: list[dict[int, Ranks]] = [{} for _ in kinds]
    for kind, (groups, way) in enumerate(zip(places, ways, strict=True)):
        for slots, taken in _taken(kinds, kind, groups, cluster, way):
            for (copy, stage), ranks in zip(slots, taken, strict=False):
                out[copy][stage] = ranks
    return [[own[stage] for stage in range(len(own))] for own in out]


def _taken(
    kinds: Sequence[Sequence[int]],
    kind: int,
    groups: Sequence[Ranks],
    cluster: Cluster,
    way: Way,
) -> Iterator[tuple[list[tuple[int, int]], Iterable[Ranks]]]:
    """Copies and stages of one kind, and the devices that they take together."""
    if not way.block:
        each = ((copy, stage) for copy, own in enumerate(kinds) for stage in range(len(own)))
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
            yield slots, list(_next_of(free, len(slots)))


def _next_of(free: Mapping[int, list[Ranks]], num: int) -> Iterator[Ranks]:
    """The next so many, of one node if any has room for them."""
    with_room = [own for own in free.values() if len(own) >= num]
    for own in with_room[:1] or list(free.values()):
        while own and num:
            yield own.pop(0)
            num -= 1


def ways_of(num_copies: int) -> list[Way]:
    """The next devices first, then blocks.

    A copy in one node sends over no card between its stages; one stage of several copies in a node
    leaves it as one ring. Which is better depends on what is sent and what is summed. So copies are
    placed in blocks of 1, 2, 4 and so on: a block, or each stage of one, in one node if any has
    room for it.
    """
    powers = (2**k for k in range((num_copies - 1).bit_length()))
    blocks = itertools.product((*powers, num_copies), (True, False))
    return [NEXT, *(Way(block, whole=whole) for block, whole in blocks)]


def placements(
    staging: Staging, places: Sequence[Sequence[Ranks]], cluster: Cluster
) -> Iterator[tuple[tuple[Way, ...], list[list[Ranks]]]]:
    """Ways to place the copies, all kinds in the same, `NEXT` first.

    Args:
        staging: Which kinds hold the stages of how many copies.
        places: Per kind, its tensor-parallel groups in order.
        cluster: That the ranks are of.
    """
    nexts = (NEXT,) * len(places)
    first = copies_in(staging, places, cluster, nexts)
    yield nexts, first
    used = {cluster.devices[rank].node for own in first for (rank, *_) in own}
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
    """Transfers of a plan, those that happen at once sharing the cards of their nodes.

    Over a boundary all devices of a tensor-parallel group send at once, copies of the model one
    after another (`starts`). At the end of a step all stages reduce their gradients at once, in
    rings of one device of every copy.

    Args:
        cluster: That the ranks are of.
        reduce_factor: Bytes that a reduction moves per byte of gradient and direction, in units of
            a float32 all-reduce; 0: do not predict it, it was measured.
    """
    num_stages, num_layers = len(staging.cuts), len(chain.output_bytes)
    ends = (*staging.cuts[1:], num_layers)
    sent_bytes = [chain.output_bytes[end - 1] for end in ends[:-1]]
    card_of = functools.cache(cluster.network_card)
    known: dict[Any, BoundaryTransfer] = {}  # by nodes and bytes: most are like others
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
        own = list(itertools.islice(rest, replica.count))
        each = ([copy[i].seconds for copy in own] for i in range(num_stages - 1))
        send_seconds.append(tuple(max(seconds, default=0.0) for seconds in each))
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
    """Of one copy over one boundary, between devices and the nodes that they are of."""
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
    """When each copy begins a step: those that share a card over one boundary one after another.

    Copies that begin at once send at once, each with a share of the card, and so stay in step for
    ever. Apart by the longest transfer that they share, each has the card to itself as soon as its
    pipeline is full, as long as the card has time for all of them (`busiest_card_seconds`): beside
    a simulation in `tests/choose/test_card_replay.py`. The copies that take longest begin first;
    how many transfers later each begins is a greedy colouring.

    Args:
        seconds: Of each copy, what its microbatches take.
    """
    passed = [
        {(boundary, way): x.seconds for boundary, x in enumerate(own) for way in x.card_seconds}
        for own in traffic.crossings
    ]
    numbers = collections.Counter(itertools.chain(*passed))
    shared = (x for own in passed for way, x in own.items() if numbers[way] > 1)
    apart = max(shared, default=0.0)
    found = [0.0] * len(passed)
    taken: dict[tuple[int, CardWay], set[int]] = {}
    for i in sorted(range(len(passed)), key=lambda i: (-seconds[i], i)):
        others = set().union(*(taken.get(way, ()) for way in passed[i]))
        slot = next(slot for slot in itertools.count() if slot not in others)
        found[i] = apart * slot
        for way in passed[i]:
            taken.setdefault(way, set()).add(slot)
    return found


def busiest_card_seconds(staging: Staging, traffic: Traffic) -> float:
    """How long activations and their gradients keep the card busy that carries most of them."""
    busy: dict[CardWay, float] = {}
    counts = (r.num_microbatches for r in staging.replicas for _ in range(r.count))
    for num, own in zip(counts, traffic.crossings, strict=True):
        for x in own:
            for way, seconds in x.card_seconds.items():
                busy[way] = busy.get(way, 0.0) + num * seconds
    return max(busy.values(), default=0.0)


def shared_fill_and_period(
    t: Tables, cuts: Sequence[int], kinds: Sequence[int], one_way: Sequence[float]
) -> tuple[float, float]:
    """Seconds of a copy's first microbatch and of each further one (`fill_and_period`).

    Args:
        cuts: First layer of each stage.
        one_way: The least that a transfer over each boundary takes.
    """
    crossed = zip(cuts[1:], itertools.pairwise(kinds), one_way, strict=True)
    edges = [max(float(t.cross[cut, *pair]), 2 * sent) for cut, pair, sent in crossed]
    return times_with_edges(t, cuts, kinds, edges)


def copy_seconds(
    t: Tables, staging: Staging, traffic: Traffic
) -> tuple[list[float], list[list[float]]]:
    """What the microbatches of a copy take, and when each copy begins, by sort."""
    found = []
    for replica, one_way in zip(staging.replicas, traffic.send_seconds, strict=True):
        fill, period = shared_fill_and_period(t, staging.cuts, replica.groups, one_way)
        found.append(fill + (replica.num_microbatches - 1) * period)
    each = zip(found, staging.replicas, strict=True)
    begun = iter(starts(traffic, [own for own, r in each for _ in range(r.count)]))
    return found, [list(itertools.islice(begun, r.count)) for r in staging.replicas]


def shared_step_seconds(t: Tables, staging: Staging, traffic: Traffic) -> float:
    """The search's closed formula of a step (`step_seconds`), no transfer faster than is said."""
    cuts, ends = staging.cuts, (*staging.cuts[1:], t.num_layers)
    each = zip(*copy_seconds(t, staging, traffic), strict=True)
    ends_of_copies = [own + max(begun, default=0.0) for own, begun in each]
    slowest = max(busiest_card_seconds(staging, traffic), *ends_of_copies)
    update = max(
        float(t.update[stage])
        for replica in staging.replicas
        for stage in zip(replica.groups, cuts, ends, strict=True)
    )
    least = reductions(t, cuts, staging.replicas)
    return slowest + max(*least, *traffic.reduction_seconds) + update


_NEAR = 1.02  # times the best plan known: a descent may overtake it
_NEAR_BY_KIND = 1.1  # the same of a descent over ways to take devices
_TRANSFERS = 5_000  # that are looked at: a plan on many devices is tried less often


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedStaging:
    """A plan on its devices.

    Attributes:
        staging: Cut, counts, and kinds of the stages.
        copies: The devices of each copy of the model, in the order of the staging's replicas.
        traffic: The least that its transfers take.
        step_seconds: The closed formula of its step, no transfer faster than that.
    """

    staging: Staging
    copies: Copies
    traffic: Traffic
    step_seconds: float


class DevicePlacement:
    """Plans that a search finds on the devices where they share network cards least.

    Args:
        places: Alternative to the groups of devices of every kind.
        cluster: That the ranks are of.
        reduce_factor: As for `traffic_of`.
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
            staging: Without places.
            fastest: Seconds of the best plan known: one that is far from it is not bettered.
        """
        chain, cluster = self._chains[key], self._cluster
        if key not in self._tables:
            self._tables[key] = tables(chain)
        t = self._tables[key]
        best: PlacedStaging | None = None
        for ways, copies in placements(staging, self._places[key], cluster):
            own = placed(chain, t, staging, copies, cluster, reduce_factor=self._factor)
            if best is None or own.step_seconds < best.step_seconds * (1 - 1e-9):
                best, chosen = own, ways
                if best.step_seconds == staging.step_seconds:
                    break  # no other placement is faster
        assert best is not None
        if staging.step_seconds < best.step_seconds < fastest * _NEAR_BY_KIND:
            best = self._by_kind(key, best, chosen)
        if staging.step_seconds < best.step_seconds < fastest * _NEAR:
            best = improved(chain, t, best, cluster, reduce_factor=self._factor)
        found = dataclasses.replace(best.staging, step_seconds=best.step_seconds)
        self.known[key, found] = dataclasses.replace(best, staging=found)
        return found

    def _by_kind(self, key: Any, best: PlacedStaging, ways: tuple[Way, ...]) -> PlacedStaging:
        """The same plan with some kinds of devices taken in other ways, by descent."""
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
                own = placed(
                    chain, t, best.staging, copies, self._cluster, reduce_factor=self._factor
                )
                if own.step_seconds < best.step_seconds * (1 - 1e-9):
                    best, ways, is_better = own, other, True
        return best


def _num_transfers(plan: PlacedStaging) -> int:
    """About how many there are over all its boundaries."""
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
    """A plan on devices that are given.

    Args:
        cluster: That the ranks are of.
        reduce_factor: As for `traffic_of`.
    """
    traffic = traffic_of(chain, staging, copies, cluster, reduce_factor=reduce_factor)
    seconds = shared_step_seconds(t, staging, traffic)
    # A plan whose transfers share nothing is as fast as the search has it, to the last bit.
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

    A move shifts one boundary between stages, or several neighbours together, by a layer; the
    microbatches are then dealt out to the copies by what each takes among the transfers of all.

    Args:
        start: The plan; its devices stay as they are.
        cluster: That the ranks are of.
        reduce_factor: As for `traffic_of`.
    """

    def dealt(cuts: tuple[int, ...]) -> PlacedStaging | None:
        return _dealt(chain, t, cuts, best, cluster, reduce_factor)

    best = start
    num_left = _TRANSFERS // _num_transfers(start)
    again = dealt(best.staging.cuts)
    if again is not None and again.step_seconds < best.step_seconds:
        best = again
    is_better = True
    while is_better:
        is_better = False
        for cuts in _neighbours(best.staging.cuts, t.num_layers):
            if num_left <= 0:
                return best
            num_left -= 1
            found = dealt(cuts)
            if found is not None and found.step_seconds < best.step_seconds * (1 - 1e-9):
                best, is_better = found, True
                break
    return best


def _neighbours(cuts: tuple[int, ...], num_layers: int) -> Iterator[tuple[int, ...]]:
    """Cuts with some neighbouring boundaries shifted by a layer: few of them before many."""
    for num in range(1, len(cuts)):
        for first in range(1, len(cuts) - num + 1):
            for step in (-1, 1):
                moved = (c + step * (first <= i < first + num) for i, c in enumerate(cuts))
                new = tuple(moved)
                if all(a < b for a, b in itertools.pairwise((*new, num_layers))):
                    yield new


def _dealt(
    chain: Chain,
    t: Tables,
    cuts: tuple[int, ...],
    known: PlacedStaging,
    cluster: Cluster,
    reduce_factor: float,
) -> PlacedStaging | None:
    """The devices of a plan with a cut, and the counts that suit them; None: they do not fit."""
    kinds = [r.groups for r in known.staging.replicas for _ in range(r.count)]
    limits = {own: _most(t, cuts, own, chain.num_microbatches) for own in dict.fromkeys(kinds)}
    if sum(limits[own] for own in kinds) < chain.num_microbatches:
        return None
    alone = [ReplicaSort(groups=own, count=1, num_microbatches=1) for own in kinds]
    staging = Staging(cuts=cuts, replicas=tuple(alone), step_seconds=0.0)
    traffic = traffic_of(chain, staging, known.copies, cluster, reduce_factor=reduce_factor)
    times = [
        shared_fill_and_period(t, cuts, own, sent)
        for own, sent in zip(kinds, traffic.send_seconds, strict=True)
    ]
    counts = best_counts(
        chain.num_microbatches,
        [period for _, period in times],
        [fill - period for fill, period in times],
        [limits[own] for own in kinds],
    )
    if not all(counts):
        return None  # a copy without work would leave its devices idle
    each = list(zip(kinds, counts, traffic.send_seconds, strict=True))
    order = sorted(range(len(each)), key=each.__getitem__)
    sorts, sent = [], []
    for (own, num, times_sent), same in itertools.groupby(order, key=each.__getitem__):
        sorts.append(ReplicaSort(groups=own, count=len(list(same)), num_microbatches=num))
        sent.append(times_sent)
    own_times = [(fill_and_period(t, cuts, r.groups), r.num_microbatches) for r in sorts]
    seconds = max(fill + (num - 1) * period for (fill, period), num in own_times)
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


def _most(t: Tables, cuts: Sequence[int], kinds: Sequence[int], num_microbatches: int) -> int:
    """The most microbatches that a copy can run, for its memory (0: none)."""
    num, ends = len(cuts), (*cuts[1:], t.num_layers)
    stages = tuple(np.array(x) for x in (kinds, cuts, ends))
    after = np.arange(num, 0, -1)
    for most in (num_microbatches, *range(min(num - 1, num_microbatches), 0, -1)):
        held = t.state_bytes[stages] + np.minimum(after, most) * t.stash_bytes[stages]
        if (held <= t.memory[stages[0]]).all():
            return most
    return 0
