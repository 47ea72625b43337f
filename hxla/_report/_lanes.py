"""A step in time, measured or predicted: what each device does when."""

import collections
import dataclasses
from collections.abc import Sequence

from .._schedule._replay import Timeline

COMPUTATION, COLLECTIVE, TRANSFER = "computation", "collective", "transfer"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Something that takes time on a lane.

    Attributes:
        lane: Index into `Lanes.names`.
        kind: `computation`, `collective` or `transfer` if it was measured.
        label: What it is, as the HLO names it if it was measured.
        program: Name of the HLO module, if it was measured.
        chunk: Of the stage that it works on.
        start_seconds: From the start of the step.
        end_seconds: The same.
    """

    lane: int
    kind: str
    label: str
    program: str = ""
    chunk: int = 0
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """One step.

    Attributes:
        title: What it is, in words.
        names: Of the lanes: devices, or stages.
        bars: By start, within each lane.
        note: What it was read from, in a sentence.
        end_seconds: Of the step, where it is later than the last bar's.
    """

    title: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    note: str = ""
    end_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Until the step ends."""
        return max([self.end_seconds, *(bar.end_seconds for bar in self.bars)])

    def mean_seconds(self) -> dict[tuple[str, str, str], float]:
        """Seconds of what has a label, a kind and a program, the mean over lanes."""
        out: dict[tuple[str, str, str], float] = collections.defaultdict(float)
        for bar in self.bars:
            out[bar.label, bar.kind, bar.program] += bar.seconds / len(self.names)
        return out

    def busy_seconds(self, lane: int, kind: str) -> float:
        """Time in which a lane has at least one bar of a kind."""
        busy, until = 0.0, 0.0
        for bar in self.bars:
            if bar.lane == lane and bar.kind == kind and bar.end_seconds > until:
                busy += bar.end_seconds - max(bar.start_seconds, until)
                until = bar.end_seconds
        return busy


def lanes_of_timeline(
    timeline: Timeline, names: Sequence[str] = (), *, title: str, end_seconds: float = 0.0
) -> Lanes:
    """A pipeline's step as lanes, one for each stage.

    Args:
        timeline: The step.
        names: Of the stages; none: their numbers.
        title: What it is, in words.
        end_seconds: Of the step, where it is later than the timeline's: reduction and update.
    """
    bars = [
        Bar(
            lane=e.stage,
            kind=e.kind,
            label=str(e.microbatch),
            chunk=e.chunk,
            start_seconds=e.start_seconds,
            end_seconds=e.end_seconds,
        )
        for e in (*timeline.events, *timeline.sends)
    ]
    return Lanes(
        title=title,
        names=tuple(names) or tuple(f"stage {stage}" for stage in range(timeline.num_stages)),
        bars=tuple(sorted(bars, key=lambda bar: bar.start_seconds)),
        end_seconds=end_seconds,
    )
