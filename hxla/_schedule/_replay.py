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
    blocking: bool = False,
) -> Timeline:
    """Times of every operation of a schedule.

    Args:
        schedule: The schedule.
        forward_seconds_P: Forward of one microbatch, per part of the chain.
        backward_seconds_P: Backward of one microbatch, per part; where the schedule has weight
            gradients of their own, of the input only.
        weight_seconds_P: Weight gradient of one microbatch, per part.
        send_seconds_P: One transfer between part p and p + 1, either direction, per part but the
            last (default 0).
        blocking: True if a transfer holds up both stages, one transfer at a time, as sends on the
            stream that computes do; False if it only delays the one that waits for it.

    Returns:
        The timeline. Of each microbatch the transfers happen once per direction and boundary.

    Raises:
        PlanError: If lengths do not match, a time is negative or not finite, or blocking transfers
            wait for one another in a circle.
    """
    num_parts = schedule.num_stages * schedule.num_chunks
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
    run = _blocking if blocking else _overlapped
    events, sends = run(schedule, seconds)
    return Timeline(
        num_stages=schedule.num_stages,
        # Each stage's events were made in their order, which a stable sort keeps.
        events=tuple(sorted(events, key=lambda event: event.stage)),
        sends=tuple(sends),
    )


_Seconds = dict[str, tuple[float, ...]]


def _part(schedule: Schedule, stage: int, op: Action) -> int:
    return op.chunk * schedule.num_stages + stage


def _send_seconds(
    schedule: Schedule, seconds: _Seconds, need: tuple[int, Action], part: int
) -> float:
    """Of the transfer from the needed operation to the one of `part`; 0 within a part."""
    source = _part(schedule, *need)
    return 0.0 if source == part else seconds[SEND][min(source, part)]


def _overlapped(schedule: Schedule, seconds: _Seconds) -> tuple[list[Event], list[Event]]:
    events: list[Event] = []
    sends: list[Event] = []
    ends: dict[tuple[int, Action], float] = {}
    free = [0.0] * schedule.num_stages
    # The table's order is a topological order: every need lies in an earlier tick.
    for tick in schedule.table_TS:
        for stage, op in enumerate(tick):
            if op is None:
                continue
            part = _part(schedule, stage, op)
            start = free[stage]
            need = needs(op, stage, schedule.num_stages, schedule.num_chunks)
            if need is not None:
                took = _send_seconds(schedule, seconds, need, part)
                start = max(start, ends[need] + took)
                if took:
                    sends.append(make_event(need[0], SEND, op, ends[need], took))
            free[stage] = start + seconds[op.kind][part]
            ends[stage, op] = free[stage]
            events.append(make_event(stage, op.kind, op, start, seconds[op.kind][part]))
    return events, sends


def _blocking(schedule: Schedule, seconds: _Seconds) -> tuple[list[Event], list[Event]]:
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    events: list[Event] = []
    sends: list[Event] = []
    rows = schedule.rows
    position = [0] * num_stages
    free = [0.0] * num_stages
    owed = [0] * num_stages  # transfers a stage still has to send before it goes on
    computed: set[tuple[int, Action]] = set()
    received: set[tuple[int, Action]] = set()
    receivers = _receivers(schedule)

    def choice(stage: int) -> tuple[float, bool, int] | None:
        """What a stage could do next: from when, whether it is a computation, and the stage."""
        if position[stage] == len(rows[stage]):
            return None
        op = rows[stage][position[stage]]
        need = needs(op, stage, num_stages, num_chunks)
        if need is not None and need[0] != stage and (stage, op) not in received:
            return (max(free[stage], free[need[0]]), False, stage) if need in computed else None
        return None if owed[stage] else (free[stage], True, stage)

    choices = [choice(stage) for stage in range(num_stages)]
    # Of all that could happen next, what can start first does; a transfer before a computation, as
    # it is issued first.
    while possible := [c for c in choices if c is not None]:
        start, computes, stage = min(possible)
        op = rows[stage][position[stage]]
        part = _part(schedule, stage, op)
        touched = [stage]
        if computes:
            took = seconds[op.kind][part]
            events.append(make_event(stage, op.kind, op, start, took))
            free[stage] = start + took
            computed.add((stage, op))
            owed[stage] += (stage, op) in receivers
            position[stage] += 1
        else:
            need = needs(op, stage, num_stages, num_chunks)
            assert need is not None
            took = _send_seconds(schedule, seconds, need, part)
            if took:
                sends.append(make_event(need[0], SEND, op, start, took))
            free[stage] = free[need[0]] = start + took
            owed[need[0]] -= 1
            received.add((stage, op))
            touched.append(need[0])
        # Only a stage and its neighbours, around the end too, can have got another choice.
        for near in {(t + step) % num_stages for t in touched for step in (-1, 0, 1)}:
            choices[near] = choice(near)
    waiting = [row[p] for p, row in zip(position, rows, strict=True) if p < len(row)]
    if waiting:
        raise PlanError(
            f"schedule {schedule.name} cannot go on with blocking transfers: its stages wait with "
            f"{waiting}; replay it with blocking=False"
        )
    return events, sends


def _receivers(schedule: Schedule) -> set[tuple[int, Action]]:
    """Operations whose result another stage waits for."""
    found = set()
    for stage, row in enumerate(schedule.rows):
        for op in row:
            need = needs(op, stage, schedule.num_stages, schedule.num_chunks)
            if need is not None and need[0] != stage:
                found.add(need)
    return found


def make_event(stage: int, kind: str, op: Action, start: float, took: float) -> Event:
    return Event(
        stage=stage,
        kind=kind,
        microbatch=op.microbatch,
        chunk=op.chunk,
        start_seconds=start,
        end_seconds=start + took,
    )
