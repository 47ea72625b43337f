"""A profile in seconds: each segment alone on each kind of device, and links between devices.

Links between the devices of a job are measured by the messages that a pipeline's ticks send.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..cluster.cluster import Cluster, Link
from ..cluster.hardware import copy_bytes_per_second
from ..cluster.kinds import are_unlike
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..jax.devices import is_here
from ..job.context import JobContext
from ..lower.compile import adds_in_order, compiler_options
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import SumsForm
from ..profile.profile import MeasuredLink, Profile, Setting, merge_profiles
from ..profile.segment_times import layer_sizes, measure, model_name

_AXIS = "pair"
_MESSAGE_BYTES = (1 << 12, 1 << 18, 1 << 22)
_REPEATS = 3
_SECONDS = 0.15  # of a timed loop: several periods of a throttled process's CPU quota
_MOST_ROUNDS = 256
_SLOW = 1.0  # seconds of an exchange, above which no longer message is tried
_SOURCE = f"measured by exchanges of messages, jax {jax.__version__}"


def measured_links(
    job: JobContext, cluster: Cluster, devices: Sequence[jax.Device]
) -> tuple[MeasuredLink, ...]:
    """The links between neighbours by rank, one pair of devices for each pair of kinds.

    Every process of the job takes part and gets the same figures. Devices whose libraries for
    collectives differ send each other nothing, so their links are not measured.
    """
    return tuple(
        MeasuredLink(
            kinds=kinds,
            in_node=in_node,
            mesh=cluster.name,
            link=_measured(job, [devices[rank] for rank in pair]),
        )
        for kinds, in_node, pair in _pairs(cluster)
    )


def _pairs(cluster: Cluster) -> Iterator[tuple[tuple[str, str], bool, tuple[int, int]]]:
    """The kinds of two neighbours, whether a node has both, and their ranks: each case once."""
    num, seen = len(cluster.devices), set()
    for i, j in itertools.pairwise((*range(num), 0)):
        a, b = cluster.devices[i], cluster.devices[j]
        first, second = sorted((a.label, b.label))
        case = (first, second), a.node == b.node
        if i != j and case not in seen and not are_unlike((a.kind, b.kind)):
            seen.add(case)
            yield *case, (i, j)


def _measured(job: JobContext, pair: Sequence[jax.Device]) -> Link:
    """Half of the time of an exchange, by message size: in a tick both devices send."""
    takes_part = any(map(is_here, pair))
    curve: list[tuple[float, float]] = []
    for num_bytes in _MESSAGE_BYTES:
        exchange = _exchange(pair, num_bytes) if takes_part else None
        once = _agreed(job, exchange, 1, repeats=1)
        num = min(_MOST_ROUNDS, max(1, round(_SECONDS / max(once, 1e-9))))
        seconds = _agreed(job, exchange, num, repeats=_REPEATS) / 2
        curve.append((float(num_bytes), float(f"{num_bytes / seconds:.4g}")))
        if once > _SLOW:
            break
    (least, slowest), (_, fastest) = curve[0], curve[-1]
    return Link(
        bytes_per_second=fastest,
        latency_seconds=float(f"{least / slowest:.4g}"),
        curve=tuple(curve),
        source=_SOURCE,
    )


def _agreed(
    job: JobContext, exchange: Callable[[int], float] | None, num: int, *, repeats: int
) -> float:
    """Seconds of one of `num` exchanges that follow one another, the same on every process."""
    seconds = 0.0
    if exchange is not None:
        seconds = statistics.median(exchange(num) for _ in range(repeats))
    texts = job.gather("seconds of exchanges", json.dumps(seconds / num))
    return max(float(json.loads(text)) for text in texts)


def _exchange(pair: Sequence[jax.Device], num_bytes: int) -> Callable[[int], float]:
    """A function that runs so many exchanges, in one program, and returns their seconds."""
    mesh = Mesh(np.array(pair), (_AXIS,), axis_types=(AxisType.Auto,))

    def run(num: jax.Array, down: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        def once(_: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            down, up = arrays
            return (
                jax.lax.ppermute(down, _AXIS, [(0, 1)]),
                jax.lax.ppermute(up, _AXIS, [(1, 0)]),
            )

        return jax.lax.fori_loop(0, num, once, (down, up))

    mapped = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(P(), P(_AXIS), P(_AXIS)), out_specs=P(_AXIS), check_vma=False
        )
    )
    shape, everywhere = (2 * num_bytes // 4,), NamedSharding(mesh, P())
    zeros = jax.jit(
        lambda: jnp.zeros(shape, jnp.int32), out_shardings=NamedSharding(mesh, P(_AXIS))
    )()

    def number(num: int) -> jax.Array:
        here = [jax.device_put(np.int32(num), device) for device in pair if is_here(device)]
        return jax.make_array_from_single_device_arrays((), everywhere, here)

    def timed(num: int) -> float:
        rounds = number(num)
        begin = time.perf_counter()
        jax.block_until_ready(mapped(rounds, zeros, zeros))
        return time.perf_counter() - begin

    timed(1)  # compiles, and opens connections
    return timed


_COPIED_BYTES = 1 << 26


def short_profile(
    job: JobContext,
    cluster: Cluster,
    devices: tuple[jax.Device, ...],
    sizes: Sequence[int],
    num_segments: int,
    sums: SumsForm,
) -> Profile:
    """Times of the job's segments on the kinds of devices here; every process takes part.

    A device holds one segment's parameters at a time, so a model that fits no device is measured
    too. An update takes the time of its bytes through the device's memory.

    Args:
        num_segments: Most segments of the chain.

    Returns:
        The same profile on every process.
    """
    device = next(d for d in devices if is_here(d))
    label = cluster.devices[devices.index(device)].label
    rate = copy_bytes_per_second(device, _COPIED_BYTES)
    param_bytes = max(tree_bytes(job.functional(sizes[0]).params), 1)
    # Per byte of parameters: it and the optimizer's state are read and written, sums are read.
    touched = 2 + sums.num_parts + 2 * job.optimizer_bytes(sizes[0]) / param_bytes
    profiles: list[Profile] = []
    for size in sizes:
        alone = segment_profile(job, Setting(label, size), num_segments, device, sums)
        [(setting, times)], [whole] = alone.times.items(), alone.sizes.values()
        updated = tuple(
            dataclasses.replace(t, update=touched * s.parameter_bytes / rate)
            for t, s in zip(times, whole, strict=True)
        )
        profiles.append(dataclasses.replace(alone, times={setting: updated}))
    known = everywhere(job, merge_profiles(profiles))
    return dataclasses.replace(known, links=measured_links(job, cluster, devices))


def segment_profile(
    job: JobContext,
    setting: Setting,
    num_segments: int,
    device: jax.Device,
    sums: SumsForm,
    done: Callable[[int], None] = lambda _: None,
) -> Profile:
    """Seconds of each segment on one device of this process, without updates.

    Args:
        num_segments: Most segments of the chain.
        done: Called with the number of segments measured so far.
    """
    graph = graph_of(job.graph(setting.microbatch_size))
    model = job.functional(setting.microbatch_size)
    chain = segments(graph, num_segments)
    params, aux = model.arrays
    times = measure(
        graph,
        chain,
        params=params,
        aux=aux,
        batch=job.as_inputs(job.first_batch(0, setting.microbatch_size)),
        device=device,
        options=compiler_options(device.platform, sums),
        in_order=adds_in_order(device.platform, sums),
        done=done,
    )
    whole = layer_sizes(graph, chain, shard_graph(graph, (), {}), trained=model.trained_places)
    return Profile(
        model=model_name(model.params),
        layers=tuple(s.name for s in chain),
        num_segments=num_segments,
        sizes={(setting.microbatch_size, 1): whole},
        times={setting: times},
    )


def everywhere(job: JobContext, profile: Profile) -> Profile:
    """The profiles of all processes, merged on each of them."""
    texts = job.gather("profile", json.dumps(profile.to_table()))
    return merge_profiles(Profile.from_table(json.loads(text)) for text in texts)
