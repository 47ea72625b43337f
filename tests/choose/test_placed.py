"""Plans on their devices: never slower for the counts and the cut that suit their transfers."""

import dataclasses
import itertools

import numpy as np
import pytest

from hxla import Cluster, Device, LayerSize, LayerTime, Link, NetworkCard, Node, Profile, Setting
from support import chains
from support.inside.choose import (
    _placed,
    _propose,
    _search,
    _shared_links,
    step_seconds,
    tables,
    tail_seconds,
)
from support.inside.core import _errors
from support.shared_clusters import search_chain, searched
from support.tiers import examples


def cluster(chain, rng, per_node):
    """A chain's devices on nodes of a few each, and the tensor-parallel groups of every kind."""
    devices, nodes, places = [], [], []
    for group in chain.groups:
        own = []
        for i in range(group.num_devices):
            if i % per_node == 0:
                nodes.append(Node(name=f"n{len(nodes)}", link=Link(bytes_per_second=1e3)))
            own.append((len(devices),))
            devices.append(Device(kind=group.kind, node=len(nodes) - 1))
        places.append(own)
    return (
        Cluster(
            name="random",
            devices=tuple(devices),
            nodes=tuple(nodes),
            default_link=Link(bytes_per_second=float(10.0 ** rng.uniform(0, 1.5))),
        ),
        places,
    )


def test_a_plan_that_suits_its_transfers_is_one_and_no_slower():
    rng, num = np.random.default_rng(11), examples(7, 60)
    num_faster = num_moved = 0
    for _ in range(num):
        chain = chains.random_chain(rng, max_devices=8, max_layers=8, max_microbatches=24)
        described, places = cluster(chain, rng, per_node=int(rng.integers(1, 4)))
        try:
            found = _search.search({"only": chain})
        except _errors.PlanError:
            continue
        t, staging = tables(chain), found.ranked[-1].staging
        for _, copies in _shared_links.placements(staging, places, described):
            start = _placed.placed(chain, t, staging, copies, described, reduce_factor=1.0)
            best = _placed.improved(chain, t, start, described, reduce_factor=1.0)
            assert best.step_seconds <= start.step_seconds
            assert not chains.faults(chain, best.staging)
            own = best.staging
            assert own.step_seconds >= step_seconds(chain, own.cuts, own.replicas) * (1 - 1e-9)
            assert best.step_seconds >= found.bound_seconds * (1 - 1e-9)
            # The same devices hold the same stages of as many copies.
            assert sorted(best.copies) == sorted(start.copies)
            kinds = [r.groups for r in own.replicas for _ in range(r.count)]
            for (place, *_), kind in itertools.chain(
                *(zip(*x, strict=True) for x in zip(best.copies, kinds, strict=True))
            ):
                assert described.devices[place].kind == chain.groups[kind].kind
            # What is said of the traffic holds for the plan as it is read from anew.
            again = _placed.placed(chain, t, own, best.copies, described, reduce_factor=1.0)
            assert again.step_seconds <= best.step_seconds * (1 + 1e-9)
            num_faster += best.step_seconds < start.step_seconds * (1 - 1e-6)
            num_moved += own.cuts != staging.cuts
    assert num_faster > 0.1 * num
    assert num_moved > 0.03 * num


def test_a_copy_whose_transfers_share_a_card_gets_fewer_microbatches():
    """Of three copies of two stages two send over one card, the third within its node."""
    group = chains.Group(
        kind="A",
        num_devices=6,
        memory_bytes=1e9,
        forward_seconds=(1.0, 1.0),
        backward_seconds=(2.0, 2.0),
        update_seconds=(0.0, 0.0),
        parameter_bytes=(1.0, 1.0),
        stash_bytes=(1.0, 1.0),
    )
    chain = chains.Chain(
        groups=(group,), num_microbatches=30, output_bytes=(100.0, 0.0), send_seconds=((1e-3,),)
    )
    described, _ = cluster(chain, np.random.default_rng(0), per_node=2)
    sort = _placed.ReplicaSort(groups=(0, 0), count=3, num_microbatches=10)
    staging = _placed.Staging(
        cuts=(0, 1), replicas=(sort,), step_seconds=step_seconds(chain, (0, 1), [sort])
    )
    copies = [[(0,), (1,)], [(2,), (4,)], [(3,), (5,)]]
    start = _placed.placed(chain, tables(chain), staging, copies, described, reduce_factor=0.0)
    best = _placed.improved(chain, tables(chain), start, described, reduce_factor=0.0)
    counts = [r.num_microbatches for r in best.staging.replicas for _ in range(r.count)]
    assert dict(zip(map(str, best.copies), counts, strict=True))[str(copies[0])] == max(counts)
    assert min(counts) < 10 < max(counts)


