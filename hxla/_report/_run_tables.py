"""What a terminal and a page tell of a run: figures, and tables."""

from collections.abc import Iterator

from .._core._format import clock, gain, number, percent, plural, shares, si, span
from ._history import History, SplitWork, scalars
from ._run_summary import Phase, Summary, names_of
from ._tables import Table

_MAX_STEPS = 20  # whose numbers are said


def lead(history: History, summary: Summary) -> str:
    """The run in a sentence."""
    return (
        f"{plural(len(history.steps), 'step')} on {plural(len(summary.after.counts), 'device')}, "
        f"{si(summary.num_units)} {summary.unit} in {clock(sum(r.seconds for r in history.steps))}."
    )


def figures(history: History, summary: Summary) -> Iterator[tuple[str, str, str]]:
    """What to see first: a label, a value and a detail each."""
    before, after = summary.before, summary.after
    yield (
        f"{summary.unit} per second",
        si(after.rate),
        f"{span(after.step_seconds)} per step, last {after.num_steps}; whole run "
        f"{si(summary.whole.rate)}, {span(summary.whole.step_seconds)} per step",
    )
    if summary.moved:
        moved = f"{shares(before.counts)} to {shares(after.counts)}"
        yield "gain by balancing", gain(summary.balancing_gain), moved
    losses = [number(record.loss) for record in history.steps]
    yield "final loss", losses[-1], f"was {losses[0]}"
    if history.evaluations:
        last = history.evaluations[-1]
        yield "evaluation loss", number(last.loss), f"after {plural(last.step, 'update')}"
    idle = after.idle_fractions
    worst = max(range(len(idle)), key=idle.__getitem__)
    yield "idle at most", percent(idle[worst]), names_of(history, after.counts)[worst]


def evaluation_table(history: History) -> Table:
    """Every evaluation, the last one first."""
    keys = sorted({key for e in history.evaluations for key in scalars(e.metrics)})
    rows = [
        (
            str(e.step),
            number(e.loss),
            *(number(scalars(e.metrics)[key]) if key in e.metrics else "" for key in keys),
            str(e.num_examples),
            span(e.seconds),
        )
        for e in reversed(history.evaluations)
    ]
    return Table(("evaluated after step", "loss", *keys, "examples", "took"), rows)


def device_tables(history: History, summary: Summary) -> Iterator[tuple[str, Phase, Table]]:
    """Titles, steps and tables of the devices' work before balancing and after it."""
    phases = {"Counts": summary.after}
    if summary.moved:
        phases = {"First counts": summary.before, "Last counts": summary.after}
    heads = ("device", "microbatches", "busy", "idle", "of the step", "busy per microbatch")
    for words, phase in phases.items():
        rows = [
            (
                name,
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
        steps = f"steps {phase.steps[0]} to {phase.steps[1]}, {span(phase.step_seconds)} each"
        title = f"{words} ({shares(phase.counts)}), {steps}"
        yield title, phase, Table((*heads, "idle, whole run"), rows)


def split_table(work: SplitWork) -> Table:
    """What each device of a split did of a step."""
    rows = [
        (name, span(own), span(max(0.0, work.step_seconds - own)), percent(own / work.step_seconds))
        for name, own in zip(work.names, work.work_seconds, strict=True)
    ]
    return Table(("device", "worked", "waited", "worked, of a step"), rows)


def change_table(history: History) -> Table:
    """Every change of counts."""
    rows = [
        (
            str(i),
            str(change.step),
            shares(change.before),
            shares(change.after),
            gain(change.expected_gain),
            gain(change.achieved_gain),
            change.reason,
        )
        for i, change in enumerate(history.rebalances, start=1)
    ]
    heads = ("mark", "from step", "before", "after", "expected", "achieved", "reason")
    return Table(heads, rows, left=(0, 6))


def event_table(history: History) -> Table:
    """What went differently than it should."""
    events = {
        "Steps redone after an overflow of the fixed-point range": [
            r.step for r in history.steps if r.redone
        ],
        "Updates skipped because a gradient was not finite": [
            r.step for r in history.steps if r.skipped
        ],
    }
    rows = []
    for what, steps in events.items():
        more = f" and {len(steps) - _MAX_STEPS} more" if len(steps) > _MAX_STEPS else ""
        listed = f" (steps {', '.join(map(str, steps[:_MAX_STEPS]))}{more})" if steps else ""
        rows.append((what, f"{len(steps)}{listed}"))
    rows.append(("Compilations after the first completed step", str(history.num_compilations)))
    return Table(("event", "how often"), rows, left=(0, 1))
