"""What waits in host memory or on a disk: whether it may, and what it costs.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 4.
"""

import math
from collections.abc import Iterator, Sequence

import jax

from ..cluster.cluster import Cluster, Device
from ..core.errors import PlanError
from ..core.format import num_bytes
from ..job.context import JobContext
from ..plan.parts import Tier
from ..plan.plan import Plan
from .memory_candidates import MemoryForm

FLOPS_OF_FORWARD = 3  #: Of a microbatch: the backward is two more.
#: Of the state that a copy updates, what is on its device at most, see `lower/units.py`.
PART_ON_DEVICE = 1 / 8


def device_optimizer_bytes(job: JobContext, plan: Plan) -> float:
    """Of the optimizer's state of a copy, whole: what each of its devices would have of it."""
    model = job.functional(plan.microbatch_size)
    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(model.trained))
    shapes = plan.device_shapes
    own = sum(math.prod(shapes[p]) for p in model.trained_places)
    return job.optimizer_bytes(plan.microbatch_size) * own / max(whole, 1)


def check_host(job: JobContext, plan: Plan, cluster: Cluster) -> None:
    """Refuse state in host memory that is described as too small for it.

    Raises:
        PlanError: With the bytes that it has and that it would need.
    """
    total = device_optimizer_bytes(job, plan)
    for replica, part in zip(plan.replicas, plan.owned_parts, strict=True):
        device, needed = cluster.devices[replica.devices[0]], total * part
        room = device.host_memory_bytes
        if room is not None and needed > room:
            raise PlanError(
                f"memory.offload.optimizer='host': device {replica.devices[0]} ({device.label}) "
                f"would keep {int(needed):,} bytes of the optimizer's state in the {room:,} of its "
                "host's memory: share it out with memory.zero"
                + ("" if plan.axes else ", or set 'disk'")
            )


#: What may wait in host memory besides the optimizer's state, and how less of it does.
_WAITS = {
    "parameters": ("the parameters", "share them out more, or leave memory.offload.parameters out"),
    "stash": (
        "what waits for backwards",
        "use memory.recompute='boundaries', more memory.waves, or leave memory.offload.stash out",
    ),
}


def on_hosts(job: JobContext, plan: Plan, cluster: Cluster, form: MemoryForm) -> Plan:
    """The plan with what it costs that parameters or what waits for backwards are on the host.

    Args:
        plan: Of it, with its counts, and the optimizer's state where it will be.

    Raises:
        PlanError: If nothing would go to the host, or its memory is described as too small.
    """
    if not any(form.on_host.get("stash", [1])):
        num = sum(text.startswith("B") for text in form.sequence)
        raise PlanError(
            f"memory.offload.stash='host': a chain of {num} segments keeps nothing for longer than "
            "one of them runs: set memory.segments to more, or leave it out"
        )
    total = device_optimizer_bytes(job, plan)
    is_state_there = plan.placement.optimizer == "host"
    devices = [cluster.devices[replica.devices[0]] for replica in plan.replicas]
    for i, (replica, device) in enumerate(zip(plan.replicas, devices, strict=True)):
        kept = {_WAITS[name][0]: own[i] for name, own in form.on_host.items()}
        if is_state_there:
            kept["the optimizer's state"] = int(total * plan.owned_parts[i])
        room = device.host_memory_bytes
        if room is not None and sum(kept.values()) > room:
            each = " and ".join(f"{size:,} bytes of {name}" for name, size in kept.items())
            largest = max(form.on_host, key=lambda name: form.on_host[name][i])
            raise PlanError(
                f"memory.offload: device {replica.devices[0]} ({device.label}) would keep {each} "
                f"in the {room:,} of its host's memory: {_WAITS[largest][1]}"
            )
    return plan.replaced(reasons=(*plan.reasons, *_moves_in_words(form, devices)))


