"""The replay of all copies together, in cases that can be reckoned by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hxla
from support.card_replay import card_replay
from support.inside.choose import Chain, Group, ReplicaSort, Staging
from support.inside.schedule import blocking_replay
from support.tiers import examples

RATE = 100.0  # bytes a second of a card, and of the link between two nodes


def cluster(per_node, num_nodes=2, latency=0.0, **card):
    devices = tuple(
        hxla.Device(kind="cpu", node=node) for node in range(num_nodes) for _ in range(per_node)
    )
    own = hxla.NetworkCard(**{"bytes_per_second": RATE} | card)
    nodes = tuple(hxla.Node(name=f"n{i}", network_card=own) for i in range(num_nodes))
    between = hxla.Link(bytes_per_second=RATE, latency_seconds=latency)
    return hxla.Cluster(name="c", devices=devices, nodes=nodes, default_link=between)


def chain(forward, backward, output_bytes):
    """A layer for each stage."""
    nothing = (0.0,) * len(forward)
    group = Group(
        kind="cpu",
        num_devices=99,
        memory_bytes=1e9,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        update_seconds=nothing,
        parameter_bytes=nothing,
        stash_bytes=nothing,
    )
    return Chain(groups=(group,), num_microbatches=1, output_bytes=(*output_bytes, 0.0))


def replayed(own, num_microbatches, copies, described, starts):
    num = len(own.output_bytes)
    sort = ReplicaSort(groups=(0,) * num, count=len(copies), num_microbatches=num_microbatches)
    staging = Staging(cuts=tuple(range(num)), replicas=(sort,), step_seconds=0.0)
    return card_replay(own, staging, copies, described, starts)


def in_step(num_copies, num_nodes=2):
    """Copies of which each stage is in a node of its own, beside those of the others."""
    return [[(node * num_copies + i,) for node in range(num_nodes)] for i in range(num_copies)]


# Two stages, forward 1 s and backward 2 s, a message of 50 bytes: half a second alone.
TWO = chain([1.0, 1.0], [2.0, 2.0], [50.0])
# F, its transfer, F and B of stage 1, its transfer, B: a microbatch alone.
ALONE = 1 + 0.5 + 3 + 0.5 + 2


@settings(max_examples=examples(15, 60))
@given(
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from([1, 0.125, 0.375]),  # sums are exact: whoever is first of two is so in both
)
def test_one_copy_alone_takes_what_its_own_replay_says(stages, num_microbatches, unit):
    forward, backward, sent = ([unit * x for x in own] for own in zip(*stages, strict=True))
    own = chain(forward, backward, [RATE * x for x in sent[:-1]])
    num = len(stages)
    [done] = replayed(own, num_microbatches, in_step(1, num), cluster(1, num), [0.0])
    schedule = hxla.make_schedule("1f1b", num, num_microbatches)
    expected = blocking_replay(schedule, forward, backward, sent[:-1])
    assert done == pytest.approx(expected.makespan_seconds)


def test_copies_in_step_share_a_card_and_take_twice_the_transfers():
    assert replayed(TWO, 1, in_step(2), cluster(2), [0.0, 0.0]) == pytest.approx([ALONE + 1] * 2)


def test_copies_a_transfer_apart_have_it_to_themselves():
    assert replayed(TWO, 1, in_step(2), cluster(2), [0.0, 0.5]) == pytest.approx(
        [ALONE, ALONE + 0.5]
    )


def test_copies_a_transfer_apart_stay_so_through_a_step():
    num = 10
    [alone] = replayed(TWO, num, in_step(1), cluster(1), [0.0])
    both = replayed(TWO, num, in_step(2), cluster(2), [0.0, 0.0])
    apart = replayed(TWO, num, in_step(2), cluster(2), [0.0, 0.5])
    assert max(apart) == pytest.approx(alone + 0.5)
    doubled = chain([1.0, 1.0], [2.0, 2.0], [100.0])
    assert both == pytest.approx(replayed(doubled, num, in_step(1), cluster(1), [0.0]) * 2)
    assert max(apart) < max(both)


def test_shares_follow_who_is_there():
    # The first has sent half of its bytes when the second begins, each sends 25 at half the rate,
    # and the last 25 of the second have the card to themselves; the way back is alike.
    own = chain([1.0, 0.0], [0.0, 0.0], [50.0])
    done = replayed(own, 1, in_step(2), cluster(2), [0.0, 0.25])
    assert done == pytest.approx([1 + 2 * 0.75, 1 + 2 * 0.75 + 0.25])


@pytest.mark.parametrize(("duplex", "seconds"), [(True, 0.5), (False, 1.0)])
def test_directions_share_a_card_that_is_not_duplex(duplex, seconds):
    own = chain([1.0, 1.0], [2.0, 2.0], [50.0])
    there_and_back = [[(0,), (2,)], [(3,), (1,)]]
    done = replayed(own, 1, there_and_back, cluster(2, duplex=duplex), [0.0, 0.0])
    assert done == pytest.approx([6 + 2 * seconds] * 2)


def test_a_tensor_group_sends_from_every_rank_at_once():
    assert replayed(TWO, 1, [[(0, 1), (2, 3)]], cluster(2), [0.0]) == pytest.approx([ALONE + 1])


def test_devices_of_a_node_use_no_card():
    assert replayed(TWO, 1, [[(0,), (1,)]] * 2, cluster(2), [0.0, 0.0]) == pytest.approx([6.0] * 2)


def test_a_transfer_takes_its_latency_and_no_less_than_its_link():
    fast = cluster(2, latency=0.1, bytes_per_second=10 * RATE)
    assert replayed(TWO, 1, in_step(2), fast, [0.0, 0.0]) == pytest.approx([ALONE + 0.2] * 2)


def test_many_copies_through_one_card_are_no_faster_than_each_alone():
    own = chain([1.0] * 8, [2.0] * 8, [50.0] * 7)
    done = replayed(own, 16, in_step(4, 8), cluster(4, 8), [0.0, 0.5, 1.0, 1.5])
    [alone] = replayed(own, 16, in_step(1, 8), cluster(1, 8), [0.0])
    assert len(done) == 4
    assert all(end >= alone + i * 0.5 - 1e-9 for i, end in enumerate(done))
