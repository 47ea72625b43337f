"""Pictures of a run, drawn by matplotlib without its global state.

They are SVG for a page, where every colour becomes a CSS variable so that the page's light and dark
mode reach into the picture.

Matplotlib takes a third of a second to import, so only the functions that draw do it.
"""

import contextlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._core._format import percent, plural, shares, si, span
from ._history import History
from ._page import Picture
from ._run_summary import Phase, names_of, num_units

#: Name of the CSS variable and colour on white.
INK, MUTED, GRID, PAPER = "#1f2430", "#626b7a", "#e2e5ea", "#fffffe"
BUSY, IDLE, MARK = "#2f6fdb", "#d3d9e2", "#b4552d"
CSS_COLORS = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    PAPER: "paper",
    BUSY: "busy",
    IDLE: "idle",
    MARK: "mark",
}
_SERIES = ("#2f6fdb", "#e39a1d", "#2a9d78", "#c8508f", "#7a5bd0", "#4fa8d8", "#9a6a45", "#7f8794")
_MAX_POINTS = 600  # a curve of more steps is drawn as the range and mean of groups of steps
_MAX_ROWS = 24  # devices whose bars are drawn
_MAX_BANDS = 12  # devices with a band of their own
_MAX_LABELLED_MARKS = 15


def loss_picture(history: History) -> Picture:
    """Training and evaluation loss over steps."""
    with _figure(3.1) as (figure, ax):
        x, y = _xy([(r.step, r.loss) for r in history.steps])
        curves = [y[np.isfinite(y)]]
        _curve(ax, x, y, BUSY, "training")
        if history.evaluations:
            ex, ey = _xy([(e.step, e.loss) for e in history.evaluations])
            ax.plot(ex, ey, "o-", color=MARK, markersize=4, linewidth=1.2, label="evaluation")
            curves.append(ey[np.isfinite(ey)])
            _legend(ax)
        for record in history.steps:
            if record.skipped or not math.isfinite(record.loss):
                ax.plot(record.step, 0.02, "x", color=MARK, transform=ax.get_xaxis_transform())
        values = np.concatenate(curves)
        log = values.size > 1 and values.min() > 0 and values.max() > 30 * values.min()
        if log:
            ax.set_yscale("log")
        ax.set(xlabel="step", ylabel="loss (log scale)" if log else "loss")
        caption = "Mean loss of the global batch before each update"
        caption += ", and of the evaluation data." if history.evaluations else "."
        if any(r.skipped or not math.isfinite(r.loss) for r in history.steps):
            caption += " Crosses at the bottom: steps whose update was skipped or loss not finite."
        return _picture(figure, "loss", caption)


def busy_picture(phases: Mapping[str, Phase], names: Sequence[str]) -> Picture:
    """Busy and idle seconds per step of each device, one panel per phase on a common scale."""
    shown = _rows(phases, len(names))
    with _figure(0.95 + 0.36 * len(shown), num_columns=len(phases)) as (figure, axes):
        _busy_panels(axes, phases, names, shown)
    caption = "Mean seconds per step in which each device computed and waited. " + "; ".join(
        f"{title}: steps of {span(phase.step_seconds)}, idle "
        f"{', '.join(f'{names[d]} {percent(phase.idle_fractions[d])}' for d in shown[:6])}"
        for title, phase in phases.items()
    )
    if len(shown) < len(names):
        caption += f". The {len(shown)} of {len(names)} devices with the most idle time"
    return _picture(figure, "busy", caption + ".")


def counts_picture(history: History) -> Picture:
    """Microbatches of each device over steps, stacked, with the changes marked."""
    with _figure(3.1) as (figure, ax):
        num_devices = max(len(r.counts) for r in history.steps)
        counts = np.array([r.counts + (0,) * (num_devices - len(r.counts)) for r in history.steps])
        names = names_of(history, range(num_devices))
        # Devices beyond the bands that the eye can tell apart share the last one.
        if num_devices > _MAX_BANDS:
            rest = counts[:, _MAX_BANDS - 1 :].sum(axis=1, keepdims=True)
            counts = np.concatenate([counts[:, : _MAX_BANDS - 1], rest], axis=1)
            names = (*names[: _MAX_BANDS - 1], f"{num_devices - _MAX_BANDS + 1} others")
        x, rows = _changes(np.array([r.step for r in history.steps]), counts)
        top = np.zeros(len(x))
        for d, name in enumerate(names):
            bottom, top = top, top + rows[:, d]
            color = _SERIES[d % len(_SERIES)]
            ax.fill_between(
                x,
                bottom,
                top,
                step="post",
                facecolor=color,
                edgecolor=PAPER,
                linewidth=0.8,
                label=_text(name),
            )
        ax.set(xlabel="step", ylabel="microbatches", xlim=(x[0], x[-1]), ylim=(0, None))
        ax.grid(visible=False)
        ax.yaxis.get_major_locator().set_params(integer=True)
        _marks(ax, history)
        _legend(ax, outside=True, reverse=True)
    caption = f"Microbatches per step on each device; {plural(len(history.rebalances), 'change')}"
    caption += (
        ": "
        + "; ".join(
            f"from step {r.step} {shares(r.before)} to {shares(r.after)}"
            for r in history.rebalances[:5]
        )
        if history.rebalances
        else ""
    )
    more = "; and later ones" if len(history.rebalances) > 5 else ""
    return _picture(figure, "counts", caption + more + ".")


