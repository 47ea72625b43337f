"""The events of an elastic job, and its ledger: which generation committed which steps."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

from ..core.errors import LaunchError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommittedRun:
    """Consecutive steps that one generation committed.

    Attributes:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """The processes of a generation were started.

    Attributes:
        pids: By device.
        hosts: Likewise the names of the hosts that they run on.
    """

    generation: int
    pids: dict[str, int]
    hosts: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A device was met for the first time.

    Attributes:
        device: What this run calls it.
        label: Its kind, and what share of a core it is.
    """

    device: str
    label: str
    host: str


class EventLog:
    """A file of events and decisions, with the seconds since the start.

    Args:
        path: Of it; None: nothing is written.

    Raises:
        LaunchError: If it cannot be written.
    """

    def __init__(self, path: str | None):
        self._began = time.monotonic()
        try:
            self._file = open(path, "w", buffering=1) if path is not None else None  # noqa: SIM115
        except OSError as error:
            raise LaunchError(f"--events {path}: {error.strerror}") from error

    def write(self, what: Any) -> None:
        """Write an event of the authority, or what it decided."""
        fields = dataclasses.asdict(what)
        fields.pop("at_seconds", None)
        self._line(type(what).__name__, fields)

    def close(self, ledger: Ledger) -> None:
        """Write which generation committed which steps, and let go of the file."""
        self._line("Ledger", dataclasses.asdict(ledger))
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _line(self, name: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        row = {"seconds": round(time.monotonic() - self._began, 4), "what": name, **fields}
        with contextlib.suppress(OSError):  # a full disk ends no job
            self._file.write(json.dumps(row, default=sorted) + "\n")
