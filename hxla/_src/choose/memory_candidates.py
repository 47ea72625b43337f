"""Memory forms of a data-parallel step, and the cheapest that fits.

A form is a stage of ZeRO, what of a microbatch runs again, and how the state is shared out. What
each device then holds follows from formulas; a stage, a sequence and shares are chosen together,
for what waits between forward and backward takes room from the state.

    P parameters, S sums of gradients, O optimizer state in bytes, f a device's share, W(s) what
    the largest segment s needs beside the state, A what waits for backwards

    stage 0    P + S + O         + P + A      one program: the gradients of all layers at once
    stage 1    P + S + f O       + P + A
    chain      P + S + (f) O     + A          gradients go into the sums segment by segment
    stage 2    P + f P + f O     + W + A      W: the sums of a segment
    stage 3    f P + f P + f O   + W + A      W: those, and the parameters of the segment

Sums, gradients and shares are of those parameters that are trained. In stages 0 and 1 the sum
itself may need more than a microbatch: see `ModelBytes.summing`.
In stages 2 and 3 the microbatches of a device wait together, so A grows with their number. What
devices compute is the same in all stages, so forms differ in time by what runs again, and by what
travels: stage 3 gathers the parameters once more than the others.

References:
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC
    2020, sections 5 and 7.
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
from .recompute import (
    Waits,
    best_sequence,
    boundary_texts,
    keep_all,
    keep_texts,
    least_memory,
    num_again,
)
from .split_sizes import SplitDevice, best_sizes

Recompute = Literal["none", "boundaries", "auto"]

_ROUNDING_BYTES = 1e-6  # of sums of parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainBytes:
    """What the segments of a microbatch take.

    Attributes:
        costs: Of each segment, as programs of its own.
        fused: Of each segment, as a part of one program.
        parameter_bytes: Of each segment, of the parameters that it reads, as float32.
        gathered_bytes: The same as stage 3 gathers them; empty: as float32.
    """

    costs: tuple[SegmentCost, ...]
    fused: tuple[SegmentCost, ...]
    parameter_bytes: tuple[int, ...]
    gathered_bytes: tuple[int, ...] = ()

    @property
    def part_gathered(self) -> float:
        """What a gather of all parameters takes of one in float32."""
        whole = sum(self.parameter_bytes)
        return sum(self.gathered_bytes) / whole if self.gathered_bytes and whole else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What a copy of the model takes.

    Attributes:
        parameters: The bytes of the parameters.
        trained: The bytes of those that are trained, as float32.
        num_sums: The arrays of four bytes per parameter in which gradients are summed.
        optimizer: The bytes of the optimizer's state.
        bucket: The bytes of gradients, as float32, up to which tensors are summed together.
        keeps_sums: Whether sums stay beside their totals.
        inputs: The bytes of one microbatch's inputs. Those of the others count where they wait
            together; elsewhere they follow counts, which follow the memory.
        values: The bytes of all arrays of a microbatch's forward.
        chain: Makes the segments, which takes time for a large model.
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

    def kept_sums(self, waves: int, shard_groups: int) -> float:
        """Words of a parameter that a copy keeps of its own sums, in stages 2 and 3.

        Between waves each group has a part of the chunks, and at the end totals of one word.

        Args:
            shard_groups: Of copies that share the state.
        """
        return max(self.num_sums / shard_groups, 1.0) if waves > 1 else 1.0

    def state(self, zero: int, waves: int = 1, shard_groups: int = 1) -> tuple[int, float]:
        """Bytes of the state that each copy has whole, and of what all copies have together.

        From stage 2 on sums are what `kept_sums` says; those of a segment are none of the state.

        Args:
            shard_groups: Of copies that share the state.
        """
        between = self.trained * self.kept_sums(waves, shard_groups)
        each, own, sums = self.parameters, self.trained, self.trained * self.num_sums
        return (
            (each + sums + int(self.optimizer), 0.0),
            (each + sums, self.optimizer),
            (each, between + self.optimizer),
            (each - own, own + between + self.optimizer),
        )[zero]

    def summing(self, zero: int, num: int) -> float:
        """Bytes beside the sums while they travel: totals, copies that travel, and chunks of them.

        Args:
            zero: The stage of ZeRO, 0 or 1.
        """
        totals = self.trained * self.keeps_sums / (num if zero else 1)
        bucket = min(self.bucket, self.trained) if num > 1 else 0
        copies = self.num_sums * (1 + 2 / num) if not zero else self.num_sums * (1 + 1 / num) + 1
        return totals + bucket * copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Travel:
    """Seconds of what travels between copies of the model, of all parameters as float32.

    Attributes:
        gather: Of a gather, or a reduce-scatter, in all groups of copies that share the state.
        all_copies: Of the same over all copies.
        across: Of the same over the groups, of what each copy has of its own.
    """

    gather: float = 0.0
    all_copies: float = 0.0
    across: float = 0.0

    def of_groups(self, num_sums: int, waves: int) -> float:
        """Of a step, what groups take beyond sums and gathers over all copies; below 0 if less.

        In each wave sums are reduced and scattered inside groups and then over them; at the end
        floats are gathered over them.

        Args:
            num_sums: Arrays in which gradients are summed.
        """
        inside = (num_sums + 1) * (self.gather - self.all_copies)
        return inside + (num_sums * waves + 1) * self.across


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyDevice:
    """The device of a copy of the model, of several that which has least memory.

    Attributes:
        num_microbatches: That the copy runs in a step.
        memory_bytes: That it has; None: not described, so no limit.
        speed: Operations of the copy per second, in a unit that all share.
    """

    name: str
    num_microbatches: int
    memory_bytes: int | None = None
    speed: float = 1.0

    @property
    def room(self) -> float:
        """Its bytes, without end if they are not described."""
        return math.inf if self.memory_bytes is None else self.memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where that waits which may be outside the devices' memory.

    Attributes:
        stash: What waits for backwards of a chain.
        parameters: Each copy's own share of the parameters, in stage 3.
    """

    optimizer: Tier = "device"
    stash: HostTier = "device"
    parameters: HostTier = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryForm:
    """One way.

    Attributes:
        recompute: What was asked of the chain of segments; None: a microbatch is one program.
        sequence: Of the chain, as a plan has it.
        shares: Of each copy of a group, in lowest terms; empty: even.
        shard_groups: Of copies that share the state out.
        waves: In which the microbatches of a device run, in stages 2 and 3.
        tier: Where the optimizer's state waits.
        stash: Where what waits for backwards of a chain is.
        parameters: Where each copy's own share of the parameters is, in stage 3.
        moved: The bytes that each device moves to and from its host in a step, by what it is: the
            `stash` or the `parameters`.
        on_host: The most bytes of these of each device in host memory.
        held: The bytes on each device, by their owner.
        extra_seconds: Of a step, beyond those of one program and whole state.
        lack_bytes: Most bytes that a device lacks; 0 or less: it fits.
    """

    zero: int
    recompute: Recompute | None
    sequence: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    shard_groups: int = 1
    waves: int = 1
    tier: Tier = "device"
    stash: HostTier = "device"
    parameters: HostTier = "device"
    moved: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    on_host: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    held: tuple[HeldBytes, ...]
    extra_seconds: float
    lack_bytes: float

    @property
    def fits(self) -> bool:
        """Whether every device holds what it has to."""
        return self.lack_bytes <= _ROUNDING_BYTES

    def __str__(self) -> str:
        parts = [f"memory.zero {self.zero}" if self.zero else "whole state"]
        if self.recompute is not None:
            again = num_again(self.sequence)
            parts.append(
                f"{again} of its forwards run again" if again else "a chain that keeps all"
            )
        if self.waves > 1:
            parts.append(f"{self.waves} waves")
        if self.shard_groups > 1:
            parts.append(f"in {self.shard_groups} groups")
        if self.shares:
            parts.append("shares " + ":".join(map(str, self.shares)))
        if self.stash != "device":
            parts.append(f"what waits on the {self.stash}")
        if self.parameters != "device":
            parts.append(f"shares of the parameters on the {self.parameters}")
        if self.tier != "device":
            parts.append(f"optimizer's state on the {self.tier}")
        return ", ".join(parts)


