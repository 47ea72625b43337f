"""The authority: what is true of thousands of random events, and of chosen ones."""

import dataclasses
import inspect

import pytest

from support.elastic_world import World, commits_of
from support.inside.launch import (
    AskedBack,
    Completed,
    Copied,
    Discard,
    Exited,
    Form,
    Joined,
    KeptState,
    Kill,
    Leave,
    Ledger,
    LeftState,
    MemberEvent,
    MembershipRules,
    Offered,
    Passed,
    Prepare,
    Prepared,
    Release,
    Save,
    Saved,
    Stop,
    Tell,
    Vanished,
    _authority,
    _membership,
    added,
    advance,
    begin,
    chosen,
    differing,
    newest,
    pruned,
)
from support.tiers import rows

RULES = MembershipRules(min_devices=2, max_devices=4, num_steps=100, num_microbatches=8)
ENDLESS = dataclasses.replace(RULES, num_steps=10**6, most_failures=10**6)


@pytest.mark.parametrize("seed", rows(range(20), *range(6)))
def test_of_random_events_none_loses_a_commit_or_makes_two_authorities(seed):
    """500 events each; the world asserts all of it after every single one."""
    world = World(seed, ENDLESS)
    for _ in range(500):
        world.happen(fault_share=0.12)
    before = world.known.ledger.end
    world.settle()
    assert world.known.phase in ("running", "waiting")
    if world.known.phase == "waiting":
        assert len(chosen(world.known)) < RULES.min_devices
    else:
        assert set(world.known.generation.members) == set(chosen(world.known))
        assert world.known.ledger.end > before


@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("seed", rows(range(5), 0, 1))
def test_of_copies_every_few_steps_the_newest_is_found_and_no_needed_one_is_freed(
    seed, every, spread
):
    """States in parts that a kill takes along: the world asserts that no more is lost than that."""
    world = World(100 + seed, ENDLESS, copies_every=every, spread=spread)
    for _ in range(500):
        world.happen(fault_share=0.06)
    before = world.known.ledger.end
    world.settle()
    assert world.counts["Form"] > 1
    assert world.known.phase == "waiting" or world.known.ledger.end > before


class Run:
    """Events at growing times, and what was to be done about the last one."""

    def __init__(self, rules=RULES, saved_step=0):
        self.known, self.at = begin(rules, saved_step), 0.0

    def __call__(self, kind, *names, after=0.1, **more):
        self.at += after
        todo = ()
        for name in names or (None,):
            if kind in (Offered, AskedBack, Vanished):
                more = {**more, "device": name}
            elif name is not None:
                number = more.get("generation", self.known.generation.number)
                more = {**more, "generation": number, "device": name}
            self.known, todo = advance(self.known, kind(at_seconds=self.at, **more))
        return todo

    @property
    def phase(self):
        return self.known.phase


def training(num=3, rules=RULES):
    run = Run(rules)
    names = [f"gpu{i}" for i in range(num)]
    run(Offered, *names[: rules.min_devices])
    run(Joined, *names[: rules.min_devices])
    for name in names[rules.min_devices :]:
        run(Offered, name)
        members = run.known.coming.members
        run(Prepared, *members, generation=run.known.coming.number)
        run(LeftState, *run.known.generation.members, step=run.known.ledger.end + 1, digest="x")
        run(Exited, *run.known.generation.members)
        run(Joined, *members)
    return run


def kinds(todo):
    return [type(one) for one in todo if not isinstance(one, Tell)]


def test_a_run_waits_for_minp_and_then_starts_from_its_checkpoint():
    run = Run(saved_step=7)
    assert run(Offered, "a") == ()
    assert run.phase == "waiting"
    [form] = run(Offered, "b")
    assert (form.generation.members, form.generation.first_step) == (("a", "b"), 7)
    assert form.sources == ()
    assert run.phase == "forming"
    run(Joined, "a")
    assert run.phase == "forming"
    run(Joined, "b")
    assert run.phase == "running"


