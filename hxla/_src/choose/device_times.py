"""Seconds of devices, from a profile, else estimated: of a chain's layers, and of a split.

Every device of a replica repeats the work that is not sharded, the slow one at its speed: norms,
residual additions, and on CPUs the collectives, which are memory copies and additions. So a slow
device's shard is smaller than the ratio of speeds alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..cluster.cluster import Cluster, Device, Link, Rate
from ..core.errors import PlanError
from ..core.types import TOKEN_AXIS
from ..graph.graph import Graph, Op, leaves
from ..plan.layout import Layout
from ..plan.plan import Plan
from ..plan.sharding import Sharded
from ..profile.products import MatrixProduct
from ..profile.profile import LayerSize, Profile, Setting, SplitTime, together_key
from .apportionment import SplitDevice

BACKWARD_FLOPS = 2.0  # a layer's backward is two products for each of its forward's
# The part of the data sheet's rate that large products reach: on one V100 in the profiles of Sailor
# (SOSP 2025), GPT-Neo-2.7, whose matrices fill all waves. docs/concepts/prediction.md says why
# such figures were chosen.
_SHARE_OF_DATA_SHEET = 0.9
# Seconds of each kernel in a chain of short ones on a V100: NVIDIA, "Getting Started with
# CUDA Graphs", 2019.
_LAUNCH_SECONDS = 3.8e-6
# Other kernels per kernel of a product: the GPTs of benchmarks/gpu_parts, compiled for an H100,
# have 492 beside 219 (124 million parameters) and 174 beside 75.
_FUSED_PER_PRODUCT = 2.25
# Sides of the tiles of products. Operations per loaded number grow with the side; the speed is
# assumed to grow with its square root.
_TILES = (128, 64, 32)


@dataclasses.dataclass(frozen=True, order=True)
class Alternative:
    """A choice that changes the chain itself.

    Attributes:
        tensor: Devices of a tensor-parallel group, all of one kind and in one node.
        recompute: Whether a segment keeps its inputs only and its backward runs the forward again.
    """

    microbatch_size: int
    tensor: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        parts = [f"microbatches of {self.microbatch_size}"]
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}")
        if self.recompute:
            parts.append("recomputed")
        return ", ".join(parts)


def layer_times(
    device: Device,
    alternative: Alternative,
    sizes: Sequence[LayerSize],
    profile: Profile | None,
    *,
    state_factor: float = 1.0,
    whole: Sequence[LayerSize] = (),
    sent_bytes: Sequence[float] = (),
    num_collectives: Sequence[float] = (),
    link: Link | None = None,
) -> tuple[np.ndarray, str]:
    """[3, L] Seconds of every layer's forward, backward and update; their origin in words.

    A tensor-parallel group that was not measured takes a share of the time measured on one device.
    The share is an estimate, because smaller products are slower and unsharded work is repeated.
    Its collectives on the node's link are added, half in the forward. Without a rate the group
    shares all work evenly.

    Args:
        alternative: Microbatch size, tensor parallelism, recomputation.
        sizes: Of the layers on one device of the group.
        profile: None: no measured times.
        state_factor: Bytes kept per byte of parameters.
        whole: Sizes of the same layers on a device alone.
        sent_bytes: Per layer, of one device of the group in a forward and backward; empty: none.
        num_collectives: Per layer, of the group in a forward and backward; empty: not counted.
        link: Between the devices of the group.

    Raises:
        PlanError: If there are neither times nor a rate.
    """
    size, tensor = alternative.microbatch_size, alternative.tensor
    setting, alone = Setting(device.label, size, tensor), Setting(device.label, size)
    known = profile.times if profile is not None else {}
    times, how = known.get(setting), "measured"
    if times is None and alone in known:
        times, how = known[alone], f"measured alone, shared by {tensor}"
    if times is None:
        seconds, how = _estimated(device, alternative, sizes, state_factor)
    else:
        seconds = np.array([(t.forward, t.backward, t.update) for t in times]).T
    if setting not in known:
        if times is not None:
            seconds *= _share(device, alternative, sizes, whole, state_factor)
        if link is not None and len(sent_bytes):
            seconds[:2] += np.array(sent_bytes) / 2 / link.bytes_per_second
        if link is not None and len(num_collectives):
            each = link.all_reduce_seconds * math.log2(max(2, tensor))
            seconds[:2] += np.array(num_collectives) / 2 * each
    if alternative.recompute:
        seconds[1] += seconds[0]
    return seconds, f"{device.label}: {how}"


def _share(
    device: Device,
    alternative: Alternative,
    sizes: Sequence[LayerSize],
    whole: Sequence[LayerSize],
    state_factor: float,
) -> np.ndarray:
    """[3, L] The time of one device of a group over that of a device alone, by estimate."""
    even = np.full((3, len(sizes)), 1.0 / alternative.tensor)
    arithmetic = sizes[0].arithmetic if sizes else "model"
    if device.product_rate(arithmetic) is None or len(whole) != len(sizes):
        return even
    grouped, alone = (_estimated(device, alternative, s, state_factor)[0] for s in (sizes, whole))
    return np.divide(grouped, alone, out=even, where=alone > 0)


def _estimated(
    device: Device, alternative: Alternative, sizes: Sequence[LayerSize], state_factor: float
) -> tuple[np.ndarray, str]:
    """[3, L] Seconds of products, of other kernels, and of launches."""
    rate = device.product_rate(sizes[0].arithmetic if sizes else "model")
    if rate is None:
        raise PlanError(
            f"device kind {device.label!r}: the profile has no times for {alternative}, "
            "and the mesh file gives no rate to estimate them from: measure with hxla profile, or "
            "add [device.rates] float32 to the mesh file"
        )
    bandwidth = device.memory_bytes_per_second or math.inf
    arithmetics = dict.fromkeys(p.arithmetic for s in sizes for p in s.products)
    rates = {arithmetic: device.product_rate(arithmetic) or rate for arithmetic in arithmetics}
    launch = device.launch_seconds or (_LAUNCH_SECONDS if device.multiprocessors else 0.0)

    def speed(rate: Rate) -> float:
        return rate.flops_per_second * (1.0 if rate.measured else _SHARE_OF_DATA_SHEET)

    def kernel_seconds(products: Sequence[MatrixProduct], flops: float, num_bytes: float) -> float:
        # No kernel takes less time than the launch of the next.
        work = sum(
            max(
                product_flops(p, device.multiprocessors) / speed(rates[p.arithmetic]),
                launch * p.count,
            )
            for p in products
        )
        rest = max(0.0, flops - sum(p.flops for p in products)) / speed(rate)
        fused = launch * _FUSED_PER_PRODUCT * sum(p.count for p in products)
        # Kernels that only move bytes do not overlap with products.
        return work + rest + max(num_bytes / bandwidth, fused)

    rows = []
    for s in sizes:
        backward = tuple(itertools.chain(*(product.backward for product in s.products)))
        moved = s.parameter_bytes + (s.moved_bytes or s.stash_bytes)
        update = (state_factor + 1) * s.parameter_bytes / bandwidth
        rows.append(
            (
                kernel_seconds(s.products, s.flops, moved),
                kernel_seconds(backward, BACKWARD_FLOPS * s.flops, BACKWARD_FLOPS * moved),
                update,
            )
        )
    used = list(dict.fromkeys(rates.values())) or [rate]
    origin = "measured" if all(x.measured for x in used) else "data-sheet"
    names = " and ".join(x.dtype for x in used)
    how = f"not measured, estimated from FLOPs at the {origin} rate of {names}"
    if device.multiprocessors is None and not rate.measured:
        how += (
            "; small products are taken to be as fast as large ones, for the mesh file does not "
            "give its multiprocessors"
        )
    return np.array(rows, float).reshape(-1, 3).T, how


def product_flops(product: MatrixProduct, multiprocessors: int | None) -> float:
    """Operations that a fully busy GPU would compute in the time of a product.

    A product is cut into tiles, each of which one multiprocessor computes; as many as there are run
    at once, and the last of these waves takes as long as a full one. A smaller tile leaves fewer
    multiprocessors idle, and loads more numbers for each operation: of the tiles the fastest is
    taken.

    Args:
        multiprocessors: Of the GPU; None: not known, taken as fully busy.

    References:
        NVIDIA, "Matrix Multiplication Background User's Guide", 2023, sections 3.1 and 3.2 (tile
        and wave quantization).
    """
    if multiprocessors is None:
        return product.flops

    def by_tile(side: int) -> float:
        # The tile of a narrow matrix is cut in steps of the least tile.
        rows, columns = (min(side, _up(n, _TILES[-1])) for n in (product.rows, product.columns))
        tiles = math.ceil(product.rows / rows) * math.ceil(product.columns / columns)
        waves = math.ceil(product.copies * tiles / multiprocessors)
        work = 2.0 * rows * columns * product.depth * multiprocessors * waves
        return work / math.sqrt(side / _TILES[0])

    return product.count * min(map(by_tile, _TILES))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


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


def granules_of(parameters: Sequence[Layout], axis: str, shares: Sequence[int]) -> list[float]:
    """Each device's share of the sharded parameters, in granules; empty: one has nothing.

    Args:
        shares: The ratio of the axis: that of tokens, of which no parameter is sharded.
    """
    if axis == TOKEN_AXIS:
        return [NUM_GRANULES * share / sum(shares) for share in shares]
    size = len(shares)
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
    shares: Sequence[int] = (),
) -> float:
    """Seconds of a microbatch on a replica that one axis shards: those of its slowest device.

    A device takes its share of its time alone in the profile, all repeated work, and its share of
    the collectives' work. If the profile has this split, with these shards or others, its time
    beyond that is added: collectives, and waiting in them. Zero if a kind of device was not
    measured at this microbatch size.

    Args:
        replicas: The ranks of each replica.
        profile: Times of the model on each kind of device alone.
        shares: The ratio of the axis; empty: even.
    """
    [(axis, _)] = sharded.axes.items()
    size = graph.values[graph.batch_values[0]].shape[0] if graph.batch_values else 1
    kinds = {cluster.devices[rank].label for ranks in replicas for rank in ranks}
    granules = granules_of(parameters, axis, shares or (1,) * len(replicas[0]))
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
    granules = granules_of(plan.parameters, axis.name, axis.ratio)
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
