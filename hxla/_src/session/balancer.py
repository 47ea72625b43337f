"""Microbatch counts that follow the measured speed of devices.

Every process sees the same measured times (they travel with the sum of the step), and decides by
this same pure arithmetic, so all of them move to the same counts at the same step without asking
each other.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence

from ..choose.counts import best_counts, finish_seconds
from ..core.config import BalanceConfig
from ..report.history import Rebalance

_NEW_SPEED = 1.2  # ratio beyond which two samples in a row are no noise
_FEW = 3  # swings of which a median says something
# Standard deviations of normal noise over medians: of the magnitude of a difference of two samples,
# 1.4826 / sqrt(2), and of a median of many samples over that of their mean, sqrt(pi / 2).
_OF_SWING = 1.4826 / math.sqrt(2)
_OF_MEDIAN = math.sqrt(math.pi / 2)


class Pace:
    """Seconds of a microbatch on one device.

    Args:
        window: Steps whose median it is.
        first: What a measurement before training said; 0: nothing. Samples take its place.
    """

    def __init__(self, window: int, first: float):
        self._first = first
        self._samples: collections.deque[float] = collections.deque(maxlen=window)
        # From a sample to the next, as logarithms of ratios; a new speed is one of many.
        self._swings: collections.deque[float] = collections.deque(maxlen=2 * window)

    @property
    def seconds(self) -> float:
        """Present estimate; 0: never measured."""
        return statistics.median(self._samples) if self._samples else self._first

    @property
    def noise(self) -> float | None:
        """Relative standard deviation of a sample, by how samples differ from the ones before them.

        None as long as there are too few to tell.
        """
        if len(self._swings) < _FEW:
            return None
        return _OF_SWING * statistics.median(self._swings)

    def error(self, noise: float) -> float:
        """Relative standard error of `seconds` where samples have this noise."""
        return _OF_MEDIAN * noise / max(1, len(self._samples)) ** 0.5

    def learn(self, seconds: float) -> bool:
        """Take in a sample; two alike that are far from the median mean a new speed, not noise.

        Returns:
            Whether it is a new speed.
        """
        samples, is_new = self._samples, False
        if len(samples) >= 2:
            usual = statistics.median(list(samples)[:-1])
            newest = (samples[-1], seconds)
            is_new = min(newest) > _NEW_SPEED * usual or max(newest) * _NEW_SPEED < usual
        if samples:
            self._swings.append(abs(math.log(seconds / samples[-1])))
        if is_new:
            last = samples[-1]
            samples.clear()
            samples.append(last)
        samples.append(seconds)
        return is_new

    def forget(self) -> None:
        """Estimate anew from the next sample."""
        self._samples.clear()


_SETTLE_STEPS = 5  # steps after a move whose median is the achieved step time
_SURE = 2.0  # standard errors that a gain must exceed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Move:
    """A change of counts that is on trial.

    Attributes:
        change: What is told of it.
        wall: Median seconds of a step before it.
        finish: Median seconds of the slowest device before it.
        seconds: Of a microbatch on each device before it.
        walls: Seconds of steps since, the first of which was measured before it took effect.
        finishes: Seconds of the slowest device in steps since.
        samples: For each step since the seconds of a microbatch on each device.
    """

    change: Rebalance
    wall: float
    finish: float
    seconds: tuple[float, ...]
    walls: list[float] = dataclasses.field(default_factory=list)
    finishes: list[float] = dataclasses.field(default_factory=list)
    samples: list[tuple[float, ...]] = dataclasses.field(default_factory=list)

    def longer(self) -> float:
        """How much longer the slowest device needs since, beyond what all devices need longer."""
        pairs = zip(self.seconds, zip(*self.samples, strict=True), strict=True)
        ratios = [statistics.median(s) / old for old, s in pairs if all(s)] or [1.0]
        common = max(1.0, min(ratios)) * min(1.0, max(ratios))
        return statistics.median(self.finishes) / self.finish / common - 1


class Balancer:
    """Watches measured times and says when counts should move.

    Counts move where the predicted gain is larger than `min_gain` and than what the spread of the
    measured times explains, and back where steps have become longer since.

    Args:
        limits: Most microbatches each device can take.
        seconds: Measured seconds of a microbatch on each device, if known.
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
        self._refused: dict[tuple[int, ...], int] = {}  # counts that did not pay, until which step
        self._after_trial: tuple[int, ...] | None = None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Present estimate of one microbatch's seconds on each device (0: never measured)."""
        return tuple(pace.seconds for pace in self._paces)

    @property
    def fixed(self) -> tuple[float, ...]:
        """Present estimate of each device's seconds per step outside microbatches."""
        return tuple(statistics.median(s) if s else 0.0 for s in self._fixed)

    def observe(
        self, step: int, busy: Sequence[float], update: Sequence[float]
    ) -> Rebalance | None:
        """Take in the times of a step that ran with `counts`; maybe change `counts`.

        Args:
            step: The step that was measured.
            busy: Seconds of each device's microbatches.
            update: Seconds of each device's previous update (0: none yet).

        Returns:
            The change that takes effect with step `step + 1`, or None.
        """
        self._learn(busy, update)
        if self._after_trial is not None:
            self.counts, self._after_trial = self._after_trial, None
        if not all(self.seconds):
            return None
        self._parked = [0 if c else p + 1 for c, p in zip(self.counts, self._parked, strict=True)]
        unpaid = self._unpaid(step)
        if unpaid is not None:
            return unpaid
        best = best_counts(sum(self.counts), self.seconds, self.fixed, self._limits)
        gain = self._gain(best)
        worth = max(self._config.min_gain, _SURE * self._error(best))
        is_refused = self._refused.get(best, step) > step
        self._agreeing = self._agreeing + 1 if gain > worth and not is_refused else 0
        if self._agreeing < self._config.patience_steps:
            self._try_parked()
            return None
        speeds = "/".join(f"{s * 1e3:.3g}" for s in self.seconds)
        reason = f"a microbatch takes {speeds} ms on devices 0 to {len(best) - 1}"
        if self._move is not None and self._move.finishes and self._move.longer() > 0:
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

    def _learn(self, busy: Sequence[float], update: Sequence[float]) -> None:
        samples = tuple(b / c if c else 0.0 for b, c in zip(busy, self.counts, strict=True))
        is_new = [pace.learn(s) for pace, s in zip(self._paces, samples, strict=True) if s]
        if any(is_new):  # what was found with other speeds says nothing of these
            self._walls.clear()
            self._finishes.clear()
            if self._move is None:  # else other counts may have made them
                self._refused.clear()
        for fixed, seconds in zip(self._fixed, update, strict=True):
            if seconds:
                fixed.append(seconds)
        finish = max(b + u for b, u in zip(busy, update, strict=True))
        self._finishes.append(finish)
        if self._move is not None:
            self._move.finishes.append(finish)
            self._move.samples.append(samples)

    def _finish(self, counts: Sequence[int]) -> tuple[float, ...]:
        return finish_seconds(counts, self.seconds, self.fixed)

    def _gain(self, best: Sequence[int]) -> float:
        return max(self._finish(self.counts)) / max(self._finish(best)) - 1

    def _error(self, best: Sequence[int]) -> float:
        """Relative standard error of the gain: of the device that is slowest now beside others."""
        now, then = self._finish(self.counts), self._finish(best)
        slowest = max(range(len(now)), key=now.__getitem__)
        others = [d for d in range(len(then)) if d != slowest and best[d]]
        last = max(others, key=then.__getitem__, default=slowest)
        known = [pace.noise for pace in self._paces]
        most = max((noise for noise in known if noise is not None), default=math.inf)

        def error(d: int, counts: Sequence[int], finish: Sequence[float]) -> float:
            noise = known[d]
            own = self._paces[d].error(most if noise is None else noise)
            return own * counts[d] * self.seconds[d] / finish[d]

        return math.hypot(error(slowest, self.counts, now), error(last, best, then))

    def _changed(self, step: int, counts: tuple[int, ...], reason: str, gain: float) -> Rebalance:
        change = Rebalance(
            step=step + 1, before=self.counts, after=counts, reason=reason, expected_gain=gain
        )
        self._agreeing, self.counts = 0, counts
        return change

    def _unpaid(self, step: int) -> Rebalance | None:
        """Take a move back after which the slowest device needed longer than before."""
        move = self._move
        if move is None or len(move.finishes) != _SETTLE_STEPS:
            return None
        longer = move.longer()
        if longer < self._config.min_gain:
            return None
        self._refuse(step)
        self._finishes.clear()
        return self._changed(
            step,
            move.change.before,
            f"steps have become {longer:.1%} longer since the move",
            longer,
        )

    def _refuse(self, step: int) -> None:
        """Leave the counts of the last move alone for a while."""
        if self._move is not None:
            self._refused[self._move.change.after] = step + self._config.retry_steps

    def _try_parked(self) -> None:
        """Give a device without microbatches one for a single step, to learn its speed anew."""
        for d, parked in enumerate(self._parked):
            if parked >= self._config.retry_steps and self._limits[d] != 0:
                self._parked[d] = 0
                self._after_trial = self.counts
                trial = list(self.counts)
                trial[max(range(len(trial)), key=trial.__getitem__)] -= 1
                trial[d] += 1
                self._paces[d].forget()
                self.counts = tuple(trial)
                return

    def stepped(self, seconds: float) -> Rebalance | None:
        """Take in the wall time of the step just done.

        Returns:
            The last change with its achieved gain, once enough steps have run since.
        """
        self._walls.append(seconds)
        move = self._move
        if move is None:
            return None
        move.walls.append(seconds)
        if len(move.walls) <= _SETTLE_STEPS:
            return None
        self._move = None
        if not move.wall:
            return None
        gain = move.wall / statistics.median(move.walls[1:]) - 1
        return dataclasses.replace(move.change, achieved_gain=gain)
