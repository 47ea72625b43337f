"""What a trial of training tells of a step's parts."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence

from .._core._statistics import middle_mean
from .._planner._counts import finish_seconds
from .._report._history import StepRecord

MOST_STEPS = 200
_WARM_STEPS = 2
_FEWEST_STEPS = 10
_FEWEST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Some steps of training.

    Attributes:
        micro_seconds: One microbatch on each device, forward and backward.
        update_seconds: Update on each device.
        counts: Microbatches of each device in most of the steps.
        step_seconds: One of those steps.
        peak_bytes: See `Profile.peaks`.
        end_step: No step from here on was read.
        form: Of memory in which it trained, as `Plan.memory_form` names it.
    """

    micro_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    step_seconds: float
    peak_bytes: int
    end_step: int
    form: str = ""

    def by_kind(self, labels: Sequence[str]) -> "Trial":
        """With the mean of like devices for each of them.

        Args:
            labels: Kind of each device.
        """

        def mean(values: Sequence[float]) -> tuple[float, ...]:
            of = collections.defaultdict(list)
            for label, value in zip(labels, values, strict=True):
                of[label].append(value)
            return tuple(statistics.mean(of[label]) for label in labels)

        return dataclasses.replace(
            self,
            micro_seconds=mean(self.micro_seconds),
            update_seconds=mean(self.update_seconds),
        )

    @property
    def rest_seconds(self) -> float:
        """Of a step beyond the slowest device's part: the sum, and what the loop does besides."""
        busy = finish_seconds(self.counts, self.micro_seconds, self.update_seconds)
        return max(0.0, self.step_seconds - max(busy))


class Observer:
    """Says when steps with the same counts have told enough."""

    def __init__(self) -> None:
        self._num_warm = 0
        self._seconds: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)

    def has_told_enough(self, record: StepRecord) -> bool:
        """Take in a step."""
        if self._num_warm < _WARM_STEPS:
            self._num_warm += 1
            return False
        own = self._seconds[record.counts]
        own.append(record.seconds)
        return len(own) >= _FEWEST_STEPS and sum(own) >= _FEWEST_SECONDS

    @property
    def most(self) -> tuple[tuple[int, ...], float]:
        """The counts that most steps had, and the mean of the middle half of those steps."""
        counts, seconds = max(self._seconds.items(), key=lambda item: len(item[1]))
        return counts, middle_mean(seconds)
