"""The report of a run: terminal text, and one self-contained HTML page."""

import base64
import html
import io
import os
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from .._errors import ConfigError
from .._history import History, StepRecord

_BUSY, _IDLE, _LINE = "#2f6f9f", "#d9a441", "#7a4f9c"
_END_STEPS = 10  # steps at either end that stand for "before" and "after"


def rate(steps: tuple[StepRecord, ...]) -> tuple[float, str]:
    """Median amount per second of some steps, and its unit."""
    seconds = statistics.median(s.seconds for s in steps)
    amount, unit = steps[-1].num_examples, "examples/s"
    if steps[-1].num_tokens:
        amount, unit = steps[-1].num_tokens, "tokens/s"
    return (amount / seconds if seconds else 0.0), unit


def _settled(history: History) -> tuple[StepRecord, ...]:
    """Steps without the first, which waits for compilation of the update."""
    return history.steps[1:] or history.steps


def _ends(history: History) -> tuple[tuple[StepRecord, ...], tuple[StepRecord, ...]]:
    steps = _settled(history)
    first = tuple(s for s in steps if s.counts == steps[0].counts)[:_END_STEPS]
    last = tuple(s for s in steps if s.counts == steps[-1].counts)[-_END_STEPS:]
    return first, last


def _shares(steps: tuple[StepRecord, ...]) -> tuple[list[float], list[float]]:
    devices = range(len(steps[0].counts))
    busy = [statistics.median(s.busy_seconds[d] for s in steps) for d in devices]
    idle = [statistics.median(s.idle_seconds[d] for s in steps) for d in devices]
    return busy, idle


def _rows(history: History) -> list[tuple[str, str]]:
    first, last = _ends(history)
    speed, unit = rate(last)
    rows = [
        ("steps", f"{len(history.steps)}"),
        ("final loss", f"{history.steps[-1].loss:.4f}"),
        ("speed", f"{speed:,.0f} {unit}"),
        ("counts", "/".join(map(str, last[-1].counts))),
    ]
    if first[0].counts != last[-1].counts:
        before, _ = rate(first)
        counts = "/".join(map(str, first[0].counts))
        rows.append(("before balancing", f"{before:,.0f} {unit} with {counts}"))
    _, idle = _shares(last)
    seconds = statistics.median(s.seconds for s in last)
    shares = (f"{n} {i / seconds:.0%}" for n, i in zip(history.device_names, idle, strict=True))
    rows.append(("idle", ", ".join(shares)))
    for change in history.rebalances:
        gain = "" if change.achieved_gain is None else f", achieved {change.achieved_gain:.0%}"
        rows.append(
            (
                f"re-balance at step {change.step}",
                f"{'/'.join(map(str, change.before))} to {'/'.join(map(str, change.after))}: "
                f"{change.reason}; expected gain {change.expected_gain:.0%}{gain}",
            )
        )
    for record in history.evaluations[-1:]:
        rows.append((f"evaluation at step {record.step}", f"loss {record.loss:.4f}"))
    if any(s.redone for s in history.steps):
        rows.append(("steps redone", f"{sum(s.redone for s in history.steps)}"))
    if any(s.skipped for s in history.steps):
        rows.append(("steps skipped", f"{sum(s.skipped for s in history.steps)}"))
    rows.append(("recompilations", f"{history.num_compilations}"))
    return rows


def terminal_report(history: History, *, title: str) -> str:
    """A short report as plain text."""
    rows = _rows(history)
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _data_uri(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def draw_busy(axes: Any, groups: Mapping[str, tuple[StepRecord, ...]], names: Any) -> None:
    """Bars of busy and idle seconds per step, a group of devices for each entry of `groups`."""
    labels, position = [], 0.0
    ticks = []
    for group, steps in groups.items():
        busy, idle = _shares(steps)
        for d, (b, i) in enumerate(zip(busy, idle, strict=True)):
            first = not ticks
            axes.barh(position, b, color=_BUSY, label="busy" if first else None)
            axes.barh(position, i, left=b, color=_IDLE, label="idle" if first else None)
            ticks.append(position)
            labels.append(f"{group}\n{names[d]}  {steps[-1].counts[d]} microbatches")
            position += 1
        position += 0.6
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step (median)")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2)


def _pictures(history: History) -> dict[str, str]:
    steps = history.steps
    numbers = [s.step for s in steps]
    pictures = {}
    figure, axes = _figure(7, 3)
    axes.plot(numbers, [s.loss for s in steps], color=_LINE, label="training")
    if history.evaluations:
        points = [(e.step, e.loss) for e in history.evaluations]
        axes.plot(*zip(*points, strict=True), "o", color=_IDLE, label="evaluation")
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    pictures["Loss"] = _data_uri(figure)

    first, last = _ends(history)
    groups = {"first steps": first, "last steps": last}
    if first[0].counts == last[-1].counts:
        groups = {"all steps": _settled(history)}
    bars = sum(len(s[0].counts) for s in groups.values())
    figure, axes = _figure(7, 1.4 + 0.45 * bars)
    draw_busy(axes, groups, history.device_names)
    pictures["Busy and idle time of each device"] = _data_uri(figure)

    figure, axes = _figure(7, 3)
    series = list(zip(*(s.counts for s in steps), strict=True))
    axes.stackplot(numbers, *series, labels=history.device_names, step="post", alpha=0.85)
    for change in history.rebalances:
        axes.axvline(change.step, color="black", linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("microbatches")
    if len(series) <= 8:
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=4)
    pictures["Counts over time"] = _data_uri(figure)

    figure, axes = _figure(7, 3)
    axes.plot(numbers[1:], [s.seconds for s in steps[1:]], color=_BUSY)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    pictures["Step time"] = _data_uri(figure)
    return pictures


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left;
vertical-align: top; } img { max-width: 100%; border-radius: 6px; } pre { overflow-x: auto; }
"""


def html_report(history: History, *, title: str, notes: Mapping[str, str] | None = None) -> str:
    """One HTML page with everything in it: no network, no script.

    Args:
        history: Of the run, with at least one step.
        title: Heading.
        notes: Further sections of plain text.
    """
    rows = "".join(
        f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in _rows(history)
    )
    body = [f"<h1>{html.escape(title)}</h1><table>{rows}</table>"]
    for name, uri in _pictures(history).items():
        body.append(f'<h2>{name}</h2><img alt="{name}" src="{uri}">')
    for name, text in (notes or {}).items():
        body.append(f"<h2>{html.escape(name)}</h2><pre>{html.escape(text)}</pre>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>"
    )


def write_report(
    path: str | os.PathLike[str],
    history: History,
    *,
    title: str,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write the HTML page.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        pathlib.Path(path).write_text(html_report(history, title=title, notes=notes))
    except OSError as error:
        raise ConfigError(f"report {path} cannot be written: {error.strerror}") from None
