"""A lowered schedule, run on names instead of arrays: every read finds what it should."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hxla import Action, make_schedule, schedule_from_table
from support.inside.lower import FIELDS, KINDS, _actions
from support.inside.schedule import BACKWARD, FORWARD, WEIGHT, needs
from support.tiers import examples

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")


def named(name, num_stages, rounds, num_chunks):
    """Any number of microbatches, for `interleaved` the multiples of the stages."""
    if name == "interleaved":
        return make_schedule(name, num_stages, num_stages * rounds, num_chunks)
    return make_schedule(name, num_stages, rounds)


def shuffled(random, num_stages, num_microbatches, num_chunks):
    """A table of one's own: in each tick a stage does anything that can be done, or waits."""
    every = [
        (s, Action(kind, m, c))
        for s in range(num_stages)
        for kind in (FORWARD, BACKWARD)
        for m in range(num_microbatches)
        for c in range(num_chunks)
    ]
    done, table = set(), []
    while len(done) < len(every):
        tick = []
        for s in range(num_stages):
            ready = [
                op
                for where, op in every
                if where == s
                and (s, op) not in done
                and needs(op, s, num_stages, num_chunks) in (None, *done)
                and (op.kind == FORWARD or (s, Action(FORWARD, op.microbatch, op.chunk)) in done)
            ]
            tick.append(random.choice(ready) if ready and random.random() < 0.7 else None)
        done |= {(s, op) for s, op in enumerate(tick) if op is not None}
        table.append(["" if op is None else str(op) for op in tick])
    return schedule_from_table(table)


