"""A replayed schedule as a picture and as a trace for Perfetto."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from .._core._errors import PlanError
from ._replay import SEND, Event, Timeline
from ._schedules import BACKWARD, FORWARD, WEIGHT

_COLORS = {FORWARD: "#7fa9ea", BACKWARD: "#2f6fdb", WEIGHT: "#2a9d78", SEND: "#e39a1d"}
_INK = {FORWARD: "#1f2430", BACKWARD: "#fffffe", WEIGHT: "#fffffe", SEND: "#1f2430"}
_CHUNK_HATCH = ("", "///", "...", "xxx")
_MIN_LABELLED = 0.011  # share of the width below which a number does not fit its bar


def draw(
    timeline: Timeline,
    path: pathlib.Path,
    *,
    names: Sequence[str] = (),
    title: str = "",
    step_seconds: float = 0.0,
) -> None:
    """Draw a timeline: one row per stage, microbatch numbers in the bars, transfers below them.

    Args:
        timeline: What to draw.
        path: `.png` or `.svg`.
        names: Of the stages (default: their numbers).
        title: Above the picture.
        step_seconds: End of the step, where it is later than the timeline's (reduction and
            update).
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = max(step_seconds, timeline.makespan_seconds)
    scale, unit = (1e3, "ms") if end < 1 else (1.0, "s")
    names = names or [f"stage {stage}" for stage in range(timeline.num_stages)]
    figure = Figure(figsize=(10, 1.3 + 0.42 * timeline.num_stages), dpi=150, layout="constrained")
    ax: Any = figure.add_subplot()
    for event in (*timeline.events, *timeline.sends):
        sent = event.kind == SEND
        ax.broken_barh(
            [(event.start_seconds * scale, (event.end_seconds - event.start_seconds) * scale)],
            (event.stage + (0.36 if sent else -0.4), 0.1 if sent else 0.74),
            facecolor=_COLORS[event.kind],
            edgecolor="#fffffe",
            linewidth=0 if sent else 0.5,
            hatch=_CHUNK_HATCH[event.chunk % len(_CHUNK_HATCH)] or None,
        )
        label = str(event.microbatch)
        if not sent and event.end_seconds - event.start_seconds > _MIN_LABELLED * len(label) * end:
            ax.text(
                (event.start_seconds + event.end_seconds) / 2 * scale,
                event.stage - 0.03,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color=_INK[event.kind],
                # A hatched bar needs a plain ground under its number.
                bbox={"color": _COLORS[event.kind], "pad": 0.5} if event.chunk else None,
            )
    if step_seconds > timeline.makespan_seconds:
        ax.axvspan(timeline.makespan_seconds * scale, end * scale, color="#d3d9e2", linewidth=0)
    ax.set_yticks(range(timeline.num_stages), names)
    ax.set(xlim=(0, end * scale), ylim=(timeline.num_stages - 0.4, -0.55), xlabel=unit)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)
    kinds = {event.kind for event in (*timeline.events, *timeline.sends)}
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in kinds]
    if step_seconds > timeline.makespan_seconds:
        handles.append(Patch(color="#d3d9e2", label="reduction and update"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    # The same timeline gives the same bytes, and text stays text.
    with mpl.rc_context({"svg.hashsalt": "hxla", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


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
    try:
        records = json.loads(text)["traceEvents"]
        # Of each stage two tracks, its own and that of its sends.
        names = {
            r["tid"] // 2: r["args"]["name"]
            for r in records
            if r["ph"] == "M" and r["name"] == "thread_name" and r["tid"] % 2 == 0
        }
        events = [Event(**r["args"]) for r in records if r["ph"] == "X"]
        stages = tuple(names[stage] for stage in range(len(names)))
    except (ValueError, KeyError, TypeError) as error:
        raise PlanError(f"this is no timeline that hxla plan wrote: {error!r}") from error
    return Timeline(
        num_stages=len(stages),
        events=tuple(e for e in events if e.kind != SEND),
        sends=tuple(e for e in events if e.kind == SEND),
    ), stages


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
