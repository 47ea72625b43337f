"""The report of a run as one self-contained HTML page."""

import dataclasses
import datetime
import html
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..core.format import clock, gain, number, plural, shares, si, span
from ..lower.determinism import Determinism
from ..plan.plan import Plan
from .charts import CSS, Curve, band_chart, curve_chart
from .history import History, RunStart, RunState, scalars
from .lanes import Lanes, step_legend, step_picture
from .page import Markup, Table, facts, figure, fold, items, page, section, stack, table, tiles
from .run_tables import (
    Summary,
    change_table,
    device_tables,
    evaluation_table,
    event_table,
    names_of,
    num_units,
    split_table,
    summarise,
)

_MAX_CHARTS = 24  # of metrics
_MAX_MARKS = 15  # changes of counts
_SHORT = 3  # rows of a table that is never folded
_CSS = """
.state { font-weight: 600; color: var(--ink); }
.state::before { content: ""; display: inline-block; width: .6rem; height: .6rem;
  border-radius: 50%; margin-right: .5rem; background: var(--good); }
.running::before { background: var(--line); } .failed::before { background: var(--mark); }
.stopped::before { background: var(--muted); }
footer { border-top: 1px solid var(--grid); padding-top: 1rem; color: var(--muted);
  font-size: .88rem; }
"""


def html_report(
    history: History,
    starts: Sequence[RunStart],
    state: RunState,
    *,
    title: str,
    plan: Plan,
    bits: Determinism,
    pipelines: Mapping[int, Sequence[Lanes]],
) -> str:
    """The report as one self-contained HTML page.

    Args:
        history: Of at least one step, with the steps before a resume.
        starts: The start of the run and each resume.
        pipelines: The planned and the measured step of each pipeline.
    """
    now, summary = datetime.datetime.now().astimezone(), summarise(history)
    marks = {float(start.step): "resumed" for start in starts if start.step}
    parts = [tiles(list(_figures(history, starts[-1], state, summary)))]
    parts.append(section("Loss", _loss(history, marks), *_evaluations(history)))
    parts.append(section("Speed", *_speed(history, summary, marks)))
    if pipelines:
        parts.append(section("Pipeline", *_pipelines(pipelines)))
    if metrics := "".join(_metrics(history, marks)):
        parts.append(section("Metrics", f'<div class="charts">{metrics}</div>'))
    heads, events, left = event_table(history)
    if events := [row for row in events if row[1] != "0"]:
        parts.append(section("What went differently", table(heads, events, left)))
    promise = f"{bits.promise[:1].upper()}{bits.promise[1:]}."
    level = f"<p><b>{bits.level}.</b> {promise}</p>"
    reasons = items(html.escape(f"{reason[:1].upper()}{reason[1:]}.") for reason in bits.reasons)
    parts.append(section("Reproducibility", level, reasons))
    parts.append(section("Plan", f"<pre>{html.escape(plan.explain())}</pre>"))
    parts.append(section("How it was started", *_starts(starts)))
    versions = " · ".join(f"{name} {version}" for name, version in starts[-1].versions.items())
    parts.append(f"<footer>Written {_date(now)}. {html.escape(versions)}</footer>")
    return page(title, _lead(history, starts[-1], state, summary, now), parts, css=CSS + _CSS)


def _date(time: datetime.datetime) -> str:
    return f"{time.day} {time:%B %Y, %H:%M}"


def _lead(
    history: History,
    start: RunStart,
    state: RunState,
    summary: Summary,
    now: datetime.datetime,
) -> str:
    """How the run stands or ended, and its size, in two sentences."""
    done = history.steps[-1].step
    words = {
        "running": f"Running: step {done} at {now:%H:%M:%S}. Reload the page for newer figures.",
        "finished": f"Finished on {_date(now)}.",
        "stopped": f"Stopped after {plural(done, 'step')} on {_date(now)}.",
        "failed": f"Failed after {plural(done, 'step')} on {_date(now)}.",
    }[state.kind]
    devices = sum(start.devices.values())
    size = (
        f"{si(summary.num_units)} {summary.unit} in {plural(done, 'step')} on "
        f"{plural(devices, 'device')}"
    )
    size += f" of {plural(len(start.hosts), 'host')}." if len(start.hosts) > 1 else "."
    why = f"<br>{html.escape(state.why)}" if state.why else ""
    return f'<span class="state {state.kind}">{words}</span> {size}{why}'


