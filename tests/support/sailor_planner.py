"""hxla's own prediction of the measured plans, as the planner has it for its programs.

It knows nothing of the runtime that they ran on: no tensor is rebuilt on a host. A link is what one
device alone gets, a node's network card what all of them get together, as a mesh file says them.
"""

import itertools
from collections.abc import Mapping

import hxla
from hxla import Setting
from support.inside.choose import (
    UNBOUNDED,
    Chain,
    Group,
    ReplicaSort,
    Staging,
    staging_cost,
    traffic_of,
)
from support.sailor import monotone
from support.sailor_data import Data, Measured, Place
from support.sailor_network import NOT_DUPLEX, card, nodes_of

_LONG = 2.0**30  # the longest message that was measured


def step_seconds(data: Data, plan: Measured, *, describes_cards: bool = True) -> float:
    """The replayed step of a plan whose groups all have as many devices.

    Args:
        data: Profiles and curves.
        plan: What to predict.
        describes_cards: Whether the cluster says what the devices of a node get together; else
            that is what one of them gets.
    """
    (tensor,) = {place.tensor for places in plan.places for place in places}
    profile = monotone(data.profiles[plan.model])
    sizes = profile.sizes[plan.microbatch_size, tensor]
    kinds = tuple(dict.fromkeys(place for places in plan.places for place in places))
    rates = {place: _rates(data, place) for place in kinds}
    cluster, copies = _placed(data, plan, rates if describes_cards else {}, rates)
    columns = [
        tuple(kinds.index(places[r % len(places)]) for places in plan.places)
        for r in range(plan.num_replicas)
    ]
    order = sorted(range(len(columns)), key=lambda r: columns[r])
    replicas = tuple(
        ReplicaSort(groups=own, count=len(list(like)), num_microbatches=plan.num_microbatches)
        for own, like in itertools.groupby(columns[r] for r in order)
    )
    chain = Chain(
        groups=tuple(
            Group(
                kind=place.kind,
                num_devices=sum(column.count(k) for column in columns),
                memory_bytes=UNBOUNDED,
                **{
                    f"{what}_seconds": tuple(
                        getattr(time, what)
                        for time in profile.times[Setting(place.kind, plan.microbatch_size, tensor)]
                    )
                    for what in ("forward", "backward", "update")
                },
                parameter_bytes=tuple(size.parameter_bytes for size in sizes),
                stash_bytes=tuple(size.stash_bytes for size in sizes),
            )
            for k, place in enumerate(kinds)
        ),
        num_microbatches=plan.num_microbatches * plan.num_replicas,
        output_bytes=tuple(size.output_bytes for size in sizes),
    )
    staging = Staging(cuts=plan.cuts, replicas=replicas, step_seconds=0.0)
    traffic = traffic_of(chain, staging, [copies[r] for r in order], cluster, reduce_factor=1.0)
    return staging_cost(chain, staging, traffic).step_seconds


def _rates(data: Data, place: Place) -> tuple[float, float]:
    """Bytes a second to other nodes: of one device, and of all of a node."""
    counts = [a.tensor for a, b in data.curves if a.kind == b.kind == place.kind]
    alone, most = min(counts), max(counts)
    return (
        _LONG / card(data, place, place, alone)(_LONG),
        most * _LONG / card(data, place, place, most)(_LONG),
    )


def _placed(
    data: Data,
    plan: Measured,
    described: Mapping[Place, tuple[float, float]],
    rates: Mapping[Place, tuple[float, float]],
):
    """The cluster, and the ranks of each copy's groups."""
    numbers = nodes_of(data, plan)
    place_of = {
        node: place
        for places, own in zip(plan.places, numbers, strict=True)
        for place, node in zip(places, own, strict=True)
    }
    devices, groups = [], []
    for places, own in zip(plan.places, numbers, strict=True):
        groups.append([])
        for place, node in zip(places, own, strict=True):
            first = len(devices)
            devices += [hxla.Device(kind=place.kind, node=node)] * place.tensor
            groups[-1].append(tuple(range(first, len(devices))))
    inside = hxla.Link(bytes_per_second=1e12)
    nodes = tuple(
        hxla.Node(
            name=place_of[node].kind,
            link=inside,
            network_card=hxla.NetworkCard(
                bytes_per_second=described[place_of[node]][1],
                duplex=place_of[node].kind not in NOT_DUPLEX,
            )
            if described
            else None,
        )
        for node in sorted(place_of)
    )
    by_name = {place.kind: rates[place][0] for place in rates}
    links = tuple(
        (*sorted(pair), hxla.Link(bytes_per_second=min(by_name[name] for name in pair)))
        for pair in itertools.combinations_with_replacement(sorted(by_name), 2)
    )
    cluster = hxla.Cluster(name="measured", devices=tuple(devices), nodes=nodes, links=links)
    copies = [[own[r % len(own)] for own in groups] for r in range(plan.num_replicas)]
    return cluster, copies
