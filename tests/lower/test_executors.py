"""Several microbatches at once on one device."""

import contextlib
import functools
import math
import threading
import types

import jax
import pytest

import hxla
from support.executor_jobs import NUM, ended, job
from support.inside.choose import with_executors
from support.inside.session import _opening, with_fastest_executors
from support.tiers import rows

LIMIT_SECONDS = 300  # of a wait that ends at once, however slow the machine is


@functools.cache
def by_one():
    """A plan of one microbatch after another, and how a run of it ends."""
    plan = job().plan(microbatch_size=2)
    return plan, ended(plan)


@pytest.mark.parametrize("executors", rows([2, 3, 5, NUM + 3], NUM + 3))
def test_no_number_of_executors_moves_a_bit(executors):
    plan, end = by_one()
    more = with_executors(plan, (executors,))
    assert more.numerics == plan.numerics
    assert ended(more) == end


def test_sums_that_are_let_go_give_the_same_bits():
    plan, end = by_one()
    released = plan.placement.model_copy(update={"sums": "released"})
    assert ended(with_executors(plan, (3,)).replaced(placement=released)) == end


def test_sums_that_are_let_go_lend_their_memory_to_the_totals():
    plan, _ = by_one()
    lent = {}
    for word in ("kept", "released"):
        placement = plan.placement.model_copy(update={"sums": word})
        with job().open(plan.replaced(placement=placement), quiet=True) as session:
            session._programs.compile_each()
            stats = [p.memory_analysis() for p in session._programs.reducer.programs]
            lent[word] = sum(own.alias_size_in_bytes for own in stats)
    assert lent["kept"] == 0
    assert lent["released"] >= sum(4 * math.prod(own.shape) for own in plan.parameters)


#: Memory of chains, with the microbatches of each device.
CHAINS = {
    "zero 2": ({"zero": 2}, (7, 5)),
    "waves": ({"zero": 2, "waves": 2, "recompute": "none"}, (11, 1)),
    "zero 3": ({"zero": 3, "offload": {"parameters": "host"}}, (12, 0)),
    "stash": ({"zero": 2, "recompute": "none", "offload": {"stash": "host"}}, (5, 7)),
    "a chain's stash": ({"recompute": "none", "offload": {"stash": "host"}}, (5, 7)),
}


@pytest.mark.parametrize("name", rows(CHAINS))
def test_executors_of_segments_move_no_bit(name):
    memory, counts = CHAINS[name]
    settings = {"memory": {"recompute": "boundaries", "segments": 3} | memory}
    jobs = [job((0, 1), {"executors": num}, **settings) for num in (1, 3)]
    plans = [own.plan(microbatch_size=2, counts=list(counts)) for own in jobs]
    assert plans[0].numerics == plans[1].numerics
    assert [replica.executors for replica in plans[1].replicas] == [3, 3]
    assert ended(plans[1], jobs[1]) == ended(plans[0], jobs[0])


@contextlib.contextmanager
def meeting(session, num):
    """Microbatches that go on only when so many of them are under way."""
    barrier, [runner] = threading.Barrier(num), session._programs.runners
    programs = runner._programs.of(0)
    run = programs["loss"]

    def meet(*arguments):
        barrier.wait(timeout=LIMIT_SECONDS)
        return run(*arguments)

    programs["loss"] = meet
    yield
    programs["loss"] = run


def test_microbatches_are_under_way_at_once():
    """Each waits until another one does: one after another they would wait for ever."""
    plan = job().plan(microbatch_size=2)
    with job().open(with_executors(plan, (3,)), steps=2) as session, meeting(session, 3):
        records = list(session)
    assert [record.loss for record in records] == by_one()[1][0][:2]


def test_a_microbatch_that_fails_ends_the_step(monkeypatch):
    plan = job().plan(microbatch_size=2)
    with job().open(with_executors(plan, (2,)), steps=2) as session:
        [runner] = session._programs.runners

        def fail(*arguments):
            raise RuntimeError("no memory is left")

        monkeypatch.setitem(runner._programs.of(0), "loss", fail)
        with pytest.raises(RuntimeError, match="no memory is left"):
            session.step()


