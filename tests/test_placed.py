"""Plans on their devices: never slower for the counts and the cut that suit their transfers."""

import itertools

import chains
import numpy as np

from hxla._cluster._cluster import Cluster, Device, Link, Node
from hxla._core import _errors
from hxla._planner import _placed, _search, _shared_links
from hxla._planner._chain_tables import step_seconds, tables


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
    rng = np.random.default_rng(11)
    num_faster = num_moved = 0
    for _ in range(80):
        chain = chains.random_chain(rng, max_devices=8, max_layers=8, max_microbatches=24)
        described, places = cluster(chain, rng, per_node=int(rng.integers(1, 4)))
        try:
            found = _search.search({"only": chain}, good_enough=0.05)
        except _errors.PlanError:
            continue
        t, staging = tables(chain), found.ranked[-1].staging
        for copies in _shared_links.placements(staging, places, described):
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
    assert num_faster > 8
    assert num_moved > 3


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
