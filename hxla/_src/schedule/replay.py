"""Replay of a schedule with true times: transfers block both ends, or stages wait tick by tick.

Only the order of each stage's row is taken from the table; an operation starts when its inputs are
there. XLA's permutes stand between the computations of a step, on every device. The search's closed
formula assumes the same, and so does the prediction of its plan.

In the lowered form a stage begins its next tick after the arrays of this one have crossed, in both
directions, every boundary of the tick's set at this stage. So it waits for those neighbours even if
it needs nothing from them, unlike in `blocking_replay`.

A replayed schedule is written as a trace for Perfetto.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import PlanError
from ..core.files import parse_json, shown
from .schedules import BACKWARD, FORWARD, WEIGHT, Action, Schedule, needs

SEND = "send"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An operation, or a transfer, in time.

    Attributes:
        stage: Where; of a transfer, the sender.
        kind: `forward`, `backward`, `weight` or `send`.
        start_seconds: From the start of the step.
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
        events: Operations, in the order of their starts within each stage.
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


def make_event(stage: int, kind: str, op: Action, start: float, took: float) -> Event:
    return Event(
        stage=stage,
        kind=kind,
        microbatch=op.microbatch,
        chunk=op.chunk,
        start_seconds=start,
        end_seconds=start + took,
    )


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
    """Times of every operation of a schedule without separate weight gradients.

    Args:
        forward_seconds_P: Forward of one microbatch, per part of the chain.
        backward_seconds_P: Backward of one microbatch, per part.
        send_seconds_P: One transfer between part p and p + 1, either direction, per part but the
            last (default 0).

    Raises:
        PlanError: If stages wait for one another's transfers in a circle.
    """
    seconds = {FORWARD: forward_seconds_P, BACKWARD: backward_seconds_P}
    state = _State(schedule, start_seconds)
    events: list[Event] = []
    sends: list[Event] = []
    # The earliest possible event is next; a transfer before a computation, because it is issued
    # first.
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
    """The position of each stage in its row, and when it is free."""

    def __init__(self, schedule: Schedule, start_seconds: float):
        self._schedule = schedule
        self._rows = schedule.rows
        self._position = [0] * schedule.num_stages
        self._free = [start_seconds] * schedule.num_stages
        self._owed = [0] * schedule.num_stages  # transfers to send before a stage goes on
        self._computed: set[Need] = set()
        self._received: set[Need] = set()
        self._waited_for: set[Need] = set()
        self._near = [
            {stage} for stage in range(schedule.num_stages)
        ]  # stages that wait for one another
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
        """The operation of another stage that an operation waits for."""
        need = self._need(stage, op)
        assert need is not None
        return need

    def part_of(self, stage: int, op: Action) -> int:
        """The part of the chain of an operation."""
        return op.chunk * self._schedule.num_stages + stage

    def next_op(self, stage: int) -> Action:
        """The next operation of a stage."""
        return self._rows[stage][self._position[stage]]

    def choices(self) -> list[Choice]:
        """The possible next event of each stage."""
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
        """A stage has received the input of its next operation."""
        self._free[stage] = self._free[source] = end
        self._owed[source] -= 1
        self._received.add((stage, op))
        self._changed |= self._near[stage] | self._near[source]

    def waiting(self) -> list[Action]:
        """The next operation of each unfinished stage."""
        rows = zip(self._position, self._rows, strict=True)
        return [row[position] for position, row in rows if position < len(row)]


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
        seconds: By kind of operation and part; others take no time.
        boundaries: Per tick, the boundaries that arrays cross; boundary b is below stage b.
        transfer_seconds: Of an exchange over each boundary; None: no time.
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
    """The ticks of one step as measured by every stage's process.

    Args:
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


_NO_TIMELINE = "this is no timeline that hxla plan wrote:"
_MOST = 10**9  # of a number, or of seconds


def perfetto(timeline: Timeline, names: Sequence[str] = ()) -> str:
    """The timeline as JSON that ui.perfetto.dev opens: one track per stage, one per its sends.

    References:
        Trace Event Format, the Chromium project: complete events (`"ph": "X"`), times in
        microseconds.
    """
    names = names or [f"stage {stage}" for stage in range(timeline.num_stages)]
    records: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "step"}}
    ]
    senders = {event.stage for event in timeline.sends}
    for stage, name in enumerate(names):
        tracks = [name, f"{name}: sends"] if stage in senders else [name]
        for kind, track in enumerate(tracks):
            records.append(
                {
                    "ph": "M",
                    "pid": 0,
                    "tid": 2 * stage + kind,
                    "name": "thread_name",
                    "args": {"name": track},
                }
            )
    records += [_record(event) for event in (*timeline.events, *timeline.sends)]
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def from_perfetto(text: str) -> tuple[Timeline, tuple[str, ...]]:
    """Read what `perfetto` wrote: the timeline, and the names of its stages.

    Raises:
        PlanError: If the text is something else.
    """
    table, _ = parse_json(text, lambda words: PlanError(f"{_NO_TIMELINE} it {words}"))
    try:
        records = table["traceEvents"]
        # Each stage has two tracks: its operations and its sends.
        names = {
            r["tid"] // 2: str(r["args"]["name"])
            for r in records
            if r["ph"] == "M" and r["name"] == "thread_name" and r["tid"] % 2 == 0
        }
        stages = tuple(names[stage] for stage in range(len(names)))
        events = [_event(r["args"], len(stages)) for r in records if r["ph"] == "X"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{_NO_TIMELINE} {shown(error)}") from None
    if not events:
        raise PlanError(f"{_NO_TIMELINE} nothing happens in it")
    return Timeline(
        num_stages=len(stages),
        events=tuple(e for e in events if e.kind != SEND),
        sends=tuple(e for e in events if e.kind == SEND),
    ), stages


def _event(args: Any, num_stages: int) -> Event:
    event = Event(**args)
    numbers = event.stage, event.microbatch, event.chunk
    if not all(type(n) is int and 0 <= n <= _MOST for n in numbers) or event.stage >= num_stages:
        raise ValueError(f"stage, microbatch or chunk of {shown(args)}")
    if event.kind not in (FORWARD, BACKWARD, WEIGHT, SEND):
        raise ValueError(f"kind {shown(event.kind)}")
    times = event.start_seconds, event.end_seconds
    if not all(type(t) in (int, float) and 0 <= t <= _MOST for t in times) or times[1] < times[0]:
        raise ValueError(f"times {shown(times)}")
    return event


def _record(event: Event) -> dict[str, object]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": 2 * event.stage + (event.kind == SEND),
        "name": f"{event.kind} {event.microbatch}",
        "cat": event.kind,
        "ts": event.start_seconds * 1e6,
        "dur": (event.end_seconds - event.start_seconds) * 1e6,
        "args": dataclasses.asdict(event),
    }
