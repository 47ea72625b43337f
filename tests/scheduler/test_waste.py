"""EasyScale's waste model, what jobs propose, and what they learn."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hxla import ScheduleError
from support.inside.scheduler import (
    MOST_WASTE,
    Capability,
    ExecutorTime,
    Trials,
    best_configuration,
    configuration,
    learned,
    proposals,
)
from support.scheduled_jobs import KINDS, active, capabilities, enumerated, job


def instance(seed):
    """Kinds, devices and microbatches, at random."""
    rng = random.Random(seed)
    speeds = [round(rng.uniform(0.3, 5), 3) for _ in range(rng.randint(1, 3))]
    nums = [rng.randint(0, 6) for _ in speeds]
    nums[rng.randrange(len(nums))] += 1
    return rng.randint(1, 32), capabilities(speeds), tuple(nums)


def test_the_exact_optimum_is_never_worse_than_easyscales_enumeration_on_1000_instances():
    num_better = 0
    for seed in range(1000):
        num_microbatches, known, nums = instance(seed)
        exact = best_configuration(num_microbatches, known, nums).perf
        theirs = enumerated(num_microbatches, known, nums)
        assert exact >= theirs * (1 - 1e-12), seed
        num_better += exact > theirs * (1 + 1e-9)
    assert num_better > 50  # it is not the same thing said twice


def test_the_optimum_is_the_smallest_time_in_which_all_microbatches_fit():
    for seed in range(200):
        num, known, nums = instance(seed)
        found = best_configuration(num, known, nums)
        speeds = [c.microbatches_per_second for c in known]

        def places(seconds, speeds=speeds, nums=nums):
            each = [int(seconds * c + 1e-9) for c in speeds]
            return sum(n * a for n, a in zip(nums, each, strict=True))

        times = sorted(k / c for c in speeds for k in range(1, num + 1))
        least = next(time for time in times if places(time) >= num)
        assert num / found.perf == pytest.approx(least)


@settings(max_examples=300)
@given(st.data())
def test_perf_is_maxp_over_the_slowest_and_waste_is_the_rest(data):
    num_kinds = data.draw(st.integers(1, 3))
    shares = data.draw(st.lists(st.floats(0.3, 1), max_size=2))
    known = capabilities(
        data.draw(st.lists(st.floats(0.1, 9), min_size=num_kinds, max_size=num_kinds)),
        (1.0, *shares),
    )
    whole = st.tuples(*[st.integers(1, 5)] * num_kinds)
    nums, threads = data.draw(whole), data.draw(whole)
    executors = data.draw(st.tuples(*[st.integers(1, 1 + len(shares))] * num_kinds))
    places = sum(n * m * a for n, m, a in zip(nums, executors, threads, strict=True))
    num = data.draw(st.integers(1, places))
    found = configuration(num, known, nums, executors, threads)
    speeds = [c.of_executor(m) for c, m in zip(known, executors, strict=True)]
    assert found.perf == pytest.approx(
        num / max(a / c for a, c in zip(threads, speeds, strict=True))
    )
    total = sum(n * m * c for n, m, c in zip(nums, executors, speeds, strict=True))
    assert found.perf + found.waste * total == pytest.approx(total)
    assert -1e-9 <= found.waste < 1


def test_worked_examples():
    # Speeds 3 and 1: a V100 with three threads beside a T4 with one waste nothing.
    known = capabilities((3.0, 1.0))
    assert configuration(4, known, (1, 1), (1, 1), (3, 1)).waste == pytest.approx(0)
    assert best_configuration(4, known, (1, 1)).threads == (3, 1)
    # Two each: the V100 waits for a third of the time, 4 of its 6 microbatches' worth.
    even = configuration(4, known, (1, 1), (1, 1), (2, 2))
    assert (even.perf, even.waste) == (pytest.approx(2.0), pytest.approx(0.5))
    # 16 microbatches on three like devices: 6 each, so 2 of 18 places are empty.
    assert best_configuration(16, capabilities((1.0,)), (3,)).waste == pytest.approx(2 / 18)
    # EasyScale's experiment: on a V100 and two P100 of half its speed the threads are 2, 1 and 1.
    assert best_configuration(4, capabilities((2.0, 1.0)), (1, 2)).threads == (2, 1)


def test_a_second_executor_is_used_where_it_pays():
    half_idle = Capability(kind="V100", microbatches_per_second=1.0, interference=(1.0, 0.8))
    found = best_configuration(8, (half_idle,), (1,))
    assert (found.executors, found.perf) == ((2,), pytest.approx(1.6))
    full = Capability(kind="V100", microbatches_per_second=1.0, interference=(1.0, 0.5))
    assert best_configuration(8, (full,), (1,)).executors == (1,)  # as fast, fewer executors


def test_what_does_not_fit_or_is_no_speed_is_refused():
    with pytest.raises(ScheduleError, match="5 microbatches on 4 places"):
        configuration(5, capabilities((1.0, 1.0)), (2, 0), (1, 1), (2, 9))
    with pytest.raises(ScheduleError, match="V100: 0 microbatches per second, give a positive"):
        capabilities((0,))
    with pytest.raises(ScheduleError, match=r"interference \(0\.9,\), give the share"):
        capabilities((1,), (0.9,))
    assert best_configuration(4, capabilities((1.0,)), (0,)) is None


def test_proposals_grow_by_one_kind_to_twice_as_many_and_waste_no_more_than_the_threshold():
    free = (4, 4, 4)
    for nums in itertools.product(range(3), repeat=3):
        one = active(job(microbatches=16), nums)
        for found in proposals(one, free, most=99) if any(nums) else ():
            more = [a - b for a, b in zip(found.nums, nums, strict=True)]
            assert sum(1 for m in more if m) == 1
            assert more[found.kind] == found.num_more
            assert found.num_more <= min(sum(nums), free[found.kind])
            assert found.after.waste <= MOST_WASTE
            assert found.speedup > 1


def test_the_best_proposals_come_first_and_of_equal_ones_the_larger():
    one = active(job(microbatches=4, speeds=(1.0,)), (2,))
    [found] = proposals(one, (2,))  # three devices are no faster than two
    assert (found.num_more, found.speedup, found.speedup_per_device) == (2, 2.0, 0.5)
    gains = [p.speedup_per_device for p in proposals(active(job(), (1, 1, 1)), (8, 8, 8), most=9)]
    assert gains == sorted(gains, reverse=True)
    assert len(proposals(active(job(microbatches=32), (4, 4, 4)), (9, 9, 9))) == 3


def test_a_job_that_cannot_mix_stays_on_its_kind():
    one = active(job(mixed=False, alone=1), (0, 2, 0))
    assert {p.kind for p in proposals(one, (9, 9, 9), most=99)} == {1}


def test_what_did_not_help_is_given_up_and_not_proposed_again():
    trials = Trials(nums=(1, 0, 0)).grown((2, 0, 0), step_seconds=2.0)
    assert trials.measured([1.1, 1.2, 1.0]).nums == (2, 0, 0)
    back = trials.measured([2.3, 2.1, 2.2])
    assert (back.nums, back.refused) == ((1, 0, 0), frozenset({(2, 0, 0)}))
    assert back.measured([2.0]) == back  # with nothing to fall back to it stays
    one = active(job(), (1, 0, 0))
    offered = {p.nums for p in proposals(one, (1, 0, 0), most=99)}
    left = {p.nums for p in proposals(one, (1, 0, 0), most=99, refused=back.refused)}
    assert offered - left == {(2, 0, 0)}


def test_speeds_and_interference_are_learned_and_what_was_not_seen_stays():
    known = capabilities((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    times = [
        ExecutorTime(kind="V100", num_executors=m, num_microbatches=6, seconds=6 / speed)
        for m, speed in ((1, 4.0), (1, 4.0), (1, 4.0), (1, 400.0), (2, 3.0))
    ]
    v100, p100, t4 = learned(known, times)
    assert v100.microbatches_per_second == pytest.approx(4.0)  # one that is far off moves nothing
    assert v100.interference == pytest.approx((1.0, 0.75, 1.0))
    assert (p100, t4) == known[1:]
    [only_two] = learned(
        capabilities((1.0,), (1.0, 0.5)),
        [ExecutorTime(kind=KINDS[0], num_executors=2, num_microbatches=2, seconds=1.0)],
    )
    assert only_two.microbatches_per_second == pytest.approx(4.0)
    assert only_two.interference == (1.0, 0.5)
