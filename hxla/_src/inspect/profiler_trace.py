"""One step in time: measured, from a trace of jax's profiler, and predicted."""

import collections
import dataclasses
import html
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.errors import InspectError
from ..core.files import (
    MOST_DUMP_BYTES,
    MOST_JSON_BYTES,
    named,
    parse_json,
    read_bytes,
    read_text,
    shown,
    unpack,
)
from ..core.format import span
from ..plan.parts import Prediction
from ..plan.plan import Plan
from ..report.lanes import (
    COLLECTIVE,
    COMPUTATION,
    TRANSFER,
    Bar,
    Lanes,
    lanes_of_timeline,
    step_legend,
    step_picture,
)
from ..report.page import figure, fold, section, table
from ..schedule.replay import from_perfetto
from .collectives import KINDS
from .program import Program

_SUFFIX = ".trace.json.gz"
_MOST_VALUES = 20_000_000
_MOST_MICROSECONDS = 1e18
_UPDATE = "jit_hxla_update"  # hxla may still reduce metrics, evaluate or save after it
_TRANSFERS = ("copy-start", "copy-done", "send", "recv", "infeed", "outfeed")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Event:
    """An event of the profiler, in microseconds."""

    device: str
    line: str
    program: str
    run: str
    name: str
    start: float
    end: float


