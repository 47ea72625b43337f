"""Every schedule keeps the laws of a pipeline, and each its own figures."""

import dataclasses
import functools
import itertools
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from hxla import Action, PlanError, make_schedule, schedule_from_table
from support.inside.schedule import blocking_replay, from_rows
from support.overlapped_replay import replay
from support.tiers import examples, rows

FORWARD, BACKWARD, WEIGHT = "forward", "backward", "weight"
gpipe, one_f_one_b, interleaved, zero_bubble_h1 = (
    functools.partial(make_schedule, name) for name in ("gpipe", "1f1b", "interleaved", "zb-h1")
)
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1": lambda s, m: interleaved(s, s * m, 1),
    "interleaved-2": lambda s, m: interleaved(s, s * m, 2),
    "interleaved-3": lambda s, m: interleaved(s, s * m, 3),
    "zb-h1": zero_bubble_h1,
}
every_schedule = pytest.mark.parametrize(
    "name", rows(SCHEDULES, "gpipe", "1f1b", "interleaved-2", "interleaved-3", "zb-h1")
)
some = hypothesis.settings(max_examples=examples(12, 60))


def sizes(test):
    """Numbers of stages and of microbatches, or of rounds of them."""
    return hypothesis.example(3, 4)(
        some(hypothesis.given(st.integers(1, 6), st.integers(1, 9))(test))
    )


def idle_seconds(timeline):
    """Time that each stage does not compute: bubbles and communication."""
    return [timeline.makespan_seconds - busy for busy in timeline.busy_seconds]


def formula(*numbers):
    """Many random sizes for what a closed formula says."""
    many = hypothesis.settings(max_examples=examples(15, 125))
    return lambda test: many(hypothesis.given(*numbers)(test))


stages, microbatches = st.integers(1, 16), st.integers(1, 40)


def bubble_per_work(schedule):
    """Idle ticks of a stage over the ticks that it works."""
    return schedule.bubble / (1 - schedule.bubble)


def ticks(schedule):
    return {
        (stage, op): tick
        for tick, ops in enumerate(schedule.table_TS)
        for stage, op in enumerate(ops)
        if op is not None
    }


@every_schedule
@sizes
def test_every_operation_happens_exactly_once(name, num_stages, num_microbatches):
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    kinds = {op.kind for op in schedule.rows[0]}
    wanted = [
        Action(kind, m, c)
        for kind in sorted(kinds)
        for m in range(schedule.num_microbatches)
        for c in range(schedule.num_chunks)
    ]
    assert kinds in ({FORWARD, BACKWARD}, {FORWARD, BACKWARD, WEIGHT})
    for row in schedule.rows:
        assert sorted(row) == sorted(wanted)


@every_schedule
@sizes
def test_microbatches_go_down_the_parts_and_back_up(name, num_stages, num_microbatches):
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    tick = ticks(schedule)
    places = [(s, c) for c in range(schedule.num_chunks) for s in range(num_stages)]
    for m in range(schedule.num_microbatches):
        way = [tick[s, Action(FORWARD, m, c)] for s, c in places]
        way += [tick[s, Action(BACKWARD, m, c)] for s, c in reversed(places)]
        assert all(a < b for a, b in itertools.pairwise(way))
        for s, c in places:
            later = tick.get((s, Action(WEIGHT, m, c)), way[-1] + 1)
            assert tick[s, Action(BACKWARD, m, c)] < later


@formula(stages, microbatches)
def test_gpipe_keeps_all_microbatches(num_stages, num_microbatches):
    schedule = gpipe(num_stages, num_microbatches)
    assert schedule.num_ticks == 2 * (num_microbatches + num_stages - 1)
    assert bubble_per_work(schedule) == pytest.approx((num_stages - 1) / num_microbatches)
    assert schedule.peak_stash == (num_microbatches,) * num_stages


@formula(stages, microbatches)
def test_1f1b_takes_as_long_and_keeps_less(num_stages, num_microbatches):
    schedule = one_f_one_b(num_stages, num_microbatches)
    assert schedule.num_ticks == 2 * (num_microbatches + num_stages - 1)
    assert bubble_per_work(schedule) == pytest.approx((num_stages - 1) / num_microbatches)
    assert schedule.peak_stash == tuple(
        min(num_microbatches, num_stages - s) for s in range(num_stages)
    )


