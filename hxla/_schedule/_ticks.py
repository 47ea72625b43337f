"""A table of ticks with true times: what the lowered pipeline takes.

In the lowered form a stage goes on to its next tick once the arrays of this one have crossed, in
both directions, every boundary of the tick's set that touches it. So it waits for those neighbours
even where it needs nothing of them, which `_replay` does not.
"""

from collections.abc import Mapping, Sequence

from ._replay import SEND, Event, Timeline, make_event
from ._schedules import Schedule

Seconds = Mapping[tuple[str, int], float]


def replay_ticks(
    schedule: Schedule,
    seconds: Seconds,
    boundaries: Sequence[Sequence[int]],
    *,
    transfer_seconds: Mapping[int, float] | None = None,
) -> Timeline:
    """Times of every operation of a lowered schedule.

    Args:
        schedule: The table.
        seconds: Of each kind of operation and part; those not in it take no time.
        boundaries: For each tick those that arrays cross; boundary b is below stage b.
        transfer_seconds: Of an exchange over each boundary; None: they take no time.

    Returns:
        The timeline.
    """
    num_stages = schedule.num_stages
    ready = [0.0] * num_stages
    events: list[Event] = []
    sends: list[Event] = []
    for tick, crossed in zip(schedule.table_TS, boundaries, strict=True):
        done = list(ready)
        for stage, op in enumerate(tick):
            if op is None:
                continue
            part = op.chunk * num_stages + stage
            took = seconds.get((op.kind, part), 0.0)
            done[stage] = ready[stage] + took
            events.append(make_event(stage, op.kind, op, ready[stage], took))
        ready = list(done)
        last = [0.0] * num_stages  # transfer of each stage
        for b in crossed:
            took = (transfer_seconds or {}).get(b, 0.0)
            for stage, other in ((b, (b + 1) % num_stages), ((b + 1) % num_stages, b)):
                meet = max(done[stage], done[other]) + took
                if meet > ready[stage]:
                    ready[stage], last[stage] = meet, took
        for stage, op in enumerate(tick):
            if op is not None and last[stage]:
                start = ready[stage] - last[stage]
                sends.append(make_event(stage, SEND, op, start, last[stage]))
    return Timeline(
        num_stages=num_stages,
        events=tuple(sorted(events, key=lambda e: e.stage)),
        sends=tuple(sorted(sends, key=lambda e: e.stage)),
    )


def measured_timeline(
    schedule: Schedule, times_ST: Sequence[Sequence[tuple[float, float]]]
) -> Timeline:
    """The ticks of one step as every stage's process saw them.

    Args:
        schedule: The table.
        times_ST: Start and end of each tick on each stage, seconds from the start of the step; a
            tick ends when its transfers have.
    """
    events = [
        make_event(stage, op.kind, op, start, end - start)
        for stage in range(schedule.num_stages)
        for t, tick in enumerate(schedule.table_TS)
        if (op := tick[stage]) is not None
        for start, end in [times_ST[stage][t]]
    ]
    return Timeline(num_stages=schedule.num_stages, events=tuple(events), sends=())
