"""Seconds of simultaneous transfers, where devices of a node share its network card."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from .cluster import Cluster, NetworkCard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send:
    """A transfer from one device to another, in one direction.

    Attributes:
        num_bytes: Of one message.
    """

    sender: int
    receiver: int
    num_bytes: float


CardWay = tuple[int, bool]  # a node, and whether into it; always False if it is not duplex


def cards_passed(
    card_of: Callable[[int], NetworkCard | None], a: int, b: int
) -> list[tuple[NetworkCard, CardWay]]:
    """The cards that a transfer from node `a` to node `b` passes, with its direction.

    Args:
        card_of: `Cluster.network_card`, cached for speed.
    """
    if a == b:
        return []
    known = [(node, card_of(node), bool(i)) for i, node in enumerate((a, b))]
    return [(card, (node, card.duplex and into)) for node, card, into in known if card]


def ring_transfers(cluster: Cluster, ranks: Iterable[int], num_bytes: float) -> list[Send]:
    """The sends from each device of a ring to the next; none for a single device.

    The ring passes the devices node by node and leaves each node once, as collective libraries
    build rings.
    """
    order = sorted(ranks, key=lambda rank: cluster.devices[rank].node)
    if len(order) < 2:
        return []
    return [
        Send(sender=a, receiver=b, num_bytes=num_bytes)
        for a, b in zip(order, (*order[1:], order[0]), strict=True)
    ]


def transfer_seconds(cluster: Cluster, transfers: Sequence[Send]) -> list[float | None]:
    """Predict the time of each of several transfers that begin together.

    A transfer takes at least its link's time. Transfers over a network card in one direction, or in
    both if it is not duplex, share its bandwidth equally. So a transfer of b bytes ends when the
    card has carried at most b bytes of every other transfer.

    Returns:
        The seconds of each; None where no link is described.
    """
    # Most transfers have equals: the same nodes and bytes.
    kinds = [
        (cluster.devices[x.sender].node, cluster.devices[x.receiver].node, x.num_bytes)
        if x.sender != x.receiver
        else None
        for x in transfers
    ]
    numbers = collections.Counter(filter(None, kinds))
    card_of = functools.cache(cluster.network_card)
    over: dict[CardWay, dict[float, int]] = collections.defaultdict(collections.Counter)
    for (a, b, size), num in numbers.items():
        for _, key in cards_passed(card_of, a, b):
            over[key][size] += num
    carried = {key: _CarriedBytes(sizes) for key, sizes in over.items()}
    seconds: dict[tuple[int, int, float] | None, float | None] = {None: None}
    for kind, x in zip(kinds, transfers, strict=True):
        if kind is None or kind in seconds:
            continue
        a, b, size = kind
        link = cluster.link(x.sender, x.receiver)
        if link is None:
            seconds[kind] = None
            continue
        shared = [
            link.latency_seconds + carried[key].until(size) / card.bytes_per_second
            for card, key in cards_passed(card_of, a, b)
        ]
        seconds[kind] = max([link.seconds(size), *shared])
    return [seconds[kind] for kind in kinds]


class _CarriedBytes:
    """The bytes that a card has carried when a transfer of some size is done.

    Args:
        counts: The number of its transfers of each size in bytes.
    """

    def __init__(self, counts: Mapping[float, int]):
        self._until: dict[float, float] = {}
        num_longer, done = sum(counts.values()), 0.0
        for size in sorted(counts):
            self._until[size] = done + num_longer * size
            done += counts[size] * size
            num_longer -= counts[size]

    def until(self, size: float) -> float:
        """Bytes carried when the card's transfers of this size are done."""
        return self._until[size]
