"""Plans of one cut where every kind of device is a node: what the nodes' cards let them do."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ._chain import ReplicaSort
from ._chain_tables import Tables, tail_seconds, times_with_edges
from ._packing import fractional_packing


def like_seconds(
    t: Tables, cuts: Sequence[int], groups: Sequence[int], least_copies: int, num_microbatches: int
) -> float:
    """The least time of copies that have the same kinds, as many as there are devices for.

    Args:
        t: Of the chain.
        cuts: First layer of each stage.
        groups: The kind of each stage.
        least_copies: Fewer are not asked for.
        num_microbatches: Of a global batch.
    """
    most = min(int(n) // groups.count(k) for k, n in enumerate(t.num_devices) if k in groups)
    best = math.inf
    for copies in range(least_copies, most + 1):
        fill, period = _times(t, cuts, groups, [copies] * (len(cuts) - 1))
        sorts = [ReplicaSort(groups=tuple(groups), count=copies, num_microbatches=1)]
        seconds = fill + (math.ceil(num_microbatches / copies) - 1) * period
        best = min(best, seconds + tail_seconds(t, cuts, sorts))
    return best * (1 - 1e-9)


def enough_for_cards(
    t: Tables,
    cuts: Sequence[int],
    modes: Sequence[int],
    copies: tuple[int, int],
    num_microbatches: int,
    seconds: float,
) -> bool:
    """Whether all microbatches might pass the cards on their way in a time.

    Copies that cross a boundary the same way share a card, so that c of them with m microbatches
    each are held up by it for m c times what one microbatch of one takes, in all for no longer than
    the time there is. A linear programme over every choice of kinds.

    Args:
        t: Of the chain.
        cuts: First layer of each stage.
        modes: The kind that all copies have at a stage; below 0: several kinds, or any.
        copies: How many there are at least and at most.
        num_microbatches: Of a global batch.
        seconds: That pipelines may take.
    """
    assert t.shared is not None
    kinds = range(t.num_kinds)
    ways = [
        (i, a, b)
        for i, (a, b) in itertools.product(range(1, len(cuts)), itertools.permutations(kinds, 2))
        if t.shared[cuts[i], a, b] > 0
    ]
    # Of each kind the devices that are left for copies of stages of several kinds.
    left = [num - copies[0] * modes.count(k) for k, num in enumerate(t.num_devices)]
    spare = [sum(max(0, num) for j, num in enumerate(left) if j != k) for k in kinds]
    used, value = [], []
    for groups in _choices(t, modes):
        at_once = [
            _at_once(copies[0], pinned, pair, spare)
            for pinned, pair in zip(
                itertools.pairwise(modes), itertools.pairwise(groups), strict=True
            )
        ]
        fill, period = _times(t, cuts, groups, at_once)
        most = min(1 + (seconds - fill) / period * (1 + 1e-9), num_microbatches)
        if most >= 1:
            crossed = [groups[i - 1 : i + 1] == (a, b) for i, a, b in ways]
            used.append([*(groups.count(k) for k in kinds), 1, *(most * x for x in crossed)])
            value.append(most)
    if not used:
        return False
    room = [seconds / float(t.shared[cuts[i], a, b]) * (1 + 1e-9) for i, a, b in ways]
    available = [*map(float, t.num_devices), float(copies[1]), *room]
    upper = fractional_packing(np.array(used), np.array(value), available, whole=False)[2]
    return upper >= num_microbatches * (1 - 1e-9)


def _at_once(
    copies: int, modes: tuple[int, int], pair: tuple[int, int], spare: Sequence[int]
) -> int:
    """How many copies at least cross a boundary the same way at once.

    Args:
        copies: How many there are at least.
        modes: What is laid down of the two stages.
        pair: The kinds that some copy has there.
        spare: Per kind, devices of all others that are left for stages of several kinds.
    """
    if min(modes) >= 0:
        return copies
    if max(modes) < 0:
        return 1
    # Those of the stage of several kinds that have another one than this copy are so many at most.
    several = pair[0] if modes[0] < 0 else pair[1]
    return max(1, copies - spare[several])


def _choices(t: Tables, modes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every kind of every stage that is allowed."""
    return itertools.product(*((mode,) if mode >= 0 else range(t.num_kinds) for mode in modes))


def _times(
    t: Tables, cuts: Sequence[int], groups: Sequence[int], at_once: Sequence[int]
) -> tuple[float, float]:
    """Fill and period of a copy, so many of which cross each boundary at once."""
    crossed = zip(cuts[1:], itertools.pairwise(groups), at_once, strict=True)
    edges = [_crossing(t, cut, a, b, num) for cut, (a, b), num in crossed]
    return times_with_edges(t, cuts, groups, edges)


def _crossing(t: Tables, cut: int, a: int, b: int, num: int) -> float:
    """What crossing a boundary takes each of so many copies at least."""
    assert t.shared is not None
    alone = float(t.cross[cut, a, b])
    return alone if a == b else max(alone, num * float(t.shared[cut, a, b]))