@formula(st.integers(1, 10), st.integers(1, 6), st.integers(1, 6))
def test_interleaving_divides_the_bubble(num_stages, groups, num_chunks):
    num_microbatches = num_stages * groups
    schedule = interleaved(num_stages, num_microbatches, num_chunks)
    assert schedule.num_ticks == 2 * (num_microbatches * num_chunks + num_stages - 1)
    wanted = (num_stages - 1) / num_microbatches / num_chunks
    assert bubble_per_work(schedule) == pytest.approx(wanted)
    if num_chunks == 1:
        assert schedule.table_TS == one_f_one_b(num_stages, num_microbatches).table_TS
    else:
        assert schedule.peak_stash == tuple(
            min(
                num_microbatches * num_chunks,
                2 * (num_stages - s - 1) + (num_chunks - 1) * num_stages + 1,
            )
            for s in range(num_stages)
        )


@formula(stages, st.integers(0, 30))
def test_zero_bubble_h1_has_a_third_of_the_bubble(num_stages, more):
    num_microbatches = num_stages + more
    schedule = zero_bubble_h1(num_stages, num_microbatches)
    assert schedule.num_ticks == 3 * num_microbatches + num_stages - 1
    assert max(schedule.peak_stash) <= num_stages
    # 1F1B, whose backward is both gradients, waits three such ticks for each stage but one.
    whole = replay(
        one_f_one_b(num_stages, num_microbatches), [1.0] * num_stages, [2.0] * num_stages
    )
    assert 3 * (schedule.num_ticks - 3 * num_microbatches) == pytest.approx(idle_seconds(whole)[0])


@every_schedule
@sizes
def test_every_schedule_is_valid_within_its_own_stash_and_reads_back(name, num_stages, number):
    schedule = SCHEDULES[name](num_stages, number)
    again = schedule_from_table(
        schedule.written, name=schedule.name, stash_limits_S=schedule.peak_stash
    )
    assert again == schedule
    less = [peak - 1 for peak in schedule.peak_stash]
    with pytest.raises(PlanError, match=f"makes {less[0] + 1} activations kept, of {less[0]} "):
        schedule_from_table(schedule.written, stash_limits_S=less)


TABLE = one_f_one_b(2, 2).written  # F0 -, F1 F0, - B0, B0 F1, - B1, B1 -


def changed(*changes):
    table = [list(tick) for tick in TABLE]
    for tick, stage, text in changes:
        table[tick][stage] = text
    return table


FAILURES = {
    "a result of the same tick": (
        [(0, 1, "F0"), (1, 1, "")],
        ["tick 0, stage 1: F0 needs F0 of stage 0, which runs in tick 0; move it to tick 1 or"],
    ),
    "a backward before its forward": (
        [(1, 1, "B0"), (2, 1, "F0")],
        ["tick 1, stage 1: B0 needs F0, which runs in tick 2; move it to tick 3 or later"],
    ),
    "a backward before its forward, which others wait for": (
        [(0, 0, "B0"), (3, 0, "F0")],
        [
            "tick 0, stage 0: B0 needs F0, which runs in tick 3; move it to tick 4 or later",
            "tick 0, stage 0: B0 needs B0 of stage 1, which runs in tick 2; move it to tick 3 or",
            "tick 1, stage 1: F0 needs F0 of stage 0, which runs in tick 3; move it to tick 4 or",
        ],
    ),
    "a backward before the next stage's": (
        [(2, 0, "B0"), (3, 0, "")],
        ["tick 2, stage 0: B0 needs B0 of stage 1, which runs in tick 2"],
    ),
    "an operation left out": ([(5, 0, "")], ["stage 0: never does B1; add them"]),
    "an operation done twice": (
        [(2, 0, "F1")],
        ["tick 2, stage 0: F1 was already done in tick 1; remove one"],
    ),
    "weight gradients of some only": (
        [(5, 1, "W1")],
        ["stage 0: never does W0, W1; add them", "stage 1: never does W0; add them"],
    ),
    "chunks of some only": ([(4, 0, "F0.1")], ["stage 1: never does F0.1, F1.1, B0.1, B1.1"]),
    "no operation": (
        [(2, 0, "f1"), (4, 0, "F1.")],
        ["tick 2, stage 0: 'f1' is no operation", "tick 4, stage 0: 'F1.' is no operation"],
    ),
    "several at once": (
        [(0, 0, "F1"), (1, 0, ""), (4, 1, "B0")],
        [
            "tick 4, stage 1: B0 was already done in tick 2",
            "stage 0: never does F0",
            "stage 1: never does B1",
        ],
    ),
}


@pytest.mark.parametrize(("changes", "says"), FAILURES.values(), ids=FAILURES)
def test_a_table_that_cannot_run_is_refused_naming_its_ticks(changes, says):
    with pytest.raises(PlanError) as caught:
        schedule_from_table(changed(*changes), name="mine")
    assert "schedule mine cannot run" in str(caught.value)
    for text in says:
        assert text in str(caught.value)