def random_cluster(rng, *, has_several_nodes=False):
    """Few devices on nodes of one kind each, or of several, and speeds of links and cards."""
    kinds = "ABC"[: int(rng.choice(3, p=[0.2, 0.6, 0.2])) + 1]
    alone = rng.random() < 0.6  # every kind a node
    numbers = [int(rng.integers(1, 5 - len(kinds))) + (len(kinds) == 1) for _ in kinds]
    if has_several_nodes:
        kinds, alone = kinds[:2], False
        numbers = [int(rng.integers(3, 6 - len(kinds) // 2)), 1]
    devices, nodes = [], []
    for kind, num in zip(kinds, numbers, strict=False):
        for i in range(num):
            if not i or (not alone and rng.random() < 0.5):
                inside = Link(bytes_per_second=float(rng.uniform(5, 50)))
                card = NetworkCard(
                    bytes_per_second=float(rng.uniform(2, 8)), duplex=bool(rng.random() < 0.7)
                )
                nodes.append(Node(name=f"n{len(nodes)}", link=inside, network_card=card))
            is_elsewhere = rng.random() < 0.1 and not has_several_nodes
            where = int(rng.integers(len(nodes))) if is_elsewhere else len(nodes) - 1
            memory = int(rng.integers(60, 400)) if not i else devices[-1].memory_bytes
            devices.append(Device(kind=kind, node=where, memory_bytes=memory))
    between = Link(
        bytes_per_second=float(rng.uniform(2, 10)), latency_seconds=float(rng.uniform(0, 0.05))
    )
    return Cluster(name="random", devices=tuple(devices), nodes=tuple(nodes), default_link=between)


def random_work(rng, described, layers=(1, 4)):
    """A chain of few layers whose transfers take about as long as its work, and its times."""
    num = int(rng.integers(*layers))
    sizes = tuple(
        LayerSize(
            parameter_bytes=float(rng.integers(1, 12)),
            output_bytes=float(rng.integers(0, 5)),
            stash_bytes=float(rng.integers(0, 6)),
        )
        for _ in range(num)
    )
    chain = _propose.ChainWork(
        layers=tuple(map(str, range(num))),
        sizes={(1, 1): sizes},
        sent_bytes={},
        input_bytes={1: 0},
        batch_size=int(rng.integers(2, 6)),
        state_factor=4.0,
    )
    times = {
        Setting(kind, 1): tuple(
            LayerTime(forward=a, backward=2 * a, update=a / 10) for a in rng.uniform(0.2, 1, num)
        )
        for kind in {device.kind for device in described.devices}
    }
    return chain, Profile(model="m", layers=chain.layers, sizes={}, times=times)


def best_placed(chain, places, described):
    """The least step of any plan on any of its places, by the formula that plans are chosen by."""
    t, num_layers, m = tables(chain), len(chain.output_bytes), chain.num_microbatches
    sizes = [len(own) for own in places]
    slots = [(k, place) for k, own in enumerate(places) for place in own]
    best = np.inf
    for num in range(1, min(num_layers, len(slots)) + 1):
        orders = list(itertools.product(range(len(places)), repeat=num))
        for cuts in chains.all_cuts(num_layers, num):
            spans = list(zip(cuts, (*cuts[1:], num_layers), strict=True))
            costs = {own: chains.pipeline_costs(chain, spans, own) for own in orders}
            for count in range(1, min(len(slots) // num, m) + 1):
                for replicas in itertools.combinations_with_replacement(orders, count):
                    held = [k for own in replicas for k in own]
                    if any(held.count(k) > n for k, n in enumerate(sizes)):
                        continue
                    sorts = tuple(
                        _placed.ReplicaSort(groups=own, count=1, num_microbatches=1)
                        for own in replicas
                    )
                    staging = _placed.Staging(cuts=cuts, replicas=sorts, step_seconds=0.0)
                    for copies in every_placement(replicas, places, described):
                        traffic = _shared_links.traffic_of(
                            chain, staging, copies, described, reduce_factor=1.0
                        )
                        for inner in itertools.combinations(range(1, m), count - 1):
                            counts = [b - a for a, b in itertools.pairwise((0, *inner, m))]
                            if any(
                                n > costs[own][2] for n, own in zip(counts, replicas, strict=True)
                            ):
                                continue
                            dealt = tuple(
                                dataclasses.replace(sort, num_microbatches=n)
                                for sort, n in zip(sorts, counts, strict=True)
                            )
                            plan = dataclasses.replace(staging, replicas=dealt)
                            seconds = _shared_links.shared_step_seconds(t, plan, traffic)
                            best = min(best, seconds)
    return best


def every_placement(replicas, places, described):
    """Devices for all stages of all copies; those of a kind in one node are alike."""
    nodes = [[described.devices[place[0]].node for place in own] for own in places]
    each = []
    for k, own in enumerate(nodes):
        num = sum(kinds.count(k) for kinds in replicas)
        each.append(set(itertools.permutations(own, num)))
    for choice in itertools.product(*each):
        free = [
            {node: [p for p, n in zip(own, at, strict=True) if n == node] for node in at}
            for own, at in zip(places, nodes, strict=True)
        ]
        wanted = [iter(own) for own in choice]
        yield [[free[k][next(wanted[k])].pop(0) for k in kinds] for kinds in replicas]


def test_plans_are_the_best_of_all_places():
    """Small clusters of all sorts, also those whose every kind is a node."""
    rng = np.random.default_rng(17)
    ratios, num = [], examples(7, 100)
    for seed in range(num):
        described = random_cluster(rng)
        work, times = random_work(rng, described)
        chain, places = search_chain(described, work, times)
        try:
            found = searched(described, chain, places)
        except _errors.PlanError:
            continue
        best, step = best_placed(chain, places, described), found.ranked[0].staging.step_seconds
        assert found.bound_seconds <= best * (1 + 1e-9), seed
        assert step >= best * (1 - 1e-9), seed
        ratios.append(step / best)
    assert len(ratios) > 0.5 * num
    assert np.mean(np.array(ratios) < 1.02) > 0.8


def four_layers(num_devices):
    """Like layers of three seconds a microbatch, on devices that hold all of them."""
    return chains.Group(
        kind="A",
        num_devices=num_devices,
        memory_bytes=1e9,
        forward_seconds=(1.0,) * 4,
        backward_seconds=(2.0,) * 4,
        update_seconds=(0.0,) * 4,
        parameter_bytes=(1.0,) * 4,
        stash_bytes=(1.0,) * 4,
    )


def like_layers(num_kinds, *, inside, num_devices=4):
    """Four like layers on kinds that are alike, each a node; sums take long but inside a node."""
    return chains.Chain(
        groups=(four_layers(num_devices),) * num_kinds,
        num_microbatches=32,
        output_bytes=(1.0,) * 4,
        reduce_seconds=(8.0,) * num_kinds,
        rings=chains.Rings(
            inside_seconds=(inside,) * num_kinds, copies_inside=(num_devices,) * num_kinds
        ),
    )


@pytest.mark.parametrize(
    ("kinds", "count", "seconds"),
    [
        ([(0,)], 1, 0.0),
        ([(0,)], 2, 4 * 0.5 * 0.1),  # of two copies half of what very many take
        ([(0,)], 4, 4 * 0.75 * 0.1),
        ([(0,), (1,)], 1, 4 * 0.5 * 8.0),  # of two kinds: between nodes
        ([(0,), (1,)], 4, 4 * 0.875 * 8.0),
    ],
)
def test_sums_of_few_copies_and_of_those_in_a_node_take_less(kinds, count, seconds):
    t = tables(like_layers(2, inside=0.1))
    sorts = [_placed.ReplicaSort(groups=own, count=count, num_microbatches=1) for own in kinds]
    assert tail_seconds(t, (0,), sorts) == pytest.approx(seconds)


def test_a_stage_on_each_node_is_found_where_sums_between_nodes_take_long():
    found = _search.search({"only": like_layers(2, inside=0.1)})
    best = found.ranked[0].staging
    assert best.cuts == (0, 2)
    assert {own.groups for own in best.replicas} <= {(0, 1), (1, 0)}
