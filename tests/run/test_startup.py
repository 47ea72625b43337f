"""How a session opens: what it compiles, and what it says meanwhile."""

import io
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.jax import num_compilations
from support.inside.report import Waiting, _waiting

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

DATA = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


def network():
    return nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    )


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - jnp.sin(batch["x"])) ** 2, axis=-1)


def opened(devices, *, loss=loss, evaluate=False, **wishes):
    """Compilations until a step is done on some devices, and the SHA-256 then."""
    jax.clear_caches()
    job = hxla.Job(
        network(),
        DATA,
        loss,
        optax.adam(1e-2),
        batch_size=16,
        default=hxla.split() if "tensor" in wishes.get("mesh", ()) else None,
        config={"cluster": {"visible_devices": list(range(devices))}},
    )
    plan = job.plan(microbatch_size=1, counts="even", **wishes)
    before = num_compilations()
    with job.open(plan, steps=1) as session:
        session.step()
        if evaluate:
            session.evaluate(DATA)
        return num_compilations() - before, session.result().sha256


WISHES = {
    "copies of one device": ((2, 4, 8), lambda _: {}),
    "copies cut in two": ((4, 8), lambda n: {"mesh": {"data": n // 2, "tensor": 2}}),
    "pipelines": ((4, 8), lambda n: {"mesh": {"data": n // 2, "stage": 2}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("name", WISHES)
def test_more_devices_of_a_kind_compile_no_more_and_change_no_bit(name, evaluate):
    nums, wishes = WISHES[name]
    fewest, *more = (opened(num, evaluate=evaluate, **wishes(num)) for num in nums)
    assert [*more] == [fewest] * len(more)


def test_an_evaluation_is_one_program_for_all_devices():
    without, _ = opened(4)
    assert opened(4, evaluate=True)[0] - without <= 2  # itself and the exchange of its rows


def test_a_model_made_on_its_devices_is_compiled_once():
    def made(num):
        job = hxla.Job(
            network,
            DATA,
            loss,
            optax.adam(1e-2),
            batch_size=16,
            config={"cluster": {"visible_devices": list(range(num))}},
        )
        plan = job.plan(microbatch_size=1, counts="even")
        jax.clear_caches()
        before = num_compilations()
        with job.open(plan, steps=1) as session:
            return num_compilations() - before, session.result().sha256

    assert made(2) == made(8)


def test_a_loss_that_calls_python_is_compiled_for_each_device():
    seen = []

    def watched(model, batch):
        out = loss(model, batch)
        jax.debug.callback(lambda x: seen.append(float(x)), out.sum())
        return out

    (_, alone), (num, together) = opened(1, loss=watched), opened(2, loss=watched)
    assert alone == together
    assert seen
    assert num > opened(2)[0]


class Slow(io.StringIO):
    """A stream that says when something was written to it."""

    def wait_for(self, text):
        deadline = time.monotonic() + 60
        while text not in self.getvalue():
            assert time.monotonic() < deadline, self.getvalue()
            time.sleep(0.005)


def test_what_is_waited_for_is_said_again_and_again():
    stream = Slow()
    with Waiting("opening", is_main=True, stream=stream, period_seconds=0.01) as waiting:
        waiting.tell("compiling a microbatch")
        stream.wait_for("opening: compiling a microbatch, 0 s\n" * 2)
        waiting.tell("running every program once")
        stream.wait_for("opening: running every program once")
    said = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == said


def test_other_processes_say_nothing():
    stream = io.StringIO()
    with Waiting("opening", is_main=False, stream=stream, period_seconds=0.001) as waiting:
        waiting.tell("compiling")
        time.sleep(0.05)
    assert not stream.getvalue()


def test_nothing_is_said_of_what_is_soon_over():
    stream = io.StringIO()
    with Waiting("opening", is_main=True, stream=stream, period_seconds=600) as waiting:
        waiting.tell("compiling")
    assert not stream.getvalue()


def test_lines_come_at_least_every_two_seconds():
    assert _waiting.PERIOD_SECONDS < 2


def test_opening_names_the_programs_that_are_not_ready(monkeypatch, capsys):
    monkeypatch.setattr(_waiting, "PERIOD_SECONDS", 0.001)
    model = models.NnxNet(nnx.Rngs(0))
    data = models.tokens(16)
    jax.clear_caches()
    hxla.train(
        model, data, models.token_loss, optax.adam(1e-2), batch_size=16, microbatch_size=2, steps=1
    )
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("opening: ")]
    assert any("compiling a microbatch" in line for line in lines)
    assert any("programs are ready" in line for line in lines)
    assert any("tracing" in line for line in lines)
