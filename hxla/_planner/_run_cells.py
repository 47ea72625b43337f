"""Parts of all plans, which are bounded together, and pipelines of runs."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ._chain_tables import Array
from ._runs import Run, Span


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
        columns: Pipelines that were met, among them those of other cells.
        is_counted: Whether the forms tell whole stages.
        is_integral: Whether it counts that microbatches are whole.
    """

    floors: Mapping[RunForm, float]
    copies: tuple[int, int]
    tail: tuple[float, float]
    level: int
    span: Span
    prices: Array
    columns: tuple[RunColumn, ...] = ()
    is_counted: bool = False
    is_integral: bool = False

    @property
    def floor(self) -> float:
        """The least of all forms."""
        return min(self.floors.values())

    @property
    def nums(self) -> list[int]:
        """Of stages, the fewest first."""
        return sorted({form.num for form in self.floors})

    def below(self, seconds: float) -> "RunCell":
        """With the forms that may take less."""
        floors = {form: floor for form, floor in self.floors.items() if floor < seconds}
        return dataclasses.replace(self, floors=floors)