def speed_picture(history: History) -> Picture:
    """Tokens or examples per second, and seconds per step, over steps."""
    with _figure(4.4, num_rows=2) as (figure, axes):
        unit = _speed_curve(axes[0], history)
        x, y = _xy([(r.step, r.seconds) for r in history.steps])
        scale, name = _time_unit(float(np.median(y)))
        _curve(axes[1], x, y * scale, _SERIES[1], smooth=True)
        # One slow step (compilation) must not flatten all others against the axis.
        limit = 3.0 * float(np.median(y)) * scale
        clipped = int((y * scale > limit).sum())
        axes[1].set(xlabel="step", ylabel=f"step time ({name})")
        axes[1].set_ylim(0, limit if clipped else None)
        for ax in axes:
            _marks(ax, history, labels=ax is axes[0])
    caption = f"{unit.capitalize()} per second and time per step. Thin: each step; thick: median "
    caption += f"of {_smooth_steps(len(history.steps))} steps."
    if clipped:
        slowest = span(float(y.max()))
        caption += f" {plural(clipped, 'step')} above the frame, the longest {slowest}."
    return _picture(figure, "speed", caption)


def before_and_after(before: Phase, after: Phase) -> dict[str, Phase]:
    """Titled phases: one if the counts never moved."""
    if before.counts == after.counts:
        return {f"counts {shares(after.counts)}": after}
    return {
        f"first counts ({shares(before.counts)})": before,
        f"last counts ({shares(after.counts)})": after,
    }


