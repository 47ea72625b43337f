"""A step in time, measured or predicted, device by device, and its picture."""

import collections
import dataclasses
import html
import itertools
import pathlib
from collections.abc import Collection, Iterator, Sequence

from ..core.format import span
from ..schedule.replay import SEND, Timeline
from .page import CSS, box

COMPUTATION, COLLECTIVE, TRANSFER = "computation", "collective", "transfer"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Something that takes time on a lane.

    Attributes:
        lane: Index into `Lanes.names`.
        kind: `computation`, `collective` or `transfer` if it was measured.
        label: What it is, as the HLO names it if it was measured.
        program: Name of the HLO module, if it was measured.
        chunk: The chunk of the stage.
        start_seconds: From the start of the step.
        end_seconds: The same.
    """

    lane: int
    kind: str
    label: str
    program: str = ""
    chunk: int = 0
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """One step.

    Attributes:
        names: Of the lanes: devices, or stages.
        bars: Sorted by start within each lane.
        note: The source, in a sentence.
        end_seconds: The step's end if it is later than the last bar's.
    """

    title: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    note: str = ""
    end_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds until the step ends."""
        return max([self.end_seconds, *(bar.end_seconds for bar in self.bars)])

    def mean_seconds(self) -> dict[tuple[str, str, str], float]:
        """Mean seconds over lanes, by label, kind and program."""
        out: dict[tuple[str, str, str], float] = collections.defaultdict(float)
        for bar in self.bars:
            out[bar.label, bar.kind, bar.program] += bar.seconds / len(self.names)
        return out

    def busy_seconds(self, lane: int, kind: str) -> float:
        """Time in which a lane has at least one bar of a kind."""
        busy, until = 0.0, 0.0
        for bar in self.bars:
            if bar.lane == lane and bar.kind == kind and bar.end_seconds > until:
                busy += bar.end_seconds - max(bar.start_seconds, until)
                until = bar.end_seconds
        return busy


def lanes_of_timeline(
    timeline: Timeline, names: Sequence[str] = (), *, title: str, end_seconds: float = 0.0
) -> Lanes:
    """A pipeline's step as lanes, one for each stage.

    Args:
        names: Of the stages; empty: their numbers.
        end_seconds: The step's end if it is later than the timeline's, by reduction and update.
    """
    bars = [
        Bar(
            lane=e.stage,
            kind=e.kind,
            label=str(e.microbatch),
            chunk=e.chunk,
            start_seconds=e.start_seconds,
            end_seconds=e.end_seconds,
        )
        for e in (*timeline.events, *timeline.sends)
    ]
    return Lanes(
        title=title,
        names=tuple(names) or tuple(f"stage {stage}" for stage in range(timeline.num_stages)),
        bars=tuple(sorted(bars, key=lambda bar: bar.start_seconds)),
        end_seconds=end_seconds,
    )


_CSS = """
.steps text { fill: var(--ink); font-size: 11px; } .steps .head { font-weight: 600; }
.steps g text { text-anchor: middle; font-size: 10px; fill: #fff; pointer-events: none; }
.steps .tick { fill: var(--muted); text-anchor: middle; }
.steps .axis { stroke: var(--grid); } .steps .end { stroke: var(--mark); stroke-width: 1.5; }
.steps { font-family: system-ui, sans-serif; }
.chunk1 { fill-opacity: .7; } .chunk2 { fill-opacity: .5; } .chunk3 { fill-opacity: .35; }
"""
_WIDTH, _LEFT, _TOP = 1000.0, 190.0, 20.0  # pixels
_LANE, _MAX_LANES = 26.0, 32
_LEAST = 0.75  # pixels: bars closer together are drawn as one
_CHARACTER = 6.4
_MAX_NAME = int(_LEFT / _CHARACTER)
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
_THIN = (COLLECTIVE, TRANSFER, SEND)  # drawn below the computation


def step_picture(panels: Sequence[Lanes]) -> str:
    """Draw steps below one another on one scale, a lane for each device or stage."""
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
    out += _legend({bar.kind for panel in panels for bar in panel.bars}, y + 10)
    size = f'viewBox="0 0 {_WIDTH:.0f} {y + 28:.0f}"'
    return f'<svg class="steps" {size}><style>{_CSS}</style>{"".join(out)}</svg>'


def write_picture(lanes: Lanes, path: pathlib.Path) -> None:
    """A step as an SVG file, whose colours follow the reader's light or dark mode."""
    svg = step_picture([lanes]).replace("<style>", f"<style>{CSS}", 1)
    path.write_text(svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))


def _bars(panel: Lanes, num_lanes: int, top: float, scale: float) -> Iterator[str]:
    ordered = sorted(panel.bars, key=lambda b: (b.lane, b.kind, b.chunk, b.start_seconds))
    alikes = itertools.groupby(ordered, key=lambda b: (b.lane, b.kind, b.chunk))
    for (lane, kind, chunk), bars in alikes:
        if lane >= num_lanes:
            continue
        thin = kind in _THIN
        y, height = top + lane * _LANE + (15 if thin else 2), 6 if thin else 13
        for start, end, label in _merged(list(bars), scale):
            width = max((end - start) * scale - 0.5, 0.3)  # with a gap between neighbours
            fits = not thin and len(label) * _CHARACTER < width - 3
            yield box(
                f"{_CLASSES[kind]} chunk{chunk % 4}",
                (_LEFT + start * scale, y, width, height),
                tooltip=f"{label}, {span(end - start)}",
                label=label if fits else "",
            )


def _legend(kinds: Collection[str], y: float) -> Iterator[str]:
    x = _LEFT
    for kind in filter(kinds.__contains__, _CLASSES):
        yield box(_CLASSES[kind], (x, y, 10, 10), tooltip=kind)
        yield _text("name", x + 15, y + 9, kind)
        x += 32 + len(kind) * _CHARACTER


def _merged(bars: Sequence[Bar], scale: float) -> Iterator[tuple[float, float, str]]:
    """Bars of one kind, joined where they cannot be seen apart: start, end and label."""
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
