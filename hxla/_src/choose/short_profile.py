"""A profile in seconds: each segment alone on each kind of device, and the links between all."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..cluster.cluster import Cluster, Link
from ..cluster.hardware import copy_bytes_per_second
from ..core.timing import median_seconds
from ..core.types import DATA_AXIS
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..jax.devices import is_here
from ..job.context import JobContext
from ..lower.compile import compiler_options
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import SumsForm
from ..profile.profile import Profile, Setting
from ..profile.profile_file import merge_profiles
from ..profile.segment_times import layer_sizes, measure, model_name

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
    return everywhere(job, merge_profiles(profiles))


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


_SHORT_BYTES, _LONG_BYTES = 1 << 12, 1 << 23


def measured_link(job: JobContext, devices: Sequence[jax.Device]) -> Link:
    """The slowest link between neighbours while all of them send at once.

    Every process of the job takes part and gets the same figures.
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
    times_of_processes = [json.loads(text) for text in job.gather("links", json.dumps(times))]
    short, long = (max(column) for column in zip(*times_of_processes, strict=True))
    seconds = max(long - short, 1e-9)
    return Link(
        bytes_per_second=(_LONG_BYTES - _SHORT_BYTES) / seconds,
        latency_seconds=short,
        source="measured by this job",
    )
