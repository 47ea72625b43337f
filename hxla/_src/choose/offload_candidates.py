"""What may wait in host memory although nobody asked for it, where nothing else fits."""

import itertools
from collections.abc import Iterator

from ..cluster.cluster import Cluster
from ..job.context import JobContext
from ..plan.parts import HostTier, Tier
from ..plan.plan import Plan
from .memory_candidates import Places
from .zero_placement import could_share, shared_update


def asked_places(job: JobContext) -> Places:
    """Where the settings put what waits; on the device where they leave it open."""
    asked = job.settings.memory.offload
    return Places(
        optimizer=asked.optimizer or "device",
        stash=asked.stash or "device",
        parameters=asked.parameters or "device",
    )


def could_be_chain(job: JobContext, plan: Plan) -> bool:
    """Whether a microbatch may be a chain of segments."""
    return not plan.sums.sparse and job.settings.communication.microbatch_clip_norm is None


def more_on_hosts(job: JobContext, plan: Plan, cluster: Cluster) -> Iterator[Places]:
    """All ways to have more in host memory than the settings say, as far as they leave it open.

    Args:
        plan: Of it, with the state whole on every copy.
        cluster: Its devices, and what their hosts have; nothing is moved to a host of which that,
            or how fast it is reached, is not known.
    """
    devices = [cluster.devices[d.rank] for d in plan.devices]
    known = all(d.host_memory_bytes and d.host_bytes_per_second for d in devices)
    if not known or plan.axes:
        return
    asked, memory = job.settings.memory.offload, job.settings.memory
    shares, has_one = could_share(plan), len(plan.replicas) == 1
    may_optimizer = (
        asked.optimizer is None
        and memory.zero != 0
        and (shares or has_one)
        and not plan.sums.sparse
        and job.optimizer_bytes(plan.microbatch_size) > 0
        and not shared_update(job, plan, (1,) * (1 if has_one else 2)).summed_state
    )
    may_chain = could_be_chain(job, plan)
    may_stash = may_chain and asked.stash is None
    may_parameters = may_chain and asked.parameters is None and shares and memory.zero in (None, 3)
    now = asked_places(job)
    optimizers: tuple[Tier, ...] = ("device", "host") if may_optimizer else (now.optimizer,)
    both: tuple[HostTier, ...] = ("device", "host")
    stashes = both if may_stash else (now.stash,)
    parameters = both if may_parameters else (now.parameters,)
    for first, second, third in itertools.product(optimizers, stashes, parameters):
        found = Places(optimizer=first, stash=second, parameters=third)
        if found != now:
            yield found
