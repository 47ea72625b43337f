"""What a run tells at its end: a few lines for the terminal, a page and a picture for later."""

import os
import pathlib
import textwrap
from collections.abc import Mapping

from .._core._errors import ConfigError
from .._core._format import clock, gain, number, percent, plural, shares, si, span
from ._history import History
from ._page import write
from ._run_page import html_report
from ._run_summary import Summary, names_of, summarise

_MAX_DEVICES = 8
_MAX_REBALANCES = 5


def terminal_report(history: History, *, title: str) -> str:
    """The report as a few lines of plain text.

    Args:
        history: The run.
        title: What the first line begins with.

    Returns:
        Lines without a newline at the end, in ASCII but for the caller's own words.
    """
    summary = summarise(history)
    if summary is None:
        return f"{title}: no step was done"
    lines = [
        f"{title}: {plural(len(history.steps), 'step')}, {si(summary.num_units)} {summary.unit} "
        f"in {clock(summary.seconds)}"
    ]
    rows = [("loss", _loss(history, summary)), ("speed", _speed(summary))]
    if summary.moved:
        rows.append(("balancing", _balancing(summary)))
    rows += [("idle", text) for text in _idle(history, summary)]
    rows += [("rebalance", text) for text in _rebalances(history)]
    rows.append(("events", _events(history, summary)))
    previous = ""
    for label, text in rows:
        # A label stands before the first of its lines only.
        indent = f"  {label if label != previous else '':<11}"
        lines += textwrap.wrap(
            text, width=100, initial_indent=indent, subsequent_indent=" " * len(indent)
        )
        previous = label
    return "\n".join(lines)


def write_report(
    path: str | os.PathLike[str],
    history: History,
    *,
    title: str,
    notes: Mapping[str, str] | None = None,
    pictures: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Write the HTML report to a file; a reader never sees half of it.

    Args:
        path: The file; its folder is made if it is not there.
        history: The run.
        title: Heading of the page.
        notes: Further sections of plain text, by heading.
        pictures: Further sections with an SVG file each, by heading.

    Raises:
        ConfigError: The path cannot be written.
    """
    write(path, html_report(history, title=title, notes=notes, pictures=pictures), ConfigError)


def _loss(history: History, summary: Summary) -> str:
    text = f"{number(history.steps[0].loss)} -> {number(summary.final_loss)}"
    if history.evaluations:
        last = history.evaluations[-1]
        text += f", evaluation {number(last.loss)} after {plural(last.step, 'update')}"
    return text


def _speed(summary: Summary) -> str:
    phase = summary.whole
    return (
        f"{si(phase.rate)} {summary.unit}/s, {span(phase.step_seconds)} per step "
        f"(mean of {plural(phase.num_steps, 'step')})"
    )


def _balancing(summary: Summary) -> str:
    before, after = summary.before, summary.after
    return (
        f"{shares(before.counts)}: {si(before.rate)} {summary.unit}/s, "
        f"{span(before.step_seconds)} per step -> {shares(after.counts)}: {si(after.rate)} "
        f"{summary.unit}/s, {span(after.step_seconds)} per step ({gain(summary.balancing_gain)})"
    )


def _idle(history: History, summary: Summary) -> list[str]:
    after = summary.after
    names = names_of(history, after.counts)
    idle = after.idle_fractions
    order = list(range(len(names)))
    rest = ""
    if len(names) > _MAX_DEVICES:
        order = sorted(order, key=lambda d: -idle[d])[:_MAX_DEVICES]
        rest = f"none of the other {len(names) - _MAX_DEVICES} devices idles more"
    width = max(len(names[d]) for d in order)
    lines = []
    for d in order:
        was = f" (was {percent(summary.before.idle_fractions[d])})" if summary.moved else ""
        lines.append(
            f"{names[d]:<{width}} {after.counts[d]}/{sum(after.counts)} microbatches, "
            f"busy {span(after.busy_seconds[d])}, idle {percent(idle[d])}{was}"
        )
    return [*lines, rest] if rest else lines


def _rebalances(history: History) -> list[str]:
    changes = history.rebalances
    lines = [
        f"step {change.step}: {shares(change.before)} -> {shares(change.after)}, expected "
        f"{gain(change.expected_gain)}, achieved {gain(change.achieved_gain)}: {change.reason}"
        for change in changes[:_MAX_REBALANCES]
    ]
    if len(changes) > _MAX_REBALANCES:
        lines.append(f"and {len(changes) - _MAX_REBALANCES} more")
    return lines or ["none: the counts never moved"]


def _events(history: History, summary: Summary) -> str:
    return (
        f"{plural(len(summary.redone_steps), 'step')} redone, "
        f"{plural(len(summary.skipped_steps), 'update')} skipped, "
        f"{plural(history.num_compilations, 'compilation')} after the first step"
    )