def test_a_weight_gradient_before_its_backward_is_refused():
    table = [("F0",), ("W0",), ("B0",)]
    with pytest.raises(PlanError, match="tick 1, stage 0: W0 needs B0, which runs in tick 2"):
        schedule_from_table(table)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "holds no operation"),
        ([[""]], "holds no operation"),
        ([["F0", ""], ["B0"]], r"tick 1: \['B0'\] is not a list of 2 texts"),
        (["F0", "B0"], "tick 0: 'F0' is not a list"),
        ([["F0"], [None], ["B0"]], "tick 1, stage 0: None is no operation"),
    ],
)
def test_what_is_no_table_is_refused(table, says):
    with pytest.raises(PlanError, match=says):
        schedule_from_table(table)


def test_a_table_over_its_stash_is_refused_naming_the_tick():
    with pytest.raises(PlanError, match="tick 1, stage 0: F1 makes 2 activations kept, of 1 allo"):
        schedule_from_table(TABLE, stash_limits_S=(1, 1))
    with pytest.raises(PlanError, match="1 stash limits for 2 stages"):
        schedule_from_table(TABLE, stash_limits_S=(2,))


@hypothesis.settings(max_examples=examples(30, 100))
@hypothesis.given(st.sampled_from(["1f1b", "zb-h1"]), st.randoms(use_true_random=False))
def test_operations_in_another_order_are_valid_only_where_their_needs_hold(name, random):
    """Two entries of a valid table exchanged, against the laws in words of their own."""
    schedule = make_schedule(name, 3, 4)
    table = [list(tick) for tick in schedule.table_TS]
    stage = random.randrange(3)
    one, other = random.sample(range(len(table)), 2)
    table[one][stage], table[other][stage] = table[other][stage], table[one][stage]
    schedule = dataclasses.replace(schedule, table_TS=tuple(map(tuple, table)))
    at = ticks(schedule)
    ways = []
    for m in range(4):
        way = [at[s, Action(FORWARD, m)] for s in range(3)]
        ways.append(way + [at[s, Action(BACKWARD, m)] for s in (2, 1, 0)])
        if name == "zb-h1":
            ways += [[at[s, Action(BACKWARD, m)], at[s, Action(WEIGHT, m)]] for s in range(3)]
    if all(a < b for way in ways for a, b in itertools.pairwise(way)):
        schedule_from_table(schedule.written)
    else:
        with pytest.raises(PlanError, match=r"stage \d: [FBW]\d needs [FBW]\d.* tick \d+; move"):
            schedule_from_table(schedule.written)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_a_schedule_is_found_by_its_name(name):
    schedule = make_schedule(name, 3, 6, 2 if name == "interleaved" else 1)
    assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == (name, 3, 6)
    assert schedule.num_chunks == (2 if name == "interleaved" else 1)


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(PlanError, match=re.escape("use one of '1f1b', 'gpipe', 'interleaved', ")):
        make_schedule("1F1B", 2, 2)
    with pytest.raises(PlanError, match="'gpipe' has 1 chunk per stage, not 2: use 'interleaved'"):
        make_schedule("gpipe", 2, 2, 2)


def test_interleaving_refuses_a_rest_and_says_the_multiple():
    with pytest.raises(PlanError, match="leave 2 over; use a multiple of 4"):
        interleaved(4, 6, 2)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0), (-1, 4)])
def test_a_pipeline_needs_stages_and_microbatches(num_stages, num_microbatches):
    for make in (gpipe, one_f_one_b, zero_bubble_h1):
        with pytest.raises(PlanError, match="use 1 or more"):
            make(num_stages, num_microbatches)


def test_rows_that_wait_for_one_another_are_refused():
    backward_first = [[Action(BACKWARD, 0), Action(FORWARD, 0)]] * 2
    with pytest.raises(PlanError, match="cannot go on"):
        from_rows("wrong", backward_first)


unlike = st.lists(st.floats(0.1, 5), min_size=4, max_size=4)


