"""Bytes of a memory layout on every device and host, and its seconds of a step.

The sequence is replayed as it would run. Sequence and shares are chosen together, because residuals
take room from the state.

    P parameters, S sums of gradients, O optimizer state in bytes, f a device's share, W(s) bytes
    of the largest segment s beside the state, A residuals

    stage 0    P + S + O         + P + A      one program: the gradients of all layers at once
    stage 1    P + S + f O       + P + A
    chain      P + S + (f) O     + A          gradients go into the sums segment by segment
    stage 2    P + f P + f O     + W + A      W: the sums of a segment
    stage 3    f P + f P + f O   + W + A      W: those, and the parameters of the segment

Sums, gradients and shares are of the trained parameters. In stages 0 and 1 the reduction may need
more than a microbatch: see `ModelBytes.summing`. In stages 2 and 3 the microbatches of a device
wait together, so A grows with their number. Devices compute the same in all stages, so layouts
differ in time by recomputation and communication: stage 3 gathers the parameters once more.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC
    2020, sections 5 and 7.
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 4.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Literal

from ..core.errors import PlanError
from ..plan.parts import HeldBytes, HostTier, Tier
from ..schedule.segment_sequence import (
    SegmentCost,
    SequenceReplay,
    layered_peak_bytes,
    replay_sequence,
    runs_by_segment,
    sequence_from_texts,
    while_running,
)
from .apportionment import SplitDevice, best_sizes
from .inner_split import in_lowest_terms
from .memory_layout import Candidate, MemoryLayout, Recompute
from .recompute import Waits, best_sequence, boundary_texts, keep_all, keep_texts, least_memory

#: The most of a state on the device that is updated part by part, see `lower.update_groups`.
PART_ON_DEVICE = 1 / 8
GRANULES_OF_A_REPLICA = 12  #: Shares are as fine as a twelfth of an even one.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainBytes:
    """Costs of the segments of a microbatch.

    Attributes:
        costs: Per segment, as separate programs.
        fused: Per segment, as a part of one program.
        parameter_bytes: Per segment, of the parameters that it reads, as float32.
        gathered_bytes: The same as stage 3 gathers them; empty: as float32.
        per_call: The microbatches of a call, whose residuals `costs` counts together.
    """

    costs: tuple[SegmentCost, ...]
    fused: tuple[SegmentCost, ...]
    parameter_bytes: tuple[int, ...]
    gathered_bytes: tuple[int, ...] = ()
    per_call: int = 1

    @functools.cached_property
    def kept(self) -> SequenceReplay:
        """The replay that keeps the residuals of every segment."""
        return keep_all(self.costs)

    @property
    def part_gathered(self) -> float:
        """Bytes of a gather of all parameters, over those in float32."""
        whole = sum(self.parameter_bytes)
        return sum(self.gathered_bytes) / whole if self.gathered_bytes and whole else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes of a pipeline on each of its devices, beside the stored state.

    Attributes:
        slots: The parameters that a stage reads.
        summed: The gradients that a stage adds, as float32.
        running: What waits for a tick, and what a program has while it runs.
        inputs: The batch of all microbatches.
        again_flops: Operations of a microbatch's forwards that run again.
        moves: The most that the sums need beside themselves while they leave the stage.
    """

    slots: int
    summed: int
    running: int
    inputs: int
    again_flops: float
    moves: int = 0

    @property
    def activations(self) -> int:
        """Of the microbatches; or of what moves sums, if that is more."""
        return max(self.running + self.inputs, self.moves)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneStage:
    """The devices of a stage, and the bytes of each beside the stored state.

    Attributes:
        place: The entry of `Plan.replicas` that has the devices.
    """

    place: int
    ranks: tuple[int, ...]
    held: StageBytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of a replica on one of its devices.

    Attributes:
        trained: The bytes of the trained parameters, as float32.
        num_sums: The arrays of four bytes per parameter in which gradients are summed.
        optimizer: The bytes of the optimizer's state, wherever they are.
        bucket: The bytes of gradients, as float32, up to which tensors are summed together.
        keeps_sums: Whether sums stay beside their totals.
        inputs: The bytes of one microbatch's inputs. Those of the others count in stages 2 and 3;
            elsewhere they follow counts, which follow the memory.
        values: The bytes of all arrays of a microbatch's forward.
        chain: Makes the segments, which takes time for a large model.
        stages: The bytes of a pipeline whose stages keep what a word says; None: no pipeline.
        unlike: The bytes of each stage, by whether it keeps its inputs only; None: all are alike.
    """

    parameters: int
    trained: int
    num_sums: int
    optimizer: float
    bucket: int
    keeps_sums: bool
    inputs: int
    values: int
    chain: Callable[[], ChainBytes]
    stages: Callable[[Recompute], StageBytes] | None = None
    unlike: Callable[[bool], Sequence[OneStage]] | None = None

    def kept_sums(self, waves: int, shard_groups: int) -> float:
        """Words per parameter of a replica's sums, in stages 2 and 3.

        Between waves each group has a shard of the chunks, and at the end totals of one word.
        """
        return max(self.num_sums / shard_groups, 1.0) if waves > 1 else 1.0

    def optimizer_on_device(self, tier: Tier) -> float:
        """Bytes of an unsharded optimizer state that are on the device at once."""
        return self.optimizer * (1 if tier == "device" else PART_ON_DEVICE)

    def summing(self, zero: int, num: int) -> float:
        """Bytes beside the sums during the reduction: totals, sums in flight, and their chunks.

        Args:
            zero: The stage of ZeRO, 0 or 1.
            num: Replicas that shard the state; in stage 0 all replicas.
        """
        totals = self.trained * self.keeps_sums / (num if zero else 1)
        bucket = min(self.bucket, self.trained) if num > 1 else 0
        copies = self.num_sums * (1 + 2 / num) if not zero else self.num_sums * (1 + 1 / num) + 1
        return totals + bucket * copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Travel:
    """Seconds of collectives between replicas, of all parameters as float32.

    Attributes:
        gather: An all-gather, or a reduce-scatter, in all groups that shard the state.
        all_copies: The same over all replicas.
        across: The same over the groups, of each replica's shard.
    """

    gather: float = 0.0
    all_copies: float = 0.0
    across: float = 0.0

    def of_groups(self, num_sums: int, waves: int) -> float:
        """Seconds of a step in groups beyond those over all replicas; below 0 if less.

        In each wave sums are reduced and scattered inside groups and then over groups; at the end
        floats are gathered over groups.

        Args:
            num_sums: The number of arrays in which gradients are summed.
        """
        inside = (num_sums + 1) * (self.gather - self.all_copies)
        return inside + (num_sums * waves + 1) * self.across


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaDevice:
    """The device of a replica with the least memory.

    Attributes:
        num_microbatches: Of the replica in a step.
        memory_bytes: None: not described, so no limit.
        speed: Operations of the replica per second, in a unit that all share.
        host_memory_bytes: None: not described.
        host_bytes_per_second: None: not described, as if moves took no time.
    """

    name: str
    num_microbatches: int
    memory_bytes: int | None = None
    speed: float = 1.0
    host_memory_bytes: int | None = None
    host_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None

    @property
    def room(self) -> float:
        """Its bytes; infinite if not described."""
        return math.inf if self.memory_bytes is None else self.memory_bytes

    def bytes_per_second(self, tier: Tier) -> float | None:
        """The rate to and from host memory or the disk."""
        return self.disk_bytes_per_second if tier == "disk" else self.host_bytes_per_second


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Inputs of the price of a layout.

    Attributes:
        shares: The granules of each replica of a group, `even`, or `auto`: by memory and speed.
        waves: Of stages 2 and 3; None: the fewest with which boundaries fit.
        travel: Seconds of collectives, by the number of groups that shard the state.
        is_timed: Whether speeds are operations per second.
        is_estimated: Whether bytes are estimated before compilation: not those of uneven replicas,
            and of pipelines only where the memory decides what stages keep.
    """

    model: ModelBytes
    devices: tuple[ReplicaDevice, ...]
    shares: Literal["auto", "even"] | tuple[int, ...] = "auto"
    waves: int | None = 1
    travel: Callable[[int], Travel] = lambda _: Travel()
    is_timed: bool = True
    is_estimated: bool = True

    @functools.cached_property
    def chain(self) -> ChainBytes:
        """The segments of a microbatch."""
        return self.model.chain()

    def slowest(self, seconds: float) -> float:
        """Seconds of all microbatches on the slowest replica, if one takes so many operations."""
        return max(d.num_microbatches * seconds / d.speed for d in self.devices)


