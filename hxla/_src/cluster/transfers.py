"""Transfers at the same time: what each takes where devices of a node share its network card."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from .cluster import Cluster, NetworkCard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send:
    """A transfer from one device to another, in one direction.

    Attributes:
        num_bytes: In one message.
    """

    sender: int
    receiver: int
    num_bytes: float


CardWay = tuple[int, bool]  # a node, and whether into it: False of a card that is not duplex


def cards_passed(
    card_of: Callable[[int], NetworkCard | None], a: int, b: int
) -> list[tuple[NetworkCard, CardWay]]:
    """The cards that a transfer from one node to another passes, and in which direction.

    Args:
        card_of: `Cluster.network_card`, best with what it has said kept.
        a: The node of the sender.
    """
    if a == b:
        return []
    known = [(node, card_of(node), bool(i)) for i, node in enumerate((a, b))]
    return [(card, (node, card.duplex and into)) for node, card, into in known if card]


def ring_transfers(cluster: Cluster, ranks: Iterable[int], num_bytes: float) -> list[Send]:
    """What every device of a ring sends to the next; none for a single device.

    The ring passes the devices node by node, so that it leaves each node once, as the libraries
    of collectives lay rings.

    Args:
        cluster: That the ranks are of.
        ranks: The devices of the ring.
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

    A transfer takes no less than its link says of it alone. Over a network card all transfers of
    its direction, or of both if it is not duplex, get equal shares of the bandwidth until the
    shortest of them is done: one of b bytes ends when the card has carried, of every other, as many
    bytes as that has, at most b.

    Args:
        cluster: That the ranks are of.

    Returns:
        The seconds of each; None where no link is described.
    """
    # Most transfers are like others: between the same nodes, of as many bytes.
    sorts = [
        (cluster.devices[x.sender].node, cluster.devices[x.receiver].node, x.num_bytes)
        if x.sender != x.receiver
        else None
        for x in transfers
    ]
    numbers = collections.Counter(filter(None, sorts))
    card_of = functools.cache(cluster.network_card)
    over: dict[CardWay, dict[float, int]] = collections.defaultdict(collections.Counter)
    for (a, b, size), num in numbers.items():
        for _, key in cards_passed(card_of, a, b):
            over[key][size] += num
    carried = {key: _Carried(sizes) for key, sizes in over.items()}
    found: dict[tuple[int, int, float] | None, float | None] = {None: None}
    for sort, x in zip(sorts, transfers, strict=True):
        if sort is None or sort in found:
            continue
        a, b, size = sort
        link = cluster.link(x.sender, x.receiver)
        if link is None:
            found[sort] = None
            continue
        shared = [
            link.latency_seconds + carried[key].until(size) / card.bytes_per_second
            for card, key in cards_passed(card_of, a, b)
        ]
        found[sort] = max([link.seconds(size), *shared])
    return [found[sort] for sort in sorts]


class _Carried:
    """How much a card carries until a transfer of some size is done.

    Args:
        counts: Bytes of the transfers that pass it, with how many are of as many.
    """

    def __init__(self, counts: Mapping[float, int]):
        self._until: dict[float, float] = {}
        left, before = sum(counts.values()), 0.0
        for size in sorted(counts):
            self._until[size] = before + left * size
            before += counts[size] * size
            left -= counts[size]

    def until(self, size: float) -> float:
        """Bytes carried when the transfers of a size that is among them are done."""
        return self._until[size]