def _figures(
    history: History, start: RunStart, state: RunState, summary: Summary
) -> Iterator[tuple[str, str, str]]:
    """Loss, steps, time and speed: a label, a value and a detail each."""
    is_running, last = state.kind == "running", history.steps[-1]
    done, after = last.step, summary.after
    detail = f"{number(history.steps[0].loss)} at first"
    if history.evaluations:
        detail += f"; evaluation {number(history.evaluations[-1].loss)}"
    yield "loss" if is_running else "final loss", number(last.loss), detail
    planned = f"of {start.num_steps}, " if start.num_steps not in (None, done) else ""
    epochs = "" if last.epoch is None else f"; epoch {last.epoch:.3g}"
    yield "steps", str(done), f"{planned}{plural(last.num_examples, 'example')} each{epochs}"
    training = sum(record.seconds for record in history.steps)
    evaluating = sum(record.seconds for record in history.evaluations)
    detail = f"{clock(evaluating)} of it for evaluations" if evaluating >= 0.5 else ""
    if is_running and start.num_steps is not None:
        detail = f"about {clock(after.step_seconds * (start.num_steps - done))} to go"
    yield "time", clock(training + evaluating), detail
    detail = f"{span(after.step_seconds)} a step"
    if summary.moved:
        detail += f"; {gain(summary.balancing_gain)} by the change of counts"
    yield f"{summary.unit} per second", si(after.rate), detail


def _loss(history: History, marks: Mapping[float, str]) -> str:
    """Training and evaluation loss over steps."""
    records, evaluations = history.steps, history.evaluations
    curves = [_curve("training", [(r.step, r.loss) for r in records])]
    if evaluations:
        curves.append(_evaluated("evaluation", [(e.step, e.loss) for e in evaluations]))
    odd = [r.step for r in records if r.skipped or not np.isfinite(r.loss)]
    title = "Mean loss of the global batch" if evaluations else "Loss of the global batch"
    chart = curve_chart(title, curves, marks=marks, odd_steps=odd, height=220)
    return chart + ("<p>Crosses: the update was skipped, or no finite loss.</p>" if odd else "")


def _curve(name: str, points: Sequence[tuple[float, float]]) -> Curve:
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Curve(name=name, color="train", x=x, y=y, is_noisy=True)


def _evaluated(name: str, points: Sequence[tuple[float, float]]) -> Curve:
    x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return Curve(name=name, color="eval", x=x, y=y, has_dots=len(points) < 60)


def _shortened(noun: str, content: Table) -> str:
    """A table, folded if it is long."""
    num = len(content.rows)
    return table(*content) if num <= _SHORT else fold(plural(num, noun), table(*content))


def _evaluations(history: History) -> Iterator[str]:
    if history.evaluations:
        yield _shortened("evaluation", evaluation_table(history))


def _metrics(history: History, marks: Mapping[float, str]) -> Iterator[str]:
    """A small chart of each of the user's metrics and of what the optimizer applied."""
    training = [(r.step, scalars(r.metrics)) for r in history.steps]
    evaluated = [(e.step, scalars(e.metrics)) for e in history.evaluations]
    names = list(dict.fromkeys(name for _, values in (*training, *evaluated) for name in values))
    for name in names[:_MAX_CHARTS]:
        curves = [
            make(word, points)
            for make, word, records in (
                (_curve, "training", training),
                (_evaluated, "evaluation", evaluated),
            )
            if (points := [(step, values[name]) for step, values in records if name in values])
        ]
        # A share, such as an accuracy, is never shown on a logarithmic scale.
        is_share = all(np.nanmax(curve.y, initial=0.0) <= 1 for curve in curves)
        yield curve_chart(name, curves, marks=marks, is_linear=is_share, height=140)
    applied = {
        "learning rate": [(r.step, r.learning_rate) for r in history.steps],
        "gradient norm": [(r.step, r.gradient_norm) for r in history.steps],
        "loss scale": [(r.step, r.loss_scale) for r in history.steps],
    }
    for title, values in applied.items():
        if known := [(step, value) for step, value in values if value is not None]:
            is_norm = title == "gradient norm"
            curve = dataclasses.replace(_curve(title, known), is_noisy=is_norm)
            yield curve_chart(title, [curve], marks=marks, from_zero=not is_norm, height=140)