def price(candidate: Candidate, step: StepMemory) -> MemoryLayout:
    """The layout of a candidate in the available memory, with its bytes and seconds."""
    if not step.is_estimated:
        layout = _unestimated(candidate, step)
        is_known = candidate.recompute is not None and step.model.stages is not None
        return _in_stages(layout, step) if is_known else layout
    if candidate.zero < 2:
        return _sequential(candidate, step)
    if candidate.recompute == "none":
        return _layerwise(candidate, step, step.waves or 1)
    most, layouts = max(device.num_microbatches for device in step.devices), []
    for waves in range(1, max(most, 1) + 1) if step.waves is None else [step.waves]:
        layouts.append(_layerwise(candidate, step, waves))
        if layouts[-1].fits:
            return layouts[-1]
    return min(layouts, key=lambda layout: layout.lack_bytes)


def upper_bound(candidate: Candidate, step: StepMemory) -> MemoryLayout:
    """One program with more bytes than it can need: quick, because no chain is made.

    A backward reads some of the values of its forward, and makes as many again.
    """
    layout = _sequential(candidate, step, 2 * step.model.values)
    return dataclasses.replace(layout, held=())


def _unestimated(candidate: Candidate, step: StepMemory) -> MemoryLayout:
    """A layout without an estimate of bytes; only its transfers are known."""
    shares: tuple[int, ...] = ()
    if candidate.zero and not isinstance(step.shares, str) and len(set(step.shares)) > 1:
        shares = in_lowest_terms(step.shares)
    parts = _parts(candidate, shares or (1,) * _num_members(candidate, step))
    moved, on_host = _moved(candidate, step, parts)
    return MemoryLayout(
        candidate=candidate,
        shares=shares,
        waves=step.waves or 1,
        moved=moved,
        on_host=on_host,
        moving_seconds=_moving_seconds(candidate, step, moved),
    )


