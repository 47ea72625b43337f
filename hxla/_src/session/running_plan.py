"""The plan that a session runs: its counts follow the measured speed of devices.

Measured times are all-gathered with the sums of a step, and decisions are pure arithmetic on them.
So all processes move to the same counts at the same step without further communication.
"""

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from ..choose.apportionment import best_counts, finish_seconds
from ..choose.microbatch_counts import check_limits, count_limits, predicted, shared_numbers
from ..core.config import BalanceConfig
from ..job.context import JobContext
from ..lower.lower import Programs
from ..lower.stage_chain import use_counts
from ..plan.parts import Prediction
from ..plan.plan import Plan
from ..plan.unlike_stages import most_counts
from ..report.history import Rebalance, StepRecord
from .device_memory import stage_bytes
from .opening import Opened
from .recorder import Recorder
from .step import Outcome
from .values import SessionOptions
from .watch import PipelineWatch, SplitWatch

_NEW_SPEED = 1.2  # least ratio beyond which two samples in a row are no noise
_LEAST_CHANGE = 1.02  # least ratio of the medians of two windows that is a change of speed
_FEW = 3  # fewest swings for a median
_LONGEST = 8  # windows whose median is the speed of a device that keeps it
_FAR = 3.0  # standard deviations beyond which a difference is no noise
# For normal noise: standard deviation of a sample over the median difference of two samples, and
# standard error of a median of many samples over that of their mean.
_SWING_FACTOR = 1.4826 / math.sqrt(2)
_MEDIAN_FACTOR = math.sqrt(math.pi / 2)


class Pace:
    """Seconds of a microbatch on one device.

    Args:
        window: Number of steps for the median.
        first: Estimate before the first sample; 0 if never measured.
    """

    def __init__(self, window: int, first: float):
        self._first = first
        self._window = window
        self._samples: collections.deque[float] = collections.deque(maxlen=_LONGEST * window)
        # Logarithms of the ratios of consecutive samples.
        self._swings: collections.deque[float] = collections.deque(maxlen=4 * window)

    @property
    def seconds(self) -> float:
        """Present estimate; 0 if never measured."""
        return statistics.median(self._samples) if self._samples else self._first

    @property
    def noise(self) -> float | None:
        """Relative standard deviation of a sample, from differences of consecutive samples.

        None while there are too few samples.
        """
        if len(self._swings) < _FEW:
            return None
        return _SWING_FACTOR * statistics.median(self._swings)

    @property
    def num_samples(self) -> int:
        """Samples of the present speed."""
        return len(self._samples)

    def error(self, noise: float) -> float:
        """Relative standard error of `seconds` for samples with this noise."""
        return _MEDIAN_FACTOR * noise / max(1, len(self._samples)) ** 0.5

    def learn(self, seconds: float) -> bool:
        """Add a sample.

        Two samples far from the median are a new speed, and so is a window of samples whose median
        differs from that of earlier ones by more than noise explains.

        Returns:
            Whether it is a new speed, unlike the old one.
        """
        samples, before = self._samples, self.seconds
        num_new = self._num_new([*samples, seconds])
        if samples:
            self._swings.append(abs(math.log(seconds / samples[-1])))
        samples.append(seconds)
        if not num_new:
            return False
        while len(samples) > num_new:
            samples.popleft()
        return abs(math.log(self.seconds / before)) > math.log(_NEW_SPEED)

    def _num_new(self, samples: Sequence[float]) -> int:
        """How many of the newest samples are of a new speed; 0: all are of one."""
        noise = self.noise or 0.0
        if len(samples) > 2:
            usual = statistics.median(samples[-1 - self._window : -2])
            ratio = max(_NEW_SPEED, math.exp(_FAR * noise))
            newest = samples[-2:]
            if min(newest) > ratio * usual or max(newest) * ratio < usual:
                return 2
        newest, earlier = samples[-self._window :], samples[: -self._window]
        if len(earlier) < _FEW:
            return 0
        error = _MEDIAN_FACTOR * noise * math.hypot(len(newest) ** -0.5, len(earlier) ** -0.5)
        change = abs(math.log(statistics.median(newest) / statistics.median(earlier)))
        return len(newest) if change > max(math.log(_LEAST_CHANGE), _FAR * error) else 0

    def forget(self) -> None:
        """Drop all samples."""
        self._samples.clear()


