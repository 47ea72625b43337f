"""The ledger of a run: which generation committed which steps."""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommittedRun:
    """Consecutive steps that one generation committed.

    Attributes:
        generation: Its number.
        first: The first of them.
        end: The step after the last.
    """

    generation: int
    first: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """What is committed: every microbatch of every step up to `end`, once each.

    A step is one exact sum over all its microbatches, so they are committed together. What a run
    lost with the last holder of its state is taken back, and counted.

    Attributes:
        num_microbatches: The microbatches of a step.
        runs: Who committed what, without gaps.
        num_lost: Steps that were taken back.
    """

    num_microbatches: int
    runs: tuple[CommittedRun, ...] = ()
    num_lost: int = 0

    @property
    def end(self) -> int:
        """How many steps are committed."""
        return self.runs[-1].end if self.runs else 0

    def committed(self, generation: int, end: int) -> "Ledger":
        """After a generation completed all steps before `end`; some may be known already."""
        if end <= self.end:
            return self
        last = self.runs[-1] if self.runs else None
        if last is not None and last.generation == generation:
            runs = (*self.runs[:-1], dataclasses.replace(last, end=end))
        else:
            run = CommittedRun(generation=generation, first=self.end, end=end)
            runs = (*self.runs, run)
        return dataclasses.replace(self, runs=runs)

    def back_to(self, end: int) -> "Ledger":
        """After the steps from `end` on were lost; it never goes forward."""
        if end >= self.end:
            return self
        kept = (r for r in self.runs if r.first < end)
        runs = tuple(dataclasses.replace(r, end=min(r.end, end)) for r in kept)
        return dataclasses.replace(self, runs=runs, num_lost=self.num_lost + self.end - end)

    def commits(self) -> Iterator[tuple[int, int]]:
        """Every (step, microbatch) as the runs have them."""
        for run in self.runs:
            for step in range(run.first, run.end):
                yield from ((step, microbatch) for microbatch in range(self.num_microbatches))
