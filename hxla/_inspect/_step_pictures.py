"""A measured step and a predicted one, drawn on the same scale."""

import html
import itertools
import json
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .._core._format import span
from .._plan._plan import Plan
from .._plan._plan_parts import Prediction
from .._report._page import Picture, box, figure, fold, legend, section, table
from .._schedule._replay import SEND
from .._schedule._timeline import from_perfetto
from ._lanes import COLLECTIVE, COMPUTATION, TRANSFER, Bar, Lanes

_WIDTH, _LEFT, _TOP = 1000.0, 190.0, 20.0  # pixels
_LANE, _MAX_LANES = 26.0, 32
_LEAST = 0.75  # pixels: what lies closer together is drawn as one bar
_CHARACTER = 6.4
_MAX_NAME = int(_LEFT / _CHARACTER)
_MAX_LONGEST = 15  # operations that are listed
#: Kinds in the order of the legend, with the CSS class of their bars.
_CLASSES = {
    COMPUTATION: "k0",
    COLLECTIVE: "k1",
    TRANSFER: "k2",
    "forward": "k3",
    "backward": "k0",
    "weight": "k2",
    SEND: "k1",
    "forward and backward": "k0",
    "waiting": "idle",
    "reduction": "k1",
    "update": "k2",
}
_THIN = (COLLECTIVE, TRANSFER, SEND)  # drawn below what computes


def step_section(measured: Lanes | None, predicted: Lanes | None) -> str:
    """A section of a page: one step in time, and its longest operations if it was measured."""
    parts = [figure(step_picture([step for step in (measured, predicted) if step is not None]))]
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
        took: dict[tuple[str, str, str], float] = defaultdict(float)
        for bar in measured.bars:
            took[bar.label, bar.kind, bar.program] += bar.seconds / len(measured.names)
        longest = sorted(took.items(), key=lambda item: -item[1])[:_MAX_LONGEST]
        heads = ("operation", "kind", "program", "a step, mean over devices")
        rows = [(*names, span(seconds)) for names, seconds in longest]
        parts.append(fold("Longest operations", table(heads, rows, left=(0, 1, 2))))
        parts.append(f"<p>{html.escape(measured.note)}</p>")
    return section("One step in time", *parts)


def lanes_of_file(path: pathlib.Path) -> Lanes:
    """A file of `hxla plan --write` as lanes: the plan or the timeline of one replica.

    Raises:
        PlanError: If it is neither.
        OSError: If it cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        has_events = "traceEvents" in json.loads(text)
    except ValueError:
        has_events = False
    if not has_events:
        return lanes_of_plan(Plan.from_json(text))
    timeline, names = from_perfetto(text)
    events = sorted((*timeline.events, *timeline.sends), key=lambda e: e.start_seconds)
    return Lanes(
        title=f"predicted, without reduction and update: {span(timeline.makespan_seconds)}",
        names=names,
        bars=tuple(
            Bar(
                lane=e.stage,
                kind=e.kind,
                label=str(e.microbatch),
                start_seconds=e.start_seconds,
                end_seconds=e.end_seconds,
            )
            for e in events
        ),
    )


def lanes_of_plan(plan: Plan) -> Lanes:
    """A plan as lanes: what each device's step is made of, not in which order."""
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


def step_picture(panels: Sequence[Lanes]) -> Picture:
    """Steps below one another on one scale, a lane for each device or stage."""
    longest = max(panel.seconds for panel in panels)
    scale = (_WIDTH - _LEFT - 10) / longest if longest else 0.0
    out: list[str] = []
    y = 8.0
    for panel in panels:
        num = min(len(panel.names), _MAX_LANES)
        more = f", {len(panel.names) - num} more lanes" if num < len(panel.names) else ""
        out.append(_text("head", 0, y + 10, panel.title + more))
        y += _TOP
        for lane, name in enumerate(panel.names[:num]):
            top = y + lane * _LANE
            short = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."
            out.append(_text("lane", 0, top + 14, short))
            out.append(f'<path class="axis" d="M{_LEFT} {top + 22:.0f}H{_WIDTH - 10:.0f}"/>')
        out += _bars(panel, num, y, scale)
        end = _LEFT + panel.seconds * scale
        out.append(f'<path class="end" d="M{end:.1f} {y - 2:.0f}v{num * _LANE + 2:.0f}"/>')
        y += num * _LANE + 14
    out += _ticks(longest, scale, y)
    found = {bar.kind for panel in panels for bar in panel.bars}
    colors = legend((color, kind) for kind, color in _CLASSES.items() if kind in found)
    caption = "; ".join(panel.title for panel in panels) + ". A line marks where a step ends."
    svg = f'<svg class="steps" viewBox="0 0 {_WIDTH:.0f} {y + 8:.0f}">{"".join(out)}</svg>'
    return Picture(svg=svg + colors, caption=caption)


def _bars(panel: Lanes, num_lanes: int, top: float, scale: float) -> Iterator[str]:
    ordered = sorted(panel.bars, key=lambda b: (b.lane, b.kind, b.start_seconds))
    for (lane, kind), bars in itertools.groupby(ordered, key=lambda b: (b.lane, b.kind)):
        if lane >= num_lanes:
            continue
        thin = kind in _THIN
        y, height = top + lane * _LANE + (15 if thin else 2), 6 if thin else 13
        for start, end, label in _merged(list(bars), scale):
            width = max((end - start) * scale, 0.3)
            fits = not thin and len(label) * _CHARACTER < width - 3
            yield box(
                _CLASSES.get(kind, "idle"),
                (_LEFT + start * scale, y, width, height),
                said=f"{label}, {span(end - start)}",
                label=label if fits else "",
            )


def _merged(bars: Sequence[Bar], scale: float) -> Iterator[tuple[float, float, str]]:
    """Bars of one kind as they can be told apart: start, end and label."""
    run: list[Bar] = []
    until = 0.0
    for bar in bars:
        # Two bars that both can be seen stay two.
        seen = bar.seconds * scale >= 2 * _LEAST
        far = (bar.start_seconds - until) * scale >= _LEAST
        if run and (far or seen or (until - run[0].start_seconds) * scale >= 2 * _LEAST):
            yield run[0].start_seconds, until, _label(run)
            run = []
        until = max(until, bar.end_seconds) if run else bar.end_seconds
        run.append(bar)
    if run:
        yield run[0].start_seconds, until, _label(run)


def _label(run: Sequence[Bar]) -> str:
    return run[0].label if len(run) == 1 else f"{len(run)} x {run[0].kind}"


def _ticks(longest: float, scale: float, y: float) -> Iterator[str]:
    steps = (m * 10.0**e for e in range(-9, 6) for m in (1, 2, 5))
    step = next((s for s in steps if longest <= 6 * s), longest)
    for i in range(int(longest / step) + 1 if longest else 0):
        yield _text("tick", _LEFT + i * step * scale, y, span(i * step))


def _text(style: str, x: float, y: float, text: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.0f}">{html.escape(text)}</text>'
