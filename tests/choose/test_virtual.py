"""Virtual devices, against the rules of Whale's section 3.2.1."""

import pytest

import hxla
from support.inside.choose import Request, assign_devices


def ask(*counts, kind="replicate"):
    return [Request(kind=kind, device_count=c) for c in counts]


def test_task_graphs_take_devices_in_order():
    virtual = assign_devices(ask(1, 3), 4)
    assert virtual.devices == (((0,), (1, 2, 3)),)


def test_a_multiple_of_the_request_is_nested_data_parallelism():
    virtual = assign_devices(ask(1, 1), 6)
    assert virtual.devices == (((0,), (1,)), ((2,), (3,)), ((4,), (5,)))


def test_no_count_means_all_devices_of_the_replica():
    assert assign_devices(ask(None, None), 3).devices == (((0, 1, 2), (0, 1, 2)),)
    virtual = assign_devices(ask(None, 2), 4)
    assert virtual.devices == (((0, 1), (0, 1)), ((2, 3), (2, 3)))


def test_sharing_uses_the_same_devices():
    virtual = assign_devices(ask(4, 2), 8, share=True)
    assert virtual.num_replicas == 2
    assert virtual.replica(1) == (4, 5, 6, 7)


def test_replicas_stay_within_a_node_where_they_can():
    virtual = assign_devices(ask(2), 6, nodes=[3, 3])
    inside = [v[0] for v in virtual.devices if len({d // 3 for d in v[0]}) == 1]
    assert len(inside) == 2
    assert sorted(d for v in virtual.devices for d in v[0]) == list(range(6))


def test_replicas_may_be_spread_over_nodes():
    virtual = assign_devices(ask(2), 4, nodes=[2, 2], prefer_intra_node=False)
    assert virtual.devices == (((0, 2),), ((1, 3),))


def test_a_remainder_is_refused_with_the_counts_that_fit():
    with pytest.raises(hxla.PlanError, match="use 3, 6, 9, 12"):
        assign_devices(ask(1, 2), 8)


def test_sharing_is_offered_where_it_would_fit():
    with pytest.raises(hxla.PlanError, match="share_devices"):
        assign_devices(ask(8, 8), 8)


def test_layouts_place_copies_within_their_groups():
    split = ask(None, kind="split")
    assert assign_devices(split, 4, nodes=[2, 2]).num_replicas == 1
    host = assign_devices(split, 4, nodes=[2, 2], layout="host")
    assert host.devices == (((0, 1),), ((2, 3),))
    given = assign_devices(split, 4, layout=[[0, 2], [1, 3]])
    assert given.devices == (((0, 2),), ((1, 3),))
    inner = assign_devices(ask(1, kind="split"), 4, layout=[[3, 2], [1, 0]])
    assert inner.devices == (((3,),), ((2,),), ((1,),), ((0,),))
    assert assign_devices(split, 4, nodes=[2, 2], layout="all").devices == (((0, 1, 2, 3),),)


@pytest.mark.parametrize(
    ("layout", "nodes", "message"),
    [
        ([[0, 1], [1, 2]], None, "each of the 4 devices once"),
        ([[0, 1, 2], [3]], None, "of one length"),
        ("host", [3, 1], r"hosts of one size, these have \[3, 1\] devices"),
        ("all", None, "one replica over 4 devices.*make 2"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout, nodes, message):
    with pytest.raises(hxla.PlanError, match=message):
        assign_devices(ask(2, kind="split"), 4, nodes=nodes, layout=layout)
