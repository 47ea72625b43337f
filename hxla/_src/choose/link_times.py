"""Measures the links between the devices of a job, by the messages that a pipeline's ticks send."""

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
from ..cluster.kinds import are_unlike
from ..jax.devices import is_here
from ..job.context import JobContext
from ..profile.profile import MeasuredLink

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
