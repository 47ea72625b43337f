"""How long a computation takes, despite noise and throttling."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


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


_REPEATS = 7
_CALM = 1.1  # longest run over the median of a device that never rests
_BLOCKS = 3
_BLOCK_SECONDS = 0.1  # several periods of a process's CPU quota


def median_seconds(run: Callable[[], Any]) -> float:
    """Median time, after a first run that compiles and warms up.

    As often in every process: `run` may hold collectives.
    """
    return statistics.median(_times(run, _REPEATS))


def middle_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Mean of the middle half of some times, after a first run that warms up.

    What many runs in turn take each, also in a throttled process: it runs and rests in turns, so
    that most runs hold either a rest more or a rest less than their share, and the median is one
    of the two. As often in every process: `run` may hold collectives.
    """
    return middle_mean(_times(run, repeats))


def steady_seconds(run: Callable[[], Any]) -> float:
    """Like `middle_seconds`, also for runs much shorter than a rest; holds no collectives.

    Runs that all fit between two rests know of none, so that some are timed for longer than that.
    """
    times = _times(run, _REPEATS)
    usual = statistics.median(times)
    is_calm = max(times) <= _CALM * usual
    if usual >= _BLOCK_SECONDS or (is_calm and sum(times) >= _BLOCK_SECONDS):
        return usual
    means = [_mean_of_block(run)]
    if is_calm and means[0] <= _CALM * usual:
        return usual
    means += [_mean_of_block(run) for _ in range(_BLOCKS - 1)]
    return statistics.median(means)


def _mean_of_block(run: Callable[[], Any]) -> float:
    num, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < _BLOCK_SECONDS:
        jax.block_until_ready(run())
        num += 1
    return took / num


def _times(run: Callable[[], Any], repeats: int) -> list[float]:
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return times
