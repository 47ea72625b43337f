"""Times of a plan in training, by some steps of it."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

import jax

from ..choose.counts import finish_seconds
from ..core.config import BalanceConfig
from ..core.timing import middle_mean
from ..core.types import PyTree
from ..job.context import JobContext
from ..plan.plan import Plan
from ..report.history import StepRecord
from .session import Session
from .values import SessionOptions

MOST_STEPS = 200
_WARM_STEPS = 2
_FEWEST_STEPS = 10
_FEWEST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedSteps:
    """Times of some training steps.

    Attributes:
        micro_seconds: Seconds of a microbatch's forward and backward, by device.
        counts: Microbatch counts of most of the steps.
        peak_bytes: See `Profile.peaks`.
        end_step: First step whose data was not read.
        form: The memory layout, as `Plan.memory_form` names it.
    """

    micro_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    step_seconds: float
    peak_bytes: int
    end_step: int
    form: str = ""

    def by_kind(self, labels: Sequence[str]) -> "ObservedSteps":
        """Average times over the devices of each kind."""

        def mean(values: Sequence[float]) -> tuple[float, ...]:
            by_label = collections.defaultdict(list)
            for label, value in zip(labels, values, strict=True):
                by_label[label].append(value)
            return tuple(statistics.mean(by_label[label]) for label in labels)

        return dataclasses.replace(
            self,
            micro_seconds=mean(self.micro_seconds),
            update_seconds=mean(self.update_seconds),
        )

    @property
    def rest_seconds(self) -> float:
        """Seconds of a step beyond the slowest device's work: the all-reduce and the loop."""
        busy = finish_seconds(self.counts, self.micro_seconds, self.update_seconds)
        return max(0.0, self.step_seconds - max(busy))


class Observer:
    """Collects steps until enough of them have the same counts.

    Args:
        fewest_seconds: Of these steps together.
    """

    def __init__(self, fewest_seconds: float = _FEWEST_SECONDS) -> None:
        self._fewest_seconds = fewest_seconds
        self._num_warm = 0
        self._seconds: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)

    def has_enough_steps(self, record: StepRecord) -> bool:
        """Add a step; returns whether its counts have enough steps now."""
        if self._num_warm < _WARM_STEPS:
            self._num_warm += 1
            return False
        seconds = self._seconds[record.counts]
        seconds.append(record.seconds)
        return len(seconds) >= _FEWEST_STEPS and sum(seconds) >= self._fewest_seconds

    @property
    def most(self) -> tuple[tuple[int, ...], float]:
        """The most frequent counts, and the mean of the middle half of their seconds."""
        counts, seconds = max(self._seconds.items(), key=lambda item: len(item[1]))
        return counts, middle_mean(seconds)


def run_trial(
    job: JobContext,
    plan: Plan,
    devices: tuple[jax.Device, ...],
    *,
    start: int = 0,
    batch: PyTree | None = None,
    fewest_seconds: float = _FEWEST_SECONDS,
) -> ObservedSteps:
    """Train a plan from a step on until enough steps are timed; every process takes part.

    Args:
        batch: The batch of every step; None: those of the data.
    """
    # Counts that follow small changes would leave too few steps of each.
    moves = job.settings.balance
    calm = BalanceConfig(
        min_gain=max(0.1, moves.min_gain),
        patience_steps=moves.patience_steps,
        window_steps=MOST_STEPS,
        retry_steps=moves.retry_steps,
    )
    observer = Observer(fewest_seconds)
    options = SessionOptions(
        steps=start + MOST_STEPS, balance=calm, first_step=start, is_trial=True
    )
    with Session(job, plan, devices, options) as session:
        if batch is None:
            for record in session:
                if observer.has_enough_steps(record):
                    session.stop()
        else:
            for _ in range(_num_steps(job, session, observer, batch, fewest_seconds)):
                observer.has_enough_steps(session.step(batch))
        counts, seconds = observer.most
        return ObservedSteps(
            micro_seconds=session.running.balancer.seconds,
            update_seconds=session.running.balancer.fixed,
            counts=counts,
            step_seconds=seconds,
            peak_bytes=session.running.memory_bytes,
            end_step=session.step_number + job.settings.data.prefetch_steps,
            form=plan.memory_form,
        )


def _num_steps(
    job: JobContext, session: Session, observer: Observer, batch: PyTree, fewest_seconds: float
) -> int:
    """How many steps take so many seconds, the same on every process, by some first steps."""
    for _ in range(_WARM_STEPS + 1):
        record = session.step(batch)
        observer.has_enough_steps(record)
    slowest = max(map(float, job.gather("step of a trial", str(record.seconds))))
    return min(max(math.ceil(fewest_seconds / slowest), _FEWEST_STEPS), MOST_STEPS)
