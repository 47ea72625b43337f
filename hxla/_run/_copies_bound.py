"""A time that no copies of a model beat, in whatever form their step lies in memory."""

import dataclasses
import functools
import math
from collections.abc import Iterator

from .._cluster._cluster import Cluster
from .._plan._plan import Plan
from .._planner._memory_values import CopyDevice, MemoryForm
from ._forms_of_job import forms_on, forms_to_try, model_bytes
from ._host_places import asked_places, more_on_hosts
from ._shared_state import group_options, stages_to_try
from ._state_elsewhere import FLOPS_OF_FORWARD, device_optimizer_bytes
from ._traced_job import TracedJob


def least_seconds(job: TracedJob, plan: Plan, cluster: Cluster, seconds: float) -> float:
    """The least step of copies of one device each that fit, of any number, counts and form.

    In a form all copies run the same of a microbatch again, so that every step is longer by the
    same factor than without limits of memory. The least factor is that of a form which fits where
    no copies have less to hold: one on every device, all with the memory of the largest; one of
    them runs an even share of the microbatches, as some copy must, and each other a single one.
    What a form moves to hosts takes at least as long as it takes if all their links are busy to the
    end.

    Args:
        job: That is planned.
        plan: Some copies with this size of a microbatch, and sums of this form.
        cluster: Its devices.
        seconds: No copies are faster whose devices have no end of memory.

    Returns:
        Infinity if there is no form that fits.
    """
    busiest = _even_share(plan, cluster)
    work = busiest * FLOPS_OF_FORWARD * job.graph(plan.microbatch_size).flops
    if not work:
        return seconds  # nothing says how much longer a step is
    rates = sum(device.host_bytes_per_second or math.inf for device in cluster.devices)
    least = math.inf
    for form in _roomiest(job, plan, cluster):
        if not form.fits:
            continue
        factor = 1 + max(form.extra_seconds, 0.0) / work
        moved = form.moved.get("stash", (0,))[0] * plan.num_microbatches / busiest
        moved += sum(form.moved.get("parameters", ()))
        if form.tier != "device":
            moved += 2 * device_optimizer_bytes(job, plan)
        least = min(least, seconds * factor + moved / rates)
        if least <= seconds:
            break
    return least


def _even_share(plan: Plan, cluster: Cluster) -> int:
    """Microbatches that some copy has at least."""
    return math.ceil(plan.num_microbatches / len(cluster.devices))


def _roomiest(job: TracedJob, plan: Plan, cluster: Cluster) -> Iterator[MemoryForm]:
    """The forms of copies that have least to hold, those of one program first."""
    sizes = [device.memory_bytes for device in cluster.devices]
    most = None if None in sizes else max(own for own in sizes if own is not None)
    counts = (_even_share(plan, cluster), *(1 for _ in cluster.devices[1:]))
    devices = [CopyDevice(name="", num_microbatches=num, memory_bytes=most) for num in counts]
    stages, groups = stages_to_try(job, plan), min(group_options(job, plan, cluster))
    now = asked_places(job)
    model_of = functools.cache(functools.partial(model_bytes, job, plan))
    for places in (now, *more_on_hosts(job, plan, cluster)):
        to_try = forms_to_try(job, plan, stages, places)
        if not to_try:
            continue
        model = dataclasses.replace(model_of(places.stash), keeps_sums=False)
        forms = forms_on(
            model, devices, places, shares="auto", travel=None, groups=groups, waves=None
        )
        if places == now and to_try[0][1] is None:
            yield forms.surely(to_try[0][0])  # without a look at its chain
        yield from (forms.form(zero, recompute) for zero, recompute in to_try)
