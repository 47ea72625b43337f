"""What sends take on the machines of the measured plans, where devices share a node's network card.

A published curve is a node's bandwidth: 1, 2, 4 or 8 devices of one node each send one message to a
device of another, and the sum of their bytes over the time is fitted by a polynomial in log2 of one
message's megabytes (`profiling/networking/test_sendrecv.py` and `fit_func.py` of the repository).
Nothing comes back meanwhile, so a curve says what a card carries in one direction.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence

from support.inside.choose import LinkSeconds, all_gather_seconds, ring_all_reduce_seconds
from support.sailor_data import Data, Measured, Place

Nodes = Sequence[Sequence[int]]  # of each stage and replica

#: Machines whose cards carry both directions together. Ethernet, InfiniBand and Slingshot are
#: duplex. On the GH200 nodes all 13 reductions that were timed by themselves took more than rings
#: over duplex cards would, and are nearer to twice that; no curve says why.
NOT_DUPLEX = frozenset({"GH-96"})


def node_seconds(coefficients: Sequence[float], num_senders: int) -> LinkSeconds:
    """Seconds of one device's bytes while so many devices of its node send as many each.

    Messages of 64 KiB to 1 GiB were measured. Below 1 MB the fitted polynomials leave what was
    measured (GH200's are negative at 64 KiB), so the bandwidth there is that of 1 MB; above a
    parabola's top it is the top's.
    """
    powers = coefficients[::-1]
    falls = len(powers) == 3 and powers[2] < 0
    top = -powers[1] / (2 * powers[2]) if falls else math.inf

    def seconds(num_bytes):
        log = min(max(math.log2(num_bytes / 1e6), 0.0), top)
        gigabytes_per_second = sum(c * log**i for i, c in enumerate(powers))
        return num_senders * num_bytes / 1e9 / gigabytes_per_second

    return seconds


def between(data: Data, a: Place, num_sent: int, b: Place, num_received: int) -> LinkSeconds:
    """Seconds of one of several messages of like size between two nodes.

    The slower card sets the pace, each as its own kind's curve has it. The published curves of
    unlike kinds of workstations say the same where they are measurements. Most are not: that of a
    Titan-RTX and an RTX-2080 for 1 and 8 devices is, digit by digit, that of an RTX-2080 and an
    RTX-3090, which has the slow card. Between zones there is only the pair's own curve.

    Args:
        data: Curves.
        a: The sender's place.
        num_sent: Messages that leave its node at the same time.
        b: The receiver's place.
        num_received: Messages that reach its node at the same time.
    """
    if a.zone != b.zone:
        return card(data, a, b, max(num_sent, num_received))
    sends, receives = card(data, a, a, num_sent), card(data, b, b, num_received)
    return lambda num_bytes: max(sends(num_bytes), receives(num_bytes))


def card(data: Data, a: Place, b: Place, num_senders: int) -> LinkSeconds:
    """By the curve of the most devices that do not exceed the senders."""
    curves = {
        count: coefficients
        for (sender, receiver), coefficients in data.curves.items()
        if (sender.kind, sender.zone, receiver.kind, receiver.zone)
        == (a.kind, a.zone, b.kind, b.zone)
        and (count := sender.tensor) == receiver.tensor
    }
    count = max((c for c in curves if c <= num_senders), default=min(curves))
    return node_seconds(curves[count], num_senders)


def inside(data: Data, place: Place) -> LinkSeconds:
    """Seconds of one device's message inside a node, while its whole group sends in a ring.

    The curves are of one half of 2, 4 or 8 devices that send to the other half.
    """
    counts = [count for kind, count in data.inside if kind == place.kind]
    count = max((c for c in counts if c <= place.tensor), default=min(counts))
    return node_seconds(data.inside[place.kind, count], max(1, count // 2))


def gather_seconds(data: Data, place: Place, whole_bytes: float) -> float:
    """Every rank of a group gets the parts of the others, in a ring inside the node."""
    if place.tensor == 1:
        return 0.0
    return all_gather_seconds(whole_bytes, place.tensor, inside(data, place))


def nodes_of(data: Data, plan: Measured) -> list[list[int]]:
    """The node of each stage's groups.

    A plan file gives each group a kind and a zone but no machine. Ranks go stage by stage, replica
    by replica (`local_controller.py` of the repository), and machines are filled in their order. A
    machine has as many devices as the largest curve of its kind.
    """
    sizes: dict[str, int] = collections.defaultdict(int)
    for sender, receiver in data.curves:
        if sender.kind == receiver.kind:
            sizes[sender.kind] = max(sizes[sender.kind], sender.tensor)
    numbers = itertools.count()
    left: dict[tuple[str, str], int] = collections.defaultdict(int)
    current: dict[tuple[str, str], int] = {}
    found = []
    for stage in plan.places:
        found.append([])
        for place in stage:
            key = (place.kind, place.zone)
            if left[key] < place.tensor:
                current[key], left[key] = next(numbers), sizes[place.kind]
            left[key] -= place.tensor
            found[-1].append(current[key])
    return found


@dataclasses.dataclass(frozen=True)
class Hop:
    """Two groups, of which one sends to the other."""

    a: Place
    node_a: int
    b: Place
    node_b: int

    @property
    def num_messages(self) -> int:
        """Ranks of the larger group each have a partner in the smaller one."""
        return max(self.a.tensor, self.b.tensor)

    @property
    def leaves(self) -> bool:
        return self.node_a != self.node_b


def boundary_seconds(data: Data, hops: Sequence[Hop], whole_bytes: float) -> list[float]:
    """Of each replica, sending activations one way over a boundary while all replicas do.

    A rank sends its part, one t-th of the activation, to each of its partners.
    """
    sent, received = collections.Counter(), collections.Counter()
    for hop in hops:
        if hop.leaves:
            sent[hop.node_a] += hop.num_messages
            received[hop.node_b] += hop.num_messages
    found = []
    for hop in hops:
        size = whole_bytes / hop.a.tensor
        if hop.leaves:
            link = between(data, hop.a, sent[hop.node_a], hop.b, received[hop.node_b])
        else:
            link = inside(data, dataclasses.replace(hop.a, tensor=2 * hop.num_messages))
        found.append(link(size))
    return found


def reduction_seconds(
    data: Data,
    plan: Measured,
    nodes: Nodes,
    stage_bytes: Sequence[float],
    not_duplex: Collection[str] = NOT_DUPLEX,
) -> list[float]:
    """Of each stage, the rings over its replicas while those of all stages run.

    A stage has as many rings as its largest group has ranks. A group of fewer takes several in
    turn, so that as many run at once as the smallest has ranks. A ring leaves each node once.

    Args:
        data: Curves.
        plan: Whose replicas add up their gradients.
        nodes: Of its groups.
        stage_bytes: Gradients of one rank, of the largest group, of each stage.
        not_duplex: Kinds whose cards carry both directions together.
    """
    at_once = collections.Counter()
    for places, own in zip(plan.places, nodes, strict=True):
        if len(set(own)) > 1:
            for node in set(own):
                at_once[node] += min(place.tensor for place in places)
    found = []
    for places, own, num_bytes in zip(plan.places, nodes, stage_bytes, strict=True):
        order = sorted(zip(own, places, strict=True))
        turns = max(p.tensor for p in places) // min(p.tensor for p in places)
        slowest = 0.0
        for (node_a, a), (node_b, b) in zip(order, (*order[1:], order[0]), strict=True):
            if len(order) == 1:
                continue
            if node_a == node_b:
                link = inside(data, a)
            else:
                link = between(data, a, at_once[node_a], b, at_once[node_b])
            directions = 2 if {a.kind, b.kind} & not_duplex else 1
            slowest = max(
                slowest, directions * ring_all_reduce_seconds(num_bytes, len(places), link)
            )
        found.append(turns * slowest)
    return found
