"""What a schedule takes with true times: unlike stages, communication between them.

Only the order of each stage's row is kept from the table; when an operation starts follows from
what it waits for.
"""

import dataclasses
from collections.abc import Sequence

from .._core._errors import PlanError
from ._schedules import BACKWARD, FORWARD, WEIGHT, Action, Schedule, needs

SEND = "send"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An operation, or a transfer, in time.

    Attributes:
        stage: Where; of a transfer, the sender.
        kind: `forward`, `backward`, `weight` or `send`.
        microbatch: Which.
        chunk: Of the stage.
        start_seconds: From the start of the step.
        end_seconds: The same.
    """

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A replayed schedule.

    Attributes:
        num_stages: Stages.
        events: Operations, in the order of their starts within each stage.
        sends: Transfers between stages.
    """

    num_stages: int
    events: tuple[Event, ...]
    sends: tuple[Event, ...]

    @property
    def makespan_seconds(self) -> float:
        """Seconds until the last operation or transfer has ended."""
        return max(event.end_seconds for event in (*self.events, *self.sends))

    @property
    def finish_seconds(self) -> tuple[float, ...]:
        """When each stage ends its last operation."""
        ends = [0.0] * self.num_stages
        for event in self.events:
            ends[event.stage] = max(ends[event.stage], event.end_seconds)
        return tuple(ends)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Time that each stage computes."""
        busy = [0.0] * self.num_stages
        for event in self.events:
            busy[event.stage] += event.end_seconds - event.start_seconds
        return tuple(busy)


def replay(
    schedule: Schedule,
    forward_seconds_P: Sequence[float],
    backward_seconds_P: Sequence[float],
    *,
    weight_seconds_P: Sequence[float] = (),
    send_seconds_P: Sequence[float] = (),
) -> Timeline:
    """Times of every operation of a schedule.

    Args:
        schedule: The schedule.
        forward_seconds_P: Forward of one microbatch, per part of the chain.
        backward_seconds_P: Backward of one microbatch, per part; where the schedule has weight
            gradients of their own, of the input only.
        weight_seconds_P: Weight gradient of one microbatch, per part.
        send_seconds_P: One transfer between part p and p + 1, either direction, per part but the
            last (default 0). It delays only the operation that waits for it.

    Returns:
        The timeline. Of each microbatch the transfers happen once per direction and boundary.

    Raises:
        PlanError: If lengths do not match, or a time is negative or not finite.
    """
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    num_parts = num_stages * num_chunks
    seconds = {
        FORWARD: tuple(forward_seconds_P),
        BACKWARD: tuple(backward_seconds_P),
        WEIGHT: tuple(weight_seconds_P) if schedule.has_weight else (0.0,) * num_parts,
        SEND: tuple(send_seconds_P) or (0.0,) * (num_parts - 1),
    }
    for kind, values in seconds.items():
        wanted = num_parts - (kind == SEND)
        if len(values) != wanted:
            raise PlanError(
                f"{len(values)} times of {kind} for a chain of {num_parts} parts: give {wanted}"
            )
        if not all(0 <= value < float("inf") for value in values):
            raise PlanError(f"times of {kind} are {values}: each must be finite and at least 0")
    events: list[Event] = []
    sends: list[Event] = []
    ends: dict[tuple[int, Action], float] = {}
    free = [0.0] * num_stages
    # The table's order is a topological order: every need lies in an earlier tick.
    for tick in schedule.table_TS:
        for stage, op in enumerate(tick):
            if op is None:
                continue
            part = op.chunk * num_stages + stage
            start = free[stage]
            need = needs(op, stage, num_stages, num_chunks)
            if need is not None:
                source = need[1].chunk * num_stages + need[0]
                took = 0.0 if source == part else seconds[SEND][min(source, part)]
                start = max(start, ends[need] + took)
                if took:
                    sends.append(make_event(need[0], SEND, op, ends[need], took))
            events.append(make_event(stage, op.kind, op, start, seconds[op.kind][part]))
            ends[stage, op] = free[stage] = events[-1].end_seconds
    return Timeline(
        num_stages=num_stages,
        # Each stage's events were made in their order, which a stable sort keeps.
        events=tuple(sorted(events, key=lambda event: event.stage)),
        sends=tuple(sends),
    )


def make_event(stage: int, kind: str, op: Action, start: float, took: float) -> Event:
    return Event(
        stage=stage,
        kind=kind,
        microbatch=op.microbatch,
        chunk=op.chunk,
        start_seconds=start,
        end_seconds=start + took,
    )
