"""A small step as one program: one call, and the bits of the programs that other spreads have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.executor_jobs import Net
from support.inside.job import JobContext
from support.inside.lower import lower
from support.models import Layers
from support.tiers import rows

pytestmark = pytest.mark.optimized

NUM, SIZE, EXAMPLES = 6, 2, 48  # microbatches of a step, examples of one, and all


def floats(scale=None):
    """Data whose examples may be scaled, in order."""
    rng = np.random.default_rng(5)
    found = {"x": rng.normal(size=(EXAMPLES, 6)), "y": rng.normal(size=EXAMPLES)}
    if scale is not None:
        found = {"x": found["x"], "y": found["y"] * np.repeat(scale, NUM * SIZE)}
    return {k: x.astype(np.float32) for k, x in found.items()}


def tokens():
    rng = np.random.default_rng(1)
    found = rng.integers(0, 32, (EXAMPLES, 5)).astype(np.int32)
    return {"x": found, "y": rng.normal(size=EXAMPLES).astype(np.float32)}


class Tokens(nnx.Module):
    """Rows of a table, some of them twice."""

    def __init__(self, rngs):
        self.table = nnx.Embed(32, 16, rngs=rngs)
        self.inner = nnx.Linear(16, 16, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.inner(self.table(x))).mean(1))[:, 0]


#: So many layers that their sums are one table.
Many = functools.partial(Layers, num=17)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def clipped(optimizer):
    return optax.chain(optax.clip_by_global_norm(0.3), optimizer)


def with_rates():
    rates = optax.cosine_decay_schedule(0.1, 20)
    return optax.inject_hyperparams(optax.adamw)(rates, weight_decay=0.1)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "clip and adamw": lambda: clipped(optax.adamw(1e-2, weight_decay=0.1)),
    "rates": with_rates,
    "lion": lambda: optax.lion(1e-2),
    "clip and rmsprop": lambda: clipped(optax.rmsprop(1e-2, momentum=0.5, centered=True)),
    "adagrad": lambda: optax.adagrad(0.1),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
}
CLIP = {"clip_norm": 1.0, "clip": "before"}
#: Models, their data, and what their jobs ask for.
MODELS = {
    "statistics": (Net, floats, {}),
    "one microbatch": (Net, floats, {"batch_size": SIZE}),
    "rows": (Tokens, tokens, {}),
    "a frozen layer": (Tokens, tokens, {"trainable": nnx.Not(nnx.PathContains("inner"))}),
    "a table of sums": (Many, floats, {}),
    "fp16": (Many, floats, {"precision": "fp16"}),
    "bf16": (Tokens, tokens, {"precision": "bf16"}),
    "other scales": (Many, lambda: floats((1, 1e6, 1, 1e-6)), {}),
    "a step is skipped": (Many, lambda: floats((1, np.inf, 1, 1)), {"nonfinite": "skip"}),
    "each is clipped": (Many, floats, {"config": {"communication": CLIP}}),
}


class Counted:
    """Counts the calls of compiled programs."""

    def __init__(self, monkeypatch):
        self.names = []
        run = jax.stages.Compiled.__call__

        def counted(program, *arguments, **named):
            self.names.append(program.as_text()[:80].split()[1].strip(","))
            return run(program, *arguments, **named)

        monkeypatch.setattr(jax.stages.Compiled, "__call__", counted)


@functools.lru_cache(maxsize=4)  # each has its programs
def job(model, optimizer, num):
    make, data, options = MODELS[model]
    options = {"batch_size": NUM * SIZE, "shuffle": False, "config": {}} | options
    cluster = {"visible_devices": list(range(num))}
    if options["batch_size"] == SIZE:  # executors run it in several programs too
        cluster = {"visible_devices": [0], "executors": num}
    config = options["config"] | {"cluster": cluster}
    options["config"] = config
    made = lambda: make(nnx.Rngs(0))  # noqa: E731
    return hxla.Job(made, data(), loss, OPTIMIZERS[optimizer](), **options)


def planned(model, optimizer, num):
    own = job(model, optimizer, num)
    left = own.batch_size // SIZE
    num = min(num, left)
    counts = [left] if num == 1 else [max(left - num + 1, 1), *[min(left - 1, 1)] * (num - 1)]
    return own.plan(microbatch_size=SIZE, mesh={"data": num}, counts=counts)


def ended(model, optimizer, num):
    """Whether a step is one program, its records, and what must be equal, NaNs too."""
    own = job(model, optimizer, num)
    with own.open(planned(model, optimizer, num), steps=4) as session:
        records = list(session)
        is_one = session._programs.step_program is not None
        result = session.result()
    told = [
        (r.loss, r.metrics, r.learning_rate, r.gradient_norm, r.redone, r.skipped, r.loss_scale)
        for r in records
    ]
    return is_one, told, (result.plan.numerics, repr(told), result.sha256)


TABLE = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]
QUICK = [("other scales", "momentum")]


@pytest.mark.parametrize("row", rows(TABLE, *QUICK, ids="-".join))
def test_a_step_of_one_program_has_the_bits_of_several(row):
    is_one, told, alone = ended(*row, 1)
    is_several, _, on_two = ended(*row, 2)
    # What the optimizer writes as a whole is a program of its own.
    assert (is_one, is_several) == (row[1] != "every second step", False)
    assert alone == on_two
    if row[0] == "other scales":
        assert any(redone for *_, redone, _, _ in told)
    if row[0] == "a step is skipped":
        assert any(skipped for *_, skipped, _ in told)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["statistics", "rows"])
def test_three_devices_have_these_bits_too(model):
    assert ended(model, "clip and adamw", 3)[2] == ended(model, "clip and adamw", 1)[2]


def test_a_steady_step_calls_one_program(monkeypatch):
    own, plan = job("statistics", "clip and adamw", 1), planned("statistics", "clip and adamw", 1)
    with own.open(plan, steps=4) as session:
        steps = iter(session)
        next(steps)
        calls = Counted(monkeypatch)
        next(steps)
        assert calls.names == ["jit_hxla_step"]
        calls.names.clear()
        session.step(own_batch())
        assert calls.names == ["jit_hxla_step"]
        # Evaluations, checkpoints and whatever else reads the state see it after the step.
        assert session.evaluate(floats()).loss > 0
        state = session.gather(session.state.params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


def own_batch():
    return {k: x[: NUM * SIZE] for k, x in floats().items()}


def step_program_of(num=1, width=6, optimizer=None, config=None, printing=False, **asked):
    """The program of a small step of a linear model, of a plan for so many devices."""

    def of(model, batch):
        if printing:
            jax.debug.print("{}", batch["x"].sum())
        return loss(lambda x: model(x)[:, 0], batch)

    model = nnx.eval_shape(lambda: nnx.Linear(width, width, rngs=nnx.Rngs(0)))
    data = {"x": np.zeros((NUM * SIZE, width), np.float32), "y": np.zeros(NUM * SIZE, np.float32)}
    own = hxla.Job(
        model, data, of, optimizer or optax.adam(1e-3), batch_size=NUM * SIZE, config=config
    )
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * num)
    plan = own.plan(cluster, auto=False, microbatch_size=SIZE, mesh={"data": num}, **asked)
    training = JobContext(own).training(SIZE, 0)
    return lower(training, own.graph(SIZE), plan, tuple(jax.devices()[:num])).step_program


#: Jobs whose step is several programs.
SEVERAL = {
    "two devices": {"num": 2},
    "a large state": {"width": 1200},  # 16.5 MiB
    "groups": {"config": {"optimizer": {"num_apply_groups": 2}}},
    "a call for each": {"config": {"cluster": {"microbatches_per_call": 1}}},
    "float sums": {"reduction": "float"},
    "whole arrays": {"optimizer": optax.contrib.muon(1e-3)},
    "offload": {"config": {"memory": {"offload": {"optimizer": "host"}}}},
    "callbacks": {
        "printing": True,
        "config": {"cluster": {"microbatches_per_call": NUM}},
    },
}


def test_a_small_step_on_one_device_is_one_program():
    assert step_program_of(width=1000) is not None  # 11.5 MiB


@pytest.mark.parametrize("name", SEVERAL)
def test_other_steps_are_several_programs(name):
    assert step_program_of(**SEVERAL[name]) is None
