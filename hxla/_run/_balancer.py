"""Counts that follow the devices.

Every process sees the same measured times (they travel with the sum of the step), and decides by
this same pure arithmetic, so all of them move to the same counts at the same step without asking
each other.
"""

import collections
import dataclasses
import statistics
from collections.abc import Sequence

from .._core._config import BalanceConfig
from .._planner._counts import best_counts, finish_seconds
from .._report._history import Rebalance

_NEW_SPEED = 1.2  # ratio beyond which two samples in a row are no noise
_SETTLE_STEPS = 5  # steps after a move whose median is the achieved step time


class Balancer:
    """Watches measured times and says when counts should move.

    Args:
        config: Thresholds.
        counts: Counts to start with.
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
        known = [[s] if s else [] for s in seconds or [0.0] * len(counts)]
        self._seconds = [collections.deque(own, config.window_steps) for own in known]
        self._fixed = [collections.deque[float](maxlen=config.window_steps) for _ in counts]
        self._agreeing = 0
        self._parked = [0] * len(counts)
        self._recent: collections.deque[float] = collections.deque(maxlen=config.patience_steps)
        self._open: tuple[Rebalance, float, list[float]] | None = None
        self._after_trial: tuple[int, ...] | None = None

    @property
    def seconds(self) -> tuple[float, ...]:
        """Present estimate of one microbatch's seconds on each device (0: never measured)."""
        return tuple(statistics.median(s) if s else 0.0 for s in self._seconds)

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
        for d, count in enumerate(self.counts):
            if count:
                self._learn(d, busy[d] / count)
            if update[d]:
                self._fixed[d].append(update[d])
        if self._after_trial is not None:
            self.counts, self._after_trial = self._after_trial, None
        if not all(self.seconds):
            return None
        self._parked = [0 if c else p + 1 for c, p in zip(self.counts, self._parked, strict=True)]
        best = best_counts(sum(self.counts), self.seconds, self.fixed, self._limits)
        now = max(finish_seconds(self.counts, self.seconds, self.fixed))
        then = max(finish_seconds(best, self.seconds, self.fixed))
        gain = now / then - 1
        self._agreeing = self._agreeing + 1 if gain > self._config.min_gain else 0
        if self._agreeing < self._config.patience_steps:
            self._try_parked()
            return None
        self._agreeing = 0
        speeds = "/".join(f"{s * 1e3:.3g}" for s in self.seconds)
        change = Rebalance(
            step=step + 1,
            before=self.counts,
            after=best,
            reason=f"a microbatch takes {speeds} ms on devices 0 to {len(best) - 1}",
            expected_gain=gain,
        )
        self.counts = best
        before = statistics.median(self._recent) if self._recent else 0.0
        self._open = (change, before, [])
        return change

    def _learn(self, device: int, seconds: float) -> None:
        """Add a sample; two alike that are far from the median mean a new speed, not noise."""
        samples = self._seconds[device]
        if len(samples) >= 2:
            usual = statistics.median(list(samples)[:-1])
            newest = (samples[-1], seconds)
            if min(newest) > _NEW_SPEED * usual or max(newest) * _NEW_SPEED < usual:
                last = samples[-1]
                samples.clear()
                samples.append(last)
        samples.append(seconds)

    def _try_parked(self) -> None:
        """Give a device without microbatches one for a single step, to learn its speed anew."""
        for d, parked in enumerate(self._parked):
            if parked >= self._config.retry_steps and self._limits[d] != 0:
                self._parked[d] = 0
                self._after_trial = self.counts
                trial = list(self.counts)
                trial[max(range(len(trial)), key=trial.__getitem__)] -= 1
                trial[d] += 1
                self._seconds[d].clear()
                self.counts = tuple(trial)
                return

    def stepped(self, seconds: float) -> Rebalance | None:
        """Take in the wall time of the step just done.

        Returns:
            The last change with its achieved gain, once enough steps have run since.
        """
        self._recent.append(seconds)
        if self._open is None:
            return None
        change, before, after = self._open
        after.append(seconds)
        # The first step after a move is the one that was measured before it took effect.
        if len(after) <= _SETTLE_STEPS or not before:
            return None
        self._open = None
        gain = before / statistics.median(after[1:]) - 1
        return dataclasses.replace(change, achieved_gain=gain)
