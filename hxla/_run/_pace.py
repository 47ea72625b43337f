"""How fast a device is, and how sure that is."""

import collections
import math
import statistics

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