def _in_stages(layout: MemoryLayout, step: StepMemory) -> MemoryLayout:
    """The layout of a pipeline with an estimate of its bytes."""
    candidate, model = layout.candidate, step.model
    assert candidate.recompute is not None
    assert model.stages is not None
    stage, is_sharded = model.stages(candidate.recompute), candidate.zero > 2
    parts = _parts(candidate, layout.shares or (1,) * _num_members(candidate, step))
    held = tuple(
        HeldBytes(
            parameters=model.parameters + stage.slots - model.trained * (1 - part) * is_sharded,
            sums=stage.summed * model.num_sums,
            optimizer=model.optimizer_on_device(candidate.optimizer) * part,
            activations=stage.activations,
        )
        for part in parts
    )
    lacks = (x.total - device.room for x, device in zip(held, step.devices, strict=True))
    return dataclasses.replace(
        layout,
        held=held,
        extra_seconds=step.slowest(stage.again_flops),
        is_timed=step.is_timed,
        lack_bytes=max(lacks),
    )


def _sequential(candidate: Candidate, step: StepMemory, peak: int | None = None) -> MemoryLayout:
    """Each microbatch from forward to backward, before the next."""
    model, gradients = step.model, step.model.trained
    replay: SequenceReplay | None = None
    if candidate.recompute is not None:
        replay = _replay(candidate, step)
        peak, gradients = replay.copying_peak_bytes, 0
    elif peak is None:
        peak = keep_all(step.chain.fused).peak_bytes
    num = _num_members(candidate, step) if candidate.zero else len(step.devices)
    summing = model.summing(candidate.zero, num)
    if summing > gradients + peak:
        gradients, peak = 0, 0
    else:
        summing = 0.0
    need = HeldBytes(
        parameters=model.parameters,
        sums=model.trained * model.num_sums + summing,
        gradients=gradients,
        activations=peak + model.inputs,
    )
    return _layout(candidate, step, [need] * len(step.devices), replay)


