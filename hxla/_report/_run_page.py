"""The report as one HTML page that needs nothing from outside: no script, no network."""

import html
import pathlib
from collections.abc import Mapping

from .._core._format import clock, gain, number, percent, plural, shares, si, span
from ._history import History, scalars
from ._page import figure, markup, page, section, stack, table, tiles
from ._run_pictures import counts_picture, loss_picture, speed_picture
from ._run_summary import Phase, Summary, names_of, summarise


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
            section("Microbatches over time", figure(counts_picture(history)), _changes(history)),
            section("Speed over time", figure(speed_picture(history))),
            section("What went differently", _events(history, summary)),
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
    keys = sorted({key for e in history.evaluations for key in scalars(e.metrics)})
    rows = [
        [
            str(e.step),
            number(e.loss),
            *(number(scalars(e.metrics)[key]) if key in e.metrics else "" for key in keys),
            f"{e.num_examples}",
            span(e.seconds),
        ]
        for e in reversed(history.evaluations)
    ]
    return table(["evaluated after step", "loss", *keys, "examples", "took"], rows)


def _devices(history: History, summary: Summary) -> str:
    first, last = summary.before, summary.after
    if not summary.moved:
        return section("Busy and idle time", _device_table(history, summary, last, "Counts"))
    return section(
        "Busy and idle time before and after balancing",
        _device_table(history, summary, first, "First counts"),
        _device_table(history, summary, last, "Last counts"),
    )


def _device_table(history: History, summary: Summary, phase: Phase, title: str) -> str:
    longest = max(summary.before.step_seconds, summary.after.step_seconds)
    rows = [
        (
            name,
            markup(stack([("k0", busy, f"busy {span(busy)}"), ("idle", idle, "idle")], longest)),
            f"{count}/{sum(phase.counts)}",
            span(busy),
            span(idle),
            percent(fraction),
            span(busy / count) if count else "",
            percent(whole),
        )
        for name, count, busy, idle, fraction, whole in zip(
            names_of(history, phase.counts),
            phase.counts,
            phase.busy_seconds,
            phase.idle_seconds,
            phase.idle_fractions,
            summary.whole.idle_fractions,
            strict=True,
        )
    ]
    heads = (
        *("device", "busy and idle", "microbatches", "busy", "idle", "idle"),
        *("busy per microbatch", "idle, whole run"),
    )
    steps = f"steps {phase.steps[0]} to {phase.steps[1]}, {span(phase.step_seconds)} each"
    return f"<h3>{title} ({shares(phase.counts)}), {steps}</h3>{table(heads, rows, left=(0, 1))}"


def _changes(history: History) -> str:
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


def _events(history: History, summary: Summary) -> str:
    def steps(which: tuple[int, ...]) -> str:
        if not which:
            return ""
        more = f" and {len(which) - 20} more" if len(which) > 20 else ""
        return f" (steps {', '.join(map(str, which[:20]))}{more})"

    rows = [
        (what, f"{len(which)}{steps(which)}")
        for what, which in (
            ("Steps redone after an overflow of the fixed-point range", summary.redone_steps),
            ("Updates skipped because a gradient was not finite", summary.skipped_steps),
        )
    ]
    rows.append(("Compilations after the first completed step", str(history.num_compilations)))
    return table(("event", "how often"), rows, left=(0, 1))
