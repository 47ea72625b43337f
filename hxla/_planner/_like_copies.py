"""Plans of like copies that take every kind of device in turn: each stage is of one kind.

All copies of such a stage may lie in one node, so that its sum leaves no node; then all of them
send over the boundary to another node's stage at once.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ._chain import ReplicaSort, Staging
from ._chain_tables import Array, Tables, fill_and_period, tail_seconds
from ._relaxed import bisected

_TOLERANCE = 1e-3  # of the period


def like_copies(
    t: Tables, num_microbatches: int, most_stages: int, check: Callable[[], None]
) -> Iterator[Staging]:
    """For every number of copies that two nodes hold, and every order of kinds, a plan.

    Its cut has the least period of those with stages as given, by bisection: at each limit stages
    are made as long as they may be, from the first on.

    Args:
        t: Of the chain.
        num_microbatches: Of a global batch.
        most_stages: Of a plan.
        check: Called often; may raise.
    """
    inside = max(t.copies_inside, default=0)
    for copies in range(2, min(num_microbatches, 2 * inside) + 1):
        blocks = [num // copies for num in t.num_devices]
        for order in itertools.permutations(k for k, num in enumerate(blocks) if num):
            check()
            groups = tuple(k for k in order for _ in range(blocks[k]))
            if not 1 <= len(groups) <= most_stages:
                continue
            cuts = _even_periods(t, groups, copies, -(-num_microbatches // copies))
            if cuts is not None:
                yield _staging(t, cuts, groups, copies, num_microbatches)


def _staging(
    t: Tables, cuts: tuple[int, ...], groups: tuple[int, ...], copies: int, num_microbatches: int
) -> Staging:
    few, more = divmod(num_microbatches, copies)
    sorts = [
        ReplicaSort(groups=groups, count=count, num_microbatches=num)
        for count, num in ((copies - more, few), (more, few + 1))
        if count
    ]
    fill, period = fill_and_period(t, cuts, groups)
    most = sorts[-1].num_microbatches
    seconds = fill + (most - 1) * period + tail_seconds(t, cuts, sorts)
    return Staging(cuts=cuts, replicas=tuple(sorts), step_seconds=seconds)


def _even_periods(
    t: Tables, groups: Sequence[int], copies: int, num_microbatches: int
) -> tuple[int, ...] | None:
    """The cut of least period for the kinds of the stages; None: none fits."""
    num, size = len(groups), t.num_layers + 1
    kinds = (t.num_kinds, *groups, t.num_kinds)
    after = np.triu(np.ones((size, size), bool), 1)
    far = {  # [L+1] where a stage that begins at a layer ends at the latest, for its memory
        (i, k): np.arange(size)
        + (t.fits(min(num - i, num_microbatches))[k] & after).sum(axis=1)
        for i, k in enumerate(groups)
    }  # fmt: skip
    around = list(zip(kinds, groups, kinds[2:], strict=False))
    period: dict[tuple[int, ...], Array] = {
        (b, k, n): t.seconds[k]
        + (t.cross[:, b, k] * _num_at_once(t, b, k, copies))[:, None]
        + (t.cross[:, k, n] * _num_at_once(t, k, n, copies))[None, :]
        for b, k, n in dict.fromkeys(around)
    }

    def cut(limit: float) -> tuple[int, ...] | None:
        ends = {
            key: np.arange(size) + ((own <= limit) & after).sum(axis=1)
            for key, own in period.items()
        }
        cuts, layer = [], 0
        for i, (k, key) in enumerate(zip(groups, around, strict=True)):
            cuts.append(layer)
            end = min(int(ends[key][layer]), int(far[i, k][layer]), size - num + i)
            if end <= layer:
                return None
            layer = end
        return tuple(cuts) if layer == size - 1 else None

    high = max(float(own[after].max()) for own in period.values())
    if cut(high) is None:
        return None
    _, limit = bisected(lambda limit: cut(limit) is not None, 0.0, high, _TOLERANCE)
    return cut(limit)


def _num_at_once(t: Tables, before: int, kind: int, copies: int) -> int:
    """Copies that send at once over the card between a stage of one kind and one of the next."""
    if t.num_kinds in (before, kind):
        return 1
    room = min(t.copies_inside[before], t.copies_inside[kind])
    return 1 if before == kind and 2 * copies <= room else min(copies, room)
