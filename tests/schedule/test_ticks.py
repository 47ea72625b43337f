"""Lowered ticks with true times: no loss against the schedule itself where the sets say so."""

import pytest

from hxla import make_schedule
from support.inside.lower import crossed, exchanges
from support.inside.schedule import measured_timeline, replay_ticks
from support.overlapped_replay import replay

FORWARD, BACKWARD = "forward", "backward"


def sets(schedule):
    known = exchanges(schedule.num_stages, schedule.num_chunks)
    return [next(s for s in known if used <= set(s)) for used in crossed(schedule)]


def seconds(schedule, forward, backward):
    parts = range(schedule.num_stages * schedule.num_chunks)
    return {(FORWARD, p): forward for p in parts} | {(BACKWARD, p): backward for p in parts}


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_like_stages_lose_nothing_to_ticks(name, num_stages):
    schedule = make_schedule(name, num_stages, 16)
    timeline = replay_ticks(schedule, seconds(schedule, 1.0, 2.0), sets(schedule))
    assert timeline.makespan_seconds == pytest.approx((16 + num_stages - 1) * 3.0)


def test_waiting_for_every_neighbour_in_every_tick_would_cost_a_third():
    schedule = make_schedule("1f1b", 4, 64)
    every = [tuple(range(3))] * schedule.num_ticks
    slow = replay_ticks(schedule, seconds(schedule, 1.0, 2.0), every).makespan_seconds
    assert slow > 1.25 * (64 + 3) * 3.0


@pytest.mark.parametrize(("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_no_schedule_ends_before_its_own_replay(name, num_chunks):
    schedule = make_schedule(name, 4, 8, num_chunks)
    own = {
        (kind, p): (1 + p % 3) * (2 if kind == BACKWARD else 1)
        for kind, p in seconds(schedule, 1, 1)
    }
    parts = range(schedule.num_stages * schedule.num_chunks)
    free = replay(
        schedule, [own[FORWARD, p] for p in parts], [own[BACKWARD, p] for p in parts]
    ).makespan_seconds
    assert replay_ticks(schedule, own, sets(schedule)).makespan_seconds >= free - 1e-9


def test_a_transfer_ends_every_tick_that_crosses_something():
    schedule = make_schedule("gpipe", 2, 1)
    timeline = replay_ticks(
        schedule, seconds(schedule, 1.0, 2.0), sets(schedule), transfer_seconds={0: 0.5}
    )
    # Forward, transfer, forward and backward on the last stage, transfer, backward.
    assert timeline.makespan_seconds == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)


def test_every_boundary_has_its_own_transfer():
    schedule = make_schedule("gpipe", 3, 1)
    own = {0: 0.5, 1: 2.0}
    timeline = replay_ticks(
        schedule, seconds(schedule, 1.0, 2.0), sets(schedule), transfer_seconds=own
    )
    assert timeline.makespan_seconds == pytest.approx(3 * (1 + 2) + 2 * (0.5 + 2.0))
    assert sorted({e.stage for e in timeline.sends if e.end_seconds - e.start_seconds == 2.0}) == [
        1,
        2,
    ]


def test_measured_ticks_are_shown_where_something_ran():
    schedule = make_schedule("gpipe", 2, 1)
    times = [[(float(t), t + 0.5) for t in range(schedule.num_ticks)] for _ in range(2)]
    timeline = measured_timeline(schedule, times)
    assert [(e.stage, e.start_seconds, e.end_seconds) for e in timeline.events] == [
        (0, 0.0, 0.5),
        (0, 3.0, 3.5),
        (1, 1.0, 1.5),
        (1, 2.0, 2.5),
    ]
