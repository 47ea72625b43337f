"""Clusters whose devices share network cards, and plans for them."""

import hxla
from hxla import LayerSize, LayerTime, Profile, Setting
from support.inside.choose import Alternative, ChainWork, DevicePlacement, _propose, propose, search

FAST = hxla.Link(bytes_per_second=1e12)


def cluster(*, per_node=4, num_nodes=2, rate=1e9, latency=0.0, card=None, inside=FAST):
    devices = tuple(
        hxla.Device(kind="cpu", node=node) for node in range(num_nodes) for _ in range(per_node)
    )
    nodes = (hxla.Node(name="n", link=inside, network_card=card),) * num_nodes
    between = hxla.Link(bytes_per_second=rate, latency_seconds=latency)
    return hxla.Cluster(name="c", devices=devices, nodes=nodes, default_link=between)


def work(num_layers=8, parameter_bytes=1e6, output_bytes=1e6):
    size = LayerSize(
        parameter_bytes=parameter_bytes, output_bytes=output_bytes, stash_bytes=output_bytes
    )
    return ChainWork(
        layers=tuple(map(str, range(num_layers))),
        sizes={(1, 1): (size,) * num_layers},
        sent_bytes={},
        input_bytes={1: 1},
        batch_size=64,
        state_factor=4.0,
    )


def profile(chain):
    layers = (LayerTime(forward=1e-3, backward=2e-3, update=1e-6),) * len(chain.layers)
    return Profile(model="m", layers=chain.layers, sizes={}, times={Setting("cpu", 1): layers})


def proposed(described, chain, **choices):
    return propose(chain, described, profile(chain), **choices)[0]


def search_chain(described, chain, times):
    """The chain of a cluster as a search takes it, and the places of each kind of device."""
    kinds = _propose._groups_by_kind(described, 1)
    key = Alternative(1, 1, recompute=False)
    return _propose._chain(chain, key, described, kinds, times, []), list(kinds.values())


def searched(described, own, places, max_stages=None):
    """The result of a search by its formula, with network cards counted."""
    where = DevicePlacement(
        chains={0: own}, places={0: places}, cluster=described, reduce_factor=1.0
    )
    return search({0: own}, can_run=lambda _, n: n <= (max_stages or n), place=where.place)
