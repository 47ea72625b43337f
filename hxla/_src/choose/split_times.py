"""Seconds of the devices of a split: per unit for sharded work, and for repeated work.

Every device of a replica repeats the work that is not sharded, the slow one at its speed: norms,
residual additions, and on CPUs the collectives, which are memory copies and additions. So a slow
device's shard is smaller than the ratio of speeds alone.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..cluster.cluster import Cluster, Device
from ..graph.graph import Graph, Op, leaves
from ..plan.layout import Layout
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..profile.profile import Profile, Setting, SplitTime, together_key
from .split_sizes import SplitDevice

_PASSES = 3.0  # forward, and a backward of twice its products
_SUMMED_BYTES = 24.0  # of a float32 gradient read, and two int32 limbs read and written
_ALIKE = 1.05  # ratio of seconds up to which devices count as equal
# Rates of one core of an Intel Xeon, rounded: products, element-wise work, all-reduces over Gloo.
# They are fitted so that the repeated parts of device times come near those of
# benchmarks/uneven_split.py there. Only their ratios matter; a profile's times take their place.
_CORE_FLOPS_PER_SECOND = 8e10
_CORE_BYTES_PER_SECOND = 5e9
_CORE_SENT_BYTES_PER_SECOND = 3e8
_BALANCE = 50.0  # operations per byte of memory, where a device's bandwidth is not described


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A position in a replica: the least speed and memory of its devices over all replicas.

    Attributes:
        sent_bytes_per_second: The rate of a collective's work on the device; infinite for
            accelerators, whose links do it.
        memory_bytes: None: not known.
        measured_seconds: Of a microbatch of the whole model, alone; None: not measured.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    sent_bytes_per_second: float = math.inf
    memory_bytes: float | None = None
    measured_seconds: float | None = None


def places_of(
    graph: Graph,
    replicas: Sequence[Sequence[int]],
    cluster: Cluster,
    profile: Profile | None = None,
) -> tuple[Place, ...]:
    """The places of a replica; empty if the speed of a device is not known.

    Args:
        replicas: The ranks of each replica.
        profile: Times of the model on these kinds of devices, each alone; None: none were measured.
    """
    size = graph.values[graph.batch_values[0]].shape[0] if graph.batch_values else 1
    columns = [[cluster.devices[r] for r in ranks] for ranks in zip(*replicas)]  # noqa: B905
    measured = _measured({d.label for column in columns for d in column}, profile, size)
    places = []
    for place, column in enumerate(columns):
        speeds = [_speed(d, graph.arithmetic) for d in column]
        if not all(flops for flops, _, _ in speeds):
            return ()
        memory = [d.memory_bytes for d in column if d.memory_bytes is not None]
        places.append(
            Place(
                name=f"device {place} of a replica ({column[0].label})",
                flops_per_second=min(flops for flops, _, _ in speeds),
                bytes_per_second=min(rate for _, rate, _ in speeds),
                sent_bytes_per_second=min(sent for _, _, sent in speeds),
                memory_bytes=min(memory, default=None),
                measured_seconds=max(measured[d.label] for d in column) if measured else None,
            )
        )
    return tuple(places)


def flops_per_second(device: Device, arithmetic: str) -> float:
    """The described speed of a device in an arithmetic; zero: not known."""
    return _speed(device, arithmetic)[0]


def _speed(device: Device, arithmetic: str) -> tuple[float, float, float]:
    """Operations, bytes of memory and bytes of collectives a second; zero: not known."""
    if device.core_share is not None or device.kind == "cpu":
        share = device.core_share or 1.0
        of_core = (_CORE_FLOPS_PER_SECOND, _CORE_BYTES_PER_SECOND, _CORE_SENT_BYTES_PER_SECOND)
        flops, rate, sent = (share * figure for figure in of_core)
        return flops, rate, sent
    known = device.product_rate(arithmetic)
    if known is None:
        return 0.0, 0.0, 0.0
    flops = known.flops_per_second
    return flops, device.memory_bytes_per_second or flops / _BALANCE, math.inf


def _measured(labels: set[str], profile: Profile | None, size: int) -> Mapping[str, float]:
    """Seconds of a microbatch on each kind of device alone; empty: not measured at one size."""
    if profile is None:
        return {}
    sizes = sorted({s.microbatch_size for s in profile.times}, key=lambda n: (abs(n - size), n))
    for n in sizes:
        settings = {label: Setting(label, n) for label in labels}
        if all(setting in profile.times for setting in settings.values()):
            return {
                label: sum(t.forward + t.backward for t in profile.times[setting])
                for label, setting in settings.items()
            }
    return {}


def split_devices(
    graph: Graph, sharded: Sharded, places: Sequence[Place], num_units: int
) -> list[SplitDevice]:
    """Each place with its seconds, for `num_units` units of sharded work."""
    work = _work(graph, sharded)
    devices = []
    for place in places:
        shared, repeated = (_seconds(part, place) for part in work)
        sent = sum(axis.sent_bytes for axis in sharded.axes.values())
        if place.measured_seconds is not None:
            scale = place.measured_seconds / (shared + repeated)
            shared, repeated = shared * scale, repeated * scale
        devices.append(
            SplitDevice(
                name=place.name,
                unit_seconds=shared / num_units,
                fixed_seconds=repeated + sent / place.sent_bytes_per_second,
                memory_bytes=place.memory_bytes,
            )
        )
    return devices


def are_alike(devices: Sequence[SplitDevice], num_units: int) -> bool:
    """Whether devices take about the same time for so many units."""
    seconds = [d.seconds(num_units) for d in devices]
    return max(seconds) <= _ALIKE * min(seconds)


def _work(graph: Graph, sharded: Sharded) -> tuple[tuple[float, float], tuple[float, float]]:
    """Operations and bytes of a microbatch: sharded, and repeated on every device."""
    [axis] = sharded.axes.values()
    totals = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for op in leaves(graph.ops):
        is_cut = bool(op.outputs) and axis.factors.get(op.outputs[0]) is not None
        flops, moved = _op_work(op, graph)
        totals[is_cut][0] += flops
        totals[is_cut][1] += moved
    for v in graph.param_values:
        totals[sharded.num_parts(v) > 1][1] += _SUMMED_BYTES / 4 * graph.values[v].num_bytes
    cut, whole = totals[True], totals[False]
    return (cut[0], cut[1]), (whole[0], whole[1])


def _op_work(op: Op, graph: Graph) -> tuple[float, float]:
    passes = _PASSES * op.times
    if op.name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "experts"):
        return passes * op.flops, 0.0
    if not op.flops:  # views and fused operations
        return 0.0, 0.0
    return 0.0, passes * sum(graph.values[v].num_bytes for v in op.outputs)


def _seconds(work: tuple[float, float], place: Place) -> float:
    flops, moved = work
    return flops / place.flops_per_second + moved / place.bytes_per_second


NUM_GRANULES = 120  #: Of the whole work of a split.


def granules_of(parameters: Sequence[Layout], axis: str, size: int) -> list[float]:
    """Each device's share of the sharded parameters, in granules; empty: one has nothing."""
    cut = [0.0] * size
    for layout in parameters:
        dim = layout.dim_of(axis)
        if dim is not None and layout.shape[dim]:
            for d, part in enumerate(layout.parts(dim, size)):
                cut[d] += layout.num_bytes * part / layout.shape[dim]
    return [NUM_GRANULES * num_bytes / sum(cut) for num_bytes in cut] if all(cut) else []


