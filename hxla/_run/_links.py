"""How fast the devices of a job hand arrays to each other, measured over all of them at once."""

import functools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._cluster._cluster import Link
from .._core._timing import median_seconds
from .._core._types import DATA_AXIS
from ._traced_job import TracedJob

_SHORT_BYTES, _LONG_BYTES = 1 << 12, 1 << 23


def measured_link(job: TracedJob, devices: Sequence[jax.Device]) -> Link:
    """A link like the slowest between neighbours while all of them hand on at once.

    Every process of the job takes part, and all get the same figures.
    """
    mesh = Mesh(np.array(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,))
    num = len(devices)
    to_next = [(i, (i + 1) % num) for i in range(num)]
    hand_on = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.ppermute(x, DATA_AXIS, to_next),
            mesh=mesh,
            in_specs=P(DATA_AXIS),
            out_specs=P(DATA_AXIS),
            check_vma=False,
        )
    )
    times = []
    for size in (_SHORT_BYTES, _LONG_BYTES):
        make = jax.jit(
            functools.partial(jnp.zeros, num * size, jnp.uint8),
            out_shardings=NamedSharding(mesh, P(DATA_AXIS)),
        )
        times.append(median_seconds(functools.partial(hand_on, make())))
    told = [json.loads(text) for text in job.gather("links", json.dumps(times))]
    short, long = (max(column) for column in zip(*told, strict=True))
    seconds = max(long - short, 1e-9)
    return Link(
        bytes_per_second=(_LONG_BYTES - _SHORT_BYTES) / seconds,
        latency_seconds=short,
        source="measured by this job",
    )
