"""From a described cluster and a profiled chain to the planner's numbers, and back to devices."""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence

from .._cluster import Cluster, Device, Link
from .._errors import PlanError
from .._profile._values import LayerSize, LayerTime, Profile, Setting, together_key
from .._proposal import DevicePlan, Proposal, RunnerUp
from .._replay import Timeline
from ._chain import Chain, Group, Staging
from ._evaluate import staging_cost, staging_memory
from ._search import Found, search

_UNBOUNDED = 2.0**60  # bytes: no limit that a plan could meet
_NUM_RUNNERS_UP = 7
_NUM_RANKED = 1000  # all: stages may be limited afterwards
_BACKWARD_FLOPS = 2.0  # a layer's backward is two products for each of its forward's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a script asks to be planned.

    Attributes:
        model: Fingerprint.
        layers: Names of the chain's parts.
        sizes: Microbatch size to one size per layer.
        input_bytes: Microbatch size to the bytes of its inputs, all of which a device holds.
        batch_size: Examples of a global batch.
        state_factor: Bytes kept per byte of parameters: itself, its gradient, its sums and the
            optimizer's state.
        reduce_factor: Bytes that a reduction moves per byte of gradient and direction, in units of
            a float32 all-reduce (1.5: exact sums).
    """

    model: str
    layers: tuple[str, ...]
    sizes: Mapping[int, tuple[LayerSize, ...]]
    input_bytes: Mapping[int, int]
    batch_size: int
    state_factor: float
    reduce_factor: float = 1.0


def propose(
    work: Work,
    cluster: Cluster,
    profile: Profile | None,
    *,
    max_stages: int | None = None,
    time_budget_seconds: float = 10.0,
) -> tuple[Proposal, tuple[Timeline, ...]]:
    """The fastest plan for a cluster, its runners-up, and a bound on any.

    Args:
        work: The model's chain at every microbatch size to try.
        cluster: Described.
        profile: Measured times; what it lacks is estimated from the mesh file's rates.
        max_stages: Most stages of a plan; None: any number.
        time_budget_seconds: Of the search.

    Returns:
        The proposal, and the replayed timeline of each sort of replicas.

    Raises:
        PlanError: If a kind of device has neither a profile nor a rate, or nothing fits.

    References:
        Williams et al., "Roofline", CACM 2009 (estimates where nothing was measured).
    """
    reasons: dict[str, None] = {}
    kinds = _kinds(cluster)
    chains: dict[Hashable, Chain] = {
        size: _chain(work, size, cluster, kinds, profile, reasons) for size in sorted(work.sizes)
    }
    found = search(chains, time_budget_seconds=time_budget_seconds, num_ranked=_NUM_RANKED)
    ranked = [f for f in found.ranked if len(f.staging.cuts) <= (max_stages or len(work.layers))]
    if not ranked:
        raise PlanError(
            f"no plan of at most {max_stages} stages was found; the best has "
            f"{len(found.ranked[0].staging.cuts)}: {found.ranked[0].staging.step_seconds:.4g} s"
        )
    best = ranked[0]
    size = int(str(best.alternative))
    chain, staging = chains[size], best.staging
    cost = staging_cost(chain, staging)
    memory = staging_memory(chain, staging)
    measured: dict[tuple[int, int], float] = {}  # (group, stage): what compiled programs say
    if profile is not None and len(staging.cuts) == 1:
        for k, (label, ranks) in enumerate(kinds.items()):
            setting = Setting(cluster.devices[ranks[0]].label, size)
            if setting in profile.peaks:
                measured[k, 0] = profile.peaks[setting]
                reasons[f"{label}: memory from the compiled programs"] = None
    free = {k: list(ranks) for k, ranks in enumerate(kinds.values())}
    ends = (*staging.cuts[1:], len(work.layers))
    devices: list[DevicePlan] = []
    number = 0
    for sort, replica in enumerate(staging.replicas):
        for _ in range(replica.count):
            for stage, group in enumerate(replica.groups):
                spent, held = cost.stages[sort][stage], memory[sort][stage]
                devices.append(
                    DevicePlan(
                        device=free[group].pop(0),
                        kind=chain.groups[group].kind,
                        replica=number,
                        stage=stage,
                        first_layer=staging.cuts[stage],
                        last_layer=ends[stage] - 1,
                        num_microbatches=replica.num_microbatches,
                        compute_seconds=spent.compute_seconds,
                        wait_seconds=spent.wait_seconds,
                        reduction_seconds=spent.reduction_seconds,
                        update_seconds=spent.update_seconds,
                        memory_bytes=measured.get((group, stage), held.total_bytes)
                        + replica.num_microbatches * work.input_bytes[size],
                        capacity_bytes=_described(chain.groups[group].memory_bytes),
                    )
                )
            number += 1
    idle = sorted(rank for ranks in free.values() for rank in ranks)
    if idle:
        reasons[f"devices {idle} have no part: with them the step would not be shorter"] = None
    if found.exhausted:
        reasons["the search ran out of time: the bound holds, a longer search may find more"] = None
    for key, why in found.infeasible.items():
        reasons[f"microbatches of {key}: {why}"] = None
    return (
        Proposal(
            model=work.model,
            cluster=cluster.name,
            batch_size=work.batch_size,
            microbatch_size=size,
            layers=work.layers,
            devices=tuple(devices),
            step_seconds=cost.step_seconds,
            closed_form_seconds=staging.step_seconds,
            bound_seconds=found.bound_seconds,
            runners_up=_runners_up([f for f in found.ranked if f is not best]),
            reasons=tuple(reasons),
        ),
        cost.timelines,
    )


def _described(capacity: float) -> float:
    return capacity if capacity < _UNBOUNDED else 0.0


def _runners_up(found: Sequence[Found]) -> tuple[RunnerUp, ...]:
    return tuple(
        RunnerUp(
            description=f"microbatches of {other.alternative}, {_in_words(other.staging)}",
            step_seconds=other.staging.step_seconds,
        )
        for other in found[:_NUM_RUNNERS_UP]
    )


def _in_words(staging: Staging) -> str:
    stages = len(staging.cuts)
    parts = [f"{r.count} x {r.num_microbatches} microbatches" for r in staging.replicas]
    return f"{stages} stage{'s' * (stages > 1)}, {', '.join(parts)}"


def _kinds(cluster: Cluster) -> dict[str, list[int]]:
    """Ranks of like devices: of one kind, and with the same memory."""
    found: dict[tuple[str, int | None], list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        found.setdefault((device.label, device.memory_bytes), []).append(rank)
    labels: dict[str, list[int]] = {}
    for (label, memory), ranks in found.items():
        twice = sum(other == label for other, _ in found) > 1
        labels[f"{label} {memory}" if twice else label] = ranks
    return labels


def _chain(
    work: Work,
    size: int,
    cluster: Cluster,
    kinds: Mapping[str, Sequence[int]],
    profile: Profile | None,
    reasons: dict[str, None],
) -> Chain:
    sizes = work.sizes[size]
    ranks = list(kinds.values())
    groups = []
    for label, own in kinds.items():
        device = cluster.devices[own[0]]
        times = _times(device, size, sizes, work, profile, reasons)
        if device.memory_bytes is None:
            reasons[f"{label}: memory not described, taken to be enough"] = None
        groups.append(
            Group(
                kind=label,
                num_devices=len(own),
                memory_bytes=_UNBOUNDED if device.memory_bytes is None else device.memory_bytes,
                forward_seconds=tuple(t.forward for t in times),
                backward_seconds=tuple(t.backward for t in times),
                update_seconds=tuple(t.update for t in times),
                parameter_bytes=tuple(s.parameter_bytes for s in sizes),
                stash_bytes=tuple(s.stash_bytes for s in sizes),
            )
        )
    links = [[_slowest_link(cluster, a, b) for b in ranks] for a in ranks]
    if len(cluster.devices) > 1 and any(link is None for row in links for link in row):
        reasons["some links are not described: their communication is not counted"] = None
    together = together_key(d.label for d in cluster.devices)
    whole_bytes = sum(s.parameter_bytes for s in sizes)
    measured = profile.reductions.get(together) if profile is not None else None
    if measured is not None:
        reasons[f"the sum over all devices: measured, {measured:.4g} s"] = None
    slowest = max(
        (1 / link.bytes_per_second for row in links for link in row if link is not None),
        default=0.0,
    )
    return Chain(
        groups=tuple(groups),
        num_microbatches=work.batch_size // size,
        output_bytes=tuple(s.output_bytes for s in sizes),
        state_factor=work.state_factor,
        send_seconds=tuple(
            tuple(0.0 if link is None else 1 / link.bytes_per_second for link in row)
            for row in links
        ),
        send_latency_seconds=tuple(
            tuple(0.0 if link is None else link.latency_seconds for link in row) for row in links
        ),
        # Twice over the slowest link: a ring's reduce-scatter and all-gather with many devices.
        reduce_seconds=(
            2 * work.reduce_factor * slowest if measured is None else measured / whole_bytes,
        )
        * len(groups),
    )


def _slowest_link(cluster: Cluster, a: Sequence[int], b: Sequence[int]) -> Link | None:
    """Between any device of one group and any of another; None if one pair has none."""
    pairs = [(i, j) for i, j in itertools.product(a, b) if i != j]
    found: dict[tuple[int, int], Link | None] = {}
    for i, j in pairs:
        nodes = cluster.devices[i].node, cluster.devices[j].node
        if nodes not in found:
            found[nodes] = cluster.link(i, j)
    links = [link for link in found.values() if link is not None]
    if len(links) < len(found) or not links:
        return None
    return min(links, key=lambda link: link.bytes_per_second)


def _times(
    device: Device,
    size: int,
    sizes: Sequence[LayerSize],
    work: Work,
    profile: Profile | None,
    reasons: dict[str, None],
) -> tuple[LayerTime, ...]:
    setting = Setting(device.label, size)
    if profile is not None and setting in profile.times:
        reasons[f"{device.label}: measured"] = None
        return profile.times[setting]
    rate = device.rate("tensorfloat32") or device.rate("float32")
    if rate is None:
        raise PlanError(
            f"device kind {device.label!r}: the profile has no times for microbatches of {size}, "
            "and the mesh file gives no rate to estimate them from: measure with hxla profile, or "
            "add [device.rates] float32 to the mesh file"
        )
    how = "measured" if rate.measured else "data-sheet"
    reasons[
        f"{device.label}: not measured, estimated from FLOPs at the {how} rate of {rate.dtype}"
    ] = None
    bandwidth = device.memory_bytes_per_second or math.inf

    def of(layer: LayerSize) -> LayerTime:
        moved = layer.parameter_bytes + layer.stash_bytes
        forward = max(layer.flops / rate.flops_per_second, moved / bandwidth)
        return LayerTime(
            forward=forward,
            backward=_BACKWARD_FLOPS * forward,
            update=(work.state_factor + 1) * layer.parameter_bytes / bandwidth,
            measured=False,
        )

    return tuple(of(layer) for layer in sizes)
