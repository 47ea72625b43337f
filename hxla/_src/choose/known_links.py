"""The links that plans count: described in a mesh file, or measured by a profile."""

import itertools
from collections.abc import Sequence

from ..cluster.cluster import Cluster, Link, Node
from ..profile.profile import MeasuredLink

_MESSAGE_BYTES = 1 << 18  # by which links are compared


def with_measured(
    cluster: Cluster, links: Sequence[MeasuredLink]
) -> tuple[Cluster, tuple[str, ...]]:
    """A cluster with measured links, and a line for each of them.

    A described link stays unless it was measured in its own mesh: elsewhere the same kinds of
    devices may be linked in another way.
    """
    if not links or len(cluster.devices) < 2:
        return cluster, ()
    nodes = cluster.nodes or (Node(name="here"),)
    ranks = ranks_of_nodes(cluster)
    lines: dict[str, None] = {}

    def chosen(a: Sequence[int], b: Sequence[int], described: Link | None) -> Link | None:
        """The link between two devices of one node, or one of each of two nodes."""
        labels = ({cluster.devices[rank].label for rank in group} for group in (a, b))
        wanted = {tuple(sorted(pair)) for pair in itertools.product(*labels)}
        met = [x for x in links if x.kinds in wanted and x.in_node == (a is b)]
        slowest = max(met, key=lambda x: x.link.seconds(_MESSAGE_BYTES), default=None)
        if slowest is None or (described is not None and slowest.mesh != cluster.name):
            return described
        line = f"link {'in a node' if a is b else 'between nodes'}: {link_in_words(slowest.link)}"
        if described is not None and described != slowest.link:
            line += f" measured, {link_in_words(described)} described: the measured one counts"
        else:
            line += " measured"
        lines[line] = None
        return slowest.link

    between: dict[tuple[str, str], Link] = {(a, b): link for a, b, link in cluster.links}
    seen = set()
    for i, j in itertools.combinations(range(len(nodes)), 2):
        first, second = sorted((nodes[i].name, nodes[j].name))
        if (first, second) in seen or not (ranks[i] and ranks[j]):
            continue
        seen.add((first, second))
        link = chosen(ranks[i], ranks[j], cluster.link(ranks[i][0], ranks[j][0]))
        if link is not None:
            between[first, second] = link
    linked = {
        "nodes": tuple(
            node.model_copy(update={"link": chosen(group, group, node.link)})
            for node, group in zip(nodes, ranks, strict=True)
        ),
        "links": tuple((*names, link) for names, link in between.items()),
    }
    return cluster.model_copy(update=linked), tuple(lines)


def are_all_known(cluster: Cluster) -> bool:
    """Whether the link between any two devices is known."""
    groups = [group for group in ranks_of_nodes(cluster) if group]
    inside = (cluster.link(*group[:2]) for group in groups if len(group) > 1)
    pairs = itertools.combinations(range(len(groups)), 2)
    if cluster.default_link is None:
        between = (cluster.link(groups[i][0], groups[j][0]) for i, j in pairs)
        return all(link is not None for link in itertools.chain(inside, between))
    return all(link is not None for link in inside)


def ranks_of_nodes(cluster: Cluster) -> list[list[int]]:
    """The devices of each node."""
    ranks: list[list[int]] = [[] for _ in cluster.nodes or range(1)]
    for rank, device in enumerate(cluster.devices):
        ranks[device.node].append(rank)
    return ranks


def link_in_words(link: Link) -> str:
    """The bandwidth and the latency of a link."""
    rate, latency = link.bytes_per_second / 1e9, link.latency_seconds * 1e6
    return f"{rate:.3g} GB/s, {latency:.3g} us"
