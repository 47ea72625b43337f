"""The time of a computation, despite noise and throttling, and of work that is dispatched."""

import concurrent.futures
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def middle_mean(values: Sequence[float]) -> float:
    """The mean without the smallest and the largest quarter (the interquartile mean).

    It is as robust to a single outlier as the median. For values in two clusters it is between
    them, and for scattered values it is more accurate than the median.

    Args:
        values: At least one.
    """
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])


_REPEATS = 7
_CALM = 1.1  # the longest run over the median, without throttling
_BLOCKS = 3
_BLOCK_SECONDS = 0.1  # several periods of a process's CPU quota


def median_seconds(run: Callable[[], Any]) -> float:
    """The median time, after a first run that compiles and warms up.

    All processes run it equally often, so `run` may contain collectives.
    """
    return statistics.median(_times(run, _REPEATS))


def middle_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The mean of the middle half of some times, after a first run that warms up.

    It is also right in a throttled process. That alternates between work and pauses, so most times
    include a pause too many or too few, and a median is one of the two. All processes run it
    equally often, so `run` may contain collectives.
    """
    return middle_mean(_times(run, repeats))


def steady_seconds(run: Callable[[], Any]) -> float:
    """Like `middle_seconds`, also for runs much shorter than a pause; without collectives.

    Runs that all fit between two pauses miss them, so longer blocks of runs are timed too.
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


#: Pairs: the array with which a device begins, or the clock's seconds then; and an array that is
#: ready when it is done. None at the end. A watcher waits for both arrays, and says `task_done`.
Spans = queue.Queue
#: Seconds of microbatches, and of the update before them.
Seconds = concurrent.futures.Future[tuple[float, float]]


def known_seconds(seconds: float) -> Seconds:
    """The seconds of microbatches that are done, without an update."""
    known = Seconds()
    known.set_result((seconds, 0.0))
    return known


def watched(spans: Spans[Any], start: float, update: Seconds | None) -> tuple[float, float]:
    """Wait for a replica's microbatches; returns their seconds, and those of the update before."""
    of_update = busy = 0.0
    try:
        if update is not None:
            begun, done = update.result()
            of_update, start = done - begun, max(start, done)
        while (span := spans.get()) is not None:
            try:
                begins, tick = span
                if isinstance(begins, float):
                    start = max(start, begins)
                elif begins is not None:
                    jax.block_until_ready(begins)
                    start = time.perf_counter()
                jax.block_until_ready(tick)
            finally:
                spans.task_done()
            now = time.perf_counter()
            busy, start = busy + now - start, now
    except BaseException:
        # A thread that waits for spans may go on: it meets the error.
        while spans.get() is not None:
            spans.task_done()
        raise
    return busy, of_update
