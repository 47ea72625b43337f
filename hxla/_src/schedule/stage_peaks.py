"""The most bytes of a device of each stage of a pipeline, where each stage has its own programs.

The schedule is walked tick by tick: what a stage keeps for backwards, what waits to be sent or has
arrived, and what the running program needs beside it.
"""

import dataclasses
from collections.abc import Sequence

from .schedules import BACKWARD, FORWARD, Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartBytes:
    """The arrays of a part of a stage for one microbatch, in bytes on one device.

    Attributes:
        inputs: The values that cross into it, which are the results of the part before.
        read: Those of them that its backward reads.
        kept: What its forward leaves for its backward beside inputs and results.
        written: Those of its results that its backward reads.
        gradients: The gradients of its inputs.
        forward: What its forward needs beside all these.
        backward: What its backward needs beside them.
        is_loss: Whether one program is its forward and its backward.
    """

    inputs: int = 0
    read: int = 0
    kept: int = 0
    written: int = 0
    gradients: int = 0
    forward: int = 0
    backward: int = 0
    is_loss: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopBytes:
    """What a move between two stages needs of a device on each side of it.

    Attributes:
        sent: The bytes of the arrays on the side where they are made.
        received: Their bytes on the side to which they go.
        at_sender: The bytes that a device of the first side needs beside `sent` while they move.
        at_receiver: The bytes that a device of the second side needs then.
    """

    sent: int = 0
    received: int = 0
    at_sender: int = 0
    at_receiver: int = 0


class _Stage:
    """A stage while the schedule is walked."""

    def __init__(self, parts: Sequence[PartBytes], *, keeps_inputs: bool):
        self._parts, self._again = parts, keeps_inputs
        self._now = self.peak = 0

    def add(self, num_bytes: int) -> None:
        """Bytes that come, or go."""
        self._now += num_bytes
        self.needs(0)

    def needs(self, num_bytes: int) -> None:
        """Bytes beside those that are there, for a while."""
        self.peak = max(self.peak, self._now + num_bytes)

    def forward(self, sent: int) -> None:
        """Run the forwards of all parts but the loss.

        Args:
            sent: The bytes that the last part makes for the next stage.
        """
        before = 0
        made = [*(part.inputs for part in self._parts[1:]), sent]
        for part, num_bytes in zip(self._parts, made, strict=True):
            if part.is_loss:
                break
            self.needs(part.forward + part.kept + num_bytes)
            self.add(num_bytes)
            if not self._again:
                self.add(part.kept - self._freed(part, before))
                before = part.written

    def sends(self, hop: HopBytes, *, forward: bool) -> None:
        """Send what an action made, which is gone then."""
        self.needs(hop.at_sender)
        stays = self._parts[-1].written if forward and not self._again else 0
        self.add(stays - hop.sent)

    def receives(self, hop: HopBytes) -> None:
        """Receive what another stage made."""
        self.needs(hop.at_receiver)
        self.add(hop.received)

    def backward(self, given: int) -> None:
        """Run the backwards of all parts, the last one first.

        Args:
            given: The bytes of the gradients that arrived.
        """
        made = 0  # results of the last part, which nothing reads again
        for i in reversed(range(len(self._parts))):
            part = self._parts[i]
            if self._again and not part.is_loss:
                self.needs(part.forward + part.kept + made)
                self.add(part.kept + part.written - self._freed(part, 0))
            self.needs(part.backward + part.gradients)
            before = self._parts[i - 1].written if i and not self._again else 0
            stays = part.inputs - self._freed(part, before) - before
            self.add(part.gradients - given - stays - part.kept - part.written)
            given, made = part.gradients, part.inputs

    def _freed(self, part: PartBytes, before: int) -> int:
        """The bytes of a part's inputs that no backward reads.

        Args:
            before: The bytes of those that the backward of the part before reads.
        """
        return part.inputs - max(part.inputs if part.is_loss else part.read, before)


def stage_peaks(
    schedule: Schedule,
    stages: Sequence[Sequence[PartBytes]],
    hops: Sequence[tuple[HopBytes, HopBytes]],
    *,
    keeps_inputs: bool,
) -> list[int]:
    """The most bytes of activations on a device of each stage, beside its parameters and sums.

    Args:
        schedule: With whole backwards, and one chunk on each stage.
        stages: The parts of each stage.
        hops: For each two neighbours the move of values, and that of their gradients.
        keeps_inputs: Whether only the inputs of parts wait, and their forwards run again.
    """
    last = len(stages) - 1
    each = [_Stage(parts, keeps_inputs=keeps_inputs) for parts in stages]
    for tick in schedule.table_TS:
        actions = [(s, action.kind) for s, action in enumerate(tick) if action is not None]
        for s, kind in actions:
            if kind == FORWARD and s < last:
                each[s].forward(hops[s][0].sent)
            elif kind == BACKWARD:
                if s == last:
                    each[s].forward(0)
                each[s].backward(hops[s][1].received if s < last else 0)
        for s, kind in actions:
            to = s + 1 if kind == FORWARD else s - 1
            if 0 <= to <= last:
                hop = hops[s][0] if kind == FORWARD else hops[to][1]
                each[s].sends(hop, forward=kind == FORWARD)
                each[to].receives(hop)
    return [stage.peak for stage in each]
