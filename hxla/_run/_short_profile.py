"""A profile in seconds: each segment alone on each kind of device that is here."""

import dataclasses
import json
from collections.abc import Callable, Sequence

import jax

from .._cluster._cluster import Cluster
from .._cluster._hardware import copy_bytes_per_second
from .._graph._parts import graph_of
from .._graph._segments import segments
from .._jax._local_clients import is_here
from .._lower._options import compiler_options
from .._model._functional import tree_bytes
from .._plan._assign import shard_graph
from .._plan._plan_parts import SumsForm
from .._profile._profile import Profile, Setting
from .._profile._profile_file import merge_profiles
from .._profile._segment_times import layer_sizes, measure, model_name
from ._traced_job import TracedJob

_COPIED_BYTES = 1 << 26


def short_profile(
    job: TracedJob,
    cluster: Cluster,
    devices: tuple[jax.Device, ...],
    sizes: Sequence[int],
    num_segments: int,
    sums: SumsForm,
) -> Profile:
    """Times of the job's segments on the kinds of devices that are here.

    A device holds one segment's parameters at a time, so a model that fits no device is measured
    too. An update takes what its bytes take through the device's memory.

    Args:
        job: To measure; every process of it takes part.
        cluster: Its devices.
        devices: The same.
        sizes: Of microbatches.
        num_segments: Most segments of the chain.
        sums: How gradients are added up.

    Returns:
        The same profile on every process.
    """
    own = next(d for d in devices if is_here(d))
    label = cluster.devices[devices.index(own)].label
    rate = copy_bytes_per_second(own, _COPIED_BYTES)
    param_bytes = max(tree_bytes(job.functional(sizes[0]).params), 1)
    # Of a byte of parameters: itself and the optimizer's state are read and written, sums read.
    touched = 2 + sums.num_parts + 2 * job.optimizer_bytes(sizes[0]) / param_bytes
    found: list[Profile] = []
    for size in sizes:
        alone = segment_profile(job, Setting(label, size), num_segments, own, sums)
        [(setting, times)], [whole] = alone.times.items(), alone.sizes.values()
        updated = tuple(
            dataclasses.replace(t, update=touched * s.parameter_bytes / rate)
            for t, s in zip(times, whole, strict=True)
        )
        found.append(dataclasses.replace(alone, times={setting: updated}))
    return everywhere(job, merge_profiles(found))


def segment_profile(
    job: TracedJob,
    setting: Setting,
    num_segments: int,
    device: jax.Device,
    sums: SumsForm,
    done: Callable[[int], None] = lambda _: None,
) -> Profile:
    """What each segment takes on one device of this process, updates left out.

    Args:
        job: To measure.
        setting: What the times are of.
        num_segments: Most segments of the chain.
        device: Where.
        sums: How gradients are added up.
        done: Called with the number of segments measured so far.
    """
    graph = graph_of(job.graph(setting.microbatch_size))
    model = job.functional(setting.microbatch_size)
    chain = segments(graph, num_segments)
    times = measure(
        graph,
        chain,
        params=model.params,
        aux=model.aux,
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


def everywhere(job: TracedJob, own: Profile) -> Profile:
    """What all processes have measured, known to each of them."""
    texts = job.gather("profile", json.dumps(own.to_table()))
    return merge_profiles(Profile.from_table(json.loads(text)) for text in texts)
