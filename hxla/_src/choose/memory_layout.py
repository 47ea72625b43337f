"""Memory layouts of a step: the candidates that the settings allow, and a priced layout."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ..cluster.cluster import Cluster
from ..cluster.kinds import are_unlike, in_words
from ..core.config import OffloadConfig
from ..core.errors import PlanError
from ..launch.channel import own_member, pinned
from ..plan.parts import ZERO_STAGES, HeldBytes, HostTier, Tier
from ..plan.plan import Plan
from .recompute import num_again
from .workload import Workload

Recompute = Literal["none", "boundaries", "auto"]

_ROUNDING_BYTES = 1e-6  # of sums of shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A memory layout before its shares, waves and sequence are chosen by the memory.

    Attributes:
        recompute: How the chain of segments recomputes; None: a microbatch is one program, or a
            pipeline whose stages keep what its plan says.
        shard_groups: The number of groups of replicas, each of which shards the state.
        optimizer: Where the optimizer's state is between updates.
        stash: Where the residuals of a chain are.
        parameters: Where each replica's shard of the parameters is, in stage 3.
    """

    zero: int = 0
    recompute: Recompute | None = None
    shard_groups: int = 1
    optimizer: Tier = "device"
    stash: HostTier = "device"
    parameters: HostTier = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLayout:
    """A candidate with its shares, waves and sequence, and its bytes and seconds.

    Attributes:
        sequence: The operations of the chain, as in a plan; empty: one program.
        shares: The granules of each replica of a group, in lowest terms; empty: even.
        waves: The waves of a device's microbatches, in stages 2 and 3.
        moved: Bytes that each replica moves to and from its host or disk in a step: of the
            `optimizer`, the `stash`, the `parameters`.
        on_host: The most bytes of these in each host's memory.
        held: The bytes on each replica's device, by their owner; empty: not estimated.
        extra_seconds: Of a step, beyond one program with whole state; operations if the speed of
            devices is not known.
        moving_seconds: All transfers of the slowest replica.
        lack_bytes: The most bytes that a device lacks; 0 or less: it fits.
    """

    candidate: Candidate
    sequence: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    waves: int = 1
    moved: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    on_host: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    held: tuple[HeldBytes, ...] = ()
    extra_seconds: float = 0.0
    moving_seconds: float = 0.0
    is_timed: bool = True
    lack_bytes: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return self.lack_bytes <= _ROUNDING_BYTES

    @property
    def cost(self) -> tuple[bool, float, float]:
        """The key of comparison: layouts that fit first, by seconds, then the others by lack."""
        if not self.fits:
            return True, self.lack_bytes, 0.0
        if self.is_timed:
            return False, self.extra_seconds + self.moving_seconds, 0.0
        return False, self.moving_seconds, self.extra_seconds

    def __str__(self) -> str:
        candidate = self.candidate
        parts = [f"memory.zero {candidate.zero}" if candidate.zero else "state not sharded"]
        if candidate.recompute is not None and not self.sequence:
            keeps_all = candidate.recompute == "none"
            parts.append("residuals are kept" if keeps_all else "forwards are recomputed")
        elif candidate.recompute is not None:
            again = num_again(self.sequence)
            parts.append(
                f"{again} of its forwards are recomputed" if again else "a chain that keeps all"
            )
        if self.waves > 1:
            parts.append(f"{self.waves} waves")
        if candidate.shard_groups > 1:
            parts.append(f"in {candidate.shard_groups} groups")
        if self.shares:
            parts.append("shares " + ":".join(map(str, self.shares)))
        if candidate.stash != "device":
            parts.append(f"residuals on the {candidate.stash}")
        if candidate.parameters != "device":
            parts.append(f"shares of the parameters on the {candidate.parameters}")
        if candidate.optimizer != "device":
            parts.append(f"optimizer's state on the {candidate.optimizer}")
        return ", ".join(parts)


def is_estimated(plan: Plan) -> bool:
    """Whether bytes are estimated before compilation: not for pipelines and uneven replicas."""
    return plan.pipeline is None and not plan.is_uneven


def is_described(plan: Plan, cluster: Cluster) -> bool:
    """Whether the memory of any device is described."""
    return any(cluster.devices[d.rank].memory_bytes is not None for d in plan.devices)


