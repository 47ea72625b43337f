"""Transfers at the same time: what each takes where devices of a node share its network card."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from ._cluster import Cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Send:
    """A transfer from one device to another, in one direction.

    Attributes:
        sender: The rank that sends.
        receiver: The rank that receives.
        num_bytes: In one message.
    """

    sender: int
    receiver: int
    num_bytes: float


def ring_transfers(cluster: Cluster, ranks: Iterable[int], num_bytes: float) -> list[Send]:
    """What every device of a ring sends to the next; none for a single device.

    The ring passes the devices node by node, so that it leaves each node once, as the libraries
    of collectives lay rings.

    Args:
        cluster: That the ranks are of.
        ranks: The devices of the ring.
        num_bytes: That each sends.
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
        transfers: The transfers.

    Returns:
        The seconds of each; None where no link is described.
    """
    over: dict[tuple[int, bool], list[float]] = collections.defaultdict(list)
    cards = {node: cluster.network_card(node) for node in _nodes(cluster, transfers)}

    def passed(transfer: Send) -> list[tuple[int, bool]]:
        """The cards that a transfer passes, each with whether it is received there."""
        ends = (cluster.devices[transfer.sender].node, cluster.devices[transfer.receiver].node)
        if ends[0] == ends[1]:
            return []
        known = [(node, cards[node], bool(i)) for i, node in enumerate(ends)]
        return [(node, card.duplex and into) for node, card, into in known if card is not None]

    for transfer in transfers:
        for key in passed(transfer):
            over[key].append(transfer.num_bytes)
    carried = {key: _Carried(sizes) for key, sizes in over.items()}
    found: list[float | None] = []
    for transfer in transfers:
        link = cluster.link(transfer.sender, transfer.receiver)
        if link is None:
            found.append(None)
            continue
        seconds = link.seconds(transfer.num_bytes)
        for node, into in passed(transfer):
            card = cards[node]
            assert card is not None
            shared = carried[node, into].until(transfer.num_bytes) / card.bytes_per_second
            seconds = max(seconds, link.latency_seconds + shared)
        found.append(seconds)
    return found


class _Carried:
    """How much a card carries until a transfer of some size is done.

    Args:
        sizes: Bytes of all transfers that pass it.
    """

    def __init__(self, sizes: Sequence[float]):
        counts = collections.Counter(sizes)
        self._until: dict[float, float] = {}
        left, before = len(sizes), 0.0
        for size in sorted(counts):
            self._until[size] = before + left * size
            before += counts[size] * size
            left -= counts[size]

    def until(self, size: float) -> float:
        """Bytes carried when the transfers of a size that is among them are done."""
        return self._until[size]


def _nodes(cluster: Cluster, transfers: Sequence[Send]) -> set[int]:
    ranks = itertools.chain.from_iterable(
        (transfer.sender, transfer.receiver) for transfer in transfers
    )
    return {cluster.devices[rank].node for rank in ranks}
