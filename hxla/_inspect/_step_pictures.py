"""A measured step and a predicted one, drawn on the same scale."""

import dataclasses
import html
import itertools
import json
import pathlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from .._core._format import span
from .._plan._plan import Plan
from .._plan._plan_parts import Prediction
from .._report._page import Picture, figure, section, table
from .._schedule._replay import SEND
from .._schedule._timeline import from_perfetto
from ._profiler_trace import COLLECTIVE, COMPUTATION, MeasuredStep

_WIDTH, _LEFT, _TOP = 1000.0, 190.0, 20.0  # pixels
_LANE, _MAX_LANES = 26.0, 32
_LEAST = 0.75  # pixels: what lies closer together is drawn as one bar
_CHARACTER = 6.4
#: Kinds in the order of the legend, with the CSS class of their bars.
_CLASSES = {
    COMPUTATION: "k0",
    COLLECTIVE: "k1",
    "transfer": "k2",
    "forward": "k3",
    "backward": "k0",
    "weight": "k2",
    SEND: "k1",
    "forward and backward": "k0",
    "waiting": "idle",
    "reduction": "k1",
    "update": "k2",
}
_THIN = (COLLECTIVE, "transfer", SEND)  # drawn below what computes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Something that takes time on a lane.

    Attributes:
        lane: Index.
        kind: What it is.
        label: In words.
        start_seconds: From the start of the step.
        end_seconds: The same.
    """

    lane: int
    kind: str
    label: str
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """A step, measured or predicted.

    Attributes:
        title: Above the lanes.
        names: Of the lanes.
        bars: By start, within each lane.
    """

    title: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]

    @property
    def seconds(self) -> float:
        """Until the last bar ends."""
        return max((bar.end_seconds for bar in self.bars), default=0.0)


def step_section(measured: MeasuredStep | None, predicted: Lanes | None) -> str:
    """A section of a page: one step in time, and its longest operations if it was measured."""
    panels = [lanes_of_step(measured)] if measured is not None else []
    panels += [predicted] if predicted is not None else []
    parts = [figure(step_picture(panels))]
    if measured is not None:
        rows = [
            (
                name,
                span(measured.busy_seconds(d, COMPUTATION)),
                span(measured.busy_seconds(d, COLLECTIVE)),
                span(max(op.end_seconds for op in measured.operations if op.device == d)),
            )
            for d, name in enumerate(measured.devices)
        ]
        heads = ("measured", "computation", "collectives and waiting in them", "until")
        parts.append(f"<details><summary>Each device</summary>{table(heads, rows)}</details>")
        longest: dict[tuple[str, str, str], float] = defaultdict(float)
        for op in measured.operations:
            took = op.end_seconds - op.start_seconds
            longest[op.kind, op.program, op.name] += took / len(measured.devices)
        rows_ = [
            (name, kind, program, span(took))
            for (kind, program, name), took in sorted(longest.items(), key=lambda item: -item[1])[
                :15
            ]
        ]
        heads_ = ("operation", "kind", "program", "a step, mean over devices")
        parts.append(
            "<details><summary>Longest operations</summary>"
            + table(heads_, rows_, left=(0, 1, 2))
            + f"</details><p>The last of {measured.num_steps} profiled steps, "
            f"from {html.escape(measured.source)}.</p>"
        )
    return section("One step in time", *parts)


def lanes_of_step(measured: MeasuredStep) -> Lanes:
    """A profiled step as lanes, one for each device."""
    return Lanes(
        title=f"measured: {span(measured.seconds)}",
        names=measured.devices,
        bars=tuple(
            Bar(
                lane=op.device,
                kind=op.kind,
                label=op.name,
                start_seconds=op.start_seconds,
                end_seconds=op.end_seconds,
            )
            for op in measured.operations
        ),
    )


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
        out.append(f'<text class="head" x="0" y="{y + 10:.0f}">{html.escape(panel.title)}</text>')
        out += _legend(panel, y + 10)
        y += _TOP
        for lane in range(num):
            top = y + lane * _LANE
            name = html.escape(_short(panel.names[lane]))
            out.append(f'<text x="0" y="{top + 14:.0f}">{name}</text>')
            out.append(f'<path class="axis" d="M{_LEFT} {top + 22:.0f}H{_WIDTH - 10:.0f}"/>')
        out += _bars(panel, num, y, scale)
        y += num * _LANE
        if num < len(panel.names):
            out.append(f'<text x="0" y="{y + 12:.0f}">{len(panel.names) - num} more</text>')
            y += _TOP
        end = _LEFT + panel.seconds * scale
        out.append(f'<path class="end" d="M{end:.1f} {y - num * _LANE - 2:.0f}V{y:.0f}"/>')
        y += 14
    out += _ticks(longest, scale, y)
    caption = "; ".join(panel.title for panel in panels) + ". A line marks where a step ends."
    svg = f'<svg class="steps" viewBox="0 0 {_WIDTH:.0f} {y + 8:.0f}">{"".join(out)}</svg>'
    return Picture(svg=svg, caption=caption)


def _legend(panel: Lanes, y: float) -> Iterator[str]:
    """What the colours mean, from the right side of the panel's title."""
    found = {bar.kind for bar in panel.bars}
    kinds = [kind for kind in _CLASSES if kind in found]
    x = _WIDTH - 10 - sum(34 + len(kind) * _CHARACTER for kind in kinds)
    for kind in kinds:
        yield (
            f'<rect class="{_CLASSES[kind]}" x="{x:.0f}" y="{y - 9:.0f}" width="12" height="10"/>'
            f'<text x="{x + 17:.0f}" y="{y:.0f}">{kind}</text>'
        )
        x += 34 + len(kind) * _CHARACTER


