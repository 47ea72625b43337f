"""Collectives by algorithm: rounds of messages, and closed formulas of their seconds.

A link is a function from bytes to seconds, so a line (`latency + bytes / bandwidth`) and a measured
curve are the same thing here.

An all-reduce of n workers, each of which holds `num_bytes`, as the field's lecture notes and
libraries do it. A worker sends and receives at once, but at any time to one other and from one
other. So the time is latency per message and bytes over bandwidth, for the worker that has most.

| algorithm | rounds | bytes one after another, of b | sent by the busiest | in total |
|---|---|---|---|---|
| parameter server | 2 (n - 1) | 2 (n - 1) | n - 1 | 2 (n - 1) |
| naive (all to all) | n - 1 | n - 1 | n - 1 | n (n - 1) |
| ring | 2 (n - 1) | 2 (n - 1) / n | 2 (n - 1) / n | 2 (n - 1) |
| tree | 2 ceil(log2 n) | 2 ceil(log2 n) | see `tree` | 2 (n - 1) |
| butterfly | log2 n | log2 n | log2 n | n log2 n |
| halving-doubling | 2 log2 n | 2 (n - 1) / n | 2 (n - 1) / n | 2 (n - 1) |

Butterfly and halving-doubling take powers of two. Of other numbers, the r workers beyond the
largest power p send theirs to a partner before and get the result after: two rounds and 2 b more,
and in total 2 r more than p workers. A ring repeats its step n - 1 times for the reduce-scatter and
n - 1 for the gather, not n.

References:
    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19, 2005; Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009;
    Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, get_args

from ..cluster.cluster import Link
from ..core.errors import PlanError

LinkSeconds = Callable[[float], float]  # of a message of so many bytes


def ring_all_reduce_seconds(num_bytes: float, num_devices: int, link: LinkSeconds) -> float:
    """All-reduce over a ring: `2 (n - 1)` steps of one n-th of the bytes.

    Args:
        num_bytes: Of the array on every device.
        link: Of the ring's slowest pair.

    References:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009, section 3;
        NCCL computes its bus bandwidth with the same factor 2 (n - 1) / n.
    """
    return 2 * all_gather_seconds(num_bytes, num_devices, link)


def all_gather_seconds(num_bytes: float, num_devices: int, link: LinkSeconds) -> float:
    """All-gather over a ring, or a reduce-scatter: `n - 1` steps of one n-th of the bytes.

    Args:
        link: Of the ring's slowest pair.
    """
    if num_devices <= 1 or num_bytes == 0:
        return 0.0
    return (num_devices - 1) * link(num_bytes / num_devices)


Algorithm = Literal["parameter-server", "naive", "ring", "tree", "butterfly", "halving-doubling"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Volume:
    """Rounds and bytes of an all-reduce, whatever the link.

    Attributes:
        num_rounds: Messages that follow one another.
        serial_bytes: Bytes of the longest message of each round, summed.
        sent_bytes: By the worker that sends most.
        total_bytes: By all workers.
    """

    num_rounds: int
    serial_bytes: float
    sent_bytes: float
    total_bytes: float

    def seconds(self, link: Link) -> float:
        """The time over a link per worker: latency for each round, bandwidth for the bytes."""
        return self.num_rounds * link.latency_seconds + self.serial_bytes / link.bytes_per_second


def volume(algorithm: Algorithm, num_workers: int, num_bytes: float) -> Volume:
    """Rounds and bytes of an all-reduce by an algorithm.

    Raises:
        PlanError: If there are no workers, or bytes below zero.
    """
    n, b = num_workers, num_bytes
    if n < 1 or not 0 <= b < math.inf:
        raise PlanError(f"{n} workers and {b} bytes: give at least one, and no negative number")
    if n == 1:
        return Volume(num_rounds=0, serial_bytes=0.0, sent_bytes=0.0, total_bytes=0.0)
    rounds, serial, sent, total = _FORMULAS[algorithm](n)
    return Volume(
        num_rounds=rounds, serial_bytes=serial * b, sent_bytes=sent * b, total_bytes=total * b
    )


def favoured(num_workers: int, num_bytes: float, link: Link) -> tuple[Algorithm, float]:
    """The algorithm of least time by a link's figures, and that time; the first among equals.

    Args:
        link: One per worker.
    """
    times = {a: volume(a, num_workers, num_bytes).seconds(link) for a in _BY_PREFERENCE}
    best = min(times, key=lambda a: times[a])
    return best, times[best]


def _server(n: int) -> tuple[int, float, float, float]:
    # One worker is the server: it receives from the others in turn, and answers in turn.
    return 2 * (n - 1), 2.0 * (n - 1), n - 1.0, 2.0 * (n - 1)


def _naive(n: int) -> tuple[int, float, float, float]:
    return n - 1, n - 1.0, n - 1.0, float(n * (n - 1))


def _ring(n: int) -> tuple[int, float, float, float]:
    share = 2.0 * (n - 1) / n
    return 2 * (n - 1), share, share, 2.0 * (n - 1)


def _tree(n: int) -> tuple[int, float, float, float]:
    """A binomial tree: a reduction to the root, then a broadcast from it.

    In the broadcast the root sends once a level. Worker 2^k sends its array up once, and down to
    all workers below it.
    """
    levels = (n - 1).bit_length()
    below = max(
        1 + sum(1 for k in range(levels) if 2**k < (i & -i) and i + 2**k < n) for i in range(1, n)
    )
    return 2 * levels, 2.0 * levels, float(max(levels, below)), 2.0 * (n - 1)


def _butterfly(n: int) -> tuple[int, float, float, float]:
    power, rest = _power_of_two(n)
    levels = power.bit_length() - 1
    extra = 1 if rest else 0
    sent = levels + extra
    return levels + 2 * extra, levels + 2.0 * extra, float(sent), levels * power + 2.0 * rest


def _halving_doubling(n: int) -> tuple[int, float, float, float]:
    power, rest = _power_of_two(n)
    levels, share = power.bit_length() - 1, 2.0 * (power - 1) / power
    extra = 1 if rest else 0
    total = 2.0 * (power - 1) + 2.0 * rest
    return 2 * levels + 2 * extra, share + 2.0 * extra, share + extra, total


def _power_of_two(n: int) -> tuple[int, int]:
    """The largest power of two that is at most n, and what is left."""
    power = 1 << (n.bit_length() - 1)
    return power, n - power


_FORMULAS = {
    "parameter-server": _server,
    "naive": _naive,
    "ring": _ring,
    "tree": _tree,
    "butterfly": _butterfly,
    "halving-doubling": _halving_doubling,
}
_BY_PREFERENCE: tuple[Algorithm, ...] = (
    *("ring", "halving-doubling", "butterfly", "tree"),
    *("naive", "parameter-server"),
)