def test_a_planned_growth_prepares_stops_hands_over_and_forms():
    run = training(2)
    run(Completed, "gpu0", step=4)
    [prepare] = run(Offered, "gpu2")
    coming = prepare.generation
    assert (run.phase, coming.members) == ("preparing", ("gpu0", "gpu1", "gpu2"))
    run(Completed, "gpu1", step=5)  # it trains on meanwhile
    assert run(Prepared, "gpu0", "gpu1", generation=coming.number) == ()
    assert kinds(run(Prepared, "gpu2", generation=coming.number)) == [Stop]
    assert run.phase == "handing over"
    run(LeftState, "gpu0", "gpu1", step=6, digest="x")
    assert run(Exited, "gpu0") == ()
    [form] = run(Exited, "gpu1")
    assert form.generation == dataclasses.replace(coming, first_step=6)  # the prepared processes
    assert [one.device for one in form.sources] == ["gpu0"]
    assert run.known.ledger.end == 6


def test_a_member_that_does_not_end_once_states_are_handed_over_is_killed():
    """One that was killed after it left its state is waited for by the other's last collective."""
    run = training(3)
    run(Completed, "gpu0", step=run.known.ledger.end + 1)
    [prepare] = run(AskedBack, "gpu2", notice_seconds=600.0)
    coming = prepare.generation
    assert kinds(run(Prepared, *coming.members, generation=coming.number)) == [Stop]
    step = run.known.ledger.end + 1
    run(LeftState, "gpu0", "gpu1", step=step, digest="x")
    assert run(Exited, "gpu0") == ()
    assert run(Passed, after=RULES.collect_seconds) == ()  # gpu2 still writes
    run(LeftState, "gpu2", step=step, digest="x")
    [kill] = run(Passed, after=RULES.collect_seconds)
    assert isinstance(kill, Kill)
    assert kill.devices == {"gpu1", "gpu2"}
    assert run(Exited, "gpu2") == ()
    form, released = run(Exited, "gpu1")
    assert form.generation == dataclasses.replace(coming, first_step=step)  # what was prepared
    assert isinstance(released, Release)
    assert run.known.num_failures == 0


def test_a_step_that_is_done_ends_a_row_of_failures():
    run = training(3)
    run.known = dataclasses.replace(run.known, num_failures=2)
    run(Completed, "gpu0", step=run.known.ledger.end + 1)
    assert run.known.num_failures == 0


def test_a_kill_lets_the_others_leave_their_state_and_goes_on_from_the_newest():
    run = training(3)
    first = run.known.ledger.end
    run(Completed, "gpu0", step=first + 1)
    [leave] = [t for t in run(Exited, "gpu0") if isinstance(t, Leave)]
    assert leave.devices == {"gpu1", "gpu2"}
    run(LeftState, "gpu1", step=first, digest="x")
    run(LeftState, "gpu2", step=first + 1, digest="y")
    run(Exited, "gpu1")
    [form] = run(Exited, "gpu2")
    assert [one.device for one in form.sources] == ["gpu2"]
    assert form.generation.first_step == first + 1
    assert form.generation.members == ("gpu0", "gpu1", "gpu2")  # its device may be used again
    assert run.known.ledger.num_lost == 0


def test_a_frozen_member_is_asked_first_and_killed_when_it_does_not_answer():
    run = training(2)
    run(MemberEvent, "gpu0", after=4.0)
    assert kinds(run(Passed, after=2.0)) == [Leave]  # gpu1 was silent for 6 s
    run(LeftState, "gpu0", step=9, digest="x")
    [kill] = run(Exited, "gpu0")  # nothing is lost with gpu1, so it is not waited for
    assert isinstance(kill, Kill)
    assert kill.devices == {"gpu1"}
    assert kinds(run(Exited, "gpu1")) == [Form]


def test_a_frozen_member_with_the_newest_state_is_waited_for():
    run = training(2)
    first = run.known.ledger.end
    run(Completed, "gpu1", step=first + 1)
    run(MemberEvent, "gpu0", after=4.0)
    assert kinds(run(Passed, after=2.0)) == [Leave]
    run(LeftState, "gpu0", step=first, digest="x")
    assert run(Exited, "gpu0") == ()
    [kill] = run(Passed, after=RULES.collect_seconds)
    assert isinstance(kill, Kill)


def test_whoever_cannot_be_killed_is_left_out_and_not_believed():
    run = training(3)
    old = run.known.generation.number
    run(Exited, "gpu0")
    run(LeftState, "gpu1", step=9, digest="x")
    run(Exited, "gpu1")
    run(Passed, after=RULES.collect_seconds)
    [form] = [t for t in run(Passed, after=RULES.collect_seconds) if isinstance(t, Form)]
    assert set(form.generation.members) == {"gpu0", "gpu1"}
    run(Joined, "gpu0", "gpu1")
    before = run.known
    for event in (Completed, LeftState, Exited, Joined, Prepared, MemberEvent):
        more = {"step": 50} if event in (Completed, LeftState) else {}
        more |= {"digest": "z"} if event is LeftState else {}
        assert run(event, "gpu2", generation=old, **more) == ()
        assert run.known == before


