"""The report as one HTML page that needs nothing from outside: no script, no network."""

import html
import math
import pathlib
from collections.abc import Mapping, Sequence

from .._format import clock, gain, number, percent, plural, shares, si, span
from .._history import History, scalars
from ._pictures import (
    Picture,
    before_and_after,
    busy_picture,
    comparison_picture,
    counts_picture,
    loss_picture,
    speed_picture,
)
from ._summary import Phase, Summary, loss_difference, names_of, summarise

_MAX_EVALUATIONS = 20  # rows of the table; the picture shows all

_CSS = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #626b7a; --grid: #e2e5ea;
  --paper: #ffffff; --page: #f6f7f9; --busy: #2f6fdb; --idle: #d3d9e2; --mark: #b4552d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --muted: #9aa4b5; --grid: #2f3642;
  --paper: #1a1e26; --page: #12151b; --busy: #5b93f5; --idle: #414a59; --mark: #e58a5e; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 3rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 58rem; margin: 0 auto; }
h1 { font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 0 0 .9rem; }
p { margin: 0 0 1rem; max-width: 44rem; }
.lead { color: var(--muted); margin-bottom: 1.8rem; }
section { background: var(--paper); border: 1px solid var(--grid); border-radius: 10px;
  padding: 1.4rem 1.5rem 1.2rem; margin: 0 0 1.25rem; break-inside: avoid; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1.25rem;
  margin: 0; }