def _bars(panel: Lanes, num_lanes: int, top: float, scale: float) -> Iterator[str]:
    ordered = sorted(panel.bars, key=lambda b: (b.lane, b.kind, b.start_seconds))
    for (lane, kind), bars in itertools.groupby(ordered, key=lambda b: (b.lane, b.kind)):
        if lane >= num_lanes:
            continue
        thin = kind in _THIN
        y, height = top + lane * _LANE + (15 if thin else 2), 6 if thin else 13
        for start, end, label in _merged(list(bars), scale):
            x, width = _LEFT + start * scale, max((end - start) * scale, 0.3)
            said = f"{label}, {span(end - start)}"
            yield (
                f'<rect class="{_CLASSES.get(kind, "idle")}" x="{x:.1f}" y="{y:.0f}" '
                f'width="{width:.1f}" height="{height}"><title>{html.escape(said)}</title></rect>'
            )
            if not thin and len(label) * _CHARACTER < width - 3:
                yield (
                    f'<text class="in" x="{x + width / 2:.1f}" y="{y + 10.5:.1f}">'
                    f"{html.escape(label)}</text>"
                )


def _merged(bars: Sequence[Bar], scale: float) -> Iterator[tuple[float, float, str]]:
    """Bars of one kind as they can be told apart: start, end and label."""
    run: list[Bar] = []
    until = 0.0
    for bar in bars:
        # Two bars that both can be seen stay two.
        seen = (bar.end_seconds - bar.start_seconds) * scale >= 2 * _LEAST
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
    if not longest:
        return
    steps = (m * 10.0**e for e in range(-9, 6) for m in (1, 2, 5))
    step = next((s for s in steps if longest <= 6 * s), longest)
    for i in range(int(longest / step) + 1):
        x = _LEFT + i * step * scale
        yield f'<text class="tick" x="{x:.1f}" y="{y:.0f}">{_tick(i * step)}</text>'


def _short(name: str) -> str:
    most = int(_LEFT / _CHARACTER)
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _tick(value: float) -> str:
    scale, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
    return f"{value * scale:.4g} {unit}" if value else "0"
