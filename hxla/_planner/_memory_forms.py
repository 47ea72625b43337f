"""The ways in which a step of data parallelism can lie in memory, and the cheapest that fits.

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

from .._core._errors import PlanError
from .._plan._plan_parts import HeldBytes, StashTier, Tier
from .._schedule._segment_sequence import sequence_from_texts
from .._schedule._sequence_replay import (
    SegmentCost,
    SequenceReplay,
    layered_peak_bytes,
    replay_sequence,
    while_running,
)
from ._chain_texts import Waits, boundary_texts, keep_texts, num_again
from ._recompute import best_sequence, keep_all, least_memory
from ._split_sizes import SplitDevice, best_sizes

GRANULES_OF_A_COPY = 12  #: Shares are as fine as a twelfth of an even one.

Recompute = Literal["none", "boundaries", "auto"]


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

    def state(self, zero: int, waves: int = 1) -> tuple[int, float]:
        """Bytes of the state that each copy has whole, and of what all copies have together.

        From stage 2 on sums are totals of one word, or between waves whole sums; those of a segment
        are none of the state.

        Args:
            zero: The stage of ZeRO.
            waves: In which microbatches run.
        """
        between = self.trained * (self.num_sums if waves > 1 else 1)
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
            num: Copies of the model.
        """
        totals = self.trained * self.keeps_sums / (num if zero else 1)
        bucket = min(self.bucket, self.trained) if num > 1 else 0
        copies = self.num_sums * (1 + 2 / num) if not zero else self.num_sums * (1 + 1 / num) + 1
        return totals + bucket * copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyDevice:
    """The one device of a copy of the model.

    Attributes:
        name: The name in messages.
        num_microbatches: That it runs in a step.
        memory_bytes: That it has; None: not described, so no limit.
        speed: Operations per second, in a unit that all devices share.
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
class MemoryForm:
    """One way.

    Attributes:
        zero: The stage of ZeRO.
        recompute: What was asked of the chain of segments; None: a microbatch is one program.
        sequence: Of the chain, as a plan has it.
        shares: Of each copy, in lowest terms; empty: even.
        waves: In which the microbatches of a device run, in stages 2 and 3.
        tier: Where the optimizer's state waits.
        stash: Where what waits for backwards of a chain is.
        moved: The bytes that each device moves to and from its host for the stash in a step.
        on_host: The most bytes of each device's stash in host memory.
        held: The bytes on each device, by their owner.
        extra_seconds: Of a step, beyond those of one program and whole state.
        lack_bytes: Most bytes that a device lacks; 0 or less: it fits.
    """

    zero: int
    recompute: Recompute | None
    sequence: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    waves: int = 1
    tier: Tier = "device"
    stash: StashTier = "device"
    moved: tuple[int, ...] = ()
    on_host: tuple[int, ...] = ()
    held: tuple[HeldBytes, ...]
    extra_seconds: float
    lack_bytes: float

    @property
    def fits(self) -> bool:
        """Whether every device holds what it has to."""
        return self.lack_bytes <= 0

    def __str__(self) -> str:
        parts = [f"memory.zero {self.zero}" if self.zero else "whole state"]
        if self.recompute is not None:
            again = num_again(self.sequence)
            parts.append(
                f"{again} of its forwards run again" if again else "a chain that keeps all"
            )
        if self.waves > 1:
            parts.append(f"{self.waves} waves")
        if self.shares:
            parts.append("shares " + ":".join(map(str, self.shares)))
        if self.stash != "device":
            parts.append(f"what waits on the {self.stash}")
        if self.tier != "device":
            parts.append(f"optimizer's state on the {self.tier}")
        return ", ".join(parts)


class MemoryForms:
    """The forms of a job on its devices.

    Args:
        model: What a copy takes.
        devices: Of the copies, one each.
        shares: Stated granules of each copy, `even`, or `auto`: as memory and speed want them.
        gather_seconds: Of all parameters as float32.
        waves: Of stages 2 and 3; None: the fewest with which boundaries fit.
        tier: Where the optimizer's state waits, of which the model's bytes are those on the device.
        stash: Where what waits for backwards is, in chains.
    """

    def __init__(
        self,
        model: ModelBytes,
        devices: Sequence[CopyDevice],
        *,
        shares: Literal["auto", "even"] | Sequence[int] = "auto",
        gather_seconds: float = 0.0,
        waves: int | None = 1,
        tier: Tier = "device",
        stash: StashTier = "device",
    ):
        self._tier, self._stash, self._waves = tier, stash, waves
        self._model, self._devices = model, tuple(devices)
        self._shares, self._gather_seconds = shares, gather_seconds

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
        found = [self.form(zero, recompute) for zero, recompute in forms]
        return tuple(
            sorted(
                found,
                key=lambda f: (not f.fits, f.extra_seconds if f.fits else f.lack_bytes),
            )
        )

    def form(self, zero: int, recompute: Recompute | None) -> MemoryForm:
        """One of them.

        Args:
            zero: The stage of ZeRO.
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
        summing = model.summing(zero, len(self._devices))
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
        extra = (gather + (waves - 1) * again) * self._gather_seconds
        texts = replay.sequence.written
        found = self._with_shares(zero, recompute, texts, needs, replay.seconds, extra, waves)
        at_once = [-(-device.num_microbatches // waves) for device in self._devices]
        on_host = [num * replay.host_bytes for num in at_once]
        return self._with_stash(found, replay.moved_bytes, on_host)

    def _with_stash(self, form: MemoryForm, moved: int, on_host: Sequence[int]) -> MemoryForm:
        """A form with what it moves for each microbatch, and what each device has on its host."""
        if form.recompute is None or self._stash == "device":
            return form
        return dataclasses.replace(
            form,
            stash=self._stash,
            moved=tuple(device.num_microbatches * moved for device in self._devices),
            on_host=tuple(on_host),
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
        kept = self._model.num_sums if waves > 1 else 1
        held = []
        for need, own in zip(needs, granules, strict=True):
            part = own / sum(granules) if zero else 1.0
            each = self._model.trained * part
            held.append(
                need.model_copy(
                    update={
                        "optimizer": self._model.optimizer * part,
                        "sums": need.sums + each * kept * (zero > 1),
                        "parameters": need.parameters + each * (zero > 2),
                    }
                )
            )
        common = math.gcd(*granules)
        alike = len(set(granules)) == 1
        if seconds is not None:
            extra_seconds += self._slowest(seconds) - self._slowest(self._kept.seconds)
        return MemoryForm(
            zero=zero,
            tier=self._tier,
            recompute=recompute,
            sequence=sequence,
            shares=() if alike or not zero else tuple(n // common for n in granules),
            waves=waves,
            held=tuple(held),
            extra_seconds=extra_seconds,
            lack_bytes=max(
                own.total - device.room for own, device in zip(held, self._devices, strict=True)
            ),
        )

    def _slowest(self, seconds: float) -> float:
        """Of all microbatches of a device, if one takes so many operations."""
        return max(d.num_microbatches * seconds / d.speed for d in self._devices)

    def _granules(self, zero: int, needs: Sequence[float], waves: int = 1) -> tuple[int, ...]:
        """Of each copy, with which all fit if any do."""
        num = len(self._devices)
        if not zero or self._shares == "even":
            return (1,) * num
        if not isinstance(self._shares, str):
            return tuple(self._shares)
        total = GRANULES_OF_A_COPY * num
        devices = [
            SplitDevice(
                name=device.name,
                unit_seconds=1 / device.speed,
                memory_bytes=device.memory_bytes,
                fixed_bytes=need,
            )
            for device, need in zip(self._devices, needs, strict=True)
        ]
        shared = self._model.state(zero, waves)[1]
        try:
            return best_sizes(total, devices, own_bytes=shared / total)
        except PlanError:
            return self._levelled(needs, shared)

    def _levelled(self, needs: Sequence[float], shared: float) -> tuple[int, ...]:
        """The granules with which the fullest device has most left."""
        num = len(self._devices)
        total = GRANULES_OF_A_COPY * num
        granules = [1] * num
        fullest_last = [
            (-(d.room - n - shared / total), 1, i)
            for i, (d, n) in enumerate(zip(self._devices, needs, strict=True))
        ]
        heapq.heapify(fullest_last)
        for _ in range(total - num):
            lack, own, i = fullest_last[0]
            granules[i] = own + 1
            heapq.heapreplace(fullest_last, (lack + shared / total, own + 1, i))
        return tuple(granules)

    def _most_left(self, whole: int, shared: float) -> float:
        """Bytes beside the state that every device can have left, as its shares may be."""
        if self._shares == "auto" and shared:
            granules = self._levelled([whole] * len(self._devices), shared)
        else:
            granules = self._granules(int(shared > 0), ())
        return min(
            d.room - whole - shared * own / sum(granules) - self._model.inputs
            for d, own in zip(self._devices, granules, strict=True)
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
