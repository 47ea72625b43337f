"""The report as one HTML page that needs nothing from outside: no script, no network."""

import html
import pathlib
from collections.abc import Mapping, Sequence

from .._core._format import clock, gain, number, percent, plural, shares, si, span
from ._history import History, scalars
from ._page import figure, page, section, table, tiles
from ._run_pictures import (
    before_and_after,
    busy_picture,
    counts_picture,
    loss_picture,
    speed_picture,
)
from ._run_summary import Phase, Summary, names_of, summarise

_MAX_EVALUATIONS = 20  # rows of the table; the picture shows all


def html_report(
    history: History,
    *,
    title: str,
    notes: Mapping[str, str] | None = None,
    pictures: Mapping[str, pathlib.Path] | None = None,
) -> str:
    """The report as one self-contained HTML page.

    Args:
        history: The run.
        title: Heading of the page.
        notes: Further sections of plain text, by heading; line breaks and spaces are kept.
        pictures: Further sections with an SVG file each, by heading.

    Returns:
        The page. Its pictures are inline SVG whose colours follow the reader's light or dark mode.
    """
    summary = summarise(history)
    if summary is None:
        parts = ["<section><p>This run did no step, so there is nothing to show.</p></section>"]
    else:
        parts = [_tiles(history, summary)]
        parts += [
            section("Loss", figure(loss_picture(history)), _evaluations(history)),
            _devices(history, summary),
            section(
                "Microbatches over time", figure(counts_picture(history)), _rebalances(history)
            ),
            section("Speed over time", figure(speed_picture(history))),
            section("What went differently", *_events(history, summary)),
        ]
    for heading, path in (pictures or {}).items():
        drawn = path.read_text()
        parts.append(
            section(heading, f'<figure class="drawn">{drawn[drawn.index("<svg") :]}</figure>')
        )
    for heading, text in (notes or {}).items():
        parts.append(section(heading, f"<pre>{html.escape(text.strip(chr(10)))}</pre>"))
    lead = (
        ""
        if summary is None
        else f"{plural(len(history.steps), 'step')} on "
        f"{plural(len(summary.after.counts), 'device')}, {si(summary.num_units)} {summary.unit} "
        f"in {clock(summary.seconds)}."
    )
    return page(title, lead, parts)


def _tiles(history: History, summary: Summary) -> str:
    idle = summary.after.idle_fractions
    worst = max(range(len(idle)), key=idle.__getitem__)
    found = [
        (
            f"{summary.unit} per second",
            si(summary.after.rate),
            f"{span(summary.after.step_seconds)} per step, last {summary.after.num_steps}",
        ),
        ("Final loss", number(summary.final_loss), f"was {number(history.steps[0].loss)}"),
        (
            "Idle at most",
            percent(idle[worst]),
            names_of(history, summary.after.counts)[worst],
        ),
    ]
    if summary.moved:
        found.insert(
            1,
            (
                "Gain by balancing",
                gain(summary.balancing_gain),
                f"{shares(summary.before.counts)} to {shares(summary.after.counts)}",
            ),
        )
    if history.evaluations:
        last = history.evaluations[-1]
        found.append(("Evaluation loss", number(last.loss), f"after {plural(last.step, 'update')}"))
    return tiles(found)


def _evaluations(history: History) -> str:
    if not history.evaluations:
        return ""
    shown = history.evaluations[-_MAX_EVALUATIONS:]
    keys = sorted({key for e in shown for key in scalars(e.metrics)})
    rows = [
        [
            str(e.step),
            number(e.loss),
            *(number(scalars(e.metrics)[key]) if key in e.metrics else "" for key in keys),
            f"{e.num_examples}",
            span(e.seconds),
        ]
        for e in shown
    ]
    note = ""
    if len(shown) < len(history.evaluations):
        note = f"<p>The last {len(shown)} of {len(history.evaluations)} evaluations.</p>"
    heads = ["evaluated after step", "loss", *keys, "examples", "took"]
    return note + table(heads, rows)


def _devices(history: History, summary: Summary) -> str:
    names = names_of(history, summary.after.counts)
    phases = before_and_after(summary.before, summary.after)
    picture = figure(busy_picture(phases, names))
    heading = "Busy and idle time" + (" before and after balancing" if summary.moved else "")
    tables = [
        _device_table(names, phase, f"{title}, steps {phase.steps[0]} to {phase.steps[1]}")
        for title, phase in phases.items()
    ]
    whole = "; ".join(
        f"{name} {percent(idle)}"
        for name, idle in zip(names, summary.whole.idle_fractions, strict=True)
    )
    note = f"<p>Idle over the whole run (without its first step): {html.escape(whole)}.</p>"
    return section(heading, picture, *tables, note)


def _device_table(names: Sequence[str], phase: Phase, title: str) -> str:
    rows = [
        [
            name,
            f"{count}/{sum(phase.counts)}",
            span(busy),
            span(idle),
            percent(fraction),
            span(busy / count) if count else "",
        ]
        for name, count, busy, idle, fraction in zip(
            names,
            phase.counts,
            phase.busy_seconds,
            phase.idle_seconds,
            phase.idle_fractions,
            strict=True,
        )
    ]
    return table([title, "microbatches", "busy", "idle", "idle", "busy per microbatch"], rows)


def _rebalances(history: History) -> str:
    if not history.rebalances:
        return "<p>The counts never moved.</p>"
    rows = [
        [
            str(i),
            str(change.step),
            shares(change.before),
            shares(change.after),
            gain(change.expected_gain),
            gain(change.achieved_gain),
            change.reason,
        ]
        for i, change in enumerate(history.rebalances, start=1)
    ]
    heads = ["mark", "from step", "before", "after", "expected", "achieved", "reason"]
    return table(heads, rows, left=(0, 6))


def _events(history: History, summary: Summary) -> list[str]:
    def steps(which: tuple[int, ...]) -> str:
        if not which:
            return ""
        more = f" and {len(which) - 20} more" if len(which) > 20 else ""
        return f" (steps {', '.join(map(str, which[:20]))}{more})"

    lines = [
        ("Steps redone after an overflow of the fixed-point range", summary.redone_steps, ""),
        ("Updates skipped because a gradient was not finite", summary.skipped_steps, " warn"),
    ]
    rows = [[text, f"{len(which)}{steps(which)}"] for text, which, _ in lines]
    rows.append(["Compilations after the first completed step", str(history.num_compilations)])
    return [table(["event", "how often"], rows, left=(0, 1))]