#: Of the parameters that wait on the host, what a streamed update has on the device at most.
_PART_AT_UPDATE = 1 / 8
GRANULES_OF_A_COPY = 12  #: Shares are as fine as a twelfth of an even one.


class MemoryForms:
    """The forms of a job on its devices.

    Args:
        devices: Of the copies, one each.
        shares: Stated granules of each copy of a group, `even`, or `auto`: as memory and speed want
            them.
        travel: What travels takes; None: no time.
        shard_groups: Groups of copies that share the state out; a multiple of as many devices.
        waves: Of stages 2 and 3; None: the fewest with which boundaries fit.
        tier: Where the optimizer's state waits, of which the model's bytes are those on the device.
        stash: Where what waits for backwards is, in chains.
        parameters: Where each copy's own share of the parameters is, in stage 3.
    """

    def __init__(
        self,
        model: ModelBytes,
        devices: Sequence[CopyDevice],
        *,
        shares: Literal["auto", "even"] | Sequence[int] = "auto",
        travel: Travel | None = None,
        shard_groups: int = 1,
        waves: int | None = 1,
        tier: Tier = "device",
        stash: HostTier = "device",
        parameters: HostTier = "device",
    ):
        self._parameters = parameters
        self._tier, self._stash, self._waves = tier, stash, waves
        self._model, self._devices = model, tuple(devices)
        self._shares, self._travel, self._num_groups = shares, travel or Travel(), shard_groups
        self._members = len(self._devices) // shard_groups

    @functools.cached_property
    def _chain(self) -> ChainBytes:
        return self._model.chain()

    @functools.cached_property
    def _kept(self) -> SequenceReplay:
        return keep_all(self._chain.costs)

    def best(self, forms: Sequence[tuple[int, Recompute | None]]) -> tuple[MemoryForm, ...]:
        """All of some forms, the one to take first: the cheapest that fits.

        Of equal ones it is the first in the order given, and where none fits the one that lacks
        least.

        Args:
            forms: Stages of ZeRO and what is asked of the chain.
        """
        return best_of([self], forms)

    def form(self, zero: int, recompute: Recompute | None) -> MemoryForm:
        """One of them.

        Args:
            recompute: What is asked of the chain; None: one program, in stages 0 and 1.
        """
        if zero < 2:
            return self._one_after_another(zero, recompute)
        if recompute == "none":
            return self._layered(zero, recompute, self._waves or 1)
        if recompute != "auto":
            most = max(device.num_microbatches for device in self._devices)
            waves = range(1, max(most, 1) + 1) if self._waves is None else [self._waves]
            found = []
            for num in waves:
                found.append(self._layered(zero, "boundaries", num))
                if found[-1].fits:
                    return found[-1]
            return min(found, key=lambda form: form.lack_bytes)
        return self.best([(zero, "none"), (zero, "boundaries")])[0]

    def surely(self, zero: int) -> MemoryForm:
        """That of one program, for which it has more than it can need: quick, no chain is made.

        A backward reads some of what its forward makes, and makes as much again.

        Args:
            zero: The stage of ZeRO, 0 or 1.
        """
        return self._one_after_another(zero, None, 2 * self._model.values)

    def fullest(self, form: MemoryForm) -> tuple[CopyDevice, HeldBytes]:
        """The device that lacks most or has least left, and what it holds."""
        return max(
            zip(self._devices, form.held, strict=True),
            key=lambda pair: pair[1].total - pair[0].room,
        )

    def _one_after_another(
        self, zero: int, recompute: Recompute | None, peak: int | None = None
    ) -> MemoryForm:
        """Each microbatch from forward to backward, before the next."""
        model, gradients = self._model, self._model.trained
        sequence: tuple[str, ...] = ()
        seconds: float | None = None
        moved = on_host = 0
        if recompute is not None:
            replay = self._replay(recompute, self._most_left(*model.state(zero)))
            peak, gradients, seconds = replay.copying_peak_bytes, 0, replay.seconds
            sequence = replay.sequence.written
            moved, on_host = replay.moved_bytes, replay.host_bytes
        elif peak is None:
            peak = keep_all(self._chain.fused).peak_bytes
        summing = model.summing(zero, self._members if zero else len(self._devices))
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
        needs = [need] * len(self._devices)
        found = self._with_shares(zero, recompute, sequence, needs, seconds)
        return self._with_stash(found, moved, [on_host] * len(needs))

    def _layered(self, zero: int, recompute: Recompute, waves: int) -> MemoryForm:
        """Segment by segment, each for all microbatches of a wave."""
        model, chain = self._model, self._chain
        replay = self._as_asked(recompute, layered=True)
        sums = max(chain.parameter_bytes) * model.num_sums
        gathered = max(chain.parameter_bytes) * (zero > 2)
        own = [n * (model.num_sums + (zero > 2)) for n in chain.parameter_bytes]
        beside = while_running(replay.sequence, own)
        need_of: dict[int, HeldBytes] = {}  # by the microbatches of a device
        for num in {max(device.num_microbatches, 1) for device in self._devices}:
            peak = layered_peak_bytes(replay.sequence, chain.costs, -(-num // waves), beside)
            need_of[num] = HeldBytes(
                parameters=gathered + model.parameters - model.trained * (zero > 2),
                sums=sums,
                activations=max(peak - max(own), 0) + num * model.inputs,
            )
        needs = [need_of[max(device.num_microbatches, 1)] for device in self._devices]
        gather = chain.part_gathered * (zero > 2)
        # Sums travel as often as waves run, and so do the gathers of stage 3.
        again = model.num_sums + 2 * gather
        extra = (gather + (waves - 1) * again) * self._travel.gather
        texts = replay.sequence.written
        found = self._with_shares(zero, recompute, texts, needs, replay.seconds, extra, waves)
        if zero > 2:
            found = self._with_parameters(found, replay)
        at_once = [-(-device.num_microbatches // waves) for device in self._devices]
        on_host = [num * replay.host_bytes for num in at_once]
        return self._with_stash(found, replay.moved_bytes, on_host)

    def _with_stash(self, form: MemoryForm, moved: int, on_host: Sequence[int]) -> MemoryForm:
        """A form with what it moves for each microbatch, and what each device has on its host."""
        if form.recompute is None or self._stash == "device":
            return form
        all_moved = tuple(device.num_microbatches * moved for device in self._devices)
        return dataclasses.replace(
            form,
            stash=self._stash,
            moved={**form.moved, "stash": all_moved},
            on_host={**form.on_host, "stash": tuple(on_host)},
        )

    def _with_parameters(self, form: MemoryForm, replay: SequenceReplay) -> MemoryForm:
        """A form of stage 3 with what it moves of the parameters, if they wait on the host."""
        if self._parameters == "device":
            return form
        trained, of_part = self._model.trained, self._chain.parameter_bytes
        granules = form.shares or (1,) * self._members
        own = [trained * share / sum(granules) for share in granules * self._num_groups]
        # Each run of a segment gathers its own, and the update has all of them once, both ways.
        gathered = form.waves * sum(of_part[i] for i, _ in runs_by_segment(replay.sequence))
        factor = 2 + gathered / trained if trained else 0.0
        return dataclasses.replace(
            form,
            parameters=self._parameters,
            moved={**form.moved, "parameters": tuple(int(n * factor) for n in own)},
            on_host={**form.on_host, "parameters": tuple(map(int, own))},
        )

    def _with_shares(
        self,
        zero: int,
        recompute: Recompute | None,
        sequence: tuple[str, ...],
        needs: Sequence[HeldBytes],
        seconds: float | None,
        extra_seconds: float = 0.0,
        waves: int = 1,
    ) -> MemoryForm:
        granules = self._granules(zero, [need.total for need in needs], waves)
        kept = self._model.kept_sums(waves, self._num_groups)
        held = []
        for need, own in zip(needs, granules * self._num_groups, strict=True):
            part = own / sum(granules) if zero else 1.0
            each = self._model.trained * part
            optimizer = self._model.optimizer * part
            found = need.model_copy(
                update={
                    "optimizer": optimizer,
                    "sums": need.sums + each * kept * (zero > 1),
                    "parameters": need.parameters + each * (zero > 2),
                }
            )
            if zero > 2 and self._parameters == "host":
                found = self._most_held(found, part)
            held.append(found)
        common = math.gcd(*granules)
        alike = len(set(granules)) == 1
        if seconds is not None:
            extra_seconds += self._slowest(seconds) - self._slowest(self._kept.seconds)
        if zero and self._num_groups > 1:
            # Groups are for what must be shared out: alone they are no reason to leave whole state.
            travels = self._travel.of_groups(self._model.num_sums, waves)
            extra_seconds = max(extra_seconds + travels, 0.0)
        return MemoryForm(
            zero=zero,
            tier=self._tier,
            recompute=recompute,
            sequence=sequence,
            shares=() if alike or not zero else tuple(n // common for n in granules),
            shard_groups=self._num_groups if zero else 1,
            waves=waves,
            held=tuple(held),
            extra_seconds=extra_seconds,
            lack_bytes=max(
                own.total - device.room for own, device in zip(held, self._devices, strict=True)
            ),
        )

    def _most_held(self, running: HeldBytes, part: float) -> HeldBytes:
        """What a device with shares of the parameters on its host holds, in segments or the update.

        Args:
            running: What it holds in segments, its share with it.
            part: Its part of what is shared out.
        """
        each = self._model.trained * part
        # The pieces of a segment and of the next one are here.
        pieces = min(2 * max(self._chain.parameter_bytes) * part, each)
        running = running.model_copy(update={"parameters": running.parameters - each + pieces})
        frozen = self._model.parameters - self._model.trained
        updating = HeldBytes(
            parameters=frozen + each * (1 if self._tier == "device" else _PART_AT_UPDATE),
            sums=each,
            optimizer=running.optimizer,
        )
        return max(running, updating, key=lambda held: held.total)

    def _slowest(self, seconds: float) -> float:
        """Of all microbatches of a device, if one takes so many operations."""
        return max(d.num_microbatches * seconds / d.speed for d in self._devices)

    def _granules(self, zero: int, needs: Sequence[float], waves: int = 1) -> tuple[int, ...]:
        """Of each copy of a group, with which all fit if any do."""
        num = self._members
        if not zero or self._shares == "even":
            return (1,) * num
        if not isinstance(self._shares, str):
            return tuple(self._shares)
        total = GRANULES_OF_A_COPY * num
        devices = [
            SplitDevice(
                name=device.name,
                unit_seconds=1 / min(own.speed for own, _ in same),
                memory_bytes=device.memory_bytes,
                fixed_bytes=need,
            )
            for same in self._same_parts(needs)
            for device, need in [_fullest(same)]
        ]
        shared = self._model.state(zero, waves, self._num_groups)[1]
        if zero > 2 and self._parameters == "host":
            shared -= self._model.trained
        try:
            return best_sizes(total, devices, own_bytes=shared / total)
        except PlanError:
            return self._levelled(needs, shared)

    def _levelled(self, needs: Sequence[float], shared: float) -> tuple[int, ...]:
        """The granules with which the fullest device has most left."""
        num = self._members
        total = GRANULES_OF_A_COPY * num
        granules = [1] * num
        fullest_last = [
            (-(d.room - n - shared / total), 1, i)
            for i, (d, n) in enumerate(map(_fullest, self._same_parts(needs)))
        ]
        heapq.heapify(fullest_last)
        for _ in range(total - num):
            lack, own, i = fullest_last[0]
            granules[i] = own + 1
            heapq.heapreplace(fullest_last, (lack + shared / total, own + 1, i))
        return tuple(granules)

    def _same_parts(self, needs: Sequence[float]) -> list[list[tuple[CopyDevice, float]]]:
        """For each copy of a group the devices of those that have the same, and what they need."""
        pairs = list(zip(self._devices, needs, strict=True))
        return [pairs[member :: self._members] for member in range(self._members)]

    def _most_left(self, whole: int, shared: float) -> float:
        """Bytes beside the state that every device can have left, as its shares may be."""
        if self._shares == "auto" and shared:
            granules = self._levelled([whole] * len(self._devices), shared)
        else:
            granules = self._granules(int(shared > 0), ())
        return min(
            d.room - whole - shared * own / sum(granules) - self._model.inputs
            for d, own in zip(self._devices, granules * self._num_groups, strict=True)
        )

    def _as_asked(self, recompute: Recompute, *, layered: bool = False) -> SequenceReplay:
        """What keeps the residuals of all segments, or what crosses between them."""
        costs = self._chain.costs
        waits: Waits = "device"
        if self._stash == "host":
            waits = "host, microbatch by microbatch" if layered else "host, segment by segment"
        texts = (keep_texts if recompute == "none" else boundary_texts)(len(costs), waits)
        return replay_sequence(sequence_from_texts(len(costs), texts), costs)

    def _replay(self, recompute: Recompute, limit: float) -> SequenceReplay:
        costs = self._chain.costs
        if recompute != "auto":
            return self._as_asked(recompute)
        if self._stash == "host":
            keeps, least = self._as_asked("none"), self._as_asked("boundaries")
            both = keeps.copying_peak_bytes, least.copying_peak_bytes
            return keeps if both[0] <= max(limit, both[1]) else least
        if self._kept.peak_bytes <= limit:
            return self._kept
        try:
            return best_sequence(costs, max(int(limit), 0))
        except PlanError:
            return least_memory(costs)


def best_of(
    ways: Sequence[MemoryForms], forms: Sequence[tuple[int, Recompute | None]]
) -> tuple[MemoryForm, ...]:
    """`MemoryForms.best`, with several numbers of groups.

    Args:
        ways: For each number; of equal forms that of the first is taken first.
        forms: Stages of ZeRO and what is asked of the chain.
    """
    found = [
        way.form(zero, recompute)
        for zero, recompute in forms
        for way in (ways if zero else ways[:1])
    ]
    return tuple(
        sorted(found, key=lambda f: (not f.fits, f.extra_seconds if f.fits else f.lack_bytes))
    )


def _fullest(devices: Sequence[tuple[CopyDevice, float]]) -> tuple[CopyDevice, float]:
    """Of devices and what each needs that which has least left."""
    return min(devices, key=lambda own: own[0].room - own[1])
