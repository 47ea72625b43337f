"""A profile in seconds: each segment alone on each kind of device, and links between devices."""

import dataclasses
import json
from collections.abc import Callable, Sequence

import jax

from ..cluster.cluster import Cluster
from ..cluster.hardware import copy_bytes_per_second
from ..graph.parts import graph_of
from ..graph.segments import segments
from ..jax.devices import is_here
from ..job.context import JobContext
from ..lower.compile import adds_in_order, compiler_options
from ..model.functional import tree_bytes
from ..plan.axis_assignment import shard_graph
from ..plan.parts import SumsForm
from ..profile.profile import Profile, Setting, merge_profiles
from ..profile.segment_times import layer_sizes, measure, model_name
from .link_times import measured_links

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