def _moves_in_words(form: MemoryForm, devices: Sequence[Device]) -> Iterator[str]:
    """What each of it moves over the host's link, on the device that takes longest."""
    for name, own in form.moved.items():
        times = [
            (moved / rate if (rate := device.host_bytes_per_second) else 0.0, moved, rate)
            for moved, device in zip(own, devices, strict=True)
        ]
        seconds, moved, rate = max(times, key=lambda found: found[:2])
        said = (
            f"offload: at most {num_bytes(max(form.on_host[name]))} of {_WAITS[name][0]} of a copy "
            f"are in host memory; a step moves {num_bytes(moved)} there and back"
        )
        if rate is None:
            yield f"{said}; what that takes is not known: the mesh file does not say how fast"
        else:
            yield f"{said} at {rate / 1e9:.3g} GB/s, {seconds:.3g} s, beside the programs"


def words(job: JobContext, plan: Plan, cluster: Cluster, tier: Tier) -> str:
    """What waiting elsewhere costs, of the copy that it costs most.

    Args:
        plan: Of it, with its counts and shares.
    """
    total = device_optimizer_bytes(job, plan)
    own = [total * part for part in plan.owned_parts]
    place = "in host memory" if tier == "host" else "on the disk"
    said = f"offload: {num_bytes(int(max(own)))} of the optimizer's state of a copy wait {place}"
    found = []
    for replica, state, count in zip(plan.replicas, own, plan.counts, strict=True):
        device = cluster.devices[replica.devices[0]]
        rate = _rate(device, tier)
        if rate is not None:
            found.append((2 * state / rate, state, count, rate, device))
    if not found:
        return f"{said}; what the copies cost is not known: the mesh file does not say how fast"
    seconds, state, count, rate, device = max(found, key=lambda own: own[0])
    ways = "half of it where both ways go at once" if tier == "host" else "each byte in and out"
    said += (
        f"; a step moves {num_bytes(int(2 * state))} at {rate / 1e9:.3g} GB/s, {seconds:.3g} s "
        f"({ways}), hidden behind nothing but the update itself"
    )
    products = device.product_rate(job.precision.arithmetic)
    if products is None:
        return said
    flops = FLOPS_OF_FORWARD * job.graph(plan.microbatch_size).flops * count
    # Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 4: compute / (compute + copies).
    reached = flops / (2 * state) * rate
    part = reached / (reached + products.flops_per_second)
    return f"{said}; {part:.1%} of the device's rate are left (ZeRO-Infinity's formula)"


def fits_hosts(job: JobContext, plan: Plan, cluster: Cluster, form: MemoryForm) -> bool:
    """Whether the hosts hold what a form puts there, and there is something.

    Args:
        plan: Of it; all its devices are described with their hosts.
    """
    of_state = _state_on_hosts(job, plan, form)
    devices = [cluster.devices[replica.devices[0]] for replica in plan.replicas]
    return any(form.on_host.get("stash", [1])) and all(
        sum(own[i] for own in form.on_host.values()) + of_state[i] <= (d.host_memory_bytes or 0)
        for i, d in enumerate(devices)
    )


def moving_seconds(job: JobContext, plan: Plan, cluster: Cluster, form: MemoryForm) -> float:
    """Of what the device that moves longest moves in a step to its host and back.

    What takes an unknown time does not count.
    """
    of_state = _state_on_hosts(job, plan, form)
    devices = [cluster.devices[replica.devices[0]] for replica in plan.replicas]
    return max(
        (sum(own[i] for own in form.moved.values()) + 2 * of_state[i])
        / (d.host_bytes_per_second or math.inf)
        for i, d in enumerate(devices)
    )


def _state_on_hosts(job: JobContext, plan: Plan, form: MemoryForm) -> list[float]:
    """For each copy the bytes of the optimizer's state that a form puts on its host."""
    num = len(plan.replicas)
    granules = form.shares or (1,) * (num // form.shard_groups if form.zero else 1)
    total = device_optimizer_bytes(job, plan) * (form.tier == "host")
    return [total * granules[i % len(granules)] / sum(granules) for i in range(num)]


def _rate(device: Device, tier: Tier) -> float | None:
    return device.host_bytes_per_second if tier == "host" else device.disk_bytes_per_second