def last_step(path: pathlib.Path, programs: Sequence[Program]) -> Lanes:
    """The last step of a profile; its bars are the innermost operations.

    A step ends with the last run of hxla's update, or else of the program that ran last, and begins
    after its run before. If several processes each wrote a profile, the last step of each begins
    at zero.

    Args:
        path: The folder of `jax.profiler.trace`, a folder of several such, or a `trace.json.gz`
            file.
        programs: Of the step; runs of others are left out.

    Raises:
        InspectError: If there is no profile, or no run of the programs in it.
    """
    files = _files(path)
    if not files:
        raise InspectError(
            f"{path} holds no profile: no file like plugins/profile/*/*{_SUFFIX}; make one with "
            "jax.profiler.trace(FOLDER)"
        )
    names = {program.name for program in programs}
    collectives = {(p.name, c.name) for p in programs for c in p.collectives}
    lanes: list[str] = []
    bars: list[Bar] = []
    num_steps = 0
    seen: set[str] = set()
    for number, file in enumerate(files):
        events = list(_events(file))
        seen |= {e.program for e in events}
        step_events = [e for e in events if e.program in names]
        if not step_events:
            continue
        step, num_steps = _last_step(step_events)
        begin = min(e.start for e in step)
        devices = sorted({e.device for e in step}, key=lambda d: (len(d), d))
        lane_of = {device: len(lanes) + i for i, device in enumerate(devices)}
        process = f"process {number}, " if len(files) > 1 else ""
        lanes += [f"{process}device {device}" for device in devices]
        bars += [
            Bar(
                lane=lane_of[e.device],
                kind=_kind(e, collectives),
                label=e.name,
                program=e.program,
                start_seconds=(e.start - begin) * 1e-6,
                end_seconds=(e.end - begin) * 1e-6,
            )
            for e in _leaves(step)
        ]
    if not bars:
        raise InspectError(
            f"{path} has no run of {', '.join(sorted(names)) or 'any program'}, only of "
            f"{', '.join(sorted(seen)) or 'none'}: profile the step that is inspected"
        )
    return Lanes(
        title=f"measured: {span(max(bar.end_seconds for bar in bars))}",
        names=tuple(lanes),
        bars=tuple(sorted(bars, key=lambda bar: bar.start_seconds)),
        note=f"The last of {num_steps} profiled steps, from {path}.",
    )


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of the newest session in each `plugins/profile`, one for each process."""
    if path.is_file():
        return [path]
    sessions: dict[pathlib.Path, pathlib.Path] = {}
    for file in sorted(path.rglob(f"*{_SUFFIX}")):
        sessions[file.parent.parent] = file.parent  # sessions are named by their time
    return [file for folder in sessions.values() for file in sorted(folder.glob(f"*{_SUFFIX}"))]


def _events(file: pathlib.Path) -> Iterator[_Event]:
    # The other form, xplane.pb, needs jax.profiler.ProfileData, which crashes the process on some
    # events of jax 0.12.
    def refuse(words: str) -> InspectError:
        return InspectError(f"{file} is no profile: it {words}")

    packed = read_bytes(file, MOST_DUMP_BYTES, refuse)
    try:
        text, wrong = unpack(packed)
    except ValueError as error:
        text, wrong = b"", str(error)
    if wrong:
        raise refuse(f"cannot be unpacked: {wrong}")
    limits = {"most_bytes": MOST_DUMP_BYTES, "most_values": _MOST_VALUES}
    table, _ = parse_json(text, refuse, **limits)
    try:
        yield from _events_of(table["traceEvents"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(f"is no trace of jax's profiler: {shown(error)}") from None


def _events_of(records: Sequence[Any]) -> Iterator[_Event]:
    planes = {r["pid"]: r["args"]["name"] for r in records if r.get("name") == "process_name"}
    for record in records:
        args = record.get("args", {})
        name, program = args.get("hlo_op"), args.get("hlo_module")
        if record.get("ph") != "X" or not name or not program:
            continue
        start, took = float(record["ts"]), float(record.get("dur", 0))
        if not (abs(start) < _MOST_MICROSECONDS and 0 <= took < _MOST_MICROSECONDS):
            raise ValueError(f"{name} begins at {start} and takes {took} microseconds")
        device = args.get("device_ordinal") or planes.get(record["pid"], "").split(":")[-1]
        yield _Event(
            # On GPUs and TPUs each device has one plane: `/device:GPU:0`.
            device=str(device),
            line=f"{record['pid']} {record['tid']}",
            program=program.split("(")[0],
            run=str(args.get("run_id", "")),
            name=str(name),
            start=start,
            end=start + took,
        )


def _last_step(events: Sequence[_Event]) -> tuple[list[_Event], int]:
    """Events of the last step, and how many steps there are."""
    last = max(events, key=lambda e: e.end).program
    if any(e.program == _UPDATE for e in events):
        last = _UPDATE
    ends: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for event in events:
        if event.program == last:
            run_ends = ends[event.device]
            run_ends[event.run] = max(run_ends.get(event.run, 0.0), event.end)
    # One device may begin its next step before another has ended this one.
    bounds = {device: [0.0, *sorted(run_ends.values())][-2:] for device, run_ends in ends.items()}
    step = [
        e
        for e in events
        if e.device in bounds and bounds[e.device][0] <= e.start < bounds[e.device][1]
    ]
    return step, max(map(len, ends.values()))


def _leaves(events: Sequence[_Event]) -> Iterator[_Event]:
    """The innermost events of each line: not a loop, but the operations in it."""
    lines: dict[tuple[str, str], list[_Event]] = collections.defaultdict(list)
    for event in events:
        lines[event.device, event.line].append(event)
    for line_events in lines.values():
        line_events.sort(key=lambda e: (e.start, -e.end))
        for event, after in zip(line_events, [*line_events[1:], None], strict=True):
            if after is None or after.start >= event.end:
                yield event


def _kind(event: _Event, collectives: set[tuple[str, str]]) -> str:
    if (event.program, event.name) in collectives or event.name.startswith(tuple(KINDS)):
        return COLLECTIVE
    return TRANSFER if event.name.startswith(_TRANSFERS) else COMPUTATION


_MAX_LONGEST = 15  # operations listed


def step_section(measured: Lanes | None, predicted: Lanes | None) -> str:
    """A section on one step in time, with its longest operations if it was measured."""
    steps = [step for step in (measured, predicted) if step is not None]
    titles = "; ".join(step.title for step in steps)
    picture = figure(step_picture(steps), f"{titles}. A line marks where a step ends.")
    parts = [picture, step_legend(steps)]
    if measured is not None:
        rows = [
            (
                name,
                span(measured.busy_seconds(lane, COMPUTATION)),
                span(measured.busy_seconds(lane, COLLECTIVE)),
                span(max(bar.end_seconds for bar in measured.bars if bar.lane == lane)),
            )
            for lane, name in enumerate(measured.names)
        ]
        heads = ("measured", "computation", "collectives and waiting in them", "until")
        parts.append(fold("Each device", table(heads, rows)))
        took = sorted(measured.mean_seconds().items(), key=lambda item: -item[1])
        heads = ("operation", "kind", "program", "a step, mean over devices")
        rows = [(*names, span(seconds)) for names, seconds in took[:_MAX_LONGEST]]
        parts.append(fold("Longest operations", table(heads, rows, left=(0, 1, 2))))
        parts.append(f"<p>{html.escape(measured.note)}</p>")
    return section("One step in time", *parts)


def lanes_of_file(path: pathlib.Path) -> Lanes:
    """A file of `hxla plan --write` as lanes: the plan or the timeline of one replica.

    Raises:
        PlanError: If it is neither.
        InspectError: If it cannot be read.
    """
    text = read_text(path, MOST_JSON_BYTES, named("prediction", path, InspectError))
    if '"traceEvents"' not in text:
        return lanes_of_plan(Plan.from_json(text))
    timeline, names = from_perfetto(text)
    title = f"predicted, without reduction and update: {span(timeline.makespan_seconds)}"
    return lanes_of_timeline(timeline, names, title=title)


def lanes_of_plan(plan: Plan) -> Lanes:
    """A plan as lanes: the seconds of each kind of work of a device, in no true order."""
    bars = []
    known = plan.prediction or Prediction()
    kinds = {device.rank: device.kind for device in plan.devices}
    for lane, device in enumerate(known.devices):
        at = 0.0
        for kind, took in (
            ("forward and backward", device.compute_seconds),
            ("waiting", device.wait_seconds),
            ("reduction", device.reduction_seconds),
            ("update", device.update_seconds),
        ):
            if took > 0:
                label = f"{kind} {span(took)}"
                bars.append(
                    Bar(lane=lane, kind=kind, label=label, start_seconds=at, end_seconds=at + took)
                )
                at += took
    return Lanes(
        title=f"predicted: {span(known.step_seconds)}, sums of each device",
        names=tuple(f"{kinds[d.rank]} (device {d.rank})" for d in known.devices),
        bars=tuple(bars),
    )
