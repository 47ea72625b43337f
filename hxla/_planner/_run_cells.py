"""Parts of all plans, which are bounded together, and pipelines of runs."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ._chain_tables import Array
from ._runs import Run, Span, Wholes

_UNTOLD = 1e-6  # of all weights


class RunForm(NamedTuple):
    """What all copies of a plan have in common.

    Attributes:
        num: Stages.
        whole: How many of them lie, of all copies, in one node of a certain kind; None: any number.
    """

    num: int
    whole: int | None = None


@dataclasses.dataclass(frozen=True)
class RunColumn:
    """A relaxed pipeline.

    Attributes:
        runs: Its own.
        fill: Seconds.
        period: Seconds.
        tail: Of no plan with less reduction and update is it a part.
    """

    runs: tuple[Run, ...]
    fill: float
    period: float
    tail: float

    @functools.cached_property
    def by_last(self) -> dict[int, Run]:
        """Its runs by the stages from their first on, the last run first."""
        nums = itertools.accumulate(run.sort.stages for run in reversed(self.runs))
        return dict(zip(nums, reversed(self.runs), strict=True))

    @property
    def starts(self) -> dict[int, int]:
        """Where its runs begin, but the first: by the stages from there on."""
        return {num: run.layers[0] for num, run in self.by_last.items() if run.layers[0]}

    def is_within(self, windows: Mapping[int, Span], wholes: Wholes) -> bool:
        """Whether its runs begin where stages may, and are whole where they are to be."""
        starts = self.starts
        return all(
            run.sort.suits(num, (run.kind,), wholes) for num, run in self.by_last.items()
        ) and all(low <= starts.get(num, low) < high for num, (low, high) in windows.items())

    @property
    def whole(self) -> set[tuple[int, int]]:
        """Stages of which a node has all copies, as `Wholes` has them."""
        return {
            (num - i, run.kind)
            for num, run in self.by_last.items()
            if run.sort.whole == run.sort.stages
            for i in range(run.sort.stages)
        }

    def form(self, kind: int | None) -> RunForm:
        """Its own, with the whole stages on a kind, if there is one."""
        num = sum(run.sort.stages for run in self.runs)
        whole = sum(run.sort.whole for run in self.runs if run.kind == kind)
        return RunForm(num, None if kind is None else whole)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCell:
    """Plans of some forms, of some numbers of copies, and of some tails.

    Attributes:
        floors: By form: none of them takes fewer seconds.
        copies: The fewest and the most.
        tail: The least reduction and update, and the most.
        level: Of the grid of periods.
        span: Intervals of periods of that grid that their copies can have.
        prices: [T] Of what runs take.
        windows: Of some numbers of last stages, the layers with which they begin: from, up to.
        wholes: What is known of stages.
        columns: Pipelines that were met, among them those of other cells.
        counted: The kind on which the forms tell whole stages; None: they do not.
        is_integral: Whether it counts that microbatches are whole.
    """

    floors: Mapping[RunForm, float]
    copies: tuple[int, int]
    tail: tuple[float, float]
    level: int
    span: Span
    prices: Array
    windows: Mapping[int, Span] = dataclasses.field(default_factory=dict)
    wholes: Wholes = dataclasses.field(default_factory=dict)
    columns: tuple[RunColumn, ...] = ()
    counted: int | None = None
    is_integral: bool = False

    @property
    def floor(self) -> float:
        """The least of all forms."""
        return min(self.floors.values())

    @property
    def nums(self) -> list[int]:
        """Of stages, the fewest first."""
        return sorted({form.num for form in self.floors})

    @property
    def suiting(self) -> list[RunColumn]:
        """Of its pipelines, those that its plans can have."""
        return [
            x
            for x in self.columns
            if x.tail <= self.tail[1] and x.is_within(self.windows, self.wholes)
        ]

    def of_forms(self, columns: Sequence[RunColumn]) -> list[RunColumn]:
        """Of some pipelines those of its forms."""
        return [x for x in columns if x.form(self.counted) in self.floors]

    def below(self, seconds: float) -> "RunCell":
        """With the forms that may take less."""
        floors = {form: floor for form, floor in self.floors.items() if floor < seconds}
        return dataclasses.replace(self, floors=floors)


def told_by_starts(columns: Sequence[RunColumn], weights: Array) -> tuple[int, int] | None:
    """By where last stages begin: so many of them, and the layer that halves pipelines best.

    Args:
        columns: Pipelines.
        weights: [C] Of each.
    """
    best, found = _UNTOLD * float(weights.sum()), None
    each = [(x.starts, own) for x, own in zip(columns, weights.tolist(), strict=True) if own > 0]
    for num in sorted({num for starts, _ in each for num in starts}):
        known = sorted((starts[num], own) for starts, own in each if num in starts)
        total, early = sum(own for _, own in known), 0.0
        for (layer, own), (after, _) in itertools.pairwise(known):
            early += own
            if after > layer and min(early, total - early) > best:
                best, found = min(early, total - early), (num, (layer + after + 1) // 2)
    return found


def told_by_wholes(columns: Sequence[RunColumn], weights: Array) -> tuple[int, int] | None:
    """The stage and kind, as `Wholes` has them, which halves pipelines best.

    Args:
        columns: Pipelines.
        weights: [C] Of each.
    """
    told: collections.Counter[tuple[int, int]] = collections.Counter()
    for x, own in zip(columns, weights.tolist(), strict=True):
        told.update(dict.fromkeys(x.whole, own))
    total = float(weights.sum())
    less = {stage: min(own, total - own) for stage, own in told.items()}
    stage = max(sorted(less), key=less.__getitem__, default=None)
    return stage if stage is not None and less[stage] > _UNTOLD * total else None
