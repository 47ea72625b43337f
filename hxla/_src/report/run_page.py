"""The report as one self-contained HTML page, with pictures by matplotlib.

Pictures are SVG, with CSS variables as colours, so that they follow the page's light or dark mode.

Matplotlib takes a third of a second to import, so only the functions that draw import it.
"""

import contextlib
import html
import io
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.format import plural, si, span
from .history import History
from .page import Markup, page, section, stack, table, tiles
from .page import figure as page_figure
from .run_tables import (
    Summary,
    change_table,
    device_tables,
    evaluation_table,
    event_table,
    figures,
    lead,
    names_of,
    num_units,
    split_table,
    summarise,
)

#: Colours on white; in a page each is the CSS variable of that name.
INK, MUTED, GRID, PAPER = "#1f2430", "#626b7a", "#e2e5ea", "#fffffe"
BUSY, MARK = "#2f6fdb", "#b4552d"
CSS_COLORS = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper", BUSY: "busy", MARK: "mark"}
_SERIES = ("#2f6fdb", "#e39a1d", "#2a9d78", "#c8508f", "#7a5bd0", "#4fa8d8", "#9a6a45", "#7f8794")
_MAX_POINTS = 600  # of a median, and of a curve without one
_MAX_BANDS = 12  # devices with a separate band
_MAX_LABELLED_MARKS = 15


def loss_picture(history: History) -> str:
    """Draw training and evaluation loss over steps."""
    with _figure() as (figure, ax):
        x, y = _xy([(r.step, r.loss) for r in history.steps])
        curves = [y[np.isfinite(y)]]
        _curve(ax, x, y, BUSY, label="training", with_median=len(y) > _MAX_POINTS)
        if history.evaluations:
            ex, ey = _xy([(e.step, e.loss) for e in history.evaluations])
            ax.plot(ex, ey, "o-", color=MARK, markersize=4, linewidth=1.2, label="evaluation")
            curves.append(ey[np.isfinite(ey)])
            ax.legend(frameon=False)
        odd = [r.step for r in history.steps if r.skipped or not math.isfinite(r.loss)]
        ax.plot(odd, [0.02] * len(odd), "x", color=MARK, transform=ax.get_xaxis_transform())
        values = np.concatenate(curves)
        log = values.size > 1 and values.min() > 0 and values.max() > 30 * values.min()
        if log:
            ax.set_yscale("log")
        ax.set(xlabel="step", ylabel="loss (log scale)" if log else "loss")
        caption = "Mean loss of the global batch before each update"
        caption += ", and of the evaluation data." if history.evaluations else "."
        if odd:
            caption += " Crosses at the bottom: steps whose update was skipped or loss not finite."
        return _picture(figure, "loss", caption)


def counts_picture(history: History) -> str:
    """Draw the microbatches of each device over steps, stacked, with the changes marked."""
    with _figure() as (figure, ax):
        num_devices = max(len(r.counts) for r in history.steps)
        counts = np.array([r.counts + (0,) * (num_devices - len(r.counts)) for r in history.steps])
        names = names_of(history, range(num_devices))
        # The eye distinguishes so many bands; further devices share the last one.
        if num_devices > _MAX_BANDS:
            rest = counts[:, _MAX_BANDS - 1 :].sum(axis=1, keepdims=True)
            counts = np.concatenate([counts[:, : _MAX_BANDS - 1], rest], axis=1)
            names = (*names[: _MAX_BANDS - 1], f"{num_devices - _MAX_BANDS + 1} others")
        x, rows = _changes(np.array([r.step for r in history.steps]), counts)
        labels = [_text(name) for name in names]
        style = {"edgecolor": PAPER, "linewidth": 0.8}
        ax.stackplot(x, rows.T, step="post", labels=labels, colors=_SERIES, **style)
        ax.set(xlabel="step", ylabel="microbatches", xlim=(x[0], x[-1]), ylim=(0, None))
        ax.grid(visible=False)
        ax.yaxis.get_major_locator().set_params(integer=True)
        _marks(ax, history)
        ax.legend(frameon=False, reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5))
    num = len(history.rebalances)
    caption = f"Microbatches per step on each device; {plural(num, 'change')}, marked."
    return _picture(figure, "counts", caption)


def speed_picture(history: History) -> str:
    """Draw tokens or examples per second over steps."""
    with _figure() as (figure, ax):
        unit = "tokens" if any(r.num_tokens for r in history.steps) else "examples"
        x, y = _xy([(r.step, num_units(r) / r.seconds if r.seconds else 0) for r in history.steps])
        _curve(ax, x, y, _SERIES[1], with_median=len(y) > 2)
        ax.set(xlabel="step", ylabel=f"{unit} per second", ylim=(0, None))
        ax.yaxis.set_major_formatter(lambda value, _: si(value))
        _marks(ax, history)
    slowest = max(history.steps, key=lambda record: record.seconds)
    caption = f"{unit.capitalize()} per second. Thin: each step; thick: median of "
    caption += f"{2 * _half_window(y) + 1} steps. Step {slowest.step} took longest, "
    return _picture(figure, "speed", f"{caption}{span(slowest.seconds)}.")


