"""A replay whose transfers hold up both stages, one at a time, as sends of the computing stream."""

from hxla._core._errors import PlanError
from hxla._schedule._replay import SEND, Timeline, make_event
from hxla._schedule._schedules import BACKWARD, FORWARD, needs


def blocking_replay(schedule, forward_seconds_P, backward_seconds_P, send_seconds_P=()):
    """Like `replay` of a schedule without weight gradients of their own."""
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    seconds = {FORWARD: forward_seconds_P, BACKWARD: backward_seconds_P}
    events, sends = [], []
    rows = schedule.rows
    position = [0] * num_stages
    free = [0.0] * num_stages
    owed = [0] * num_stages  # transfers a stage still has to send before it goes on
    computed, received = set(), set()

    def need_of(stage, op):
        return needs(op, stage, num_stages, num_chunks)

    def part_of(stage, op):
        return op.chunk * num_stages + stage

    waited_for = {
        need
        for stage, row in enumerate(rows)
        for op in row
        if (need := need_of(stage, op)) is not None and need[0] != stage
    }

    def choice(stage):
        """What a stage could do next: from when, whether it is a computation, and the stage."""
        if position[stage] == len(rows[stage]):
            return None
        op = rows[stage][position[stage]]
        need = need_of(stage, op)
        if need is not None and need[0] != stage and (stage, op) not in received:
            return (max(free[stage], free[need[0]]), False, stage) if need in computed else None
        return None if owed[stage] else (free[stage], True, stage)

    # Of all that could happen next, what can start first does; a transfer before a computation, as
    # it is issued first.
    while possible := [c for stage in range(num_stages) if (c := choice(stage)) is not None]:
        start, computes, stage = min(possible)
        op = rows[stage][position[stage]]
        part = part_of(stage, op)
        if computes:
            took = seconds[op.kind][part]
            events.append(make_event(stage, op.kind, op, start, took))
            free[stage] = start + took
            computed.add((stage, op))
            owed[stage] += (stage, op) in waited_for
            position[stage] += 1
        else:
            need = need_of(stage, op)
            took = send_seconds_P[min(part_of(*need), part)] if send_seconds_P else 0.0
            if took:
                sends.append(make_event(need[0], SEND, op, start, took))
            free[stage] = free[need[0]] = start + took
            owed[need[0]] -= 1
            received.add((stage, op))
    waiting = [row[p] for p, row in zip(position, rows, strict=True) if p < len(row)]
    if waiting:
        raise PlanError(f"stages wait for one another's transfers with {waiting}")
    return Timeline(
        num_stages=num_stages,
        events=tuple(sorted(events, key=lambda event: event.stage)),
        sends=tuple(sends),
    )
