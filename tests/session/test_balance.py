import numpy as np
import pytest
from flax import nnx

import hxla
from hxla import BalanceConfig
from support.inside.choose import best_counts, pooled
from support.inside.session import Balancer
from support.tiers import rows


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


NOISES = (0.02, 0.05, 0.1)
SPEEDS = {
    "unlike": ((24, 8), [0.1, 0.3]),
    "alike": ((8, 8), [0.1, 0.1]),
    "four": ((4,) * 4, [0.1] * 4),
}
NOISY = [(noise, name) for noise in NOISES for name in SPEEDS]


@pytest.mark.parametrize("case", rows(NOISY, *zip(NOISES, reversed(SPEEDS), strict=True)))
def test_noise_alone_loses_nothing(case):
    """The mean step stays within 2 % of that of the best counts, whatever is measured."""
    noise, name = case
    counts, seconds = SPEEDS[name]
    best = max(np.multiply(counts, seconds))
    lost = []
    for seed in range(10):
        b = balancer(counts, seconds)
        steps = []
        for step in range(100):
            run(b, seconds, 1, noise, seed=100 * seed + step, start=step)
            steps.append(max(np.multiply(b.counts, seconds)) / best - 1)
        lost.append(np.mean(steps))
    assert np.mean(lost) < 0.02 / 2
    assert np.max(lost) < 0.1  # one move of one microbatch in four, not found out at once


def heavy(name, rng, counts, speeds):
    """Seconds of a step on an overloaded machine: wide noise, or waits that no count shortens."""
    sigma, wait = HEAVY[name]
    waits = wait * rng.pareto(1.5, size=len(speeds)) * (rng.random(len(speeds)) < 0.5)
    noise = np.exp(sigma * rng.normal(size=len(speeds)))
    return np.multiply(counts, speeds) * noise + np.where(counts, waits, 0)


HEAVY = {"wide": (0.6, 0.0), "wider": (1.0, 0.0), "waits": (0.3, 0.4), "long waits": (0.6, 0.8)}


@pytest.mark.parametrize("name", HEAVY)
@pytest.mark.parametrize("counts", [(4, 4), (16, 16)], ids=str)
def test_like_devices_under_equal_heavy_noise_keep_their_counts(counts, name):
    moves, lost = 0, []
    for seed in range(5):
        rng, b = np.random.default_rng(seed), balancer(counts, [0.1, 0.1])
        for step in range(400):
            busy = heavy(name, rng, b.counts, [0.1, 0.1])
            moves += b.observe(step, busy, [0.01, 0.01]) is not None
            b.stepped(float(busy.max()))
            lost.append(max(b.counts) / counts[0] - 1)
    assert moves <= 20
    assert np.mean(lost) < 0.3


@pytest.mark.parametrize(("sigma", "steps"), [(0.1, 4), (0.3, 12), (0.6, 36)])
def test_a_real_slowdown_is_followed_the_later_the_more_noise(sigma, steps):
    for seed in range(5):
        rng, b = np.random.default_rng(seed), balancer((16, 16), [0.1, 0.1])
        for step in range(100 + steps):
            speeds = np.array([0.1, 0.1 if step < 100 else 0.3])
            busy = np.array(b.counts) * speeds * np.exp(sigma * rng.normal(size=2))
            b.observe(step, busy, [0.01, 0.01])
            b.stepped(float(busy.max()))
        assert b.counts[0] >= 20


def test_an_idle_device_that_was_fast_for_a_step_stays_idle():
    """A trial that promises a gain goes on until there are three samples."""
    b, trials = balancer((8, 0), [0.1, 0.9]), 0
    for step in range(70):
        trials += b.counts[1]
        busy = np.array(b.counts) * [0.1, 0.02 if trials == 1 else 0.9]
        assert b.observe(step, busy, [0.01, 0.01]) is None
        b.stepped(float(busy.max()))
    assert trials == 3


def test_first_measurements_that_are_wrong_are_put_right_in_ten_steps():
    b = balancer((9, 7), [0.1, 0.13])
    run(b, [0.1, 0.1], 10, noise=0.03)
    assert b.counts == (8, 8)


@pytest.mark.parametrize("overload", [0.5, 0.22])
def test_a_move_that_did_not_pay_is_taken_back(overload):
    """Device 1 needs longer for each microbatch beyond its fifth: its memory is full."""

    def seconds(counts):
        return np.array([0.1 * counts[0], 0.3 * counts[1] + overload * max(0, counts[1] - 5)])

    b, seen = balancer((25, 5), [0.1, 0.3]), []
    for step in range(40):
        seen.append(b.counts)
        busy = seconds(b.counts)
        b.observe(step, busy, [0.01, 0.01])
        b.stepped(float(busy.max()))
    assert seen.count((23, 7)) in range(1, 9)  # what it would be without the overload
    assert seconds(seen[-1]).max() <= seconds((25, 5)).max()
    assert len(set(seen[15:])) == 1


def test_like_devices_start_alike_whatever_was_measured():
    model, batch = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), {"x": np.ones((2, 4), np.float32)}
    plan = hxla.make_plan(hxla.trace(model, lambda model, batch: model(batch["x"]), batch), 3)
    kinds = [
        device.model_copy(update={"kind": k}) for device, k in zip(plan.devices, "aba", strict=True)
    ]
    unlike = plan.model_copy(update={"devices": tuple(kinds)})
    assert pooled([0.1, 0.3, 0.2], unlike) == pytest.approx((0.15, 0.3, 0.15))


def test_a_device_without_microbatches_is_tried_again():
    b = balancer((32, 0), [0.1, 9.0])
    assert run(b, [0.1, 9.0], 40) == []
    changes = run(b, [0.1, 0.1], 60, start=40)
    assert changes[0].after == (16, 16)


def test_processes_with_the_same_times_decide_alike():
    one, two = balancer((16, 16), [0.1, 0.1]), balancer((16, 16), [0.1, 0.1])
    assert run(one, [0.1, 0.25], 30, 0.1) == run(two, [0.1, 0.25], 30, 0.1)
