"""A step in time, measured or predicted: what each device does when."""

import dataclasses

COMPUTATION, COLLECTIVE, TRANSFER = "computation", "collective", "transfer"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Something that takes time on a lane.

    Attributes:
        lane: Index into `Lanes.names`.
        kind: `computation`, `collective` or `transfer` if it was measured.
        label: What it is, as the HLO names it if it was measured.
        program: Name of the HLO module, if it was measured.
        start_seconds: From the start of the step.
        end_seconds: The same.
    """

    lane: int
    kind: str
    label: str
    program: str = ""
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
    """

    title: str
    names: tuple[str, ...]
    bars: tuple[Bar, ...]
    note: str = ""

    @property
    def seconds(self) -> float:
        """Until the last bar ends."""
        return max((bar.end_seconds for bar in self.bars), default=0.0)

    def busy_seconds(self, lane: int, kind: str) -> float:
        """Time in which a lane has at least one bar of a kind."""
        busy, until = 0.0, 0.0
        for bar in self.bars:
            if bar.lane == lane and bar.kind == kind and bar.end_seconds > until:
                busy += bar.end_seconds - max(bar.start_seconds, until)
                until = bar.end_seconds
        return busy