def test_settings_ask_for_executors():
    plan = job(cluster={"executors": 3}).plan(microbatch_size=2)
    assert [replica.executors for replica in plan.replicas] == [3]
    assert "3 at once" in plan.explain()
    assert plan.with_counts((NUM,)).replicas == plan.replicas
    assert hxla.Plan.from_json(plan.to_json()) == plan
    assert ended(plan, job(cluster={"executors": 3})) == by_one()[1]


def test_what_cannot_run_at_once_is_refused():
    plan = job().plan(microbatch_size=2)
    floats = plan.replaced(sums=plan.sums.model_copy(update={"kind": "float"}))
    with pytest.raises(hxla.PlanError, match="executors take microbatches in no fixed order"):
        with_executors(floats, (2,))
    cut = job(devices=(0, 1)).plan(stages=2, microbatch_size=2)
    with pytest.raises(hxla.PlanError, match="a copy has axes here: use executors 1"):
        with_executors(cut, (2,))
    with pytest.raises(hxla.ConfigError, match="executors"):
        job(cluster={"executors": 0}).plan(microbatch_size=2)


def test_each_executor_has_memory_of_its_own():
    """As XLA has it: the sums and the temporaries of a microbatch, once for each."""
    plan = job().plan(microbatch_size=2)
    bytes_of = {}
    for num in (1, 2, 4):
        with job().open(with_executors(plan, (num,)), steps=1) as session:
            [runner] = session._programs.runners
            session._programs.compile_each()  # one executor runs a step as one program
            sums = sum(x.nbytes for x in jax.tree.leaves(runner.empty()))
            temporaries = runner._programs.of(0)["loss"].memory_analysis().temp_size_in_bytes
            bytes_of[num] = runner.memory_bytes(sums) + runner.kept_bytes
            assert num == 1 or session.running_plan.memory_bytes >= bytes_of[num]
    assert bytes_of[2] - bytes_of[1] >= sums + temporaries
    assert bytes_of[4] - bytes_of[1] == 3 * (bytes_of[2] - bytes_of[1])


class Tried:
    """A stepper whose microbatches take so long with so many executors."""

    def __init__(self, seconds):
        self.seconds, self.executors, self.num_run = seconds, 1, 0

    def use(self, replicas):
        self.executors = replicas[0].executors

    def seconds_of_microbatches(self, i, batch, num, *, repeats, apart):
        self.num_run += repeats * num
        return [self.seconds[self.executors]] * repeats


def chosen(monkeypatch, seconds, num_steps=10_000, most=8):
    monkeypatch.setattr(_opening, "_most_executors", lambda programs: most)
    plan = job().plan(microbatch_size=2)
    reducer = types.SimpleNamespace(
        replicas=plan.replicas, local=[types.SimpleNamespace(index=0, is_led_here=True)]
    )
    stepper, programs = Tried(seconds), types.SimpleNamespace(reducer=reducer, plan=plan)
    monkeypatch.setattr(_opening, "use_executors", lambda _, replicas: stepper.use(replicas))
    found, each = with_fastest_executors(
        stepper, programs, plan, None, [seconds[1]], 0.015, num_steps
    )
    assert stepper.executors == found.replicas[0].executors
    assert each == [seconds[stepper.executors]]
    return found.replicas[0].executors, stepper.num_run


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 1.1}, 1),
        ({1: 1.0, 2: 0.99}, 1),  # less than the least gain
        ({1: 1.0, 2: 0.7, 4: 0.71}, 2),
        ({1: 1.0, 2: 0.7, 4: 0.5, 8: 0.4}, 8),
    ],
)
def test_more_executors_are_tried_while_they_pay(monkeypatch, seconds, best):
    assert chosen(monkeypatch, seconds)[0] == best


def test_trials_take_little_of_the_work(monkeypatch):
    seconds = {1: 1.0, 2: 0.5, 4: 0.3, 8: 0.2}
    for num_steps in (1, 50, 100, 150, 300, 500, 1000):
        executors, num_run = chosen(monkeypatch, seconds, num_steps)
        assert num_run <= num_steps * NUM / 20
        assert (executors > 1) == (num_steps >= 100)  # two runs of four microbatches, five times
    short = {num: each / 1000 for num, each in seconds.items()}
    assert chosen(monkeypatch, short, 150)[0] == 1  # those of a whole step
    assert chosen(monkeypatch, short, 250)[0] == 2