@contextlib.contextmanager
def _figure(height: float, *, num_rows: int = 1, num_columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """A figure in our style and its axes: one, or an array of them along a row or a column."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {
        "font.size": 9.5,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "axes.titlecolor": INK,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.linewidth": 0.8,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "lines.solid_capstyle": "round",
        "svg.fonttype": "none",
        "svg.hashsalt": "hxla",
    }
    # A user's matplotlibrc is for the user's pictures. The backend alone would not be restored.
    plain = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    with mpl.rc_context({**plain, **style}):
        figure = Figure(figsize=(8.6, height), layout="constrained", facecolor="none")
        axes = figure.subplots(num_rows, num_columns, sharex=num_rows > 1, squeeze=False).ravel()
        for ax in axes:
            _plain(ax)
        yield figure, axes if len(axes) > 1 else axes[0]


def _plain(ax: Any) -> None:
    ax.set_facecolor("none")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    ax.tick_params(length=3)


def _picture(figure: Any, prefix: str, caption: str) -> Picture:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # Pictures of one page share its name space.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1">', svg, count=1)
    svg = re.sub(r"font(-family)?: ?(?P<size>[\d.]+px )?[^;\"]*'[^;\"]*", _own_font, svg)
    for color, name in CSS_COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return Picture(svg=svg, caption=caption)


def _own_font(match: re.Match[str]) -> str:
    size = match["size"]
    return f"font-size: {size.strip()}" if size else "font-family: inherit"


def _busy_panels(
    axes: Any,
    phases: Mapping[str, Phase],
    names: Sequence[str],
    shown: Sequence[int],
) -> None:
    axes = np.atleast_1d(axes)
    longest = max(phase.step_seconds for phase in phases.values())
    scale, unit = _time_unit(longest)
    for ax, (title, phase) in zip(axes, phases.items(), strict=True):
        ax.grid(visible=False)
        ax.grid(axis="x")
        rows = [d for d in shown if d < len(phase.counts)]
        y = np.arange(len(rows))
        busy = np.array([phase.busy_seconds[d] for d in rows]) * scale
        idle = np.array([phase.idle_seconds[d] for d in rows]) * scale
        ax.barh(y, busy, height=0.62, color=BUSY, label="busy")
        ax.barh(y, idle, height=0.62, left=busy, color=IDLE, label="idle")
        for row, d in enumerate(rows):
            text = f"{percent(phase.idle_fractions[d])} idle"
            ax.text(
                busy[row] + idle[row] + 0.015 * longest * scale,
                row,
                text,
                va="center",
                fontsize=8.5,
                color=MUTED,
            )
        ax.set_yticks(y, [_text(f"{names[d]}  {phase.counts[d]}") for d in rows])
        ax.tick_params(axis="y", length=0, labelcolor=INK)
        ax.spines["left"].set_visible(False)
        ax.set(xlim=(0, 1.22 * longest * scale), ylim=(len(rows) - 0.45, -0.55))
        ax.set_title(_text(f"{title}: {span(phase.step_seconds)} per step"))
        ax.set_xlabel(f"{unit} per step")
    _legend(axes[-1], loc="lower right")


def _rows(phases: Mapping[str, Phase], num_devices: int) -> list[int]:
    """The devices to draw: all, or of very many those that waited longest in any phase."""
    if num_devices <= _MAX_ROWS:
        return list(range(num_devices))
    idle = [0.0] * num_devices
    for phase in phases.values():
        for d, fraction in enumerate(phase.idle_fractions):
            idle[d] = max(idle[d], fraction)
    return sorted(sorted(range(num_devices), key=lambda d: -idle[d])[:_MAX_ROWS])


def _speed_curve(ax: Any, history: History) -> str:
    unit = "tokens" if any(r.num_tokens for r in history.steps) else "examples"
    x, y = _xy([(r.step, num_units(r) / r.seconds if r.seconds else 0) for r in history.steps])
    _curve(ax, x, y, _SERIES[1], smooth=True)
    ax.set(ylabel=f"{unit} per second")
    ax.set_ylim(0, None)
    ax.yaxis.set_major_formatter(lambda value, _: si(value))
    return unit


def _curve(
    ax: Any, x: np.ndarray, y: np.ndarray, color: str, label: str = "", smooth: bool = False
) -> None:
    """A curve of any number of points; smooth: faint, with its running median on top."""
    line = {"color": color, "label": _text(label) or None}
    if smooth:
        thick = _running_median(y, _smooth_steps(len(y)))
    size = math.ceil(len(y) / _MAX_POINTS)
    if size > 1:
        groups = [y[i : i + size] for i in range(0, len(y), size)]
        finite = [g[np.isfinite(g)] for g in groups]
        low = [g.min() if g.size else np.nan for g in finite]
        high = [g.max() if g.size else np.nan for g in finite]
        mean = np.array([g.mean() if g.size else np.nan for g in finite])
        x = x[::size]
        ax.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
        ax.plot(x, thick[::size] if smooth else mean, linewidth=1.6, **line)
    elif smooth and len(y) > 2:
        ax.plot(x, y, color=color, linewidth=0.8, alpha=0.45)
        ax.plot(x, thick, linewidth=2.0, **line)
    else:
        marker = "o" if len(y) == 1 else None
        ax.plot(x, y, linewidth=1.6, marker=marker, markersize=4, **line)


def _smooth_steps(num_steps: int) -> int:
    """An odd number of steps, about a fortieth of all."""
    return max(3, num_steps // 40) | 1


def _running_median(y: np.ndarray, window: int) -> np.ndarray:
    half = window // 2
    return np.array([np.median(y[max(0, i - half) : i + half + 1]) for i in range(len(y))])


def _marks(ax: Any, history: History, labels: bool = True) -> None:
    """A line where counts changed, numbered as in the report's table."""
    for i, change in enumerate(history.rebalances, start=1):
        ax.axvline(change.step, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        if labels and len(history.rebalances) <= _MAX_LABELLED_MARKS:
            ax.annotate(
                str(i),
                (change.step, 1.0),
                xycoords=ax.get_xaxis_transform(),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=INK,
            )


def _changes(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Only the steps at which a row differs from the one before, and an end after the last."""
    new = np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])
    return np.append(x[new], x[-1] + 1), np.concatenate([rows[new], rows[-1:]])


def _legend(ax: Any, *, outside: bool = False, reverse: bool = False, loc: str = "best") -> None:
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if outside else {"loc": loc}
    legend = ax.legend(frameon=not outside, reverse=reverse, fontsize=8.5, **place)
    if not outside:
        legend.get_frame().set(facecolor=PAPER, edgecolor="none", alpha=0.85)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(points, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1e3, "ms") if seconds < 1 else (1.0, "seconds")


def _text(text: str) -> str:
    """Matplotlib reads what stands between two dollars as mathematics."""
    return text.replace("$", r"\$")
