"""What is compiled for a small step, of which opening a job is made."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.inside.job import JobContext
from support.inside.lower import lower
from support.models import Layers

pytestmark = pytest.mark.optimized

SIZE, NUM = 2, 6
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FUSION = re.compile(r" fusion\(.*calls=%?([\w.-]+)")


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def lowered(num, width=6):
    """The programs of a step of so many layers, before compilation."""
    model = nnx.eval_shape(lambda: Layers(nnx.Rngs(0), num, width))
    data = {"x": np.zeros((NUM * SIZE, width), np.float32), "y": np.zeros(NUM * SIZE, np.float32)}
    job = hxla.Job(model, data, loss, optax.adamw(1e-3), batch_size=NUM * SIZE)
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),))
    plan = job.plan(cluster, auto=False, microbatch_size=SIZE, mesh={"data": 1})
    training = JobContext(job).training(SIZE, 0)
    return lower(training, job.graph(SIZE), plan, tuple(jax.devices()[:1]))


def compiled(num, width=6):
    """The compiled program of a step, and the bytes of its state."""
    programs = lowered(num, width)
    programs.step_program.compile(programs.state_layout.like(0))
    return programs.step_program, programs.state_bytes


def kernels(text):
    """The distinct bodies of the fusions of an optimized program: XLA compiles each once."""
    bodies = dict(_COMPUTATION.findall(text))
    return {_without_names(bodies[name]) for name in _FUSION.findall(text)}


def _without_names(body):
    names = {}
    body = re.sub(r", metadata=\{[^\n]*", "", body)
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), body)


@pytest.mark.slow
def test_more_layers_of_one_size_are_hardly_more_kernels():
    few, many = (compiled(num)[0].compiled.as_text() for num in (3, 7))
    # The model itself has some, for its first and its last layers.
    assert len(kernels(many)) - len(kernels(few)) < 7 - 3
    # The divisor of the gradients is 250 operations, once.
    assert many.count(" count-leading-zeros(") == few.count(" count-leading-zeros(")


def test_a_step_copies_no_state():
    program, state_bytes = compiled(1, width=200)
    assert program.extra_bytes < 2.5 / 3 * state_bytes  # gradients, and their sums as floats


def test_a_small_step_is_traced_once(monkeypatch):
    calls, trace = [], jax.value_and_grad

    def counted(*arguments, **options):
        calls.append(arguments)
        return trace(*arguments, **options)

    programs = lowered(1)
    monkeypatch.setattr(jax, "value_and_grad", counted)
    programs.step_program.lower(*programs.state_layout.like(0))
    assert len(calls) == 1
