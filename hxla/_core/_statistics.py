"""What repeated measurements say together."""

import statistics
from collections.abc import Sequence


def middle_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest quarter (the interquartile mean).

    One disturbed value changes it no more than it does a median. Where values fall into two heaps
    it lies between them, and for values that scatter it is nearer to the truth than a median of
    as many.

    Args:
        values: At least one.
    """
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])
