import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hxla import _errors
from hxla._planner import _counts


def compositions(total, parts):
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


@settings(max_examples=200, deadline=None)
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
