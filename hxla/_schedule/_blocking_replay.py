"""A replay whose transfers hold up both stages, one at a time, as sends of the computing stream.

hxla's pipelines are so: XLA's permutes stand between the computations of a step, on every device.
The search's closed formula assumes the same, and so does the prediction of the plan it hands over.
"""

from collections.abc import Sequence

from .._core._errors import PlanError
from ._replay import SEND, Event, Timeline, make_event
from ._schedules import BACKWARD, FORWARD, Action, Schedule, needs

Choice = tuple[float, bool, int]  # from when, whether it is a computation, and the stage
Need = tuple[int, Action]


def blocking_replay(
    schedule: Schedule,
    forward_seconds_P: Sequence[float],
    backward_seconds_P: Sequence[float],
    send_seconds_P: Sequence[float] = (),
    *,
    start_seconds: float = 0.0,
) -> Timeline:
    """Times of every operation of a schedule without weight gradients of their own.

    Args:
        schedule: The schedule.
        forward_seconds_P: Forward of one microbatch, per part of the chain.
        backward_seconds_P: Backward of one microbatch, per part.
        send_seconds_P: One transfer between part p and p + 1, either direction, per part but the
            last (default 0).
        start_seconds: When the stages begin.

    Returns:
        The timeline.

    Raises:
        PlanError: If stages wait for one another's transfers in a circle.
    """
    seconds = {FORWARD: forward_seconds_P, BACKWARD: backward_seconds_P}
    state = _State(schedule, start_seconds)
    events: list[Event] = []
    sends: list[Event] = []
    # Of all that could happen next, what can start first does; a transfer before a computation, as
    # it is issued first.
    while possible := state.choices():
        start, computes, stage = min(possible)
        op = state.next_op(stage)
        part = state.part_of(stage, op)
        if computes:
            took = seconds[op.kind][part]
            events.append(make_event(stage, op.kind, op, start, took))
            state.compute(stage, op, start + took)
        else:
            source, sent = state.need_of(stage, op)
            took = send_seconds_P[min(state.part_of(source, sent), part)] if send_seconds_P else 0.0
            if took:
                sends.append(make_event(source, SEND, op, start, took))
            state.receive(stage, op, source, start + took)
    if waiting := state.waiting():
        raise PlanError(f"stages wait for one another's transfers with {waiting}")
    return Timeline(
        num_stages=schedule.num_stages,
        events=tuple(sorted(events, key=lambda event: event.stage)),
        sends=tuple(sends),
    )


class _State:
    """How far each stage is, and when it is free.

    Args:
        schedule: That is replayed.
        start_seconds: When its stages begin.
    """

    def __init__(self, schedule: Schedule, start_seconds: float):
        self._schedule = schedule
        self._rows = schedule.rows
        self._position = [0] * schedule.num_stages
        self._free = [start_seconds] * schedule.num_stages
        self._owed = [0] * schedule.num_stages  # transfers to send before a stage goes on
        self._computed: set[Need] = set()
        self._received: set[Need] = set()
        self._waited_for: set[Need] = set()
        self._near = [{stage} for stage in range(schedule.num_stages)]  # that wait for one another
        for stage, row in enumerate(self._rows):
            for op in row:
                need = self._need(stage, op)
                if need is not None and need[0] != stage:
                    self._waited_for.add(need)
                    self._near[stage].add(need[0])
                    self._near[need[0]].add(stage)
        self._choices: list[Choice | None] = [None] * schedule.num_stages
        self._changed = set(range(schedule.num_stages))

    def _need(self, stage: int, op: Action) -> Need | None:
        return needs(op, stage, self._schedule.num_stages, self._schedule.num_chunks)

    def need_of(self, stage: int, op: Action) -> Need:
        """What an operation waits for, of another stage."""
        need = self._need(stage, op)
        assert need is not None
        return need

    def part_of(self, stage: int, op: Action) -> int:
        """The part of the chain that an operation is of."""
        return op.chunk * self._schedule.num_stages + stage

    def next_op(self, stage: int) -> Action:
        """What a stage does next."""
        return self._rows[stage][self._position[stage]]

    def choices(self) -> list[Choice]:
        """What could happen next, of each stage."""
        for stage in self._changed:
            self._choices[stage] = self._choice(stage)
        self._changed = set()
        return [choice for choice in self._choices if choice is not None]

    def _choice(self, stage: int) -> Choice | None:
        if self._position[stage] == len(self._rows[stage]):
            return None
        op = self.next_op(stage)
        need = self._need(stage, op)
        if need is not None and need[0] != stage and (stage, op) not in self._received:
            if need not in self._computed:
                return None
            return max(self._free[stage], self._free[need[0]]), False, stage
        return None if self._owed[stage] else (self._free[stage], True, stage)

    def compute(self, stage: int, op: Action, end: float) -> None:
        """A stage has computed its next operation."""
        self._free[stage] = end
        self._computed.add((stage, op))
        self._owed[stage] += (stage, op) in self._waited_for
        self._position[stage] += 1
        self._changed |= self._near[stage]

    def receive(self, stage: int, op: Action, source: int, end: float) -> None:
        """A stage has received what its next operation waits for."""
        self._free[stage] = self._free[source] = end
        self._owed[source] -= 1
        self._received.add((stage, op))
        self._changed |= self._near[stage] | self._near[source]

    def waiting(self) -> list[Action]:
        """Of each stage that is not done what it would do next."""
        rows = zip(self._position, self._rows, strict=True)
        return [row[position] for position, row in rows if position < len(row)]
