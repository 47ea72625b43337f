"""Better sizes for a split, by the measured seconds of its devices."""

import dataclasses
from collections.abc import Sequence

from ..cluster.cluster import Cluster
from ..core.errors import PlanError
from ..graph.graph import Graph
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from .inner_split import best_shares, in_lowest_terms
from .mesh_axes import BATCH_AXES
from .split_times import NUM_GRANULES, granules_of, places_of, split_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class BetterShares:
    """Another ratio for the devices of a split.

    Attributes:
        gain: The slowest device's present seconds over those with the new ratio, minus one.
    """

    shares: tuple[int, ...]
    gain: float


def better_shares(
    graph: Graph,
    sharded: Sharded,
    plan: Plan,
    cluster: Cluster,
    seconds: Sequence[float],
    state_factor: float,
) -> BetterShares | None:
    """The best ratio by measured times; None: the devices are not described, or nothing fits.

    The repeated part of a device's time is estimated, as for a plan; its total is measured.

    Args:
        seconds: Measured work of each device of a replica in a step.
        state_factor: The bytes of a device per byte of its parameters.
    """
    [axis] = plan.axes
    if axis.name in BATCH_AXES:
        return None  # it shards examples, in no ratio
    places = places_of(graph, [r.devices for r in plan.replicas], cluster)
    if not places:
        return None
    granules = granules_of(plan.parameters, axis.name, axis.size)
    if not granules:
        return None
    devices = []
    for estimated, num_granules, measured in zip(
        split_devices(graph, sharded, places, NUM_GRANULES), granules, seconds, strict=True
    ):
        present = estimated.fixed_seconds + estimated.unit_seconds * num_granules
        devices.append(
            dataclasses.replace(
                estimated,
                unit_seconds=estimated.unit_seconds * measured / present,
                fixed_seconds=estimated.fixed_seconds * measured / present,
            )
        )
    try:
        best = best_shares(graph, sharded, devices, state_factor)
    except PlanError:
        return None
    then = max(d.seconds(n) for d, n in zip(devices, best, strict=True))
    return BetterShares(shares=in_lowest_terms(best), gain=max(seconds) / then - 1)
