"""The figures of a run that its reports and pictures show, computed once."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from ._history import History, StepRecord

_PHASE_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps that ran with the same counts, as means over them.

    Attributes:
        counts: Microbatches that each device ran.
        steps: First and last of the steps.
        num_steps: How many steps with these counts were averaged.
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
        """Part of a step that each device waited."""
        return tuple(s / self.step_seconds if self.step_seconds else 0.0 for s in self.idle_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a run with at least one step.

    Attributes:
        unit: What is counted, `tokens` or `examples`.
        num_units: How many of them were trained on, repetitions included.
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
    # The very first step may include compilation; with no other there is no choice.
    warm = steps[1:] or steps
    comparable = [r for r in warm if len(r.counts) == len(steps[-1].counts)]
    comparable = comparable or [steps[-1]]
    first_counts = comparable[0].counts
    same = itertools.takewhile(lambda r: r.counts == first_counts, comparable[:_PHASE_STEPS])
    last = comparable[-_PHASE_STEPS:]
    # A device without work is given some for one step now and then: not the counts of the run.
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
    """One name per count; devices that the history does not name are numbered."""
    names = history.device_names[: len(counts)]
    return names + tuple(f"device{d}" for d in range(len(names), len(counts)))