def asked_candidates(work: Workload, plan: Plan, cluster: Cluster) -> list[Candidate]:
    """The layouts that the settings allow, the one that changes least first.

    Args:
        plan: With the state whole on every replica.

    Raises:
        PlanError: If the settings contradict each other or this plan.
    """
    memory, offload = work.settings.memory, work.settings.memory.offload
    if memory.recompute == "auto" and not is_described(plan, cluster):
        raise PlanError(
            "memory.recompute is 'auto', but no device is described with its memory: give it in "
            "the mesh file, or set 'none' or 'boundaries'"
        )
    stages, groups = _stages(work, plan), _groups(work, plan, cluster)
    stages = _at_least(stages, 1, "shard_groups", None if 1 in groups else groups[0])
    if not is_estimated(plan):
        return _program_candidates(work, plan, stages, groups[0])
    stages = _at_least(stages, 2, "waves", memory.waves)
    stages = _at_least(stages, 3, "offload.parameters", _if_offloaded(offload.parameters))
    _check_chain(work, plan)
    return _candidates(work, plan, cluster, stages, groups, _asked_tiers(offload))


def candidates_on_hosts(work: Workload, plan: Plan, cluster: Cluster) -> list[Candidate]:
    """Candidates with more state in host memory, where the settings allow it.

    Nothing moves to a host whose memory or link is not described.

    Args:
        plan: With the state whole on every replica.
    """
    devices = [cluster.devices[d.rank] for d in plan.devices]
    known = all(d.host_memory_bytes and d.host_bytes_per_second for d in devices)
    if not known or plan.axes:
        return []
    memory, offload = work.settings.memory, work.settings.memory.offload
    shares, has_one = _could_share(plan), len(plan.replicas) == 1
    may_optimizer = (
        offload.optimizer is None
        and memory.zero != 0
        and (shares or has_one)
        and not plan.sums.sparse
        and work.optimizer_bytes > 0
        and not work.ownership((1,) * (1 if has_one else 2)).summed_state
    )
    may_chain = not plan.sums.sparse
    may_stash = may_chain and offload.stash is None
    may_parameters = may_chain and offload.parameters is None and shares
    may_parameters = may_parameters and memory.zero in (None, 3)
    may = {"optimizer": may_optimizer, "stash": may_stash, "parameters": may_parameters}
    free = [name for name, is_free in may.items() if is_free]
    stages, groups = _stages(work, plan), _groups(work, plan, cluster)
    stages = stages if 1 in groups else tuple(stage for stage in stages if stage)
    candidates = []
    for num in range(1, len(free) + 1):
        for names in itertools.combinations(free, num):
            on_host: dict[str, Any] = dict.fromkeys(names, "host")
            places = dataclasses.replace(_asked_tiers(offload), **on_host)
            candidates += _candidates(work, plan, cluster, stages, groups, places)
    return candidates


def _asked_tiers(offload: OffloadConfig) -> Candidate:
    """The tiers in the settings; `device` where they name none."""
    return Candidate(
        optimizer=offload.optimizer or "device",
        stash=offload.stash or "device",
        parameters=offload.parameters or "device",
    )


def _if_offloaded(tier: str | None) -> str | None:
    return None if tier == "device" else tier


def _candidates(
    work: Workload,
    plan: Plan,
    cluster: Cluster,
    stages: Sequence[int],
    groups: Sequence[int],
    places: Candidate,
) -> list[Candidate]:
    """The candidates of some tiers; in an elastic job those with the bits that it began with."""
    least = 3 if places.parameters != "device" else 2 * (work.settings.memory.waves is not None)
    # The optimizer's state leaves the device part by part, as it is updated from stage 1 on.
    zero_stages = [max(stage, int(places.optimizer != "device")) for stage in stages]
    zero_stages = list(dict.fromkeys(stage for stage in zero_stages if stage >= least))
    pairs = list(
        _recomputed(work, plan, zero_stages, places, is_described=is_described(plan, cluster))
    )
    is_chain = pinned().is_chain
    of_same_bits = [pair for pair in pairs if is_chain in (None, pair[1] is not None)]
    return [
        dataclasses.replace(places, zero=zero, recompute=recompute, shard_groups=num)
        for zero, recompute in of_same_bits
        or pairs[:1]  # the settings are the same in all generations
        for num in (groups if zero else groups[:1])
    ]


def _recomputed(
    work: Workload, plan: Plan, stages: Sequence[int], places: Candidate, *, is_described: bool
) -> Iterator[tuple[int, Recompute | None]]:
    """Stages of ZeRO, each with its recomputation."""
    asked = work.settings.memory.recompute
    layered = [stage for stage in stages if stage > 1]
    if asked is not None:
        yield from ((stage, asked) for stage in stages if stage < 2)
        words: tuple[Recompute, ...] = ("none", "boundaries") if asked == "auto" else (asked,)
        yield from ((stage, word) for stage in layered for word in words)
        return
    plain = [stage for stage in stages if stage < 2]
    is_chain = not plan.sums.sparse
    if places.stash == "device":
        yield from ((stage, None) for stage in plain)
    elif not is_described:  # one program offloads nothing
        yield from ((stage, "boundaries") for stage in plain)
    if is_chain and is_described:
        yield from ((stage, "auto") for stage in plain)
    if is_chain or not plain or (places.stash != "device" and is_described):
        words = ("none", "boundaries") if is_described else ("boundaries",)
        yield from ((stage, word) for word in words for stage in layered)


