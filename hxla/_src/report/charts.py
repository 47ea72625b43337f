"""Charts over training steps as inline SVG, readable at every width and without a script.

Curves are stretched to the width of the page. Text and lines keep their size, because their places
are percentages. The values of a step appear in a chart while the pointer is above it.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..core.format import number, round_numbers, si
from .page import legend

_MAX_POINTS = 500  # of a drawn curve
_MAX_HOVERED = 80  # steps with a readout
_LEAST_BETWEEN = 0.2  # of the width, between the labels of two marks
_MAX_BANDS = 8
_SCALE = 1000  # units of the stretched picture along a side
CSS = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 1.2rem 2.2rem; }
.chart { margin: 0 0 1.6rem; min-width: 0; break-inside: avoid; }
.chart figcaption { color: var(--ink); font-weight: 600; display: flex; flex-wrap: wrap;
  gap: 0 1.4rem; margin: 0 0 .2rem; }
.chart .legend { font-weight: 400; margin: 0; }
.plot { padding: .7rem .4rem 1.7rem 3.1rem; }
.marked { padding-top: 1.5rem; }
.plot svg { display: block; width: 100%; overflow: visible; }
.plot text { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums; }
.plot .y { text-anchor: end; }
.plot .x, .plot .note { text-anchor: middle; }
.plot .grid { stroke: var(--grid); }
.plot .base { stroke: var(--muted); stroke-opacity: .5; }
.plot .mark { stroke: var(--muted); stroke-dasharray: 3 3; }
.plot path { vector-effect: non-scaling-stroke; }
.curve { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
.faint { stroke-width: 1; stroke-opacity: .35; }
.train { stroke: var(--line); background: var(--line); }
.eval { stroke: var(--mark); background: var(--mark); }
circle.train { fill: var(--line); } circle.eval { fill: var(--mark); }
.band { stroke: var(--page); stroke-width: 1; fill-opacity: .8; }
.odd { stroke: var(--mark); stroke-width: 1.5; }
.at rect { fill: transparent; }
.at line, .at text { visibility: hidden; }
.at line { stroke: var(--muted); }
.plot .at text { fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 5px; }
.at:hover line, .at:hover text { visibility: visible; }
@media print { .at { display: none; } }
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One value over steps.

    Attributes:
        color: The CSS class, `train` or `eval`.
        x: The steps, increasing; of shape [n], as `y`.
        y: The values; NaN leaves a gap.
        is_noisy: Whether a running median is drawn above the values.
        has_dots: Whether each value is a dot.
    """

    name: str
    color: str
    x: np.ndarray
    y: np.ndarray
    is_noisy: bool = False
    has_dots: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
    """The ranges of a chart, and places in it as fractions from its left and its top."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    is_log: bool = False

    def across(self, x: np.ndarray) -> np.ndarray:
        return (np.asarray(x, float) - self.low_x) / (self.high_x - self.low_x)

    def down(self, y: np.ndarray) -> np.ndarray:
        low, high, y = self.low_y, self.high_y, np.asarray(y, float)
        if self.is_log:
            low, high, y = math.log(low), math.log(high), np.log(np.where(y > 0, y, np.nan))
        return 1 - (y - low) / (high - low)


def curve_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    marks: Mapping[float, str],
    odd_steps: Sequence[int] = (),
    text: Callable[[float], str] = number,
    from_zero: bool = False,
    is_linear: bool = False,
    height: int = 200,
) -> str:
    """Draw curves over steps.

    Args:
        marks: The label of a dashed line, by step.
        odd_steps: Steps with a cross at the bottom.
        from_zero: Whether the axis begins at zero.
        is_linear: Whether the axis is never logarithmic; otherwise it is if the values span a
            factor of 30.
        height: In pixels.
    """
    values = np.concatenate([curve.y for curve in curves])
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if values.size else (0.0, 1.0)
    is_log = low > 0 and high > 30 * low and not (from_zero or is_linear)
    axes = _axes([c.x for c in curves], 0.0 if from_zero else float(low), float(high), is_log)
    drawn = "".join(part for curve in curves for part in _curve(curve, axes))
    dots = "".join(part for curve in curves for part in _dots(curve, axes))
    bottom = "".join(
        f'<text class="odd" x="{place:.2%}" y="100%" dy="-4" text-anchor="middle">&#215;</text>'
        for place in axes.across(np.array(odd_steps))
    )
    names = [(c.color, c.name) for c in curves] if len(curves) > 1 else []
    readouts = _readouts(curves, axes, text)
    inside = _stretched(drawn) + dots + bottom + readouts
    words = f"{title} over steps{' on a logarithmic scale' if is_log else ''}"
    words += "".join(_in_words(curve, text) for curve in curves)
    return _chart(title, names, words, axes, inside, marks, height)


def band_chart(
    title: str,
    names: Sequence[str],
    x: np.ndarray,
    rows: np.ndarray,
    *,
    marks: Mapping[float, str],
    height: int = 200,
) -> str:
    """Draw whole numbers over steps, stacked; further bands than colours share the last one.

    Args:
        names: The name of each band.
        x: The steps, of shape [n].
        rows: The numbers, of shape [n, bands].
        marks: The label of a dashed line, by step.
        height: In pixels.
    """
    if len(names) > _MAX_BANDS:
        rest = rows[:, _MAX_BANDS - 1 :].sum(axis=1, keepdims=True)
        rows = np.concatenate([rows[:, : _MAX_BANDS - 1], rest], axis=1)
        names = [*names[: _MAX_BANDS - 1], f"{len(names) - _MAX_BANDS + 1} others"]
    axes = _axes([np.append(x, x[-1] + 1)], 0.0, float(rows.sum(axis=1).max()), is_log=False)
    is_new = np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])
    starts, rows = np.append(x[is_new], x[-1] + 1), rows[is_new]
    tops = np.concatenate([np.zeros((len(rows), 1)), rows.cumsum(axis=1)], axis=1)
    places = _SCALE * axes.across(starts)
    down = _SCALE * axes.down(tops)
    drawn = ""
    for band in range(len(names)):
        upper = "".join(
            f"{'M' if i == 0 else 'L'}{places[i]:.0f} {down[i, band + 1]:.0f}H{places[i + 1]:.0f}"
            for i in range(len(rows))
        )
        lower = "".join(
            f"L{places[i + 1]:.0f} {down[i, band]:.0f}H{places[i]:.0f}"
            for i in reversed(range(len(rows)))
        )
        drawn += f'<path class="band k{band}" d="{upper}{lower}z"/>'
    spans = "".join(
        _readout(places[i] / _SCALE, places[i + 1] / _SCALE, places[i] / _SCALE, words)
        for i in range(len(rows))
        for words in [f"from step {starts[i]:.0f}: {'/'.join(map(str, rows[i]))}"]
    )
    colors = [(f"k{band}", name) for band, name in enumerate(names)]
    first, last = ("/".join(map(str, row)) for row in (rows[0], rows[-1]))
    words = f"{title} over steps: {first} at first, {last} last"
    return _chart(title, colors, words, axes, _stretched(drawn) + spans, marks, height)


def _axes(steps: Sequence[np.ndarray], low: float, high: float, is_log: bool) -> _Axes:
    """The ranges, a little wider than the values so that no line is cut."""
    first = min((x[0] for x in steps if len(x)), default=0)
    last = max((x[-1] for x in steps if len(x)), default=1)
    if is_log:
        low, high = low / 1.1, high * 1.1
    else:
        pad = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        low, high = low - pad if low else 0.0, high + pad
    return _Axes(
        low_x=float(first),
        high_x=float(max(last, first + 1)),
        low_y=low,
        high_y=high,
        is_log=is_log,
    )


def _chart(
    title: str,
    names: Sequence[tuple[str, str]],
    words: str,
    axes: _Axes,
    inside: str,
    marks: Mapping[float, str],
    height: int,
) -> str:
    drawn_marks = _marks(marks, axes)
    style = "plot marked" if drawn_marks else "plot"
    caption = f"<span>{html.escape(title)}</span>" + (legend(names) if names else "")
    grid = "".join(_grid(axes))
    return (
        f'<figure class="chart"><figcaption>{caption}</figcaption><div class="{style}">'
        f'<svg height="{height}" role="img" aria-label="{html.escape(words)}">{grid}'
        f"{drawn_marks}{inside}</svg>"
        "</div></figure>"
    )


def _grid(axes: _Axes) -> Iterator[str]:
    for value in _log_ticks(axes) if axes.is_log else round_numbers(axes.low_y, axes.high_y, 4):
        place = float(axes.down(np.array(value)))
        label = f"{value:.4g}" if abs(value) < 1e3 else si(value)
        yield f'<line class="grid" x2="100%" y1="{place:.2%}" y2="{place:.2%}"/>'
        yield f'<text class="y" x="-8" y="{place:.2%}" dy=".32em">{label}</text>'
    yield '<line class="base" x2="100%" y1="100%" y2="100%"/>'
    yield '<text class="y" x="-8" y="100%" dy="1.5em">step</text>'
    for value in round_numbers(axes.low_x, axes.high_x, 5, least=1.0):
        place = float(axes.across(np.array(value)))
        label = f"{value:.0f}" if value < 1e4 else si(value)
        yield f'<text class="x" x="{place:.2%}" y="100%" dy="1.5em">{label}</text>'


def _log_ticks(axes: _Axes) -> list[float]:
    first, last = math.floor(math.log10(axes.low_y)), math.ceil(math.log10(axes.high_y))
    every = max(1, (last - first) // 5)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        some = [d * 10.0**e for e in range(first, last + 1, every) for d in digits]
        ticks = [value for value in some if axes.low_y <= value <= axes.high_y]
        if len(ticks) > 2:
            break
    return ticks


def _stretched(paths: str) -> str:
    box = f'viewBox="0 0 {_SCALE} {_SCALE}" preserveAspectRatio="none"'
    return f'<svg {box} width="100%" height="100%">{paths}</svg>'


def _curve(curve: Curve, axes: _Axes) -> Iterator[str]:
    x, y = curve.x, curve.y
    if curve.is_noisy and len(y) > 40:
        yield f'<path class="curve faint {curve.color}" d="{_path(*_extremes(x, y), axes)}"/>'
        x, y = _medians(x, y)
    else:
        x, y = _extremes(x, y)
    yield f'<path class="curve {curve.color}" d="{_path(x, y, axes)}"/>'


def _path(x: np.ndarray, y: np.ndarray, axes: _Axes) -> str:
    out, letter = [], "M"
    for across, down in zip(_SCALE * axes.across(x), _SCALE * axes.down(y), strict=True):
        if not math.isfinite(down):
            letter = "M"
            continue
        out.append(f"{letter}{across:.1f} {down:.0f}")
        letter = "L"
    return "".join(out)


def _dots(curve: Curve, axes: _Axes) -> Iterator[str]:
    if curve.has_dots or len(curve.y) == 1:
        for across, down in zip(axes.across(curve.x), axes.down(curve.y), strict=True):
            if math.isfinite(down):
                place = f'cx="{across:.2%}" cy="{down:.2%}"'
                yield f'<circle class="{curve.color}" {place} r="2.5"/>'


def _extremes(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest value of each run of steps, so that no peak is lost."""
    if len(y) <= _MAX_POINTS:
        return x, y
    kept: list[int] = []
    for part in np.array_split(np.arange(len(y)), _MAX_POINTS // 2):
        finite = part[np.isfinite(y[part])]
        ends = {finite[y[finite].argmin()], finite[y[finite].argmax()]} if finite.size else part[:1]
        kept += sorted(map(int, ends))
    return x[kept], y[kept]


def _medians(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A running median over about a fortieth of all steps."""
    places = np.linspace(0, len(y) - 1, min(len(y), _MAX_POINTS)).astype(int)
    half = max(1, len(y) // 80)
    windows = [y[max(0, i - half) : i + half + 1] for i in places]
    finite = [window[np.isfinite(window)] for window in windows]
    return x[places], np.array([np.median(w) if w.size else math.nan for w in finite])


def _marks(marks: Mapping[float, str], axes: _Axes) -> str:
    """Dashed lines; a label that would touch the one before is left out."""
    out, labelled = "", -1.0
    for step, label in sorted(marks.items()):
        place = float(axes.across(np.array(step)))
        if not 0 <= place <= 1:
            continue
        out += f'<line class="mark" x1="{place:.2%}" x2="{place:.2%}" y2="100%"/>'
        if place - labelled >= _LEAST_BETWEEN:
            labelled = place
            anchor = "end" if place > 0.9 else "start" if place < 0.1 else "middle"
            style = f'class="note" style="text-anchor: {anchor}"'
            out += f'<text {style} x="{place:.2%}" y="-7">{html.escape(label)}</text>'
    return out


def _readouts(curves: Sequence[Curve], axes: _Axes, text: Callable[[float], str]) -> str:
    """The values at some steps, each in a column of the chart."""
    longest = max((curve.x for curve in curves), key=len)
    if not len(longest):
        return ""
    some = np.linspace(0, len(longest) - 1, min(len(longest), _MAX_HOVERED)).round().astype(int)
    steps = longest[some]
    middles = axes.across((steps[1:] + steps[:-1]) / 2)
    edges = [0.0, *middles, 1.0]
    out = ""
    for i, step in enumerate(steps):
        words = [f"step {step:.0f}"]
        for curve in curves:
            if not len(curve.x):
                continue
            nearest = int(np.abs(curve.x - step).argmin())
            if edges[i] <= axes.across(curve.x[nearest]) <= edges[i + 1]:
                name = f"{curve.name} " if len(curves) > 1 else ""
                words.append(f"{name}{text(float(curve.y[nearest]))}")
        place = float(axes.across(step))
        out += _readout(edges[i], edges[i + 1], place, " · ".join(words))
    return out


def _readout(left: float, right: float, place: float, words: str) -> str:
    """A column of a chart with a text for the pointer above it."""
    anchor = "start" if place < 0.5 else "end"
    return (
        f'<g class="at"><rect x="{left:.2%}" width="{right - left:.2%}" height="100%"/>'
        f'<line x1="{place:.2%}" x2="{place:.2%}" y2="100%"/>'
        f'<text x="{place:.2%}" y="14" dx="{6 if anchor == "start" else -6}" '
        f'text-anchor="{anchor}">{html.escape(words)}</text></g>'
    )


def _in_words(curve: Curve, text: Callable[[float], str]) -> str:
    finite = curve.y[np.isfinite(curve.y)]
    if not finite.size:
        return ""
    first, last, least, most = map(text, (finite[0], finite[-1], finite.min(), finite.max()))
    return f"; {curve.name}: first {first}, last {last}, from {least} to {most}"
