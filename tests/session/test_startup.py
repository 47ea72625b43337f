"""How a session opens: what it compiles, and what it says meanwhile."""

import contextlib
import dataclasses
import functools
import io
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.inside.jax import num_compilations
from support.inside.report import Waiting, _waiting
from support.launched import PATIENCE_SECONDS
from support.tiers import rows

pytestmark = pytest.mark.usefixtures("no_persistent_cache")

NUM = 8  # microbatches: one for each device
DATA = {"x": np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)}


def network():
    return nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    )


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2, axis=-1)


def linear():
    """The least model, made on its devices."""
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class Opened:
    """Compilations until a step is done, the SHA-256 then, and what was printed meanwhile."""

    num: int
    sha256: str
    said: str = dataclasses.field(compare=False)


def opened(devices, *, loss=loss, make=linear, evaluate=False, **wishes):
    """A job that was opened, and made a step; each is opened once.

    Args:
        devices: How many.
        loss: Of the job.
        make: Makes the model: a small one where it is placed, or `network` beforehand.
        evaluate: Whether the data is evaluated too.
        wishes: The sizes of the mesh's axes, where it has more than one.
    """
    return _opened(devices, loss, make, evaluate, **wishes)


@functools.cache
def _opened(devices, loss, make, evaluate, **wishes):
    job = hxla.Job(
        network() if make is network else make,
        DATA,
        loss,
        optax.adam(1e-2) if make is network else optax.sgd(0.1),
        batch_size=16,
        default=hxla.split() if "tensor" in wishes else None,
        config={"cluster": {"visible_devices": list(range(devices))}},
    )
    mesh = {"mesh": wishes} if wishes else {}
    plan = job.plan(microbatch_size=16 // NUM, counts="even", **mesh)
    jax.clear_caches()
    before = num_compilations()
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        patched.setattr(_waiting, "PERIOD_SECONDS", 0.001)
        patched.setattr(_waiting, "CHANGE_SECONDS", 0.0)
        with job.open(plan, steps=1) as session:
            session.step()
            if evaluate:
                session.evaluate(DATA)
            sha256 = session.result().sha256
    return Opened(num_compilations() - before, sha256, said.getvalue())


WISHES = {
    "models made on their devices": (linear, (2, 8), lambda _: {}),
    "copies of one device": (network, (2, 4, 8), lambda _: {}),
    "copies cut in two": (network, (4, 8), lambda n: {"data": n // 2, "tensor": 2}),
    "pipelines": (network, (4, 8), lambda n: {"data": n // 2, "stage": 2}),
}
MORE = [(name, evaluate) for name in WISHES for evaluate in (False, True)]


@pytest.mark.parametrize("row", rows(MORE, MORE[0]))
def test_more_devices_of_a_kind_compile_no_more_and_change_no_bit(row):
    name, evaluate = row
    make, nums, wishes = WISHES[name]
    fewest, *more = (opened(n, make=make, evaluate=evaluate, **wishes(n)) for n in nums)
    assert [other.sha256 for other in more] == [fewest.sha256] * len(more)
    assert max(other.num for other in more) <= fewest.num


@pytest.mark.parametrize("make", rows([linear, network], linear, ids=lambda make: make.__name__))
def test_an_evaluation_is_one_program_for_all_devices(make):
    without, with_it = opened(2, make=make), opened(2, make=make, evaluate=True)
    assert with_it.num - without.num <= 2  # itself and the exchange of its rows


def watched(model, batch):
    out = loss(model, batch)
    jax.debug.callback(lambda x: SEEN.append(float(x)), out.sum())
    return out


SEEN = []


def test_a_loss_that_calls_python_is_compiled_for_each_device():
    assert opened(2, loss=watched).sha256 == opened(2).sha256
    assert SEEN
    assert opened(2, loss=watched).num > opened(2).num


@pytest.mark.slow
def test_a_loss_that_calls_python_gives_the_bits_of_one_device():
    assert opened(2, loss=watched).sha256 == opened(1, loss=watched).sha256


class Slow(io.StringIO):
    """A stream that is waited for until a pattern was written to it."""

    def __init__(self):
        super().__init__()
        self.written = threading.Condition()

    def write(self, text):
        with self.written:
            num = super().write(text)
            self.written.notify_all()
        return num

    def wait_for(self, text):
        with self.written:
            is_there = lambda: re.search(text, self.getvalue())  # noqa: E731
            found = self.written.wait_for(is_there, PATIENCE_SECONDS)
        assert found, self.getvalue()


def tellers():
    """The threads that tell what is waited for."""
    return [thread for thread in threading.enumerate() if thread.name == "hxla-waiting"]


def test_what_is_waited_for_is_said_when_it_changes(monkeypatch):
    monkeypatch.setattr(_waiting, "CHANGE_SECONDS", 0.0)
    with (
        contextlib.redirect_stderr(Slow()) as stream,
        Waiting("opening", is_main=True, period_seconds=0.01) as waiting,
    ):
        waiting.tell("compiling a microbatch")
        stream.wait_for(r"opening: compiling a microbatch, \d+ s\n")
        waiting.tell("running every program once")
        stream.wait_for("opening: running every program once")
        assert tellers()
    assert not tellers()
    assert stream.getvalue().count("compiling") == 1


def test_a_change_is_not_said_before_its_time():
    with (
        contextlib.redirect_stderr(Slow()) as stream,
        Waiting("opening", is_main=True, period_seconds=0.001) as waiting,
    ):
        stream.wait_for("opening: starting")
        waiting.tell("compiling")
    assert "compiling" not in stream.getvalue()
    assert _waiting.CHANGE_SECONDS == 30


def test_other_processes_say_nothing():
    with (
        contextlib.redirect_stderr(io.StringIO()) as stream,
        Waiting("opening", is_main=False, period_seconds=0.001) as waiting,
    ):
        waiting.tell("compiling")
        assert not tellers()
    assert not stream.getvalue()


def test_nothing_is_said_of_what_is_soon_over():
    with (
        contextlib.redirect_stderr(io.StringIO()) as stream,
        Waiting("opening", is_main=True, period_seconds=600) as waiting,
    ):
        waiting.tell("compiling")
    assert not stream.getvalue()


def test_lines_come_at_least_every_two_seconds():
    assert _waiting.PERIOD_SECONDS < 2


def test_opening_names_the_programs_that_are_not_ready():
    lines = [x for x in opened(2).said.splitlines() if x.startswith("opening: ")]
    assert any("compiling a microbatch" in line for line in lines)
    assert any("programs are ready" in line for line in lines)
    assert any("tracing" in line for line in lines)
