"""What the ways in which a step can lie in memory are reckoned from, and one of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from .._plan._plan_parts import HeldBytes, HostTier, Tier
from .._schedule._sequence_replay import SegmentCost
from ._chain_texts import num_again

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
            waves: In which microbatches run.
            shard_groups: Of copies that share the state.
        """
        return max(self.num_sums / shard_groups, 1.0) if waves > 1 else 1.0

    def state(self, zero: int, waves: int = 1, shard_groups: int = 1) -> tuple[int, float]:
        """Bytes of the state that each copy has whole, and of what all copies have together.

        From stage 2 on sums are what `kept_sums` says; those of a segment are none of the state.

        Args:
            zero: The stage of ZeRO.
            waves: In which microbatches run.
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
            num: Copies of the model.
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
            waves: In which microbatches run.
        """
        inside = (num_sums + 1) * (self.gather - self.all_copies)
        return inside + (num_sums * waves + 1) * self.across


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyDevice:
    """The device of a copy of the model, of several that which has least memory.

    Attributes:
        name: The name in messages.
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
        optimizer: The optimizer's state.
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
        zero: The stage of ZeRO.
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