@every_schedule
@some
@hypothesis.given(unlike, unlike, unlike, st.floats(0, 2))
def test_a_replay_keeps_order_needs_and_sums(name, forward, backward, weight, send):
    schedule = SCHEDULES[name](4, 5)
    times = [values * schedule.num_chunks for values in (forward, backward, weight)]
    num_parts = 4 * schedule.num_chunks
    timeline = replay(
        schedule,
        times[0],
        times[1],
        weight_seconds_P=times[2],
        send_seconds_P=[send] * (num_parts - 1),
    )
    at = {(e.stage, Action(e.kind, e.microbatch, e.chunk)): e for e in timeline.events}
    for stage, row in enumerate(schedule.rows):
        events = [e for e in timeline.events if e.stage == stage]
        assert [Action(e.kind, e.microbatch, e.chunk) for e in events] == list(row)
        assert all(a.end_seconds <= b.start_seconds for a, b in itertools.pairwise(events))
    places = [(s, c) for c in range(schedule.num_chunks) for s in range(4)]
    for m in range(schedule.num_microbatches):
        for (s0, c0), (s1, c1) in itertools.pairwise(places):
            down = (
                at[s1, Action(FORWARD, m, c1)].start_seconds
                - at[s0, Action(FORWARD, m, c0)].end_seconds
            )
            up = (
                at[s0, Action(BACKWARD, m, c0)].start_seconds
                - at[s1, Action(BACKWARD, m, c1)].end_seconds
            )
            assert min(down, up) >= send - 1e-9
    work = schedule.num_microbatches * schedule.num_chunks
    has_weight = any(op.kind == WEIGHT for op in schedule.rows[0])
    for s in range(4):
        own = forward[s] + backward[s] + has_weight * weight[s]
        assert timeline.busy_seconds[s] == pytest.approx(work * own)
        assert idle_seconds(timeline)[s] >= -1e-9
        assert timeline.finish_seconds[s] <= timeline.makespan_seconds


@some
@hypothesis.given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 3), st.floats(0.1, 3))
def test_1f1b_with_like_stages_has_the_bubble_of_the_formula(
    num_stages, num_microbatches, forward, backward
):
    schedule = one_f_one_b(num_stages, num_microbatches)
    timeline = replay(schedule, [forward] * num_stages, [backward] * num_stages)
    wanted = (num_microbatches + num_stages - 1) * (forward + backward)
    assert timeline.makespan_seconds == pytest.approx(wanted)


@some
@hypothesis.given(st.floats(0.1, 3), st.integers(4, 9))
def test_zero_bubble_h1_has_the_bubble_of_its_paper(seconds, num_microbatches):
    like = [seconds] * 4
    timeline = replay(zero_bubble_h1(4, num_microbatches), like, like, weight_seconds_P=like)
    # (S - 1) (F + B - W), where the three take the same time.
    assert idle_seconds(timeline) == pytest.approx([3 * seconds] * 4)


def test_a_slow_stage_sets_the_pace():
    timeline = replay(one_f_one_b(3, 10), [1.0, 1.0, 2.0], [2.0, 2.0, 4.0])
    # Two forwards to reach the last stage, ten microbatches there, two backwards from it.
    assert timeline.makespan_seconds == 2 + 10 * 6 + 4


def test_a_stage_in_the_middle_fills_its_wait_with_the_next_forward():
    timeline = replay(one_f_one_b(3, 10), [1.0, 2.0, 1.0], [2.0, 4.0, 2.0])
    # The usual estimate, all stages once and the slowest nine times more, is 2 s too long.
    assert timeline.makespan_seconds == 64 < 12 + 9 * 6


@some
@hypothesis.given(unlike, unlike, st.floats(0, 1), st.integers(1, 9))
def test_blocking_transfers_are_never_faster(forward, backward, send, num_microbatches):
    schedule = one_f_one_b(4, num_microbatches)
    free = replay(schedule, forward, backward, send_seconds_P=[send] * 3)
    held = blocking_replay(schedule, forward, backward, [send] * 3)
    assert held.makespan_seconds >= free.makespan_seconds - 1e-9
    assert held.busy_seconds == pytest.approx(free.busy_seconds)


def test_blocking_transfers_hold_up_both_stages():
    # Two stages: each microbatch's two transfers lie on both stages' way.
    timeline = blocking_replay(one_f_one_b(2, 8), [1.0, 1.0], [2.0, 2.0], [0.5])
    assert timeline.makespan_seconds == pytest.approx(8 * (3 + 2 * 0.5) + 3)
    assert len(timeline.sends) == 16
    for transfer in timeline.sends:
        for event in timeline.events:
            assert (
                event.end_seconds <= transfer.start_seconds + 1e-9
                or event.start_seconds >= transfer.end_seconds - 1e-9
            )


def test_blocking_transfers_that_wait_in_a_circle_are_refused():
    # Each stage wants to send its chunk around the end before it takes what the other sends.
    with pytest.raises(PlanError, match="wait for one another"):
        blocking_replay(interleaved(2, 4, 2), [1.0] * 4, [2.0] * 4)
