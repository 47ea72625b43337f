"""What a session hands out is to be read; what is handed in is trained on, however it lies."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import hxla
from support import zero_jobs
from support.models import mesh
from support.tiers import rows
from support.training import train_with

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

DATA = {
    "x": np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32),
}


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def optimizer():
    return optax.inject_hyperparams(optax.adam)(learning_rate=0.1)


def train(*callbacks, counts=(1, 3), model=None, **options):
    arguments = {"batch_size": 16, "microbatch_size": 4, "steps": 4, "shuffle": False} | options
    model = model or nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    return train_with(
        model,
        DATA,
        loss,
        optimizer(),
        counts=counts,
        mesh=mesh(data=len(counts)),
        callbacks=callbacks,
        **arguments,
    )


def changed(params, opt_state, step):
    """Weights clipped after each step, and the learning rate lowered after the second."""
    params = jax.tree.map(lambda x: np.clip(x, -0.2, 0.2), params)
    if step == 2:
        opt_state = optax.tree.set(opt_state, learning_rate=0.01)
    return params, opt_state


def change(record, session):
    whole = session.gather((session.state.params, session.state.opt_state))
    params, opt_state = changed(*whole, record.step)
    session.replace(params=params, opt_state=opt_state)


def test_what_a_callback_hands_in_is_trained_on_as_plain_jax_does():
    results = [train(change, counts=counts) for counts in [(4,), (1, 3)]]
    assert results[0].sha256 == results[1].sha256

    graphdef, params = nnx.split(nnx.Linear(6, 3, rngs=nnx.Rngs(0)))
    state = optimizer().init(params)
    grad = jax.jit(jax.grad(lambda p, b: loss(nnx.merge(graphdef, p), b).mean()))
    for step in range(4):
        own = slice(step % 2 * 16, step % 2 * 16 + 16)
        batch = {k: x[own] for k, x in DATA.items()}
        updates, state = optimizer().update(grad(params, batch), state, params)
        params, state = changed(optax.apply_updates(params, updates), state, step + 1)
    for ours, theirs in zip(
        jax.tree.leaves(results[0].state), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert max(abs(x).max() for x in jax.tree.leaves(params)) == np.float32(0.2)


@pytest.mark.slow
def test_where_copies_share_the_state_each_takes_its_part():
    shas = {}
    for stage, counts in [(0, (8, 0)), (1, (3, 5)), (3, (5, 3)), (3, (8, 0))]:
        own = zero_jobs.linear_job(optimizer(), memory={"zero": stage})
        plan = own.plan(microbatch_size=3, mesh=mesh(data=2), counts=counts)
        with own.open(plan, steps=3, mesh=mesh(data=2)) as session:
            for record in session:
                change(record, session)
            shas.setdefault(plan.numerics, []).append(session.result().sha256)
    assert [len(set(own)) for own in shas.values()] == [1, 1]
    assert [len(own) for own in shas.values()] == [2, 2]


def test_what_is_handed_back_as_it_lies_changes_no_bit():
    def hand_back(record, session):
        state = session.state
        session.replace(params=state.params, aux=state.aux, opt_state=state.opt_state)

    assert train(hand_back).sha256 == train().sha256


def test_a_checkpoint_holds_what_was_handed_in_also_after_a_save(tmp_path):
    def save_and_halve(record, session):
        session.save()
        halved = jax.tree.map(lambda x: x / 2, session.gather(session.state.params))
        session.replace(params=halved)
        session.save()

    first = train(save_and_halve, steps=2, checkpoint_dir=tmp_path)
    resumed = train(save_and_halve, steps=4, checkpoint_dir=tmp_path, counts=(4,))
    undisturbed = train(save_and_halve, steps=4, checkpoint_dir=tmp_path / "other")
    assert first.step == 2
    assert resumed.sha256 == undisturbed.sha256


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dense(4)(x))


@pytest.fixture(scope="module")
def opened():
    """A session of an NNX model and one of a Linen module."""
    with contextlib.ExitStack() as stack:
        sessions = []
        for model in (nnx.Linear(6, 3, rngs=nnx.Rngs(0)), Net()):
            job = hxla.Job(model, DATA, loss, optimizer(), batch_size=16)
            plan = job.plan(microbatch_size=4, mesh=mesh(data=1))
            sessions.append(stack.enter_context(job.open(plan, mesh=mesh(data=1))))
        yield sessions


def write_rate(state):
    state.opt_state.hyperparams["learning_rate"] = jnp.zeros(())


def write_nested(state):
    state.params["Dense_0"]["kernel"] = jnp.zeros((6, 4))


def update(state):
    state.params.update({})


def write_variable(state):
    state.params["kernel"][...] = jnp.zeros((6, 3))


def write_state(state):
    state.params["kernel"] = jnp.zeros((6, 3))


def take_out(state):
    del state.params["kernel"]


def write_moment(state):
    state.opt_state.inner_state[0].mu["kernel"][...] = jnp.zeros((6, 3))


def write_exponents(state):
    state.exponents[0] = 3


@pytest.mark.parametrize(
    ("write", "linen", "error", "words"),
    [
        (write_rate, False, hxla.ConfigError, r"is to be read.*session\.replace"),
        (write_nested, True, hxla.ConfigError, "is to be read"),
        (update, True, hxla.ConfigError, "is to be read"),
        (write_variable, False, hxla.ConfigError, r"written into \(params/kernel\)"),
        (write_state, False, hxla.ConfigError, r"written into \(params/kernel\)"),
        (take_out, False, hxla.ConfigError, r"written into \(its structure\)"),
        (write_moment, False, hxla.ConfigError, r"written into \(opt_state/.*mu/kernel\)"),
        (write_exponents, False, ValueError, "read-only"),
    ],
)
def test_what_is_written_into_the_state_is_refused(opened, write, linen, error, words):
    session = opened[linen]

    def write_and_go_on():
        write(session.state)
        session.step()

    with pytest.raises(error, match=words):
        write_and_go_on()
    assert session.step().loss > 0  # it goes on with its own state


def test_linen_reads_what_it_is_handed():
    x, found = DATA["x"][:2], []

    def predict(record, session):
        found.append(Net().apply({"params": session.state.params}, x))
        own = jax.tree.map(lambda p: p, session.state.params)
        own["Dense_0"]["bias"] = jnp.ones(4)  # a tree of one's own

    result = train(predict, model=Net())
    np.testing.assert_allclose(found[-1], Net().apply(result.state, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"params": {"kernel": np.zeros((6, 3), np.float32)}}, "params/bias: missing"),
        (
            {"params": {"kernel": np.zeros((3, 6), np.float32), "bias": 0.0, "b": 0.0}},
            r"params/b: not in the state\n  params/bias: has shape \(\), in the state \(3,\)\n"
            r"  params/kernel: has shape \(3, 6\), in the state \(6, 3\)",
        ),
        (
            {"params": {"kernel": np.zeros((6, 3), np.float16), "bias": np.zeros(3, "f")}},
            "params/kernel: is float16, in the state float32",
        ),
    ],
)
def test_what_is_no_such_state_is_refused_with_every_fault(opened, given, words):
    before = opened[0].gather(opened[0].state.params)
    with pytest.raises(hxla.ConfigError, match=words):
        opened[0].replace(**given)
    assert hxla.fingerprint(before) == hxla.fingerprint(opened[0].state.params)


def test_numbers_are_taken_where_they_lose_nothing(opened):
    session = opened[0]
    state = session.gather(session.state.opt_state)
    session.replace(opt_state=state._replace(count=np.int64(7)))
    assert session.state.opt_state.count == 7
    for count in (1.5, 1 << 40):
        with pytest.raises(hxla.ConfigError, match="opt_state/count: "):
            session.replace(opt_state=state._replace(count=count))


ANSWERS = [1, 0, "", [], np.float32(1), jnp.array(True), {"loss": 1.0}]


@pytest.mark.parametrize(
    "answer", rows(ANSWERS, *ANSWERS[:1], ids=lambda x: type(x).__name__ + str(x))
)
def test_only_true_ends_training_and_another_answer_is_refused(answer):
    def answering(record, session):
        return answer

    with pytest.raises(hxla.ConfigError, match=rf"answering\) returned {type(answer).__name__}: "):
        train(answering)


@pytest.mark.parametrize(("answer", "step"), [(None, 4), (False, 4), (True, 2), (np.True_, 2)])
def test_true_ends_training_after_the_next_step(answer, step):
    assert train(lambda record, session: answer).step == step


@pytest.mark.parametrize(("every", "steps"), [(2, [2, 4]), (None, [4]), (3, [3, 4])])
def test_a_callback_sees_the_evaluation_of_its_step(every, steps):
    seen = {}

    def see(record, session):
        seen[record.step] = record.evaluation

    result = train(see, eval_data=DATA, eval_every=every)
    assert [step for step, found in seen.items() if found is not None] == steps
    assert tuple(found for found in seen.values() if found) == result.history.evaluations
    assert tuple(seen.values()) == tuple(s.evaluation for s in result.history.steps)
    [last] = [float(loss(result.model, DATA).mean())]
    assert seen[4].loss == pytest.approx(last, rel=1e-5)