def microbatch_seconds(
    graph: Graph,
    sharded: Sharded,
    parameters: Sequence[Layout],
    replicas: Sequence[Sequence[int]],
    cluster: Cluster,
    profile: Profile,
) -> float:
    """Seconds of a microbatch on a replica that one axis shards: those of its slowest device.

    A device takes its share of its time alone in the profile, all repeated work, and its share of
    the collectives' work. If the profile has this split, with these shards or others, its time
    beyond that is added: collectives, and waiting in them. Zero if a kind of device was not
    measured at this microbatch size.

    Args:
        replicas: The ranks of each replica.
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
        """Seconds of devices that do not wait for each other."""
        each = zip(devices, granules, strict=True)
        return max(d.fixed_seconds + d.unit_seconds * num for d, num in each)

    split = _kinds_of_places(replicas, cluster), size, float(sharded.axes[axis].sent_bytes)
    for known in profile.splits:
        if known.split == split:
            beyond = known.seconds - apart([NUM_GRANULES * part for part in known.parts])
            return max(0.0, apart(granules) + beyond)
    return apart(granules)


def split_time(plan: Plan, cluster: Cluster, seconds: float) -> SplitTime | None:
    """The profile's entry for a split that ran; None: one device has no shard.

    Args:
        plan: One axis shards its replicas.
    """
    [axis] = plan.axes
    granules = granules_of(plan.parameters, axis.name, axis.size)
    if not granules or plan.prediction is None:
        return None
    return SplitTime(
        kinds=_kinds_of_places([replica.devices for replica in plan.replicas], cluster),
        microbatch_size=plan.microbatch_size,
        sent_bytes=plan.prediction.sent_bytes,
        parts=tuple(num / NUM_GRANULES for num in granules),
        seconds=seconds,
    )


def _kinds_of_places(replicas: Sequence[Sequence[int]], cluster: Cluster) -> tuple[str, ...]:
    """The kinds of devices at each place of a replica, as a profile names them."""
    columns = zip(*replicas, strict=True)
    return tuple(together_key({cluster.devices[r].label for r in ranks}) for ranks in columns)
