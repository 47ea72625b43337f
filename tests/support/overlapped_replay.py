"""A replay of schedules whose transfers hold up only the operations that wait for them."""

from support.inside.schedule import (
    BACKWARD,
    FORWARD,
    SEND,
    WEIGHT,
    Timeline,
    make_event,
    needs,
)


def replay(schedule, forward, backward, *, weight_seconds_P=(), send_seconds_P=()):
    """Times of every operation, given the seconds of each part of the chain.

    Of each microbatch the transfers happen once per direction and boundary.
    """
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    num_parts = num_stages * num_chunks
    seconds = {FORWARD: forward, BACKWARD: backward, WEIGHT: weight_seconds_P}
    send = send_seconds_P or (0.0,) * (num_parts - 1)
    events, sends, ends = [], [], {}
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
                took = 0.0 if source == part else send[min(source, part)]
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