def _layerwise(candidate: Candidate, step: StepMemory, waves: int) -> MemoryLayout:
    """Segment by segment, each for all microbatches of a wave."""
    model, chain, is_sharded = step.model, step.chain, candidate.zero > 2
    replay = _fixed_sequence(step, candidate.recompute, candidate.stash, layered=True)
    largest = max(chain.parameter_bytes)
    segment_bytes = [n * (model.num_sums + is_sharded) for n in chain.parameter_bytes]
    beside = while_running(replay.sequence, segment_bytes)
    need_of: dict[int, HeldBytes] = {}  # by the microbatches of a device
    for num in {max(device.num_microbatches, 1) for device in step.devices}:
        calls = -(-num // chain.per_call)
        peak = layered_peak_bytes(replay.sequence, chain.costs, -(-calls // waves), beside)
        need_of[num] = HeldBytes(
            parameters=model.parameters + (largest - model.trained) * is_sharded,
            sums=largest * model.num_sums,
            activations=max(peak - max(segment_bytes), 0) + calls * model.inputs,
        )
    needs = [need_of[max(device.num_microbatches, 1)] for device in step.devices]
    gather = chain.part_gathered * is_sharded
    # Sums travel as often as waves run, and so do the gathers of stage 3.
    again = model.num_sums + 2 * gather
    travel_seconds = (gather + (waves - 1) * again) * step.travel(candidate.shard_groups).gather
    return _layout(candidate, step, needs, replay, travel_seconds, waves)


def _layout(
    candidate: Candidate,
    step: StepMemory,
    needs: Sequence[HeldBytes],
    replay: SequenceReplay | None,
    travels: float = 0.0,
    waves: int = 1,
) -> MemoryLayout:
    """A layout whose state is sharded by the room beside other needs.

    Args:
        needs: The bytes of each device without its shard of the state.
        travels: The seconds of collectives that other layouts do not have.
    """
    granules = _granules(candidate, step, [need.total for need in needs], waves)
    parts = _parts(candidate, granules)
    device_bytes = tuple(
        _device_bytes(candidate, step, need, part, waves)
        for need, part in zip(needs, parts, strict=True)
    )
    extra = travels
    if replay is not None:
        extra += step.slowest(replay.seconds) - step.slowest(step.chain.kept.seconds)
    if candidate.zero and candidate.shard_groups > 1:
        # Groups are for state that must be sharded: their speed is no reason to shard it.
        between = step.travel(candidate.shard_groups).of_groups(step.model.num_sums, waves)
        extra = max(extra + between, 0.0)
    moved, on_host = _moved(candidate, step, parts, replay, waves)
    return MemoryLayout(
        candidate=candidate,
        sequence=() if replay is None else replay.sequence.written,
        shares=() if len(set(granules)) == 1 else in_lowest_terms(granules),
        waves=waves,
        moved=moved,
        on_host=on_host,
        held=device_bytes,
        extra_seconds=extra,
        moving_seconds=_moving_seconds(candidate, step, moved),
        is_timed=step.is_timed,
        lack_bytes=max(
            needed.total - device.room
            for needed, device in zip(device_bytes, step.devices, strict=True)
        ),
    )


def _device_bytes(
    candidate: Candidate, step: StepMemory, need: HeldBytes, part: float, waves: int
) -> HeldBytes:
    """Bytes of a device with its shard of the state."""
    model, zero = step.model, candidate.zero
    each, optimizer = model.trained * part, model.optimizer_on_device(candidate.optimizer) * part
    kept = model.kept_sums(waves, candidate.shard_groups)
    sums = need.sums + each * kept * (zero > 1)
    running = need.model_copy(update={"optimizer": optimizer, "sums": sums})
    if zero < 3:
        return running
    if candidate.parameters == "device":
        return running.model_copy(update={"parameters": need.parameters + each})
    # The pieces of a segment and of the next one are here.
    pieces = min(2 * max(step.chain.parameter_bytes) * part, each)
    running = running.model_copy(update={"parameters": need.parameters + pieces})
    frozen = model.parameters - model.trained
    updating = HeldBytes(
        parameters=frozen + each * (1 if candidate.optimizer == "device" else PART_ON_DEVICE),
        sums=each,
        optimizer=optimizer,
    )
    return max(running, updating, key=lambda needed: needed.total)


Moved = dict[str, tuple[int, ...]]


def _moved(
    candidate: Candidate,
    step: StepMemory,
    parts: Sequence[float],
    replay: SequenceReplay | None = None,
    waves: int = 1,
) -> tuple[Moved, Moved]:
    """Per kind of state, bytes that each replica moves in a step, and its bytes on the host."""
    moved, on_host = {}, {}
    if candidate.optimizer != "device":
        state = tuple(int(step.model.optimizer * part) for part in parts)
        moved["optimizer"] = tuple(2 * num_bytes for num_bytes in state)
        if candidate.optimizer == "host":
            on_host["optimizer"] = state
    if replay is not None and candidate.parameters != "device":
        trained, of_segment = step.model.trained, step.chain.parameter_bytes
        # Each run of a segment gathers its parameters; the update moves all of them both ways.
        gathered = waves * sum(of_segment[i] for i, _ in runs_by_segment(replay.sequence))
        factor = 2 + gathered / trained if trained else 0.0
        moved["parameters"] = tuple(int(trained * part * factor) for part in parts)
        on_host["parameters"] = tuple(round(trained * part) for part in parts)
    if replay is not None and candidate.stash != "device":
        nums = [device.num_microbatches for device in step.devices]
        at_once = [-(-num // waves) if candidate.zero > 1 else 1 for num in nums]
        moved["stash"] = tuple(num * replay.moved_bytes for num in nums)
        on_host["stash"] = tuple(num * replay.host_bytes for num in at_once)
    return moved, on_host


def _moving_seconds(candidate: Candidate, step: StepMemory, moved: Moved) -> float:
    """Seconds of the slowest replica's transfers; those of unknown rate do not count."""
    return max(
        sum(
            num_bytes[i] / (device.bytes_per_second(tier_of(candidate, name)) or math.inf)
            for name, num_bytes in moved.items()
        )
        for i, device in enumerate(step.devices)
    )


def tier_of(candidate: Candidate, name: str) -> Tier:
    """The tier of one of `MemoryLayout.moved` between its uses."""
    return candidate.optimizer if name == "optimizer" else "host"


def _num_members(candidate: Candidate, step: StepMemory) -> int:
    """Replicas of a group."""
    return len(step.devices) // candidate.shard_groups


def _parts(candidate: Candidate, granules: Sequence[int]) -> list[float]:
    """Each replica's share of the sharded state."""
    parts = [n / sum(granules) if candidate.zero else 1.0 for n in granules]
    return parts * candidate.shard_groups


def _state(candidate: Candidate, model: ModelBytes, waves: int = 1) -> tuple[float, float]:
    """Bytes of the state that each replica has whole, and of the state that a group shards.

    From stage 2 on sums are as in `kept_sums`; the sums of a running segment do not count.
    """
    optimizer = model.optimizer_on_device(candidate.optimizer)
    between = model.trained * model.kept_sums(waves, candidate.shard_groups)
    whole, trained, sums = model.parameters, model.trained, model.trained * model.num_sums
    return (
        (whole + sums + int(optimizer), 0.0),
        (whole + sums, optimizer),
        (whole, between + optimizer),
        (whole - trained, trained * (candidate.parameters == "device") + between + optimizer),
    )[candidate.zero]


def _granules(
    candidate: Candidate, step: StepMemory, needs: Sequence[float], waves: int = 1
) -> tuple[int, ...]:
    """Granules of each replica of a group; all replicas fit if any granules allow it."""
    num = _num_members(candidate, step)
    if not candidate.zero or step.shares == "even":
        return (1,) * num
    if not isinstance(step.shares, str):
        return step.shares
    total = GRANULES_OF_A_REPLICA * num
    devices = [
        SplitDevice(
            name=device.name,
            unit_seconds=1 / min(x.speed for x, _ in same),
            memory_bytes=device.memory_bytes,
            fixed_bytes=need,
        )
        for same in _devices_by_shard(candidate, step, needs)
        for device, need in [_fullest(same)]
    ]
    _, shared = _state(candidate, step.model, waves)
    try:
        return best_sizes(total, devices, shard_bytes=shared / total)
    except PlanError:
        return _level_granules(candidate, step, needs, shared)


def _level_granules(
    candidate: Candidate, step: StepMemory, needs: Sequence[float], shared: float
) -> tuple[int, ...]:
    """The granules that leave the fullest device the most room."""
    num = _num_members(candidate, step)
    total = GRANULES_OF_A_REPLICA * num
    granules = [1] * num
    fullest_last = [
        (-(d.room - n - shared / total), 1, i)
        for i, (d, n) in enumerate(map(_fullest, _devices_by_shard(candidate, step, needs)))
    ]
    heapq.heapify(fullest_last)
    for _ in range(total - num):
        lack, num_granules, i = fullest_last[0]
        granules[i] = num_granules + 1
        heapq.heapreplace(fullest_last, (lack + shared / total, num_granules + 1, i))
    return tuple(granules)


def _devices_by_shard(
    candidate: Candidate, step: StepMemory, needs: Sequence[float]
) -> list[list[tuple[ReplicaDevice, float]]]:
    """For each member of a group, the devices with the same shard, and their needs."""
    pairs, members = (
        list(zip(step.devices, needs, strict=True)),
        _num_members(candidate, step),
    )
    return [pairs[member::members] for member in range(members)]


def _fullest(devices: Sequence[tuple[ReplicaDevice, float]]) -> tuple[ReplicaDevice, float]:
    """The device with the least room beside its needs."""
    return min(devices, key=lambda pair: pair[0].room - pair[1])


def _most_room(candidate: Candidate, step: StepMemory) -> float:
    """The most bytes that every device can have left beside the state."""
    whole, shared = _state(candidate, step.model)
    if step.shares == "auto" and shared:
        granules = _level_granules(candidate, step, [whole] * len(step.devices), shared)
    elif shared:
        granules = _granules(candidate, step, ())
    else:
        granules = (1,) * _num_members(candidate, step)
    return min(
        d.room - whole - shared * n / sum(granules) - step.model.inputs
        for d, n in zip(step.devices, granules * candidate.shard_groups, strict=True)
    )


def _fixed_sequence(
    step: StepMemory, recompute: Recompute | None, stash: HostTier, *, layered: bool = False
) -> SequenceReplay:
    """The sequence that keeps the residuals of all segments, or their boundaries only."""
    costs = step.chain.costs
    waits: Waits = "device"
    if stash == "host":
        waits = "host, microbatch by microbatch" if layered else "host, segment by segment"
    texts = (keep_texts if recompute == "none" else boundary_texts)(len(costs), waits)
    return replay_sequence(sequence_from_texts(len(costs), texts), costs)


def _replay(candidate: Candidate, step: StepMemory) -> SequenceReplay:
    """The sequence of a microbatch from forward to backward; with `auto` the fastest that fits."""
    recompute, stash, costs = candidate.recompute, candidate.stash, step.chain.costs
    if recompute != "auto":
        return _fixed_sequence(step, recompute, stash)
    limit = _most_room(candidate, step)
    if stash == "host":
        keeps, least = (_fixed_sequence(step, word, stash) for word in ("none", "boundaries"))
        both = keeps.copying_peak_bytes, least.copying_peak_bytes
        return keeps if both[0] <= max(limit, both[1]) else least
    if step.chain.kept.peak_bytes <= limit:
        return step.chain.kept
    try:
        return best_sequence(costs, max(int(limit), 0))
    except PlanError:
        return least_memory(costs)
