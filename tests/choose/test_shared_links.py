"""Transfers that share their nodes' network cards, beside a simulation of shares of bandwidth."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hxla
from support.inside.choose import (
    NEXT,
    Chain,
    Group,
    ReplicaSort,
    Staging,
    busiest_card_seconds,
    copies_in,
    placements,
    ring_all_reduce_seconds,
    shared_step_seconds,
    staging_cost,
    step_seconds,
    tables,
    traffic_of,
)
from support.inside.cluster import Send, ring_transfers, transfer_seconds
from support.shared_clusters import cluster, profile, proposed, search_chain, searched, work
from support.tiers import examples


def simulated(transfers, rate):
    """When each transfer over one card is done, if those that are left share it evenly."""
    left, now, done = dict(enumerate(transfers)), 0.0, {}
    while left:
        share = rate / len(left)
        first = min(left.values()) / share
        now += first
        left = {i: size - first * share for i, size in left.items()}
        for i in [i for i, size in left.items() if size <= 1e-6]:
            done[i] = now
            del left[i]
    return [done[i] for i in range(len(transfers))]


def across(*sizes):
    return [Send(sender=i, receiver=4 + i, num_bytes=size) for i, size in enumerate(sizes)]


@settings(max_examples=examples(20, 50))
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=4))
def test_a_card_is_shared_evenly_until_the_shortest_transfer_is_done(sizes):
    times = transfer_seconds(cluster(), across(*sizes))
    assert times == pytest.approx(simulated(sizes, 1e9))


def test_one_transfer_takes_what_its_link_says():
    described = cluster(latency=1e-3, card=hxla.NetworkCard(bytes_per_second=4e9))
    assert transfer_seconds(described, across(1e9)) == [1.001]


def test_cards_as_many_as_devices_share_nothing():
    described = cluster(card=hxla.NetworkCard(bytes_per_second=4e9))
    assert transfer_seconds(described, across(*[1e9] * 4)) == [1.0] * 4
    assert transfer_seconds(cluster(), across(*[1e9] * 4)) == [4.0] * 4


@pytest.mark.parametrize(("duplex", "seconds"), [(True, 1.0), (False, 2.0)])
def test_a_card_that_is_not_duplex_is_shared_by_both_directions(duplex, seconds):
    card = hxla.NetworkCard(bytes_per_second=1e9, duplex=duplex)
    both = [
        Send(sender=0, receiver=4, num_bytes=1e9),
        Send(sender=4, receiver=0, num_bytes=1e9),
    ]
    assert transfer_seconds(cluster(card=card), both) == [seconds] * 2


def test_a_receivers_card_is_shared_too():
    described = cluster(num_nodes=3, per_node=1)
    both = [Send(sender=i, receiver=2, num_bytes=1e9) for i in (0, 1)]
    assert transfer_seconds(described, both) == [2.0, 2.0]


def test_devices_of_a_node_use_no_card():
    inside = Send(sender=0, receiver=1, num_bytes=1e9)
    assert transfer_seconds(cluster(), [inside, *across(1e9, 1e9)]) == [1e-3, 2.0, 2.0]


def test_a_card_that_is_not_described_is_the_nodes_fastest_link():
    nodes = tuple(hxla.Node(name=name) for name in "abc")
    links = (("a", "b", hxla.Link(bytes_per_second=5.0)), ("a", "c", hxla.Link(bytes_per_second=1)))
    devices = tuple(hxla.Device(kind="cpu", node=i) for i in range(3))
    described = hxla.Cluster(name="c", devices=devices, nodes=nodes, links=links)
    assert [described.network_card(i).bytes_per_second for i in range(3)] == [5, 5, 1]
    assert described.network_card(0).duplex
    alone = hxla.Cluster(name="c", devices=devices[:1], nodes=nodes[:1])
    assert alone.network_card(0) is None


def test_one_ring_leaves_each_node_once_and_many_rings_share():
    described = cluster(num_nodes=3)
    (one, several) = (
        [ring_transfers(described, ranks, 1e9) for ranks in rings]
        for rings in ([(0, 4, 8, 1, 5, 9)], [(i, 4 + i, 8 + i) for i in range(4)])
    )
    assert max(transfer_seconds(described, one[0])) == 1.0
    assert (
        max(transfer_seconds(described, [transfer for own in several for transfer in own])) == 4.0
    )


def test_a_ring_of_its_own_takes_the_formula():
    described = cluster(num_nodes=4, per_node=1, latency=1e-4)
    (seconds,) = set(transfer_seconds(described, ring_transfers(described, range(4), 1e9 / 4)))
    formula = ring_all_reduce_seconds(1e9, 4, described.default_link.seconds)
    assert 2 * 3 * seconds == pytest.approx(formula)


def chain_of(num_groups, *, num_layers=4, devices=4):
    row = (1.0,) * num_layers
    group = Group(
        kind="cpu",
        num_devices=devices,
        memory_bytes=1e12,
        forward_seconds=row,
        backward_seconds=row,
        update_seconds=row,
        parameter_bytes=(1e9,) * num_layers,
        stash_bytes=row,
    )
    return Chain(groups=(group,) * num_groups, num_microbatches=8, output_bytes=(1e9,) * num_layers)


def placed_next(staging, places):
    return copies_in(staging, places, cluster(), [NEXT] * len(places))


def test_copies_that_share_a_card_send_in_turns():
    """Four copies of two stages, each with its first on one node and its second on the other."""
    chain = chain_of(2)
    sort = ReplicaSort(groups=(0, 1), count=4, num_microbatches=2)
    staging = Staging(cuts=(0, 2), replicas=(sort,), step_seconds=1.0)
    copies = placed_next(staging, [[(i,) for i in range(4)], [(i,) for i in range(4, 8)]])
    assert copies == [[(i,), (4 + i,)] for i in range(4)]
    traffic = traffic_of(chain, staging, copies, cluster(), reduce_factor=1.0)
    assert traffic.send_seconds == ((1.0,),)
    # The rings of either stage stay on a node, 3 / 4 of 2e9 bytes twice over 1e12 bytes a second.
    assert traffic.reduction_seconds == pytest.approx((2 * 3 / 4 * 2e9 / 1e12,) * 2)
    plain, shared = staging_cost(chain, staging), staging_cost(chain, staging, traffic)
    assert shared.start_seconds == ((0.0, 1.0, 2.0, 3.0),)
    # The last begins three transfers later, and its two microbatches cross forth and back.
    assert shared.step_seconds > plain.step_seconds + 3 * 1.0 + 2 * 1.0
    formula = shared_step_seconds(tables(chain), staging, traffic)
    assert formula >= shared.step_seconds


def test_copies_that_take_longest_begin_first_and_others_with_them():
    """Three copies share a card, two others another: two of unlike cards may begin at once."""
    chain = chain_of(2)
    sorts = tuple(ReplicaSort(groups=(0, 1), count=1, num_microbatches=m) for m in (2, 3, 1))
    staging = Staging(cuts=(0, 2), replicas=sorts, step_seconds=1.0)
    described = cluster(num_nodes=4)
    copies = [[(0,), (4,)], [(1,), (8,)], [(12,), (9,)]]
    traffic = traffic_of(chain, staging, copies, described, reduce_factor=1.0)
    # The second shares a card with each of the others, which share none with one another.
    assert staging_cost(chain, staging, traffic).start_seconds == ((1.0,), (0.0,), (1.0,))


@pytest.mark.parametrize("duplex", [True, False])
def test_a_card_has_time_for_all_that_copies_send(duplex):
    """Four copies, each with two microbatches there and back over one card a second each way."""
    chain = chain_of(2)
    sort = ReplicaSort(groups=(0, 1), count=4, num_microbatches=2)
    staging = Staging(cuts=(0, 2), replicas=(sort,), step_seconds=1.0)
    copies = placed_next(staging, [[(i,) for i in range(4)], [(i,) for i in range(4, 8)]])
    described = cluster(card=hxla.NetworkCard(bytes_per_second=1e9, duplex=duplex))
    traffic = traffic_of(chain, staging, copies, described, reduce_factor=1.0)
    assert busiest_card_seconds(staging, traffic) == 4 * 2 * 1.0 * (1 if duplex else 2)


def test_rings_of_all_stages_share_the_card():
    """Two copies of four stages, a copy a node: the card carries what the four rings send."""
    chain = chain_of(1, devices=8)
    sort = ReplicaSort(groups=(0,) * 4, count=2, num_microbatches=4)
    staging = Staging(cuts=(0, 1, 2, 3), replicas=(sort,), step_seconds=1.0)
    copies = placed_next(staging, [[(i,) for i in range(8)]])
    traffic = traffic_of(chain, staging, copies, cluster(), reduce_factor=1.0)
    assert traffic.reduction_seconds == pytest.approx((4 * 1.0,) * 4)
    assert traffic.send_seconds == ((1e-3,) * 3,)
    measured = traffic_of(chain, staging, copies, cluster(), reduce_factor=0.0)
    assert measured.reduction_seconds == (0.0,) * 4


def test_a_tensor_parallel_group_sends_all_at_once():
    chain = chain_of(2, devices=2)
    sort = ReplicaSort(groups=(0, 1), count=1, num_microbatches=8)
    staging = Staging(cuts=(0, 2), replicas=(sort,), step_seconds=1.0)
    copies = placed_next(staging, [[(0, 1, 2, 3)], [(4, 5, 6, 7)]])
    traffic = traffic_of(chain, staging, copies, cluster(), reduce_factor=1.0)
    assert traffic.send_seconds == ((4.0,),)


def test_a_plan_is_chosen_for_what_its_transfers_take_together():
    """Two stages of three copies on nodes of two: through some card the rings of both pass."""
    chain = work(parameter_bytes=1e8, output_bytes=1.0)
    described = cluster(per_node=2, num_nodes=3)
    small = tuple(d.model_copy(update={"memory_bytes": int(2e9)}) for d in described.devices)
    described = described.model_copy(update={"devices": small})
    alone = tuple(
        node.model_copy(update={"network_card": hxla.NetworkCard(bytes_per_second=1e12)})
        for node in described.nodes
    )
    apart = proposed(described.model_copy(update={"nodes": alone}), chain, max_stages=2)
    shared = proposed(described, chain, max_stages=2)
    assert apart.cuts == shared.cuts == (0, 4)
    extra = shared.prediction.step_seconds - apart.prediction.step_seconds
    # 4 / 3 of 4e8 bytes of either stage, instead of one.
    assert extra == pytest.approx(4 / 3 * 0.4)
    assert shared.prediction.bound_seconds <= shared.prediction.step_seconds
    assert any("share their nodes' network cards" in reason for reason in shared.reasons)
    assert not any("network cards" in reason for reason in apart.reasons)


def test_like_stages_are_placed_on_one_node_where_that_is_faster():
    """Four stages of two copies on two nodes of four: no ring leaves a node."""
    chain = work(parameter_bytes=1e8, output_bytes=1.0)
    described = cluster()
    small = tuple(d.model_copy(update={"memory_bytes": int(1e9)}) for d in described.devices)
    found = proposed(described.model_copy(update={"devices": small}), chain, max_stages=4)
    assert found.cuts == (0, 2, 4, 6)
    assert sorted(found.replicas) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_sharing_is_not_spoken_of_on_one_node():
    proposal = proposed(cluster(num_nodes=1), work())
    assert not any("network card" in reason for reason in proposal.reasons)


def test_one_ring_over_all_devices_is_as_the_search_has_it():
    proposal = proposed(cluster(), work(), max_stages=1)
    own, places = search_chain(cluster(), work(), profile(work()))
    [best, *_] = searched(cluster(), own, places, max_stages=1).ranked
    assert best.staging.step_seconds == pytest.approx(proposal.prediction.step_seconds)
    assert not any("network card" in reason for reason in proposal.reasons)


def all_placements(staging, num_nodes, per_node):
    """Every way to place stages of copies on devices of one kind, those of a node being alike."""
    num = sum(replica.count * len(replica.groups) for replica in staging.replicas)
    slots = [node for node in range(num_nodes) for _ in range(per_node)]
    for nodes in set(itertools.permutations(slots, num)):
        free = [itertools.count(node * per_node) for node in range(num_nodes)]
        devices = iter([(next(free[node]),) for node in nodes])
        yield [
            [next(devices) for _ in replica.groups]
            for replica in staging.replicas
            for _ in range(replica.count)
        ]


def test_copies_are_placed_where_they_share_cards_least():
    """Beside every placement of random plans on two nodes: never better, and mostly as good."""
    rng = np.random.default_rng(3)
    num_best, first_best = 0, 0
    for _ in range(8):
        chain = chain_of(1, devices=6)
        sent, summed = 10.0 ** rng.uniform(6, 9, 2)
        group = dataclasses.replace(chain.groups[0], parameter_bytes=(summed,) * 4)
        chain = dataclasses.replace(chain, groups=(group,), output_bytes=(sent,) * 4)
        stages, copies = ((2, 2), (2, 3), (3, 2))[rng.integers(3)]
        sort = ReplicaSort(groups=(0,) * stages, count=copies, num_microbatches=4)
        staging = Staging(cuts=(0, 2, 3)[:stages], replicas=(sort,), step_seconds=1.0)
        described, places = cluster(per_node=3), [[(i,) for i in range(6)]]

        def seconds(copies, chain=chain, staging=staging, described=described):
            traffic = traffic_of(chain, staging, copies, described, reduce_factor=1.0)
            return shared_step_seconds(tables(chain), staging, traffic)

        tried = [seconds(own) for _, own in placements(staging, places, described)]
        least = min(map(seconds, all_placements(staging, 2, 3)))
        assert min(tried) >= least * (1 - 1e-9)
        # The bound is one of this formula, over all stagings.
        assert least >= step_seconds(chain, staging.cuts, staging.replicas) * (1 - 1e-9)
        num_best += min(tried) <= least * (1 + 1e-6)
        first_best += tried[0] <= least * (1 + 1e-6)
    assert num_best > first_best
    assert num_best >= 7


def test_stages_of_like_copies_share_a_node_where_sums_are_what_takes_long():
    """Two copies of two stages on two nodes: a stage a node, and no ring leaves it."""
    chain = dataclasses.replace(chain_of(1, devices=4), output_bytes=(1.0,) * 4)
    sort = ReplicaSort(groups=(0, 0), count=2, num_microbatches=4)
    staging = Staging(cuts=(0, 2), replicas=(sort,), step_seconds=1.0)
    described = cluster(per_node=2)
    found = [own for _, own in placements(staging, [[(i,) for i in range(4)]], described)]
    assert found == [[[(0,), (1,)], [(2,), (3,)]], [[(0,), (2,)], [(1,), (3,)]]]
    sums = [
        max(traffic_of(chain, staging, own, described, reduce_factor=1.0).reduction_seconds)
        for own in found
    ]
    # 1 / 2 of 2e9 bytes twice, of both stages through each card, or over the links inside.
    assert sums == pytest.approx([4.0, 2e-3])
