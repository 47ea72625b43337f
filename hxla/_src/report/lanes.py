"""A step in time, measured or predicted, device by device, and its picture."""

import collections
import dataclasses
import html
import itertools
import pathlib
from collections.abc import Iterator, Sequence

from ..core.format import round_numbers, span
from ..schedule.replay import SEND, Timeline
from .page import CSS, box, legend

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
.steps { overflow: visible; font-family: system-ui, sans-serif; }
.steps text { fill: var(--ink); font-size: 12px; } .steps .head { font-weight: 600; }
.steps g text { text-anchor: middle; font-size: 10px; fill: #14171d; pointer-events: none; }
.steps .k0 + text { fill: #fff; } .steps .chunk1 + text, .steps .chunk2 + text,
.steps .chunk3 + text { fill: var(--ink); }
.steps .lane, .steps .tick { fill: var(--muted); } .steps .tick { text-anchor: middle; }
.steps .axis { stroke: var(--grid); } .steps .end { stroke: var(--mark); stroke-width: 1.5; }
.chunk1 { fill-opacity: .7; } .chunk2 { fill-opacity: .5; } .chunk3 { fill-opacity: .35; }
@media (max-width: 42rem) { .steps g text { display: none; } }
"""
_WIDTH, _TOP = 860.0, 26.0  # pixels; the width is that of a wide page
_LANE, _MAX_LANES = 44.0, 32
_LEAST = 0.75  # pixels: bars closer together are drawn as one
_CHARACTER = 6.4
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
    """Draw steps below one another on one scale, a lane for each device or stage.

    Places in time are percentages: the picture is as wide as its page, and its text keeps its size.
    """
    drawn, height = _drawn(panels)
    return f'<svg class="steps" height="{height:.0f}"><style>{_CSS}</style>{drawn}</svg>'


def step_legend(panels: Sequence[Lanes]) -> str:
    """The legend of a picture of steps, as HTML."""
    return legend((_CLASSES[kind], kind) for kind in _kinds(panels))


def write_picture(lanes: Lanes, path: pathlib.Path) -> None:
    """A step as an SVG file, whose colours follow the reader's light or dark mode."""
    drawn, height = _drawn([lanes])
    x = 0.0
    for kind in _kinds([lanes]):
        drawn += box(_CLASSES[kind], (x, height + 8, 10, 10), tooltip=kind)
        drawn += f'<text x="{x + 15:.0f}" y="{height + 17:.0f}">{html.escape(kind)}</text>'
        x += 32 + len(kind) * _CHARACTER
    size = f'width="{_WIDTH:.0f}" height="{height + 28:.0f}"'
    style = f"<style>{CSS}{_CSS}</style>"
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="steps" {size}>{style}{drawn}</svg>'
    )


def _kinds(panels: Sequence[Lanes]) -> list[str]:
    """The kinds of bars, in the order of the legend."""
    drawn = {bar.kind for panel in panels for bar in panel.bars}
    return [kind for kind in _CLASSES if kind in drawn]


def _drawn(panels: Sequence[Lanes]) -> tuple[str, float]:
    """The elements of a picture, and its height."""
    out: list[str] = []
    y, longest = 0.0, max(panel.seconds for panel in panels)
    for panel in panels:
        num = min(len(panel.names), _MAX_LANES)
        more = f", {len(panel.names) - num} more lanes" if num < len(panel.names) else ""
        out.append(f'<text class="head" y="{y + 14:.0f}">{html.escape(panel.title + more)}</text>')
        y += _TOP
        for lane, name in enumerate(panel.names[:num]):
            top = y + lane * _LANE
            out.append(f'<text class="lane" y="{top + 12:.0f}">{html.escape(name)}</text>')
            out.append(f'<line class="axis" x2="100%" y1="{top + 39:.0f}" y2="{top + 39:.0f}"/>')
        out += _bars(panel, num, y, longest)
        end = panel.seconds / longest if longest else 0.0
        place = f'x1="{end:.2%}" x2="{end:.2%}"'
        out.append(f'<line class="end" {place} y1="{y:.0f}" y2="{y + num * _LANE:.0f}"/>')
        y += num * _LANE + 14
    out += _ticks(longest, y)
    return "".join(out), y + 8


def _bars(panel: Lanes, num_lanes: int, top: float, longest: float) -> Iterator[str]:
    scale = _WIDTH / longest if longest else 0.0
    ordered = sorted(panel.bars, key=lambda b: (b.lane, b.kind, b.chunk, b.start_seconds))
    alikes = itertools.groupby(ordered, key=lambda b: (b.lane, b.kind, b.chunk))
    for (lane, kind, chunk), bars in alikes:
        if lane >= num_lanes:
            continue
        thin = kind in _THIN
        y, height = top + lane * _LANE + (32 if thin else 18), 5 if thin else 13
        for start, end, label in _merged(list(bars), scale):
            width = max((end - start) * scale - 0.5, 0.3)  # with a gap between neighbours
            text = ""
            if not thin and len(label) * _CHARACTER < width - 3:
                middle = (start + end) / 2 / longest
                text = f'<text x="{middle:.2%}" y="{y + 10:.0f}">{html.escape(label)}</text>'
            yield (
                f"<g><title>{html.escape(f'{label}, {span(end - start)}')}</title>"
                f'<rect class="{_CLASSES[kind]} chunk{chunk % 4}" x="{start / longest:.3%}" '
                f'y="{y:.0f}" width="{width / _WIDTH:.3%}" height="{height}"/>{text}</g>'
            )


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


def _ticks(longest: float, y: float) -> Iterator[str]:
    for seconds in round_numbers(0.0, longest, 5) if longest else ():
        place = seconds / longest
        anchor = "start" if not seconds else "end" if place > 0.95 else "middle"
        style = f'class="tick" style="text-anchor: {anchor}"'
        yield f'<text {style} x="{place:.2%}" y="{y:.0f}">{span(seconds)}</text>'