def _program_candidates(
    work: Workload, plan: Plan, stages: tuple[int, ...], groups: int
) -> list[Candidate]:
    """The candidates of pipelines and of uneven replicas, which are no chain of segments.

    Raises:
        PlanError: If a setting needs a chain.
    """
    memory, offload = work.settings.memory, work.settings.memory.offload
    cut = _cut_in_words(plan) + ", in unlike parts" * plan.is_uneven
    if memory.waves is not None and plan.pipeline is not None:
        raise PlanError(
            f"memory.waves: {cut}, which run all microbatches of a step in one wave: leave it out"
        )
    stages = _at_least(stages, 2, "waves", memory.waves)
    least = stages[0]
    if memory.segments is not None and plan.pipeline is not None:
        raise PlanError(f"memory.segments: {cut}, and the stages are the segments: leave it out")
    if _if_offloaded(offload.stash):
        one = "stages run as one program" if plan.pipeline is not None else "a microbatch is one"
        raise PlanError(
            f"memory.offload.stash={offload.stash!r}: {cut}, and {one}, which offloads nothing: "
            "leave it out, or keep less with memory.recompute='boundaries'"
        )
    is_open = plan.pipeline is not None and memory.zero is None and _cut_may_share(plan)
    choices = ZERO_STAGES[least:] if is_open else (least,)
    choices = _at_least(choices, 3, "offload.parameters", _if_offloaded(offload.parameters))
    return [
        dataclasses.replace(
            _asked_tiers(offload), zero=zero, recompute=recompute, shard_groups=groups
        )
        for recompute in _kept_in_programs(work, plan)
        for zero in choices
    ]


def _kept_in_programs(work: Workload, plan: Plan) -> tuple[Recompute | None, ...]:
    """What stages, or segments in one program, may keep; None: what the plan says."""
    pipeline, word = plan.pipeline, work.settings.memory.recompute
    if word != "auto":
        return (word if pipeline is None else None,)
    before = pinned().recomputes
    if before is not None:  # the bits of an elastic job
        return ("boundaries",) if before else ("none",)
    if pipeline is not None and (pipeline.recompute or pipeline.has_weight):
        return (None,)
    return "none", "boundaries"


_NEEDS = {
    "shard_groups": (
        "memory.shard_groups needs memory.zero of 1 to 3, and replicas that can share the state: "
        "set it, or leave them out"
    ),
    "waves": (
        "memory.waves needs memory.zero of 2 or 3, which run segment by segment: set it, or leave "
        "them out"
    ),
    "offload.parameters": (
        "memory.offload.parameters='host' needs memory.zero of 3, in which each replica "
        "has its share of them: set it, or leave it out"
    ),
}


def _at_least(stages: tuple[int, ...], least: int, setting: str, value: object) -> tuple[int, ...]:
    """The stages of ZeRO that a setting allows, if it is set.

    Raises:
        PlanError: If there is none.
    """
    possible = stages if value is None else tuple(stage for stage in stages if stage >= least)
    if not possible:
        raise PlanError(_NEEDS[setting])
    return possible


def _check_chain(work: Workload, plan: Plan) -> None:
    """Refuse a stash on the host if a microbatch cannot be a chain of segments."""
    if _if_offloaded(work.settings.memory.offload.stash) and plan.sums.sparse:
        raise PlanError(
            "memory.offload.stash='host': rows of a gradient travel alone "
            "(communication.sparse_embeddings), so that a microbatch is one program, in which "
            "nothing can be moved: leave either out"
        )


def _cut_in_words(plan: Plan) -> str:
    return f"replicas are cut by {', '.join(axis.name for axis in plan.axes)}"


def _could_share(plan: Plan) -> bool:
    """Whether there are several replicas of one device, without sparse gradients."""
    return len(plan.replicas) > 1 and not plan.axes and not plan.sums.sparse


def _cut_may_share(plan: Plan) -> bool:
    """Whether replicas of several devices may shard the state without being asked to.

    Sharding changes their bits, and the next generation of an elastic job might not shard.
    """
    is_fixed = len(plan.replicas) == 1 or plan.stage_forms or plan.is_uneven
    return not (is_fixed or plan.sums.sparse or own_member() is not None)


def _may_share(plan: Plan) -> bool:
    """The same for any replicas but pipelines."""
    if not plan.axes:
        return _could_share(plan)
    return plan.pipeline is None and _cut_may_share(plan)


