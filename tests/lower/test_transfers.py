"""A steady step: what its devices read from the host, and the programs that it calls."""

import contextlib
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import families, models
from support.host_calls import host_calls
from support.inside.lower import _compile
from support.inside.session import Stepper
from support.tensor_gpt import gpt, text

CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


class Calls:
    """A compiled program that counts its calls."""

    def __init__(self, program, name, calls):
        self._program, self._name, self._calls = program, name, calls

    def __call__(self, *arguments):
        self._calls.append(self._name)
        return self._program(*arguments)


def counted(programs):
    """The names of the programs of sums and updates, in the order in which a session calls them."""
    calls = []
    reducer = programs.reducer
    reducer.programs = [Calls(p, "sum", calls) for p in reducer.programs]
    for update in programs._updates.each:
        named = zip(update.compiled, update.names, strict=True)
        update.compiled = [Calls(program, name, calls) for program, name in named]
    return calls


def job_of(optimizer, **options):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(64, 4)).astype(np.float32), "y": np.zeros((64, 1), np.float32)}
    return hxla.Job(
        lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
        data,
        lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).sum(1),
        optimizer,
        batch_size=16,
        shuffle=False,
        **options,
    )


@contextlib.contextmanager
def opened(optimizer, num=1, **options):
    job = job_of(optimizer, **options)
    with job.open(job.plan(microbatch_size=4, mesh=models.mesh(data=num))) as session:
        yield session


@pytest.mark.parametrize("num", [1, 2])
def test_a_steady_step_reads_nothing_from_the_host_but_its_batch(monkeypatch, num):
    name = "_run_at_once" if num == 1 else "_run_all"
    run = getattr(Stepper, name)

    @functools.wraps(run)
    def batch(*arguments):
        with jax.transfer_guard_host_to_device("allow"):
            return run(*arguments)

    with opened(CLIPPED, num) as session:
        for _ in range(3):
            session.step()
        monkeypatch.setattr(Stepper, name, batch)
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            records = [session.step() for _ in range(3)]
    assert [record.redone for record in records] == [0, 0, 0]
    assert all(record.gradient_norm > 0 for record in records)


def test_behind_its_microbatches_a_step_calls_the_sum_the_norm_and_the_update():
    with opened(CLIPPED, 2) as session:
        session.step()
        calls = counted(session._programs)
        session.step()
    each = ["a sum in the update"] * 2, ["the update"] * 2
    assert calls == ["sum", *each[0], *each[1]]


@pytest.mark.parametrize("form", ["tensor", "stage"])
def test_the_norm_of_shards_adds_two_arrays_however_many_parameters_there_are(form):
    """The largest magnitudes and the digits of all squares. Gloo adds arrays one by one."""
    job = hxla.Job(gpt(), text(), families.token_loss, CLIPPED, batch_size=16)
    options = {"rules": "decoder"} if form == "tensor" else {"stages": 2}
    plan = job.plan(microbatch_size=4, mesh=models.mesh(data=1, **{form: 2}), **options)
    with job.open(plan) as session:
        [update] = session._programs._updates.each
        programs = dict(zip(update.names, update.compiled, strict=True))
        found = hxla.inspect(programs["a sum in the update"]).main
    assert sum(len(c.arrays) for c in found.select("all-reduce")) == 2


@pytest.fixture
def like_a_gpu(monkeypatch):
    """The host does not wait for the sums of a step before its update."""
    monkeypatch.setattr(_compile, "_WAITING", frozenset())


@pytest.mark.usefixtures("like_a_gpu")
def test_an_update_that_nobody_waits_for_makes_its_norm():
    with opened(CLIPPED, 2) as session:
        session.step()
        calls = counted(session._programs)
        session.step()
    assert calls == ["sum", "the update", "the update"]


def test_a_large_step_on_a_gpu_is_three_calls_that_get_two_host_arrays():
    assert host_calls(job_of(CLIPPED), 4) == (3, 2)


