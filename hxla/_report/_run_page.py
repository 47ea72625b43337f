"""The report as one HTML page that needs nothing from outside: no script, no network."""

import html
import pathlib
from collections.abc import Iterator, Mapping

from .._core._format import plural, span
from ._history import History
from ._page import Markup, page, section, stack, table, tiles
from ._run_pictures import counts_picture, loss_picture, speed_picture
from ._run_summary import Summary, summarise
from ._run_tables import (
    change_table,
    device_tables,
    evaluation_table,
    event_table,
    figures,
    lead,
    split_table,
)


def html_report(
    history: History, *, title: str, notes: Mapping[str, str], pictures: Mapping[str, pathlib.Path]
) -> str:
    """The report as one self-contained HTML page.

    Args:
        history: The run, of at least one step.
        title: Heading of the page.
        notes: Further sections of plain text, by heading; line breaks and spaces are kept.
        pictures: Further sections with an SVG file each, by heading.

    Returns:
        The page. Its pictures are inline SVG whose colours follow the reader's light or dark mode.
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
    """Tables of the devices, with bars of their time on one scale."""
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
