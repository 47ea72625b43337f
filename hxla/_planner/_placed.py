"""Plans on their devices, made faster where their transfers share network cards.

The search knows kinds of devices and not their places: its cut and its counts are those that suit
transfers which share nothing. Here the devices stay, and the rest follows their transfers.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._cluster._cluster import Cluster
from ._chain import Chain, ReplicaSort, Staging
from ._chain_tables import Tables, fill_and_period, tables, tail_seconds
from ._counts import best_counts
from ._shared_links import (
    Copies,
    Ranks,
    Traffic,
    Way,
    copies_in,
    placements,
    shared_fill_and_period,
    shared_step_seconds,
    traffic_of,
    ways_of,
)

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


class Placer:
    """Plans that a search finds on the devices where they share network cards least.

    Args:
        chains: Alternative to chain.
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
            key: Alternative.
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
        chain: That is cut.
        t: Of the chain.
        staging: Its cut.
        copies: Where it runs.
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
        chain: That is cut.
        t: Of the chain.
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