def test_below_minp_the_state_is_saved_before_its_device_is_released():
    run = training(2)
    assert kinds(run(AskedBack, "gpu1", notice_seconds=30.0)) == [Stop]
    run(LeftState, "gpu1", step=5, digest="x")
    run(Exited, "gpu1")
    todo = run(Exited, "gpu0")  # it left nothing: gpu1 alone has step 5
    assert kinds(todo) == [Leave] or run.phase in ("collecting", "waiting")
    assert run.phase == "waiting"
    assert Save in kinds(todo)
    assert Release not in kinds(todo)
    assert kinds(run(Saved, step=5)) == [Release]


def test_asking_back_is_a_planned_change():
    run = training(3)
    [prepare] = run(AskedBack, "gpu1", notice_seconds=100.0)
    assert isinstance(prepare, Prepare)
    assert prepare.generation.members == ("gpu0", "gpu2")
    assert kinds(run(Offered, "gpu1")) == [Discard]  # it may stay after all
    assert run.phase == "running"


def test_a_device_that_takes_another_place_is_prepared_for_while_both_are_there():
    """With minP members, one of whom is asked back: without the new one they would end at once."""
    run = training(2)
    new = Offered(at_seconds=run.at, device="gpu9")
    assert run.known.can_note(new)
    run.known = run.known.noted(new)
    assert run.phase == "running"
    [prepare] = run(AskedBack, "gpu0", notice_seconds=100.0)
    assert prepare.generation.members == ("gpu1", "gpu9")
    assert run.phase == "preparing"
    assert not run.known.can_note(AskedBack(at_seconds=run.at, device="who", notice_seconds=1.0))


def test_a_late_device_is_waited_for_where_without_it_there_are_too_few():
    """It comes in another's place, at a notice that is shorter than it takes to be prepared."""
    run = training(2)
    run.known = run.known.noted(Offered(at_seconds=run.at, device="gpu9"))
    run(AskedBack, "gpu0", notice_seconds=8.0)
    assert kinds(run(Passed, after=3.5)) == [Stop]
    coming = run.known.coming.members
    run(LeftState, "gpu0", "gpu1", step=run.known.ledger.end + 1, digest="x")
    [form, _] = kinds(run(Exited, "gpu0", "gpu1"))
    assert form is Form
    assert run.known.generation.members == coming == ("gpu1", "gpu9")


def test_an_offer_is_not_forgotten_behind_a_device_that_is_gone_already():
    run = Run()
    run(Offered, "gpu0")
    run.known = run.known.noted(Offered(at_seconds=run.at, device="gpu1"))
    assert kinds(run(AskedBack, "gpu7", notice_seconds=9.0)) == [Release, Form]
    assert run.known.generation.members == ("gpu0", "gpu1")


def test_a_short_notice_does_not_wait_for_what_is_not_prepared():
    run = training(3)
    run(AskedBack, "gpu1", notice_seconds=8.0)
    assert run.phase == "preparing"
    assert kinds(run(Passed, after=3.5)) == [Stop]


def test_a_device_that_is_not_prepared_in_time_is_not_used():
    run = training(2)
    run(Offered, "gpu2")
    run(Prepared, "gpu0", "gpu1", generation=run.known.coming.number)
    for _ in range(int(RULES.prepare_seconds)):
        run(MemberEvent, "gpu0", "gpu1", after=1.0)
    assert kinds(run(Passed)) == [Discard, Release]
    assert run.phase == "running"


def test_states_that_differ_are_not_used():
    def left(device, step, digest):
        return KeptState(device=device, step=step, digest=digest)

    same = left("a", 3, "x"), left("b", 3, "x")
    assert newest(same) == (same[0],)
    assert differing((*same, left("c", 4, "y"), left("d", 4, "z"))) == {(4, 0)}
    run = training(2)
    run(Exited, "gpu1")
    run(LeftState, "gpu0", step=4, digest="x")
    run(LeftState, "gpu1", step=4, digest="y")
    todo = run(Exited, "gpu0")
    assert next(t.words for t in todo if isinstance(t, Tell)).startswith("the states of step 4")
    assert run.known.generation.first_step == 0