def test_no_bit_depends_on_who_makes_the_norm(monkeypatch):
    ends = []
    for waiting in (frozenset({"cpu"}), frozenset()):
        monkeypatch.setattr(_compile, "_WAITING", waiting)
        with opened(CLIPPED, 2) as session:
            norms = [session.step().gradient_norm for _ in range(3)]
            ends.append((norms, session.gather(session.state.params)))
    assert min(ends[0][0]) > 0.1  # it clips
    jax.tree.map(np.testing.assert_array_equal, *ends)


def order_of(monkeypatch, session):
    """The order in which a step reads its sums and calls its update."""
    order, reducer = [], session._reducer
    told, update = reducer.told, session._stepper.update
    monkeypatch.setattr(reducer, "told", lambda *a: order.append("read") or told(*a))
    monkeypatch.setattr(session._stepper, "update", lambda: order.append("update") or update())
    session.step()
    return order


@pytest.mark.usefixtures("like_a_gpu")
def test_the_update_is_called_before_the_host_reads_the_sums(monkeypatch):
    with opened(optax.sgd(0.1), 2) as session:
        assert order_of(monkeypatch, session) == ["update", "read"]


def test_a_cpu_reads_the_sums_and_then_calls_the_update(monkeypatch):
    with opened(optax.sgd(0.1), 2) as session:
        assert order_of(monkeypatch, session) == ["read", "update"]


@pytest.mark.usefixtures("like_a_gpu")
def test_an_update_waits_for_a_callback_in_a_branch(monkeypatch):
    """Its error must not take the state."""

    def loss(model, batch):
        like = jax.ShapeDtypeStruct((), np.float32)
        of_host = functools.partial(jax.pure_callback, np.sin, like)
        shift = jax.lax.cond(model.kernel[0, 0] > 0, of_host, jax.numpy.sin, np.float32(1))
        return ((model(batch["x"]) - batch["y"]) ** 2).sum(1) + shift

    data = {"x": np.ones((16, 4), np.float32), "y": np.zeros((16, 1), np.float32)}
    job = hxla.Job(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), data, loss, optax.sgd(0.1), batch_size=16)
    with job.open(job.plan(microbatch_size=4, mesh=models.mesh(data=1))) as session:
        assert order_of(monkeypatch, session) == ["read", "update"]


@pytest.mark.parametrize(("num", "waits"), [(1, True), (2, True), (2, False)])
def test_a_step_that_is_refused_leaves_the_state_and_is_run_again(monkeypatch, num, waits):
    monkeypatch.setattr(_compile, "_WAITING", frozenset({"cpu"}) if waits else frozenset())
    with opened(CLIPPED, num) as session, opened(CLIPPED, num) as other:
        for each in (session, other):
            each.step()
        # Scales that do not fit: a step with them is refused on the devices.
        session._stepper.scales.replace(session._store.exponents - 40)
        records = [each.step() for each in (session, other)]
        whole = [each.gather(each.state.params) for each in (session, other)]
        counts = [jax.tree.leaves(each.gather(each.state.opt_state)) for each in (session, other)]
    assert [record.redone for record in records] == [1, 0]
    assert records[0].loss == records[1].loss
    jax.tree.map(np.testing.assert_array_equal, *whole)
    jax.tree.map(np.testing.assert_array_equal, *counts)


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("reduction", ["exact", "float"])
def test_a_step_that_is_skipped_leaves_every_array_as_it_was(reduction):
    data = {"x": np.ones((16, 4), np.float32), "y": np.zeros((16, 1), np.float32)}
    bad = data | {"y": np.full((16, 1), np.inf, np.float32)}
    job = hxla.Job(
        lambda: nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
        data,
        lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).sum(1),
        CLIPPED,
        batch_size=16,
        nonfinite="skip",
    )
    plan = job.plan(microbatch_size=4, mesh=models.mesh(data=1), reduction=reduction)
    with job.open(plan) as session:
        session.step(data)
        trees = [session.gather((session.state.params, session.state.opt_state))]
        skipped = session.step(bad)
        trees.append(session.gather((session.state.params, session.state.opt_state)))
        after = session.step(data)
    assert not np.isfinite(skipped.loss)
    jax.tree.map(np.testing.assert_array_equal, *trees)
    assert np.isfinite(after.loss)
