"""A replayed schedule as a trace for Perfetto."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ..core.errors import PlanError
from ..core.files import parse_json, shown
from .replay import SEND, Event, Timeline
from .schedules import BACKWARD, FORWARD, WEIGHT

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