_SETTLE_STEPS = 5  # steps after a move, whose median is the achieved step time
_SURE = 2.0  # standard errors that a gain must exceed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Move:
    """A rebalance whose gain is not known yet.

    Attributes:
        wall: Median seconds of a step before the move.
        finish: Median seconds of the slowest device before the move.
        seconds: Seconds of a microbatch on each device before the move.
        walls: Seconds of later steps; the first was measured before the move took effect.
        finishes: Seconds of the slowest device in later steps.
        samples: Seconds of a microbatch on each device in later steps.
    """

    change: Rebalance
    wall: float
    finish: float
    seconds: tuple[float, ...]
    walls: list[float] = dataclasses.field(default_factory=list)
    finishes: list[float] = dataclasses.field(default_factory=list)
    samples: list[tuple[float, ...]] = dataclasses.field(default_factory=list)

    def slowdown(self) -> float:
        """Relative slowdown of the slowest device since the move, beyond that of all devices."""
        pairs = zip(self.seconds, zip(*self.samples, strict=True), strict=True)
        ratios = [statistics.median(s) / old for old, s in pairs if all(s)] or [1.0]
        common = max(1.0, min(ratios)) * min(1.0, max(ratios))
        return statistics.median(self.finishes) / self.finish / common - 1


class Balancer:
    """Decides by measured times when counts move.

    Counts move where the predicted gain is larger than `min_gain` and than what the spread of the
    measured times explains, and back if steps have become longer.

    Args:
        limits: Most microbatches of each device; None for no limit.
        seconds: Seconds of a microbatch on each device; None if not measured.
    """

    def __init__(
        self,
        config: BalanceConfig,
        counts: tuple[int, ...],
        limits: Sequence[int | None],
        seconds: Sequence[float] | None,
    ):
        self._config = config
        self.counts = counts
        self._limits = limits
        self._paces = [Pace(config.window_steps, s) for s in seconds or [0.0] * len(counts)]
        self._fixed = [collections.deque[float](maxlen=config.window_steps) for _ in counts]
        self._agreeing = 0
        self._parked = [0] * len(counts)
        self._walls: collections.deque[float] = collections.deque(maxlen=config.window_steps)
        self._finishes: collections.deque[float] = collections.deque(maxlen=config.window_steps)
        self._move: _Move | None = None
        # The step until which slow counts are not tried again.
        self._refused: dict[tuple[int, ...], int] = {}
        self._after_trial: tuple[int, ...] | None = None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Estimated seconds of a microbatch on each device; 0 if never measured."""
        return tuple(pace.seconds for pace in self._paces)

    @property
    def fixed(self) -> tuple[float, ...]:
        """Estimated seconds per step of each device outside microbatches."""
        return tuple(statistics.median(s) if s else 0.0 for s in self._fixed)

    def observe(
        self,
        step: int,
        busy: Sequence[float],
        update: Sequence[float],
        *,
        counts: Sequence[int] | None = None,
    ) -> Rebalance | None:
        """Add the times of a step; maybe change `counts`.

        Args:
            busy: Seconds of each device's microbatches.
            update: Seconds of each device's previous update; 0 before the first.
            counts: The microbatches in `busy`; None: the present counts. Times of other counts
                tell speeds, and move nothing.

        Returns:
            The rebalance that takes effect with step `step + 1`, or None.
        """
        is_past = counts is not None and tuple(counts) != self.counts
        self._learn(busy, update, counts or self.counts, is_past=is_past)
        if self._after_trial is not None:
            self.counts, self._after_trial = self._after_trial, None
        if is_past or not all(self.seconds):
            return None
        self._parked = [0 if c else p + 1 for c, p in zip(self.counts, self._parked, strict=True)]
        reverted = self._revert_slow_move(step)
        if reverted is not None:
            return reverted
        best = best_counts(sum(self.counts), self.seconds, self.fixed, self._limits)
        gain = self._gain(best)
        is_refused = self._refused.get(best, step) > step
        if gain > self._config.min_gain and not is_refused and self._try_again(best):
            return None
        is_worth = self._is_sure(gain, self._error(best)) and not is_refused
        self._agreeing = self._agreeing + 1 if is_worth else 0
        if self._agreeing < self._config.patience_steps:
            self._try_parked()
            return None
        speeds = "/".join(f"{s * 1e3:.3g}" for s in self.seconds)
        reason = f"a microbatch takes {speeds} ms"
        if self._move is not None and self._move.finishes and self._move.slowdown() > 0:
            self._refuse(step)
        change = self._changed(step, best, reason, gain)
        self._move = _Move(
            change=change,
            wall=statistics.median(self._walls) if self._walls else 0.0,
            finish=statistics.median(self._finishes),
            seconds=self.seconds,
        )
        self._walls.clear()
        self._finishes.clear()
        return change

    def _learn(
        self,
        busy: Sequence[float],
        update: Sequence[float],
        counts: Sequence[int],
        *,
        is_past: bool,
    ) -> None:
        samples = tuple(b / c if c else 0.0 for b, c in zip(busy, counts, strict=True))
        is_new = [pace.learn(s) for pace, s in zip(self._paces, samples, strict=True) if s]
        if any(is_new):  # earlier measurements are of other speeds
            self._walls.clear()
            self._finishes.clear()
            if self._move is None:  # otherwise the move may be the cause
                self._refused.clear()
        for fixed, seconds in zip(self._fixed, update, strict=True):
            if seconds:
                fixed.append(seconds)
        if is_past:
            return
        finish = max(b + u for b, u in zip(busy, update, strict=True))
        self._finishes.append(finish)
        if self._move is not None:
            self._move.finishes.append(finish)
            self._move.samples.append(samples)

    def _finish(self, counts: Sequence[int]) -> tuple[float, ...]:
        return finish_seconds(counts, self.seconds, self.fixed)

    def _gain(self, best: Sequence[int]) -> float:
        return max(self._finish(self.counts)) / max(self._finish(best)) - 1

    def _is_sure(self, gain: float, error: float) -> bool:
        """Whether a relative gain is more than the spread of the measured times explains."""
        return gain > self._config.min_gain and math.log1p(gain) > _SURE * error

    def _error(self, best: Sequence[int]) -> float:
        """Relative standard error of the gain, from the slowest device before and after it."""
        now, then = self._finish(self.counts), self._finish(best)
        slowest = max(range(len(now)), key=now.__getitem__)
        others = [d for d in range(len(then)) if d != slowest and best[d]]
        last = max(others, key=then.__getitem__, default=slowest)
        noises = [pace.noise for pace in self._paces]
        most = max((noise for noise in noises if noise is not None), default=math.inf)

        def error(d: int, counts: Sequence[int], finish: Sequence[float]) -> float:
            noise = noises[d]
            pace_error = self._paces[d].error(most if noise is None else noise)
            return pace_error * counts[d] * self.seconds[d] / finish[d]

        return math.hypot(error(slowest, self.counts, now), error(last, best, then))

    def _changed(self, step: int, counts: tuple[int, ...], reason: str, gain: float) -> Rebalance:
        change = Rebalance(
            step=step + 1, before=self.counts, after=counts, reason=reason, expected_gain=gain
        )
        self._agreeing, self.counts = 0, counts
        return change

    def _revert_slow_move(self, step: int) -> Rebalance | None:
        """Take back a move after which the slowest device became slower."""
        move = self._move
        if move is None or len(move.finishes) != _SETTLE_STEPS:
            return None
        slowdown = move.slowdown()
        noises = [pace.error(pace.noise or 0.0) for pace in self._paces]
        if not self._is_sure(slowdown, math.sqrt(2) * max(noises)):
            return None
        self._refuse(step)
        self._finishes.clear()
        return self._changed(
            step,
            move.change.before,
            f"steps have become {slowdown:.1%} longer since the move",
            slowdown,
        )

    def _refuse(self, step: int) -> None:
        """Refuse the counts of the last move for `retry_steps`."""
        if self._move is not None:
            self._refused[self._move.change.after] = step + self._config.retry_steps

    def _try_parked(self) -> None:
        """Move one microbatch to an idle device for a step, to measure its speed."""
        for d, parked in enumerate(self._parked):
            if parked >= self._config.retry_steps and self._limits[d] != 0:
                self._parked[d] = 0
                self._paces[d].forget()
                self._try(d)
                return

    def _try_again(self, best: Sequence[int]) -> bool:
        """Go on with the trial of an idle device that counts would use, until it has samples."""
        for d, (count, wanted) in enumerate(zip(self.counts, best, strict=True)):
            if wanted and not count and self._paces[d].num_samples < _FEW:
                self._try(d)
                return True
        return False

    def _try(self, d: int) -> None:
        self._after_trial = self.counts
        trial = list(self.counts)
        trial[max(range(len(trial)), key=trial.__getitem__)] -= 1
        trial[d] += 1
        self.counts = tuple(trial)

    def stepped(self, seconds: float) -> Rebalance | None:
        """Add the wall time of a step.

        Returns:
            The last rebalance with its achieved gain, once enough steps have run.
        """
        self._walls.append(seconds)
        move = self._move
        if move is None:
            return None
        move.walls.append(seconds)
        if len(move.finishes) < _SETTLE_STEPS:
            return None
        self._move = None
        if not move.wall:
            return None
        gain = move.wall / statistics.median(move.walls[1:]) - 1
        return dataclasses.replace(move.change, achieved_gain=gain)


class RunningPlan:
    """The present plan of a session.

    Attributes:
        plan: The plan of the next step.
        plans: The plans that ran, and the present one, by their first step.
        balancer: Moves counts, and has the measured times.
        pipelines: Compares pipelines with their prediction.
        split: Compares an uneven split with its prediction.
        memory_bytes: Of one device of this process.

    Raises:
        PlanError: If a device has no memory for its counts.
    """

    def __init__(self, opened: Opened, job: JobContext, options: SessionOptions):
        programs, plan = opened.programs, opened.plan
        self._cluster, self._is_late = opened.cluster, opened.stepper.is_late
        self._sum_seconds = opened.sum_seconds
        # Which island computes a microbatch decides bits, so these counts stay.
        self._is_moved = options.balance is not None and plan.islands is None
        self.memory_bytes = opened.memory_bytes
        local_bytes = [opened.memory_bytes] * len(programs.reducer.local)
        replica_bytes = shared_numbers(programs.reducer, local_bytes)
        sizes = replica_bytes, opened.inputs, programs.most_inputs
        self._device_bytes: Mapping[int, float]
        if plan.stage_forms:
            self._device_bytes = stage_bytes(opened, job)
            free: Sequence[int | None] = [None] * len(plan.replicas)
            limits = most_counts(plan) if plan.unlike_replicas else free
        else:
            self._device_bytes = {
                rank: num
                for replica, num in zip(plan.replicas, replica_bytes, strict=True)
                for rank in replica.devices
            }
            limits = count_limits(plan, self._cluster, *sizes)
        moves = options.balance or job.settings.balance
        before = next(reversed(opened.source.plans.values()), None)
        self.plan, self.balancer = _balanced(plan, moves, limits, opened.seconds, before)
        opened.islands.use_counts(self.plan.counts)
        self._use_counts = functools.partial(use_counts, programs.runners)
        self._use_counts(self.plan)
        self.pipelines = PipelineWatch(opened.stepper, programs, opened.store, job.gather)
        notes = (*_other_islands(self.plan, before), *_unplanned_gathers(programs))
        notes += self.pipelines.measure(opened.inputs, self.plan)
        self.plan = self._predicted(self.plan).replaced(reasons=(*plan.reasons, *notes))
        self.split = SplitWatch(programs, self._cluster, job)
        self.plans = opened.source.plans | {opened.source.first_step: self.plan}
        self._counts_before = self.plan.counts

    def stepped(self, record: StepRecord, outcome: Outcome, recorder: Recorder) -> None:
        """Learn the times of a step, and perhaps move counts; records what follows."""
        change, before = None, self._counts_before
        self._counts_before = self.plan.counts
        if self._is_moved and any(outcome.busy_seconds):
            counts = before if self._is_late else self.plan.counts
            seconds_of = outcome.busy_seconds, outcome.update_seconds
            change = self.balancer.observe(record.step - 1, *seconds_of, counts=counts)
        # Without a change, a parked device may be tried for one step.
        if change is not None or self.balancer.counts != self.plan.counts:
            self.plan = self._predicted(self.plan.with_counts(self.balancer.counts))
            self._use_counts(self.plan)
        if change is not None:
            self.plans[change.step] = self.plan
            recorder.rebalanced(change)
        if advice := self.split.stepped():
            recorder.log(f"step {record.step}: {advice}")
        if (settled := self.balancer.stepped(record.seconds)) is not None:
            recorder.settled(settled)

    def predict(self) -> None:
        """Predict the step anew, by the times that are known now."""
        self.plan = self._predicted(self.plan)

    def _predicted(self, plan: Plan) -> Plan:
        prediction = predicted(
            plan,
            self.balancer.seconds,
            self.balancer.fixed,
            memory_bytes=self._device_bytes,
            cluster=self._cluster,
        )
        known = self.pipelines.predicted(prediction)
        return plan.replaced(prediction=_with_sums(known, self._sum_seconds))


def _with_sums(known: Prediction, seconds: float) -> Prediction:
    """The prediction of a step with its reduction over replicas."""
    if not known.step_seconds:
        return known
    return known.model_copy(
        update={
            "step_seconds": known.step_seconds + seconds,
            "bound_seconds": known.bound_seconds and known.bound_seconds + seconds,
            "devices": tuple(
                device.model_copy(update={"reduction_seconds": seconds}) for device in known.devices
            ),
        }
    )


def _balanced(
    plan: Plan,
    config: BalanceConfig,
    limits: Sequence[int | None],
    seconds: Sequence[float] | None,
    before: Plan | None,
) -> tuple[Plan, Balancer]:
    """A plan with the counts with which its session begins, and what moves them.

    Args:
        limits: Most microbatches of each device; None for no limit.
        seconds: Seconds of a microbatch on each device; None if not measured.
        before: The last plan of the resumed run; None: it begins. Islands keep its counts.

    Raises:
        PlanError: If a device has no memory for its counts.
    """
    counts = plan.counts
    if plan.unlike_replicas:  # `seconds` are of all together
        seconds = plan.prediction.microbatch_seconds if plan.prediction else None
    elif seconds is not None:
        counts = best_counts(plan.num_microbatches, seconds, None, limits)
        if plan.islands is not None:
            each = _counts_of_islands(plan.islands.counts(counts), before)
            counts = tuple(
                count
                for members, num in zip(plan.islands.members(), each, strict=True)
                for count in best_counts(
                    num, [seconds[r] for r in members], None, [limits[r] for r in members]
                )
            )
    check_limits(counts, limits)
    balancer = Balancer(config, counts, limits, seconds)
    return plan if counts == plan.counts else plan.with_counts(counts), balancer


def _counts_of_islands(best: Sequence[int], before: Plan | None) -> list[int]:
    """The microbatches of each island: those of a resumed run, else one or more.

    Args:
        best: Those that suit the islands' speeds.
    """
    counts = list(best)
    if before is not None and before.islands is not None:
        kept = before.islands.counts(before.counts)
        if (len(kept), sum(kept)) == (len(counts), sum(counts)):
            return list(kept)
    while not all(counts):
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def _other_islands(plan: Plan, before: Plan | None) -> Iterator[str]:
    """A line where a resumed run's islands have other microbatches than before."""
    if plan.islands is None or before is None or before.islands is None:
        return
    now, then = plan.islands.counts(plan.counts), before.islands.counts(before.counts)
    if now != then:
        yield (
            f"islands of {'+'.join(map(str, now))} microbatches, {'+'.join(map(str, then))} "
            "before: bits differ from those of a run without a stop"
        )


def _unplanned_gathers(programs: Programs) -> tuple[str, ...]:
    if programs.sharded is None:
        return ()
    from ..inspect.unplanned_gathers import unplanned_gathers  # a reader of XLA's text

    return unplanned_gathers(programs)
