"""`hxla.train` against plain JAX, and against itself in every spread of the work."""

import functools
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.inside.session import Balancer, _opening, _running_plan
from support.tiers import rows
from support.training import train_with

pytestmark = pytest.mark.usefixtures("every_program_is_cached")

SPREADS = [(8,), (4, 4), (5, 3), (8, 0), (1, 7), (3, 3, 2), (2, 2, 2, 2), (4, 1, 2, 1),
           (1, 1, 1, 1, 4), (1, 1, 1, 1, 1, 1, 1, 1)]  # fmt: skip


def mesh(num):
    return models.mesh(data=num)


def fit(model, spread, **options):
    arguments = dict(batch_size=16, microbatch_size=2, steps=50, seed=3, counts=spread) | options
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    return train_with(
        model,
        models.tokens(),
        models.token_loss,
        optimizer,
        mesh=mesh(len(spread)),
        **arguments,
    )


class Small(nnx.Module):
    """BatchNorm and dropout: the least that makes bits depend on the spread elsewhere."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


def fit_small(spread, **options):
    """Of a model that is compiled in a moment."""
    arguments = dict(batch_size=24, microbatch_size=3, steps=12, seed=3, counts=spread) | options
    return train_with(
        arguments.pop("model", None) or Small(nnx.Rngs(0)),
        models.regression(),
        models.squared_error,
        optax.adam(0.1),
        mesh=mesh(len(spread)),
        **arguments,
    )


def make(kind):
    return models.NnxNet(nnx.Rngs(0)) if kind == "nnx" else models.LinenNet()


@functools.cache
def in_spreads(kind):
    """The results of a model in every spread, or of a small one in three of them."""
    if kind == "small":
        return {counts: fit_small(counts) for counts in [(8,), (5, 3), (8, 0)]}
    return {counts: fit(make(kind), counts) for counts in SPREADS}


@pytest.mark.parametrize("kind", rows(["small", "nnx", "linen"], "small"))
def test_every_spread_gives_the_same_bits(kind):
    results = in_spreads(kind)
    assert len({r.sha256 for r in results.values()}) == 1
    first, last = results[(8,)].history.steps[0], results[(8,)].history.steps[-1]
    assert last.loss < 0.7 * first.loss
    assert all(r.history.num_compilations == 0 for r in results.values())
    losses = {tuple(s.loss for s in r.history.steps) for r in results.values()}
    assert len(losses) == 1


def test_float_sums_depend_on_the_spread():
    """2^25 swallows a one that is added to it, and not a two."""
    x = np.zeros((16, 1), np.float32)
    x[[0, 10, 12, 14], 0] = 2.0**25, 1.0, 1.0, -(2.0**25)

    def weight(spread, reduction):
        result = hxla.train(
            hxla.Job(
                nnx.Linear(
                    1, 1, use_bias=False, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.zeros
                ),
                {"x": x},
                lambda model, batch: model(batch["x"])[:, 0],
                optax.sgd(-16.0),
                batch_size=16,
                shuffle=False,
            ),
            microbatch_size=2,
            steps=1,
            reduction=reduction,
            mesh=mesh(len(spread)),
            counts=spread,
        )
        [found] = jax.tree.leaves(result.state)
        return found.item()

    assert weight((8,), "float") == 0.0
    assert weight((5, 3), "float") == 2.0
    assert weight((8,), "exact") == 2.0


def plain_jax(data, steps, batch_size, weights=None):
    """Full-batch training without hxla."""
    graphdef, params = nnx.split(models.Dense(nnx.Rngs(0)))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            values = models.squared_error(nnx.merge(graphdef, params), batch)
            w = batch["mask"].astype(jnp.float32) if weights else jnp.ones_like(values)
            return (values * w).sum() / w.sum()

        return jax.grad(loss)(params)

    for step in range(steps):
        rows = np.arange(step * batch_size, (step + 1) * batch_size) % len(data["x"])
        batch = {k: v[rows] for k, v in data.items()}
        updates, state = optimizer.update(gradient(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.leaves(params)


@pytest.mark.parametrize("form", ["mean", "values", "masked"])
def test_gradient_is_that_of_the_global_mean(form):
    data = models.regression()

    def loss(model, batch):
        values = models.squared_error(model, batch)
        if form == "mean":
            return values.mean(), {"largest": values.max()}
        return (values, batch["mask"]) if form == "masked" else values

    result = hxla.train(
        hxla.Job(
            models.Dense(nnx.Rngs(0)),
            data,
            loss,
            optax.adam(1e-2),
            batch_size=24,
            shuffle=False,
        ),
        microbatch_size=3,
        steps=6,
        mesh=mesh(2),
        counts=(5, 3),
    )
    expected = plain_jax(data, 6, 24, weights=form == "masked")
    for ours, theirs in zip(jax.tree.leaves(result.state), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


def test_batch_statistics_are_the_mean_over_microbatches():
    class Norm(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    x = np.random.default_rng(0).normal(2.0, 3.0, (8, 3)).astype(np.float32)
    model = Norm()
    hxla.train(
        hxla.Job(
            model,
            {"x": x},
            lambda m, b: m(b["x"]).sum(-1),
            optax.sgd(0.0),
            batch_size=8,
            shuffle=False,
        ),
        microbatch_size=4,
        steps=1,
        mesh=mesh(1),
        counts=(2,),
    )
    means = np.stack([x[:4].mean(0), x[4:].mean(0)])
    np.testing.assert_allclose(model.norm.mean[...], 0.1 * means.mean(0), rtol=1e-5)


def test_sigterm_saves_the_last_step_and_a_resumed_run_has_the_same_bits(tmp_path):
    def told(record, session):
        if record.step == 3:
            signal.raise_signal(signal.SIGTERM)

    whole, handler = simple(steps=6), signal.getsignal(signal.SIGTERM)
    with pytest.raises(hxla.Preempted, match="ended after 3 steps") as left:
        simple(steps=6, checkpoint_dir=tmp_path, callbacks=[told])
    assert (left.value.code, left.value.step) == (75, 3)
    assert signal.getsignal(signal.SIGTERM) is handler
    resumed = simple(steps=6, checkpoint_dir=tmp_path, counts=(3, 5))
    assert resumed.history.steps[0].step == 4
    assert resumed.sha256 == whole.sha256


class Adapted(nnx.Module):
    """With a factor of rank 0, as LoRA may have it."""

    def __init__(self):
        self.layer = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        self.factor = nnx.Param(jnp.zeros((6, 0)))
        self.seen = nnx.Variable(jnp.zeros((0, 2)))

    def __call__(self, x):
        return self.layer(x) + (x @ self.factor[...]).sum(-1, keepdims=True)


def test_a_parameter_without_elements_is_saved_and_resumed(tmp_path):
    whole = fit_small((5, 3), model=Adapted(), steps=4)
    fit_small((8,), model=Adapted(), steps=2, checkpoint_dir=tmp_path)
    resumed = fit_small((5, 3), model=Adapted(), steps=4, checkpoint_dir=tmp_path)
    assert (len(resumed.history.steps), resumed.sha256) == (2, whole.sha256)
    assert resumed.model.factor.shape == (6, 0)


@pytest.mark.slow
def test_resume_on_other_devices_gives_the_bits_of_never_having_stopped(tmp_path):
    whole = fit(make("nnx"), (3, 5), steps=20)
    fit(make("nnx"), (4, 4), steps=7, checkpoint_dir=tmp_path)
    resumed = fit(make("nnx"), (3, 3, 2), steps=20, checkpoint_dir=tmp_path)
    assert resumed.history.steps[0].step == 8
    assert resumed.sha256 == whole.sha256


class SlowedBalancer(Balancer):
    """Sees device 0 four times slower from step 5 on: fake devices share cores, so none can be."""

    def observe(self, step, busy, update, **others):
        count = self.counts
        pace = [0.4 if step >= 5 else 0.1, *[0.1] * (len(count) - 1)]
        busy = np.multiply(count, pace)
        return super().observe(step, busy, [0.0] * len(count), **others)


@pytest.mark.parametrize("kind", rows(["small", "nnx"], "small"))
def test_a_move_of_counts_changes_no_bit_and_compiles_nothing(kind, monkeypatch):
    def run(spread, **settings):
        if kind == "small":
            return fit_small(spread, **settings)
        return fit(make(kind), spread, steps=12, **settings)  # a model is trained in place

    whole = in_spreads(kind)[8, 0] if kind == "small" else run((8, 0))
    monkeypatch.setattr(_opening, "pooled", lambda seconds, plan: (0.1, 0.1))
    monkeypatch.setattr(_running_plan, "Balancer", SlowedBalancer)
    moved = run((8, 0), counts="measured")
    counts = [s.counts for s in moved.history.steps]
    assert counts[:6] == [(4, 4)] * 6
    assert counts[-1] == (1, 7)
    assert moved.sha256 == whole.sha256
    assert moved.history.num_compilations == 0


def test_a_gradient_that_is_not_finite_stops_or_is_skipped():
    data = models.regression()
    data["x"][5, 0] = np.nan

    def run(nonfinite):
        return hxla.train(
            hxla.Job(
                models.Dense(nnx.Rngs(0)),
                data,
                models.squared_error,
                optax.adam(1e-2),
                batch_size=24,
                shuffle=False,
                nonfinite=nonfinite,
            ),
            microbatch_size=3,
            steps=4,
            mesh=mesh(2),
            counts=(3, 5),
        )

    with pytest.raises(hxla.NonFiniteError, match=r"step 1: .*layer/kernel"):
        run("stop")
    result = run("skip")
    assert [s.skipped for s in result.history.steps] == [True, False, False, False]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state))


def test_a_gradient_beyond_the_range_is_redone_to_the_same_bits():
    data = models.regression()
    data["x"][24:48] *= 1e4  # the second global batch

    def run(counts):
        return hxla.train(
            hxla.Job(
                models.Dense(nnx.Rngs(0)),
                data,
                models.squared_error,
                optax.adam(1e-2),
                batch_size=24,
                shuffle=False,
            ),
            microbatch_size=3,
            steps=4,
            mesh=mesh(len(counts)),
            counts=counts,
        )

    one, two = run((8,)), run((5, 3))
    assert [s.redone for s in one.history.steps] == [0, 1, 1, 0]
    assert one.sha256 == two.sha256


def test_evaluation_counts_every_example_once():
    data = models.regression(29)
    for loss in (models.squared_error, lambda m, b: models.squared_error(m, b).mean()):
        model = models.Dense(nnx.Rngs(0))
        result = simple(model=model, steps=1, eval_data=data, eval_loss=loss)
        expected = np.mean(models.squared_error(model, data))
        (record,) = result.history.evaluations
        assert record.num_examples == 29
        assert record.loss == pytest.approx(float(expected), rel=1e-5)


def simple(**options):
    arguments = dict(batch_size=24, microbatch_size=3, steps=2, mesh=mesh(2), counts="even")
    arguments |= options
    model = arguments.pop("model", None) or models.Dense(nnx.Rngs(0))
    data = arguments.pop("data", None) or models.regression()
    loss = arguments.pop("loss", models.squared_error)
    return train_with(model, data, loss, optax.adam(1e-2), **arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(loss=lambda m, b: m(b["x"])[:2]), hxla.LossError, "leading dimension of 3"),
        (dict(loss=lambda m, b: "low"), hxla.LossError, "returned str"),
        (dict(batch_size=25), hxla.ConfigError, "not divisible by microbatch_size=3"),
        (dict(microbatch_size=24), hxla.PlanError, "2 devices but only 1 microbatch"),
        (dict(steps=None), hxla.ConfigError, "either steps or epochs"),
        (dict(counts=(9, 9)), hxla.ConfigError, "does not hand out 8 microbatches"),
        (dict(reduction="exakt"), hxla.ConfigError, "'exact' or 'float'"),
        (dict(config={"balanse": {}}), hxla.ConfigError, "did you mean 'balance'"),
        (dict(data=iter([models.regression(24)])), hxla.DataError, "ended after 1 global batches"),
        (dict(batch_size=99), hxla.DataError, "fewer than one global batch"),
        (dict(run_dir="/proc/none"), hxla.ConfigError, "cannot be written"),
        (dict(checkpoint_dir="/proc/none"), hxla.CheckpointError, "cannot be written"),
        (dict(model=object()), hxla.ConfigError, "not a Flax module"),
    ],
)
def test_bad_input_is_one_clear_error(options, error, words):
    with pytest.raises(error, match=words):
        simple(**options)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    simple(checkpoint_dir=tmp_path)
    other = models.Dense(nnx.Rngs(0), outputs=3)
    other.extra = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    with pytest.raises(hxla.CheckpointError, match=r"missing in the checkpoint: params\.extra"):
        simple(checkpoint_dir=tmp_path, model=other, steps=4)
    with pytest.raises(hxla.CheckpointError, match="seed: 0 in the checkpoint, 1 asked"):
        simple(checkpoint_dir=tmp_path, seed=1, steps=4)


def test_no_devices_is_a_clear_error():
    code = (
        "import hxla, optax\n"
        "from flax import linen\n"
        "try:\n"
        "    loss = lambda model, batch: model(batch).sum()\n"
        "    job = hxla.Job(linen.Dense(1), None, loss, optax.sgd(1), batch_size=1)\n"
        "    hxla.train(job, steps=1)\n"
        "except hxla.HxlaError as e:\n    print(type(e).__name__, e)"
    )
    env = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert "MeshError JAX found no devices" in done.stdout, done.stderr


def test_a_script_that_leaves_its_session_open_ends_quietly():
    code = (
        "import hxla, numpy as np, optax\n"
        "from flax import nnx\n"
        "model, data = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), {'x': np.ones((4, 2), np.float32)}\n"
        "loss = lambda model, batch: (model(batch['x']) ** 2).mean()\n"
        "job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=4)\n"
        "session = job.open(job.plan(microbatch_size=2), quiet=True)\n"
        "print(session.step().step)"
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_batches_of_the_users_own_train_as_the_same_batches_of_the_data_do():
    data = {"x": np.arange(32, dtype=np.float32).reshape(16, 2) / 32}
    loss = lambda model, batch: (model(batch["x"]) ** 2).mean()  # noqa: E731
    shas = []
    for own in (False, True):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8, shuffle=False)
        plan = job.plan(microbatch_size=2, mesh=mesh(2), counts=(3, 1))
        with job.open(plan, steps=None if own else 2, mesh=mesh(2)) as session:
            if own:
                for begin in (0, 8):
                    session.step({"x": data["x"][begin : begin + 8]})
                with pytest.raises(hxla.DataError, match="has 4 examples, batch_size is 8"):
                    session.step({"x": data["x"][:4]})
            else:
                assert [record.step for record in session] == [1, 2]
            shas.append(session.result().sha256)
    assert shas[0] == shas[1]
