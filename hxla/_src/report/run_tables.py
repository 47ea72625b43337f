"""The figures of a run, for the terminal, tables and pages."""

import collections
import dataclasses
import html
import itertools
import math
from collections.abc import Iterator, Sequence

from ..core.format import clock, gain, number, percent, plural, shares, si, span
from .history import History, SplitWork, StepRecord, scalars
from .page import Table

_PHASE_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Means over steps with the same counts.

    Attributes:
        steps: The first and the last step.
        num_steps: The number of averaged steps.
        step_seconds: Wall time of a step.
        busy_seconds: Seconds of a step that each device computed.
        rate: Tokens (or examples) per second.
    """

    counts: tuple[int, ...]
    steps: tuple[int, int]
    num_steps: int
    step_seconds: float
    busy_seconds: tuple[float, ...]
    rate: float

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Seconds of a step that each device waited."""
        return tuple(max(0.0, self.step_seconds - busy) for busy in self.busy_seconds)

    @property
    def idle_fractions(self) -> tuple[float, ...]:
        """The fraction of a step that each device waited."""
        return tuple(s / self.step_seconds if self.step_seconds else 0.0 for s in self.idle_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run with at least one step.

    Attributes:
        num_units: All tokens or examples trained on, repetitions included.
        whole: All steps but the first, which may include compilation; the counts are the last
            step's, and steps on another number of devices are left out.
        before: The first steps with the first counts, without the very first step.
        after: The last steps with the last counts; the same as `before` if counts never moved.
    """

    unit: str
    num_units: int
    whole: Phase
    before: Phase
    after: Phase

    @property
    def moved(self) -> bool:
        """Whether the first steps and the last had different counts."""
        return self.before.counts != self.after.counts

    @property
    def balancing_gain(self) -> float:
        """Step time before balancing over that after it, minus one."""
        after = self.after.step_seconds
        return self.before.step_seconds / after - 1 if after else math.nan


def num_units(record: StepRecord) -> int:
    """Tokens of a step, or its examples if the batch holds no tokens."""
    return record.num_tokens or record.num_examples


def summarise(history: History) -> Summary:
    """The figures of a run of at least one step."""
    steps = history.steps
    # The very first step may include compilation; it counts only if it is alone.
    warm = steps[1:] or steps
    comparable = [r for r in warm if len(r.counts) == len(steps[-1].counts)]
    comparable = comparable or [steps[-1]]
    first_counts = comparable[0].counts
    same = itertools.takewhile(lambda r: r.counts == first_counts, comparable[:_PHASE_STEPS])
    last = comparable[-_PHASE_STEPS:]
    # A device without work gets some for one step from time to time; such steps are left out.
    usual = collections.Counter(r.counts for r in last).most_common(1)[0][0]
    last = [r for r in last if r.counts == usual]
    after = _phase(last, usual)
    return Summary(
        unit="tokens" if any(r.num_tokens for r in steps) else "examples",
        num_units=sum(map(num_units, steps)),
        whole=_phase(comparable, steps[-1].counts),
        before=_phase(list(same), first_counts) if first_counts != usual else after,
        after=after,
    )


def _phase(records: Sequence[StepRecord], counts: tuple[int, ...]) -> Phase:
    num = len(records)
    seconds = sum(r.seconds for r in records)
    devices = range(len(counts))
    return Phase(
        counts=counts,
        steps=(records[0].step, records[-1].step),
        num_steps=num,
        step_seconds=seconds / num,
        busy_seconds=tuple(sum(r.busy_seconds[d] for r in records) / num for d in devices),
        rate=sum(map(num_units, records)) / seconds if seconds else math.nan,
    )


def names_of(history: History, counts: Sequence[int]) -> tuple[str, ...]:
    """One name per count; devices without a name in the history are numbered."""
    names = history.device_names[: len(counts)]
    return names + tuple(f"device{d}" for d in range(len(names), len(counts)))


_MAX_STEPS = 20  # with their numbers shown


def lead(history: History, summary: Summary) -> str:
    """The run in a sentence."""
    return (
        f"{plural(len(history.steps), 'step')} on {plural(_num_devices(history), 'device')}, "
        f"{si(summary.num_units)} {summary.unit} in {clock(sum(r.seconds for r in history.steps))}."
    )


def _num_devices(history: History) -> int:
    if not history.plans:
        return len(history.device_names)
    plan = history.plans[max(history.plans)]
    return sum(len(replica.devices) for replica in plan.replicas)


def figures(history: History, summary: Summary) -> Iterator[tuple[str, str, str]]:
    """The most important figures: a label, a value and a detail each."""
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
    if len(idle) == 1:
        return  # there is nobody to wait for
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
    heads = ("device", "microbatches", "busy", "idle", "of the step", "busy per microbatch")
    for phase in (summary.before, summary.after) if summary.moved else (summary.after,):
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
        first, last = phase.steps
        steps = f"Step {last}" if first == last else f"Steps {first} to {last}"
        title = f"{steps}, counts {shares(phase.counts)}"
        title += f", {span(phase.step_seconds)} a step"
        yield title, phase, Table((*heads, "idle, whole run"), rows)


def split_table(work: SplitWork) -> Table:
    """The work and the waiting of each device of a split."""
    rows = [
        (
            name,
            span(worked),
            span(max(0.0, work.step_seconds - worked)),
            percent(worked / work.step_seconds),
        )
        for name, worked in zip(work.names, work.work_seconds, strict=True)
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
    heads = ("change", "after step", "before", "after", "expected", "achieved", "reason")
    return Table(heads, rows, left=(0, 6))


def event_table(history: History) -> Table:
    """Unwanted events: redone and skipped steps, late compilations."""
    events = {
        "Steps redone with other scales of the exact sums": [
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


def html_summary(history: History) -> str:
    """The most important figures as a table for a notebook."""
    if not history.steps:
        return "<p>No steps were left to train.</p>"
    summary = summarise(history)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>"
        for row in figures(history, summary)
    )
    return f"<p>{html.escape(lead(history, summary))}</p><table>{rows}</table>"


_MAX_DEVICES = 8


def terminal_report(history: History) -> str:
    """The figures of a run of at least one step as a few lines of plain text."""
    return "\n".join(_lines(history))


def _lines(history: History) -> Iterator[str]:
    summary = summarise(history)
    after = summary.after
    losses = f"{number(history.steps[0].loss)} to {number(history.steps[-1].loss)}"
    yield f"hxla: {lead(history, summary).removesuffix('.')}, loss {losses}"
    step = f"{span(after.step_seconds)} a step, last {plural(after.num_steps, 'step')}"
    yield f"  {si(after.rate)} {summary.unit}/s, {step}; whole run {si(summary.whole.rate)}"
    names = names_of(history, after.counts)
    width = max(map(len, names[:_MAX_DEVICES]))
    if len(names) > 1:
        rows = zip(names, after.counts, after.busy_seconds, after.idle_fractions, strict=True)
        for name, count, busy, idle in itertools.islice(rows, _MAX_DEVICES):
            share = f"{count}/{sum(after.counts)}"
            yield f"  {name:<{width}}  {share:>7} microbatches, busy {span(busy)}, idle {idle:.0%}"
        if len(names) > _MAX_DEVICES:
            yield f"  and {len(names) - _MAX_DEVICES} more"
    if history.rebalances:
        moves = f"  counts moved {plural(len(history.rebalances), 'time')}"
        moved = f", {shares(summary.before.counts)} to {shares(after.counts)}"
        yield moves + (f"{moved}: {gain(summary.balancing_gain)}" if summary.moved else "")
    if history.split is not None:
        for name, worked in zip(history.split.names, history.split.work_seconds, strict=True):
            share = percent(worked / history.split.step_seconds)
            yield f"  {name} of a split worked {share} of the time"
        if history.split.advice:
            yield f"  {history.split.advice}"
    for what, often in event_table(history).rows:
        if often != "0":
            yield f"  {what.lower()}: {often}"