.tiles div { min-width: 0; display: flex; flex-direction: column; }
.tiles dt { color: var(--muted); font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.55rem; line-height: 1.3; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.tiles dd + dd { color: var(--muted); font-size: .85rem; letter-spacing: 0; }
figure { margin: 0 0 1.1rem; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 34rem; height: auto; font-family: inherit; }
figcaption { color: var(--muted); font-size: .88rem; margin-top: .5rem; max-width: 48rem; }
.table { overflow-x: auto; margin-bottom: .9rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .38rem .9rem .38rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
tbody th { color: var(--ink); font-weight: 400; }
.n { text-align: right; white-space: nowrap; }
pre { margin: 0 0 .6rem; overflow-x: auto; font: .85rem/1.5 ui-monospace, "SF Mono", Menlo,
  Consolas, "Liberation Mono", monospace; }
.warn { color: var(--mark); }
.drawn { background: #ffffff; border-radius: 6px; }
@media print { body { padding: 0; background: none; } section { border: 0; padding: 0; } }
"""


def html_report(
    history: History,
    *,
    title: str,
    notes: Mapping[str, str] | None = None,
    pictures: Mapping[str, pathlib.Path] | None = None,
    comparison: Mapping[str, History] | None = None,
) -> str:
    """The report as one self-contained HTML page.

    Args:
        history: The run.
        title: Heading of the page.
        notes: Further sections of plain text, by heading; line breaks and spaces are kept.
        pictures: Further sections with an SVG file each, by heading.
        comparison: Runs to lay side by side, by name. The first is what the others are compared
            with; the run of `history` is among them only if it is given here too.

    Returns:
        The page. Its pictures are inline SVG whose colours follow the reader's light or dark mode.
    """
    summary = summarise(history)
    if summary is None:
        parts = ["<section><p>This run did no step, so there is nothing to show.</p></section>"]
    else:
        parts = [_tiles(history, summary)]
        if comparison:
            parts.append(_comparison(comparison))
        parts += [
            _section("Loss", _figure(loss_picture(history)), _evaluations(history)),
            _devices(history, summary),
            _section(
                "Microbatches over time", _figure(counts_picture(history)), _rebalances(history)
            ),
            _section("Speed over time", _figure(speed_picture(history))),
            _section("What went differently", *_events(history, summary)),
        ]
    for heading, path in (pictures or {}).items():
        drawn = path.read_text()
        parts.append(
            _section(heading, f'<figure class="drawn">{drawn[drawn.index("<svg") :]}</figure>')
        )
    for heading, text in (notes or {}).items():
        parts.append(_section(heading, f"<pre>{html.escape(text.strip(chr(10)))}</pre>"))
    lead = (
        ""
        if summary is None
        else f"{plural(len(history.steps), 'step')} on "
        f"{plural(len(summary.after.counts), 'device')}, {si(summary.num_units)} {summary.unit} "
        f"in {clock(summary.seconds)}."
    )
    head = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself then refuses whatever a page might load.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        f'<title>{head}</title>\n<link rel="icon" href="data:,">\n<style>{_CSS}</style>\n</head>\n'
        f'<body>\n<main>\n<h1>{head}</h1>\n<p class="lead">{lead}</p>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, *parts: str) -> str:
    return f"<section>\n<h2>{html.escape(heading)}</h2>\n" + "\n".join(parts) + "\n</section>"


def _figure(picture: Picture) -> str:
    text = html.escape(picture.caption)
    svg = picture.svg.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    return f"<figure>\n{svg}\n<figcaption>{text}</figcaption>\n</figure>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table; the columns in `left` hold words, all others numbers."""

    def cell(tag: str, column: int, text: str, scope: str = "") -> str:
        style = "" if column in left else ' class="n"'
        return f"<{tag}{scope}{style}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, h, ' scope="col"') for i, h in enumerate(heads))
    body = "\n".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, text) for i, text in enumerate(row[1:], start=1))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _tiles(history: History, summary: Summary) -> str:
    idle = summary.after.idle_fractions
    worst = max(range(len(idle)), key=idle.__getitem__)
    tiles = [
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
        tiles.insert(
            1,
            (
                "Gain by balancing",
                gain(summary.balancing_gain),
                f"{shares(summary.before.counts)} to {shares(summary.after.counts)}",
            ),
        )
    if history.evaluations:
        last = history.evaluations[-1]
        tiles.append(("Evaluation loss", number(last.loss), f"after {plural(last.step, 'update')}"))
    cells = "\n".join(
        f"<div><dt>{html.escape(label[:1].upper() + label[1:])}</dt><dd>{html.escape(value)}</dd>"
        f"<dd>{html.escape(detail)}</dd></div>"
        for label, value, detail in tiles
    )
    return f'<section>\n<dl class="tiles">\n{cells}\n</dl>\n</section>'


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
    return note + _table(heads, rows)


def _devices(history: History, summary: Summary) -> str:
    names = names_of(history, summary.after.counts)
    phases = before_and_after(summary.before, summary.after)
    picture = _figure(busy_picture(phases, names, "busy"))
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
    return _section(heading, picture, *tables, note)


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
    return _table([title, "microbatches", "busy", "idle", "idle", "busy per microbatch"], rows)


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
    return _table(heads, rows, left=(0, 6))


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
    return [_table(["event", "how often"], rows, left=(0, 1))]


def _comparison(runs: Mapping[str, History]) -> str:
    summaries = {name: summarise(run) for name, run in runs.items()}
    done = {name: s for name, s in summaries.items() if s is not None}
    notes = [
        f'<p class="warn">{html.escape(name)}: did no step.</p>'
        for name, s in summaries.items()
        if s is None
    ]
    if not done:
        return _section("Side by side", *notes)
    first = next(iter(done))
    base = done[first].after
    rows = []
    for name, s in done.items():
        rows.append(
            [
                name,
                shares(s.after.counts),
                si(s.after.rate),
                si(s.whole.rate),
                f"{s.after.rate / base.rate:.2f}x" if base.rate else "",
                span(s.after.step_seconds),
                percent(max(s.after.idle_fractions)),
                number(s.final_loss) if math.isfinite(s.final_loss) else "not finite",
            ]
        )
        if name != first:
            num, differs = loss_difference(runs[first], runs[name])
            notes.append(f"<p>{html.escape(_verdict(first, name, num, differs))}</p>")
    heads = [
        "run",
        "counts",
        f"{next(iter(done.values())).unit}/s",
        "whole run",
        "speed-up",
        "step",
        "idle at most",
        "final loss",
    ]
    # Pictures of devices lie on a common scale only where the devices are the same.
    parts = [_figure(comparison_picture({name: runs[name] for name in done})), _table(heads, rows)]
    if len({len(s.after.counts) for s in done.values()}) == 1 and len(done) <= 3:
        names = names_of(runs[first], base.counts)
        phases = {f"{name} ({shares(s.after.counts)})": s.after for name, s in done.items()}
        parts.insert(1, _figure(busy_picture(phases, names, "runs")))
    text = "<p>Figures are means over the last steps with the last counts; whole run: over all "
    return _section("Side by side", *parts, *notes, text + "steps but the first.</p>")


def _verdict(first: str, name: str, num: int, differs: int | None) -> str:
    if not num:
        return f"{first} and {name} have no step in common."
    if differs is None:
        return f"{first} and {name}: the losses of all {num} common steps are the same bits."
    return f"{first} and {name}: of {num} common steps the losses first differ at step {differs}."
