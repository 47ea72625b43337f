"""Plans of one cut where every kind of device is a node: what the nodes' cards let them do."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ._branch_node import MIXED
from ._chain import ReplicaSort
from ._chain_tables import Tables, fill_and_period, tail_seconds
from ._packing import fractional_packing


def like_seconds(
    t: Tables, cuts: Sequence[int], groups: Sequence[int], least_copies: int, num_microbatches: int
) -> float:
    """The least time of copies that have the same kinds, as many as there are devices for.

    All of them pass the same cards, so that they begin one transfer after another.

    Args:
        t: Of the chain.
        cuts: First layer of each stage.
        groups: The kind of each stage.
        least_copies: Fewer are not asked for.
        num_microbatches: Of a global batch.
    """
    most = min(int(n) // groups.count(k) for k, n in enumerate(t.num_devices) if k in groups)
    fill, period = fill_and_period(t, cuts, groups)
    assert t.shared is not None
    pairs = zip(cuts[1:], itertools.pairwise(groups), strict=True)
    apart = max((float(t.shared[cut, a, b]) / 2 for cut, (a, b) in pairs if a != b), default=0.0)
    best = math.inf
    for copies in range(least_copies, min(most, num_microbatches) + 1):
        sorts = [ReplicaSort(groups=tuple(groups), count=copies, num_microbatches=1)]
        # Of all copies every microbatch in the order in which they would be done: each has one.
        first = fill + apart * np.arange(copies)
        done = np.sort((first[:, None] + period * np.arange(num_microbatches)).ravel())
        seconds = max(float(first[-1]), float(done[num_microbatches - 1]))
        best = min(best, seconds + tail_seconds(t, cuts, sorts))
    return best * (1 - 1e-9)


def enough_for_cards(
    t: Tables,
    cuts: Sequence[int],
    modes: Sequence[int],
    copies: Iterable[int],
    num_microbatches: int,
    seconds: float,
) -> bool:
    """Whether all microbatches might pass the cards on their way in a time.

    In each direction a card carries, of every microbatch of a copy, its activations over the
    boundaries by which it leaves the node and their gradients over those by which it comes, or the
    other way round: one after another, and in all for no longer than the time there is. A linear
    programme over every choice of kinds.

    Args:
        t: Of the chain.
        cuts: First layer of each stage.
        modes: The kind that all copies have at a stage; below 0: several kinds, or any.
        copies: How many there may be.
        num_microbatches: Of a global batch.
        seconds: That pipelines may take.
    """
    assert t.shared is not None
    kinds = range(t.num_kinds)

    def there_can_be(num: int) -> bool:
        # Of several kinds are stages only if the others leave devices of several.
        left = [int(n) - num * modes.count(k) for k, n in enumerate(t.num_devices)]
        return min(left) >= 0 and (MIXED not in modes or sum(n > 0 for n in left) > 1)

    most_copies = max(filter(there_can_be, copies), default=0)  # fewer run no more
    one_way = t.shared[list(cuts)].diagonal(axis1=1, axis2=2) / 2  # [S, K] of a kind's own card
    used, value = [], []
    for groups in _choices(t, modes):
        fill, period = fill_and_period(t, cuts, groups)
        most = math.floor(1 + (seconds - fill) / period * (1 + 1e-9) + 1e-9)
        most = min(most, num_microbatches)
        if most >= 1:
            passed = [0.0] * t.num_kinds
            for i, (a, b) in enumerate(itertools.pairwise(groups), 1):
                for k in {a, b} if a != b else ():
                    passed[k] += most * float(one_way[i, k])
            used.append([*(groups.count(k) for k in kinds), 1, *passed])
            value.append(most)
    if not (used and most_copies):
        return False
    room = [seconds * (1 + 1e-9)] * t.num_kinds
    available = [*map(float, t.num_devices), float(most_copies), *room]
    upper = fractional_packing(np.array(used), np.array(value), available, whole=False)[2]
    return upper >= num_microbatches * (1 - 1e-9)


def _choices(t: Tables, modes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every kind of every stage that is allowed."""
    return itertools.product(*((mode,) if mode >= 0 else range(t.num_kinds) for mode in modes))