def _stages(work: Workload, plan: Plan) -> tuple[int, ...]:
    """The stages of ZeRO that the settings allow, the one that changes least first.

    Unlike devices need at least the first. The third over hosts is by request only: parameters of
    each segment would go through host memory.

    Raises:
        PlanError: If the settings make each of several unlike devices update everything.
    """
    memory, kinds = work.settings.memory, [device.kind for device in plan.devices]
    asked = memory.zero
    offload = memory.offload.optimizer
    least = int(are_unlike(kinds) or offload is not None)
    if offload is not None and asked == 0:
        raise PlanError(
            f"memory.zero=0: memory.offload.optimizer={offload!r} updates part after part, as "
            "ZeRO's stages do, so that no bit depends on where the state is: leave it out or set "
            "it to 1"
        )
    if least and asked == 0:
        raise PlanError(
            f"memory.zero=0: {in_words(kinds)} would each round the whole update in its own way, "
            "and the replicas drift apart: leave it out or set it to 1"
        )
    is_clipped = work.settings.communication.microbatch_clip_norm is not None
    most = 1 if is_clipped and memory.segments != 1 else 3
    if asked is not None and asked > most:
        raise PlanError(
            f"memory.zero={asked}: the gradients of a segment are summed over all microbatches "
            "before those of the next exist, and communication.clip='before' needs the whole "
            "gradient of a microbatch: use 0 or 1, or clip='after'"
        )
    if asked is not None or not _may_share(plan):
        return (asked or least,)
    if plan.sums.over != "device":
        most = min(most, 2)
    return ZERO_STAGES[least : most + 1]


def _groups(work: Workload, plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The numbers of groups of replicas, each sharding the state, that the settings allow.

    Raises:
        PlanError: If the replicas do not make such groups.
    """
    asked, shares = work.settings.memory.shard_groups, work.settings.memory.shares
    num = len(plan.replicas)
    if isinstance(asked, int):
        if asked > 1 and (num % asked or num == asked):
            raise PlanError(
                f"memory.shard_groups={asked}: {num} replicas do not make so many "
                "groups of equal size, of two or more: use another number, or leave it out"
            )
        numbers: tuple[int, ...] = (asked,)
    elif asked == "nodes":
        try:
            numbers = (groups_of_nodes(plan, cluster),)
        except PlanError as error:
            raise PlanError(
                f"memory.shard_groups='nodes': {error}: use a number, or leave it out"
            ) from error
    else:
        numbers = (1,)
        if _may_share(plan) and plan.sums.over == "device" and isinstance(shares, str):
            with contextlib.suppress(PlanError):  # nodes that make no groups
                numbers = (1, groups_of_nodes(plan, cluster))
    if not isinstance(shares, str) and len(shares) != num // numbers[0]:
        each = f" in each of {numbers[0]} groups" if numbers[0] > 1 else ""
        raise PlanError(
            f"memory.shares: {len(shares)} for {num // numbers[0]} replicas{each}: give one each"
        )
    return numbers


def groups_of_nodes(plan: Plan, cluster: Cluster) -> int:
    """The number of nodes, where the replicas of each node are a group.

    Raises:
        PlanError: If the replicas of the nodes are no such groups, with the reason.

    References:
        Zhao et al., "PyTorch FSDP: experiences on scaling fully sharded data parallel", VLDB 2023,
        section 3.2.2 (hybrid sharding).
        Zhang et al., "MiCS: near-linear scaling for training gigantic model on public cloud", VLDB
        2022, sections 3.2 and 3.3 (partition groups, two-hop gradient synchronisation).
    """
    nodes = [{cluster.devices[rank].node for rank in r.devices} for r in plan.replicas]
    if any(len(names) > 1 for names in nodes):
        raise PlanError("a replica is in several nodes")
    runs = [(node, len(list(same))) for node, same in itertools.groupby(x.pop() for x in nodes)]
    sizes = [size for _, size in runs]
    if len(runs) < 2:
        raise PlanError("all replicas are in one node")
    if len({node for node, _ in runs}) < len(runs):
        raise PlanError("the replicas of a node do not follow each other")
    if len(set(sizes)) > 1:
        listed = ", ".join(map(str, sizes[:8])) + " and more" * (len(sizes) > 8)
        raise PlanError(f"nodes have unlike numbers of replicas, {listed}")
    if sizes[0] == 1:
        raise PlanError("each node has one replica only")
    kinds = {device.rank: device.arithmetic for device in plan.devices}
    replica_kinds = [tuple(kinds[rank] for rank in r.devices) for r in plan.replicas]
    if any(x != replica_kinds[i % sizes[0]] for i, x in enumerate(replica_kinds)):
        raise PlanError("nodes have devices of unlike kinds, whose equal parts would drift apart")
    return len(runs)
