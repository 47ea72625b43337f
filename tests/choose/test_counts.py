import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import balanced_counts
from support.inside.choose import _counts
from support.inside.core import _errors
from support.tiers import examples


def compositions(total, parts):
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


@settings(max_examples=examples(40, 200))
@given(data=st.data(), num=st.integers(1, 12), devices=st.integers(1, 4))
def test_counts_are_the_optimum_of_exhaustive_search(data, num, devices):
    times = st.lists(st.floats(0.01, 10, allow_nan=False), min_size=devices, max_size=devices)
    seconds, fixed = data.draw(times), data.draw(times)
    limits = data.draw(
        st.lists(st.one_of(st.none(), st.integers(0, 8)), min_size=devices, max_size=devices)
    )
    room = [num if x is None else x for x in limits]
    feasible = [
        c for c in compositions(num, devices) if all(x <= r for x, r in zip(c, room, strict=True))
    ]
    if not feasible:
        with pytest.raises(_errors.PlanError, match="do not fit"):
            _counts.best_counts(num, seconds, fixed, limits)
        return

    def slowest(counts):
        busy = _counts.finish_seconds(counts, seconds, fixed)
        # A device without microbatches still does its fixed part.
        return max(busy)

    best = _counts.best_counts(num, seconds, fixed, limits)
    assert sum(best) == num
    assert all(x <= r for x, r in zip(best, room, strict=True))
    assert slowest(best) == pytest.approx(min(map(slowest, feasible)))
    assert _counts.bound_seconds(num, seconds, fixed) <= slowest(best) * (1 + 1e-9)


def test_bound_is_reached_where_shares_are_whole():
    assert _counts.bound_seconds(12, [1.0, 3.0], [0.0, 0.0]) == pytest.approx(9.0)
    assert _counts.best_counts(12, [1.0, 3.0]) == (9, 3)


def test_rounded_proportions_would_be_worse():
    # Shares 4.57, 2.29, 1.14 round to 5, 2, 1: five units on the first device. 4, 2, 2 would be 8.
    assert _counts.best_counts(8, [1.0, 2.0, 4.0]) == (5, 2, 1)
    # Shares 1.36, 1.36, 0.27 round to 1, 1, 0, which is one microbatch short.
    assert sum(_counts.best_counts(3, [1.0, 1.0, 5.0])) == 3


def test_even_counts_differ_by_one():
    assert _counts.even_counts(8, 3) == (3, 3, 2)


tables = st.integers(1, 8).flatmap(
    lambda devices: st.lists(
        st.lists(st.sampled_from([0.5, 1, 1.5, 2, 3, 5, 8]), min_size=1, max_size=5),
        min_size=devices,
        max_size=devices,
    )
)


def exhaustive(num, seconds, memory, limits):
    """The least time of the slowest device over every product of counts, dealt recursively."""

    def rest(d, left):
        if d == len(seconds):
            return 0.0 if left == 0 else float("inf")
        found = float("inf")
        for c, second in enumerate(seconds[d]):
            if c <= left and memory[d][c] <= limits[d]:
                found = min(found, max(second, rest(d + 1, left - c)))
        return found

    return rest(0, num)


@settings(max_examples=examples(40, 300))
@given(data=st.data(), seconds=tables, num=st.integers(1, 12))
def test_counts_from_any_table_are_the_optimum_of_exhaustive_search(data, seconds, num):
    sizes = st.integers(1, 9)
    memory = [[data.draw(sizes) for _ in row] for row in seconds]
    limits = [data.draw(st.integers(1, 9)) for _ in seconds]
    best = exhaustive(num, seconds, memory, limits)
    if best == float("inf"):
        with pytest.raises(_errors.PlanError, match="do not fit"):
            balanced_counts.balanced_counts(num, seconds, memory, limits)
        return
    counts = balanced_counts.balanced_counts(num, seconds, memory, limits)
    assert sum(counts) == num
    assert all(memory[d][c] <= limits[d] for d, c in enumerate(counts))
    assert max(seconds[d][c] for d, c in enumerate(counts)) == best


def test_counts_from_a_linear_table_are_those_of_the_fast_path():
    seconds = [1.0, 2.5, 4.0]
    table = [[c * s for c in range(101)] for s in seconds]
    slowest = max(c * s for c, s in zip(_counts.best_counts(100, seconds), seconds, strict=True))
    exact = balanced_counts.balanced_counts(100, table)
    assert max(table[d][c] for d, c in enumerate(exact)) == slowest


def test_a_count_that_is_faster_than_a_smaller_one_is_used():
    # Seven microbatches take longer than eight: greedy shares would stop at six.
    odd = [0, 1, 2, 3, 4, 5, 6, 9, 6.5]
    assert balanced_counts.balanced_counts(10, [odd, [0, 4, 6.4, 9]]) == (8, 2)


def test_missing_bytes_are_named_per_device():
    memory = [[10, 20, 30, 40], [10, 25, 40, 55]]
    seconds = [[0, 1, 2, 3]] * 2
    with pytest.raises(_errors.PlanError) as error:
        balanced_counts.balanced_counts(4, seconds, memory, [35, 30])
    assert "device 0 takes 2 at most and lacks 5 bytes for 3" in str(error.value)
    assert "device 1 takes 1 at most and lacks 10 bytes for 2" in str(error.value)
    with pytest.raises(_errors.PlanError, match="device 1 has 4 bytes and lacks 6 for any count"):
        balanced_counts.balanced_counts(2, seconds, memory, [35, 4])


def test_hostile_tables_are_refused_with_every_fault():
    nan = float("nan")
    with pytest.raises(_errors.PlanError) as error:
        balanced_counts.balanced_counts(0, [[0, -1], [nan, 1], []], [[1, 1], [1], [1]], [0, 5, 5])
    for part in (
        "num_microbatches is 0",
        "seconds[0][1] is -1",
        "seconds[1][0] is nan",
        "seconds[2] is empty",
        "device 1 has seconds for 2 counts and memory_bytes for 1",
        "limit_bytes[0] is 0",
    ):
        assert part in str(error.value)
    with pytest.raises(_errors.PlanError, match="there are no devices"):
        balanced_counts.balanced_counts(1, [])