def test_generations_that_make_no_step_end_the_run():
    run = training(2)
    for _ in range(RULES.most_failures):
        run(Exited, "gpu0")
        run(Exited, "gpu1")
        run(Joined, "gpu0", "gpu1")
    assert run.phase == "failed"
    assert run(Offered, "gpu5") == ()
    assert kinds(run(AskedBack, "gpu0", notice_seconds=1.0)) == [Release]


def test_the_last_checkpoint_finishes_a_run():
    run = training(2)
    run(Completed, "gpu0", step=RULES.num_steps)
    assert run.phase == "running"
    run(Saved, step=RULES.num_steps)
    assert run.phase == "finished"
    assert list(commits_of(run.known.ledger)) == [
        (step, m) for step in range(RULES.num_steps) for m in range(RULES.num_microbatches)
    ]


def test_the_ledger_takes_back_what_is_lost_and_counts_it():
    ledger = Ledger(num_microbatches=2).committed(1, 3).committed(1, 2).committed(2, 5)
    assert [(r.generation, r.first, r.end) for r in ledger.runs] == [(1, 0, 3), (2, 3, 5)]
    back = ledger.back_to(2)
    assert (back.end, back.num_lost) == (2, 3)
    assert back.back_to(9) == back
    assert list(commits_of(back.committed(3, 3))) == [(s, m) for s in range(3) for m in range(2)]


def test_every_event_is_handled_and_every_phase_can_be_late():
    events = {
        value
        for value in vars(_membership).values()
        if inspect.isclass(value) and issubclass(value, _membership.Happened)
    }
    assert events - {_membership.Happened, _membership.Wrote} == set(_authority._HANDLERS)
    phases = set(_membership.RunPhase.__args__)
    assert phases == set(_authority._LATE) | set(_membership.ENDED)


def part(device, step, which, *, generation=1, host="", spread=1, digest="x", num_parts=2):
    return KeptState(
        device=device,
        step=step,
        digest=digest,
        generation=generation,
        part=which,
        num_parts=num_parts,
        host=host,
        spread=spread,
    )


def test_a_state_in_parts_counts_when_all_of_them_are_there():
    older = part("a", 3, 0), part("b", 3, 1)
    assert newest((*older, part("a", 6, 0))) == older
    newer = part("a", 6, 0), part("b", 6, 1)
    assert newest((*older, *newer)) == newer
    assert newest((*older, part("a", 6, 0), part("b", 6, 1, generation=2))) == older
    # Another device has the part as well, and is to stay.
    assert newest((*newer, part("c", 6, 0)), {"a"}) == (part("c", 6, 0), newer[1])
    assert differing((*newer, part("c", 6, 0, digest="y"))) == {(6, 1)}


def test_older_copies_are_let_go_when_enough_hosts_have_each_part_of_a_newer_one():
    older = part("a", 3, 0, host="A", spread=2), part("b", 3, 1, host="B", spread=2)
    newer = part("a", 6, 0, host="A", spread=2), part("b", 6, 1, host="B", spread=2)
    kept = (*older, *newer)
    assert pruned(kept) == kept
    kept = added(kept, part("b", 6, 0, host="B", spread=2))
    assert pruned(kept) == kept
    assert pruned(added(kept, part("a", 6, 1, host="A", spread=2))) == (
        *newer,
        part("b", 6, 0, host="B", spread=2),
        part("a", 6, 1, host="A", spread=2),
    )
    one_host = [dataclasses.replace(one, host="A", spread=1) for one in newer]
    assert pruned((*older, *one_host)) == tuple(one_host)


def test_after_a_kill_a_generation_starts_from_the_newest_whole_copy():
    run = training(2)
    first = run.known.ledger.end
    for step in (first + 2, first + 4):
        for k, name in enumerate(("gpu0", "gpu1")):
            run(Completed, name, step=step)
            if (step, k) != (first + 4, 1):
                run(Copied, name, step=step, digest=f"{k} {step}", part=k, num_parts=2)
    run(Exited, "gpu1")  # before its second copy
    todo = run(Exited, "gpu0")
    [form] = [one for one in todo if isinstance(one, Form)] or [None]
    if form is None:
        run(Offered, "gpu9")
        form = next(one for one in run.last if isinstance(one, Form))
    assert form.generation.first_step == first + 2
    assert [(one.device, one.part) for one in form.sources] == [("gpu0", 0), ("gpu1", 1)]
    assert run.known.ledger.num_lost == 2