def _speed(history: History, summary: Summary, resumes: Mapping[float, str]) -> Iterator[str]:
    changes = {float(change.step): shares(change.after) for change in history.rebalances}
    marks = {**resumes, **changes} if len(changes) <= _MAX_MARKS else resumes
    records = history.steps
    points = [(r.step, num_units(r) / r.seconds if r.seconds else 0.0) for r in records]
    curve = _curve(f"{summary.unit} per second", points)
    yield curve_chart(
        f"{summary.unit.capitalize()} per second", [curve], marks=marks, text=si, from_zero=True
    )
    yield from _devices(history, summary)
    if history.rebalances:
        num_devices = max(len(r.counts) for r in records)
        counts = [r.counts + (0,) * (num_devices - len(r.counts)) for r in records]
        names = names_of(history, range(num_devices))
        steps = np.array([r.step for r in records])
        yield band_chart(
            "Microbatches of each device", names, steps, np.array(counts), marks=resumes, height=120
        )
        yield _shortened("change", change_table(history))


def _devices(history: History, summary: Summary) -> Iterator[str]:
    """Tables of the devices, with bars of busy and idle time on one scale."""
    longest = max(summary.before.step_seconds, summary.after.step_seconds)
    for title, phase, (heads, rows, _) in device_tables(history, summary):
        bars = [
            Markup(stack([("k0", busy, f"busy {span(busy)}"), ("idle", idle, "idle")], longest))
            for busy, idle in zip(phase.busy_seconds, phase.idle_seconds, strict=True)
        ]
        drawn = [(row[0], bar, *row[1:]) for row, bar in zip(rows, bars, strict=True)]
        devices = table((heads[0], "busy and idle", *heads[1:]), drawn, left=(0, 1))
        is_past = phase is not summary.after and len(rows) > _SHORT
        yield fold(html.escape(title), devices) if is_past else f"<h3>{title}</h3>{devices}"
    if history.split is not None:
        yield f"<h3>Devices of a split, {plural(history.split.num_steps, 'step')}</h3>"
        yield table(*split_table(history.split))
        if history.split.advice:
            yield f"<p>{html.escape(history.split.advice)}</p>"


def _pipelines(pipelines: Mapping[int, Sequence[Lanes]]) -> Iterator[str]:
    for replica, steps in pipelines.items():
        words = " and ".join(step.title for step in steps)
        yield figure(step_picture(steps), f"One step of pipeline {replica}, {words}.")
        yield step_legend(steps)


def _starts(starts: Sequence[RunStart]) -> Iterator[str]:
    last = starts[-1]
    named = [f"{num} × {kind}" for kind, num in last.devices.items()]
    entries = {
        "command": Markup(f"<code>{html.escape(last.command)}</code>"),
        "git commit": last.commit or "the script is in no git repository",
        "started": _date(datetime.datetime.fromisoformat(last.time)),
        "devices": ", ".join(named),
        "processes": f"{last.num_processes} on {', '.join(last.hosts)}",
    }
    yield facts({**entries, **last.job})
    if len(starts) > 1:
        heads = ("started", "after step", "devices", "git commit", "command")
        rows = [
            (
                _date(datetime.datetime.fromisoformat(start.time)),
                str(start.step),
                ", ".join(f"{num} × {kind}" for kind, num in start.devices.items()),
                start.commit,
                start.command,
            )
            for start in starts
        ]
        yield "<h3>All starts of this run</h3>"
        yield table(heads, rows, left=(0, 2, 3, 4))