def simulate(schedule, *, recompute):
    """Run the table's integers; returns the operations that ran, by tick and stage."""
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    num_parts = num_stages * num_chunks
    lowered = _actions.lower(schedule, recompute=recompute, programs=range(num_parts))
    assert lowered.table_TSF.shape == (schedule.num_ticks, num_stages, len(FIELDS))
    assert lowered.table_TSF.min() >= 0
    sets = _actions.exchanges(num_stages, num_chunks)
    inputs = [[None] * lowered.num_inputs for _ in range(num_stages)]
    grads = [[None] * lowered.num_grads for _ in range(num_stages)]
    residuals = [[None] * lowered.num_residuals for _ in range(num_stages)]
    down, up = [None] * num_stages, [None] * num_stages
    ran = []
    for rows in lowered.table_TSF:
        tick = []
        fields = [dict(zip(FIELDS, map(int, row), strict=True)) for row in rows]
        for s, f in enumerate(fields):
            if f["action"] == 0:
                tick.append(None)
                continue
            part, kind = divmod(f["action"] - 1, len(KINDS))
            kind, m = KINDS[kind], f["microbatch"]
            assert part % num_stages == s
            tick.append(Action(kind, m, part // num_stages))
            input_is_there = part == 0 or inputs[s][f["input"]] == ("made by", part - 1, m)
            if kind == FORWARD:
                assert input_is_there
                if not recompute:
                    residuals[s][f["residual"]] = ("kept by", part, m)
                if part < num_parts - 1:
                    down[s] = ("made by", part, m)
            if kind == BACKWARD:
                if recompute:
                    assert input_is_there
                else:
                    assert residuals[s][f["residual"]] == ("kept by", part, m)
                if part < num_parts - 1:
                    assert grads[s][f["grad"]] == ("gradient by", part + 1, m)
                if part > 0:
                    up[s] = ("gradient by", part, m)
        (exchange,) = {f["exchange"] for f in fields}
        if sets[exchange]:
            below = {(b + 1) % num_stages: down[b] for b in sets[exchange]}
            above = {b: up[(b + 1) % num_stages] for b in sets[exchange]}
            for s, f in enumerate(fields):
                # A stage that nobody sends to receives zeros, and they go somewhere too.
                inputs[s][f["down"]] = below.get(s)
                grads[s][f["up"]] = above.get(s)
        ran.append(tuple(tick))
    assert tuple(ran) == schedule.table_TS
    return lowered


@settings(max_examples=examples(30, 300))
@given(
    st.sampled_from(NAMES), st.integers(2, 8), st.integers(1, 9), st.integers(1, 4), st.booleans()
)
def test_every_buffer_holds_what_is_read_from_it(name, num_stages, rounds, chunks, recompute):
    schedule = named(name, num_stages, rounds if name != "interleaved" else 1 + rounds % 3, chunks)
    simulate(schedule, recompute=recompute)


@settings(max_examples=examples(25, 200))
@given(
    st.randoms(use_true_random=False),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_table_in_any_order_finds_what_it_reads(random, num_stages, num, chunks, recompute):
    simulate(shuffled(random, num_stages, num, chunks), recompute=recompute)


@settings(max_examples=examples(25, 200))
@given(st.sampled_from(NAMES), st.integers(2, 8), st.integers(1, 9), st.integers(1, 3))
def test_what_crosses_a_boundary_is_in_the_set_of_its_tick(name, num_stages, rounds, num_chunks):
    schedule = named(name, num_stages, rounds if name != "interleaved" else 2, num_chunks)
    num_parts = num_stages * schedule.num_chunks
    sets = _actions.exchanges(num_stages, schedule.num_chunks)
    table_TSF = _actions.lower(schedule, recompute=True, programs=range(num_parts)).table_TSF
    assert sets[0] == ()
    for row, ops in zip(table_TSF[:, :, FIELDS.index("exchange")], schedule.table_TS, strict=True):
        sent = {
            s if op.kind == FORWARD else (s - 1) % num_stages
            for s, op in enumerate(ops)
            if op is not None
            and op.kind != WEIGHT
            and (op.chunk * num_stages + s != (num_parts - 1 if op.kind == FORWARD else 0))
        }
        assert sent <= set(sets[row[0]])
        # Nothing travels in a tick in which nobody has anything to send.
        assert sent or not sets[row[0]]


def test_neighbours_take_turns_in_the_steady_state():
    sets = _actions.exchanges(4, 1)
    assert sets == ((), (0, 2), (1,), (0, 1, 2))
    table = _actions.lower(make_schedule("1f1b", 4, 16), recompute=True, programs=range(4))
    used = [sets[i] for i in table.table_TSF[8:-8, 0, FIELDS.index("exchange")]]
    assert all({a, b} == {(0, 2), (1,)} for a, b in itertools.pairwise(used))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_buffers_of_1f1b_do_not_grow_with_microbatches_and_those_of_gpipe_do(num_stages, recompute):
    def sizes(name, num):
        found = simulate(make_schedule(name, num_stages, num), recompute=recompute)
        return found.num_inputs, found.num_grads, found.num_residuals

    few, many = 2 * num_stages, 10 * num_stages
    assert sizes("1f1b", few) == sizes("1f1b", many)
    kept = sizes("1f1b", many)[0 if recompute else 2]
    # With inputs one more that waits for its forward, and one for what nobody reads.
    assert kept <= num_stages + int(recompute)
    assert sizes("gpipe", many)[0 if recompute else 2] >= many


@pytest.mark.parametrize("name", NAMES)
def test_residuals_take_as_many_buffers_as_the_schedule_keeps(name):
    for num_stages, rounds, num_chunks in itertools.product((2, 3, 5), (1, 2, 4, 7), (1, 2)):
        schedule = named(name, num_stages, rounds, num_chunks)
        found = simulate(schedule, recompute=False)
        assert found.num_residuals == max(schedule.peak_stash)


@settings(max_examples=examples(25, 200))
@given(
    st.sampled_from(NAMES),
    st.integers(2, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 3),
    st.booleans(),
)
def test_what_does_for_many_microbatches_does_for_few(
    name, num_stages, few, more, num_chunks, recompute
):
    """A program is compiled for the most, and runs any number."""

    def sizes(rounds):
        schedule = named(name, num_stages, rounds, num_chunks)
        programs = range(num_stages * schedule.num_chunks)
        found = _actions.lower(schedule, recompute=recompute, programs=programs)
        return len(found.table_TSF), found.num_inputs, found.num_grads, found.num_residuals

    assert all(a <= b for a, b in zip(sizes(few), sizes(few + more), strict=True))


def test_parts_that_compute_the_same_share_the_number_of_an_action():
    schedule = make_schedule("interleaved", 2, 2, 2)
    table = _actions.lower(schedule, recompute=True, programs=[0, 1, 1, 3]).table_TSF
    numbers = {
        (part, kind): _actions.number(program, kind)
        for part, program in enumerate([0, 1, 1, 3])
        for kind in (FORWARD, BACKWARD)
    }
    assert len(set(numbers.values())) == 6
    for ops, rows in zip(schedule.table_TS, table[:, :, 0], strict=True):
        for s, (op, number) in enumerate(zip(ops, rows, strict=True)):
            assert number == (0 if op is None else numbers[2 * op.chunk + s, op.kind])
