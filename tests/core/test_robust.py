"""Measurements that are disturbed, or come in two heaps."""

import itertools
import time

import numpy as np
import pytest

from support.inside.core import median_seconds, middle_mean, steady_seconds
from support.inside.lower import PieceTimes
from support.inside.schedule import BACKWARD, FORWARD


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 11, 40])
def test_the_middle_half_leaves_out_a_quarter_on_each_side(num):
    values = np.random.default_rng(num).normal(size=num)
    ranks = np.argsort(np.argsort(values))
    own = values[(ranks >= num // 4) & (ranks < num - num // 4)]
    assert middle_mean(list(values)) == pytest.approx(own.mean())


def test_one_disturbed_value_changes_little():
    values = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0]
    assert middle_mean([*values, 1e6]) == pytest.approx(middle_mean(values), rel=0.05)


@pytest.fixture
def throttled(monkeypatch):
    """Runs of given lengths, in turn, by a clock that only they move."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def make(*seconds):
        pauses = itertools.cycle(seconds)

        def run():
            now[0] += next(pauses)

        return run

    return make


def test_a_process_that_rests_is_timed_with_its_rests(throttled):
    """Two short runs, then one that waits for the next period: the median knows no rest."""
    seconds = (0.001, 0.001, 0.04)
    assert steady_seconds(throttled(*seconds)) == pytest.approx(0.042 / 3, rel=0.1)
    assert median_seconds(throttled(*seconds)) == pytest.approx(0.001)


def test_runs_that_all_fit_between_two_rests_are_timed_with_rests(throttled):
    """A burst of ten short runs after each rest: a first handful sees none."""
    seconds = (0.001,) * 10 + (0.03,)
    assert steady_seconds(throttled(*seconds)) == pytest.approx(0.04 / 11, rel=0.1)
    assert median_seconds(throttled(*seconds)) == pytest.approx(0.001)


def test_runs_without_rests_are_timed_by_their_median(throttled):
    assert steady_seconds(throttled(0.02)) == pytest.approx(0.02)  # longer than a period together
    assert steady_seconds(throttled(0.001)) == pytest.approx(0.001)
    assert steady_seconds(throttled(0.2, 0.3)) == pytest.approx(0.3)  # one is longer than a period


def test_a_transfer_is_what_a_meeting_takes_beyond_its_longer_side():
    measured = PieceTimes(
        seconds={(FORWARD, 0): 2.0, (FORWARD, 1): 3.0, (FORWARD, 2): 1.0, (BACKWARD, 0): 9.0},
        meeting_seconds={0: 3.5, 1: 3.25, 2: 1.5},
        fixed_seconds=0.0,
    )
    # Boundary 2 leads from the last stage to the first; a meeting may seem to take no time.
    assert measured.transfer_seconds(3) == {0: 0.5, 1: 0.25, 2: 0.0}