@contextlib.contextmanager
def _figure() -> Iterator[tuple[Any, Any]]:
    """A figure in our style and its axes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {
        "font.size": 9.5,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "legend.fontsize": 8.5,
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "grid.color": GRID,
        "lines.solid_capstyle": "round",
        "path.simplify_threshold": 1.0,
        "svg.fonttype": "none",
        "svg.hashsalt": "hxla",
    }
    # A user's matplotlibrc does not apply here. The backend is left out: it is not restored.
    plain = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    with mpl.rc_context({**plain, **style}):
        figure = Figure(figsize=(8.6, 3.1), layout="constrained", facecolor="none")
        yield figure, figure.subplots()


def _picture(figure: Any, prefix: str, caption: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # All pictures of a page share its ids.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1">', svg, count=1)
    svg = re.sub(r"font(-family)?: ?(?P<size>[\d.]+px )?[^;\"]*'[^;\"]*", _page_font, svg)
    for color, name in CSS_COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return page_figure(svg, caption)


def _page_font(match: re.Match[str]) -> str:
    size = match["size"]
    return f"font-size: {size.strip()}" if size else "font-family: inherit"


def _curve(
    ax: Any, x: np.ndarray, y: np.ndarray, color: str, *, label: str = "", with_median: bool
) -> None:
    """Draw a curve; with its running median the curve itself is faint."""
    if not with_median:
        marker = "o" if len(y) == 1 else None
        ax.plot(x, y, color=color, linewidth=1.6, marker=marker, markersize=4, label=label)
        return
    ax.plot(x, y, color=color, linewidth=0.8, alpha=0.45)
    places = np.linspace(0, len(y) - 1, min(len(y), _MAX_POINTS)).astype(int)
    half = _half_window(y)
    windows = [y[max(0, i - half) : i + half + 1] for i in places]
    finite = [window[np.isfinite(window)] for window in windows]
    medians = [np.median(window) if window.size else math.nan for window in finite]
    ax.plot(x[places], medians, color=color, linewidth=2.0, label=label)


def _half_window(y: np.ndarray) -> int:
    """Half the window of a running median over about a fortieth of all steps."""
    return max(1, len(y) // 80)


def _marks(ax: Any, history: History) -> None:
    """Draw a line where counts changed, numbered as in the report's table."""
    for i, change in enumerate(history.rebalances, start=1):
        ax.axvline(change.step, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
        if len(history.rebalances) <= _MAX_LABELLED_MARKS:
            place, above = (change.step, 1.0), ax.get_xaxis_transform()
            ax.text(*place, str(i), transform=above, ha="center", va="bottom", fontsize=8.5)


def _changes(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which a row differs from the previous one, and an end after the last."""
    new = np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])
    return np.append(x[new], x[-1] + 1), np.concatenate([rows[new], rows[-1:]])


def _xy(points: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return x, y


def _text(text: str) -> str:
    """Escape dollars, which matplotlib reads as mathematics."""
    return text.replace("$", r"\$")


def html_report(
    history: History, *, title: str, notes: Mapping[str, str], pictures: Mapping[str, pathlib.Path]
) -> str:
    """The report as one self-contained HTML page.

    Args:
        history: Of at least one step.
        notes: Further sections of plain text, by heading; line breaks and spaces are kept.
        pictures: Further sections with an SVG file each, by heading.
    """
    summary = summarise(history)
    changes = "<p>The counts never moved.</p>"
    if history.rebalances:
        changes = table(*change_table(history))
    evaluations = table(*evaluation_table(history)) if history.evaluations else ""
    parts = [
        tiles(list(figures(history, summary))),
        section("Loss", loss_picture(history), evaluations),
        section("Busy and idle time", *_devices(history, summary)),
        section("Microbatches over time", counts_picture(history), changes),
        section("Speed over time", speed_picture(history)),
        section("What went differently", table(*event_table(history))),
    ]
    for heading, path in pictures.items():
        parts.append(section(heading, f"<figure>{path.read_text()}</figure>"))
    for heading, text in notes.items():
        parts.append(section(heading, f"<pre>{html.escape(text.strip(chr(10)))}</pre>"))
    return page(title, lead(history, summary), parts)


def _devices(history: History, summary: Summary) -> Iterator[str]:
    """Tables of the devices, with bars of busy and idle time on one scale."""
    longest = max(summary.before.step_seconds, summary.after.step_seconds)
    for title, phase, (heads, rows, _) in device_tables(history, summary):
        bars = [
            Markup(stack([("k0", busy, f"busy {span(busy)}"), ("idle", idle, "idle")], longest))
            for busy, idle in zip(phase.busy_seconds, phase.idle_seconds, strict=True)
        ]
        drawn = [(row[0], bar, *row[1:]) for row, bar in zip(rows, bars, strict=True)]
        yield f"<h3>{title}</h3>"
        yield table((heads[0], "busy and idle", *heads[1:]), drawn, left=(0, 1))
    if history.split is not None:
        yield f"<h3>Devices of a split, {plural(history.split.num_steps, 'step')}</h3>"
        yield table(*split_table(history.split))
        if history.split.advice:
            yield f"<p>{html.escape(history.split.advice)}</p>"
