import numpy as np
import pytest

from hxla._core._config import BalanceConfig
from hxla._planner._counts import best_counts
from hxla._run._balancer import Balancer


def run(balancer, speeds, steps, noise=0.0, seed=0, start=0):
    """Drive a balancer with devices of known speed; returns the changes."""
    rng = np.random.default_rng(seed)
    changes = []
    for step in range(start, start + steps):
        jitter = 1 + noise * rng.normal(size=len(speeds))
        busy = np.array(balancer.counts) * speeds * jitter
        change = balancer.observe(step, busy, [0.01] * len(speeds))
        if change is not None:
            changes.append(change)
        settled = balancer.stepped(float(busy.max()))
        if settled is not None:
            changes.append(settled)
    return changes


def balancer(counts, seconds):
    return Balancer(BalanceConfig(), counts, [None] * len(counts), seconds)


def test_a_swap_of_speeds_is_followed_at_once_and_in_one_move():
    b = balancer((24, 8), [0.1, 0.3])
    assert run(b, [0.1, 0.3], 20, noise=0.02) == []
    first, settled = run(b, [0.3, 0.1], 12, noise=0.02, start=20)
    assert first.step <= 23
    assert first.after == best_counts(32, [0.3, 0.1])
    assert first.before == (24, 8)
    assert settled.step == first.step
    assert settled.achieved_gain == pytest.approx(first.expected_gain, rel=0.2)


def test_noise_alone_moves_nothing():
    b = balancer((24, 8), [0.1, 0.3])
    assert run(b, [0.1, 0.3], 300, noise=0.02) == []


def test_a_device_without_microbatches_is_tried_again():
    b = balancer((32, 0), [0.1, 9.0])
    assert run(b, [0.1, 9.0], 40) == []
    changes = run(b, [0.1, 0.1], 60, start=40)
    assert changes[0].after == (16, 16)


def test_processes_with_the_same_times_decide_alike():
    one, two = balancer((16, 16), [0.1, 0.1]), balancer((16, 16), [0.1, 0.1])
    assert run(one, [0.1, 0.25], 30, 0.1) == run(two, [0.1, 0.25], 30, 0.1)
