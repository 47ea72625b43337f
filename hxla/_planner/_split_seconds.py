"""Seconds of a split's devices with the parts that a plan gives them."""

from collections.abc import Sequence

from .._cluster._cluster import Cluster
from .._graph._graph import Graph
from .._plan._layout import Layout
from .._plan._plan import Plan
from .._plan._sharding import Sharded
from .._profile._profile import Profile, Setting, SplitTime, together_key
from ._split_times import places_of, split_devices

NUM_GRANULES = 120  #: Of a split's whole work.


def granules_of(parameters: Sequence[Layout], axis: str, size: int) -> list[float]:
    """What each device of a copy has of all that is cut, in granules; empty: one has nothing.

    Args:
        parameters: How they lie.
        axis: Of the mesh, that cuts them.
        size: Its devices.
    """
    cut = [0.0] * size
    for layout in parameters:
        dim = layout.dim_of(axis)
        if dim is not None and layout.shape[dim]:
            for d, own in enumerate(layout.parts(dim, size)):
                cut[d] += layout.num_bytes * own / layout.shape[dim]
    return [NUM_GRANULES * own / sum(cut) for own in cut] if all(cut) else []


def microbatch_seconds(
    graph: Graph,
    sharded: Sharded,
    parameters: Sequence[Layout],
    replicas: Sequence[Sequence[int]],
    cluster: Cluster,
    profile: Profile,
) -> float:
    """Seconds of a microbatch on a copy that one axis cuts: those of its slowest device.

    Each takes its part of what the profile says that it takes alone, all of what every device
    repeats, and its own share of the collectives' work. Where the profile has the split itself,
    with these parts or others, what it took beyond that counts: collectives, and waiting for each
    other in them. Zero where a kind of device was not measured with microbatches of this size.

    Args:
        graph: Of the loss.
        sharded: What the axis cuts.
        parameters: How they lie.
        replicas: The ranks of each copy.
        cluster: That they are of.
        profile: Times of the model on each kind of device alone.
    """
    [(axis, _)] = sharded.axes.items()
    size = graph.values[graph.batch_values[0]].shape[0] if graph.batch_values else 1
    kinds = {cluster.devices[rank].label for ranks in replicas for rank in ranks}
    granules = granules_of(parameters, axis, len(replicas[0]))
    places = places_of(graph, replicas, cluster, profile)
    if not granules or not places or not {Setting(k, size) for k in kinds} <= profile.times.keys():
        return 0.0
    devices = split_devices(graph, sharded, places, NUM_GRANULES)

    def apart(granules: Sequence[float]) -> float:
        """Of devices that do not wait for each other."""
        each = zip(devices, granules, strict=True)
        return max(d.fixed_seconds + d.unit_seconds * own for d, own in each)

    split = _kinds_of_places(replicas, cluster), size, float(sharded.axes[axis].sent_bytes)
    for known in profile.splits:
        if known.split == split:
            beyond = known.seconds - apart([NUM_GRANULES * part for part in known.parts])
            return max(0.0, apart(granules) + beyond)
    return apart(granules)


def split_time(plan: Plan, cluster: Cluster, seconds: float) -> SplitTime | None:
    """What a profile is to know of a split that ran; None: one device has nothing of it.

    Args:
        plan: Whose copies one axis cuts.
        cluster: Its devices.
        seconds: That a microbatch took.
    """
    [axis] = plan.axes
    granules = granules_of(plan.parameters, axis.name, axis.size)
    if not granules or plan.prediction is None:
        return None
    return SplitTime(
        kinds=_kinds_of_places([replica.devices for replica in plan.replicas], cluster),
        microbatch_size=plan.microbatch_size,
        sent_bytes=plan.prediction.sent_bytes,
        parts=tuple(own / NUM_GRANULES for own in granules),
        seconds=seconds,
    )


def _kinds_of_places(replicas: Sequence[Sequence[int]], cluster: Cluster) -> tuple[str, ...]:
    """The kinds of the devices at each place of a copy, as a profile names them."""
    columns = zip(*replicas, strict=True)
    return tuple(together_key({cluster.devices[r].label for r in own}) for own in columns)
