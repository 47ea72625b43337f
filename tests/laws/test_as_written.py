"""Models run as their authors wrote them: their mode, their random keys, what they sow, their axes.

Each fact is shown against the same model in plain Flax.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import hxla
from support import models
from support.inside.jax import num_compilations
from support.tiers import rows
from support.training import train_with

X = np.random.default_rng(0).normal(1.0, 2.0, (32, 4)).astype(np.float32)
DATA = {"x": X, "y": X.sum(axis=1)}


def squares(model, batch):
    return (model(batch["x"]).reshape(-1) - batch["y"]) ** 2


def fit(model, loss=squares, counts=(4,), optimizer=None, **options):
    arguments = dict(batch_size=16, microbatch_size=4, steps=2, shuffle=False) | options
    return train_with(
        model,
        DATA,
        loss,
        optimizer or optax.sgd(0.01),
        mesh=models.mesh(data=len(counts)),
        counts=counts,
        **arguments,
    )


# -- the mode ------------------------------------------------------------------------------------


class Tuned(nnx.Module):
    """A backbone whose statistics are frozen, and a head that drops out."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.frozen = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)
        self.own = nnx.BatchNorm(1, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.own(self.head(self.frozen(self.norm(x))))


def test_a_model_is_trained_in_the_mode_in_which_it_was_given():
    model = Tuned(nnx.Rngs(0))
    plain = nnx.clone(model)
    batches = [{k: v[i : i + 4] for k, v in DATA.items()} for i in range(0, 16, 4)]
    expected = np.mean([squares(plain, batch) for batch in batches])
    result = fit(model, steps=1)
    assert result.history.steps[0].loss == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_array_equal(model.norm.mean[...], np.zeros(4))
    assert np.abs(model.own.mean[...]).max() > 0


def test_evaluation_is_in_evaluation_mode_and_leaves_the_models_own():
    model = Tuned(nnx.Rngs(0))
    result = fit(model, optimizer=optax.sgd(0.0), eval_data=DATA)
    modes = model.norm.use_running_average, model.frozen.deterministic, model.own
    assert (*modes[:2], modes[2].use_running_average) == (True, True, False)
    plain = nnx.clone(model)
    plain.eval()
    expected = np.mean(squares(plain, DATA))
    assert result.history.evaluations[0].loss == pytest.approx(float(expected), rel=1e-5)


# -- random keys ---------------------------------------------------------------------------------


class CalledWithKeys(nnx.Module):
    """Flax's own way of late: the streams come with the call."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs):
        return self.linear(self.dropout(x, rngs=rngs))


class LinenWithKeys(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        noise = jax.random.normal(key, x.shape) + jax.random.normal(self.make_rng("dropout"))
        return nn.Dense(1)(x + noise)


def nnx_keys(model, batch, key):
    values = (model(batch["x"], rngs=nnx.Rngs(key)).reshape(-1) - batch["y"]) ** 2
    return values, {"draw": hxla.metric(jax.random.uniform(key, (4,)), "concat")}


def linen_keys(model, batch, *, key):
    values = (model(batch["x"], key).reshape(-1) - batch["y"]) ** 2
    return values, {"draw": hxla.metric(jax.random.uniform(key, (4,)), "concat")}


@pytest.mark.parametrize("kind", rows(["nnx", "linen"], "nnx"))
def test_a_loss_gets_a_key_of_its_own_for_each_microbatch_of_each_step(kind):
    def run(counts, seed=0):
        model = CalledWithKeys(nnx.Rngs(0)) if kind == "nnx" else LinenWithKeys()
        loss = nnx_keys if kind == "nnx" else linen_keys
        return fit(model, loss, counts, seed=seed, eval_data=DATA)

    one, two, other = run((4,)), run((1, 3)), run((4,), seed=1)
    draws = np.concatenate([step.metrics["draw"] for step in one.history.steps])
    assert len(np.unique(draws)) == 32
    assert one.sha256 == two.sha256
    assert one.history.steps[0].metrics["draw"] != other.history.steps[0].metrics["draw"]
    assert one.history.evaluations[0].loss == two.history.evaluations[0].loss


KEY, OLD_KEY, STREAMS = jax.random.key(0), jax.random.PRNGKey(0), nnx.Rngs(0)


def helper(shape, key=OLD_KEY):
    return jax.random.normal(key, shape)


def with_key(model, batch):
    return squares(model, batch) + jax.random.normal(KEY, (4,))


def with_streams(model, batch):
    return squares(model, batch) + jax.random.normal(STREAMS.noise(), (4,))


def through_a_helper(model, batch):
    return squares(model, batch) + helper((4,))


def in_a_scan(model, batch):
    def body(total, _):
        return total + jax.jit(helper, static_argnums=0)((4,)), None

    return squares(model, batch) + jax.lax.scan(body, jnp.zeros(4), length=2)[0]


def of_a_cell():
    own = jax.random.key(1)
    return lambda model, batch: squares(model, batch) + jax.random.normal(own, (4,))


def by_default(model, batch, key=KEY):
    return squares(model, batch) + jax.random.normal(key, (4,))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (with_key, "closes over 'KEY', a random key"),
        (with_streams, r"closes over 'STREAMS', an nnx\.Rngs"),
        (through_a_helper, "or a function that it calls, closes over the data of a random key"),
        (in_a_scan, "or a function that it calls, closes over the data of a random key"),
        (of_a_cell(), "closes over 'own', a random key"),
        (by_default, "closes over 'key', a random key"),
        (functools.partial(nnx_keys, key=KEY), "closes over 'key', a random key"),
    ],
)
def test_a_loss_that_brings_its_own_key_is_refused_by_name(loss, words):
    batch = jax.tree.map(lambda x: x[:4], DATA)
    with pytest.raises(hxla.LossError, match=words) as error:
        hxla.trace(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), loss, batch)
    assert "loss(model, batch, key)" in str(error.value)


# -- what is sown --------------------------------------------------------------------------------


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4)(x))
        self.sow("losses", "balance", jnp.mean(h**2))
        self.sow("totals", "l2", jnp.sum(h**2), init_fn=lambda: 0.0, reduce_fn=jnp.add)
        self.sow("intermediates", "width", jnp.max(h))
        return h, None


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "batch_stats": 0, "losses": 0, "totals": 0, "intermediates": 0}
        scanned = nn.scan(Expert, variable_axes=axes, split_rngs={"params": True}, length=3)
        x, _ = scanned(name="layers")(x, None)
        x, _ = Expert(name="last")(x)
        return nn.Dense(1)(x)


def sown_losses(model, batch):
    values = (model(batch["x"]).reshape(-1) - batch["y"]) ** 2
    sown = model.variables
    parts = [*jax.tree.leaves(sown["losses"]), *jax.tree.leaves(sown["totals"])]
    extra = sum(jnp.sum(x) for x in parts)
    return values.mean() + 0.1 * extra, {"width": sown["intermediates"]["last"]["width"][0]}


def plain_flax(variables, steps):
    """The sums of a step by hand: microbatches of 4, gradients and statistics averaged."""
    state = {"batch_stats": variables["batch_stats"]}
    params, losses = variables["params"], []
    mutable = ["batch_stats", "losses", "totals", "intermediates"]

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, state, batch):
        out, left = Experts().apply({"params": params, **state}, batch["x"], mutable=mutable)
        sown = [*jax.tree.leaves(left["losses"]), *jax.tree.leaves(left["totals"])]
        extra = sum(jnp.sum(x) for x in sown)
        value = jnp.mean((out.reshape(-1) - batch["y"]) ** 2) + 0.1 * extra
        return value, {"batch_stats": left["batch_stats"]}

    gradient = jax.jit(loss)
    for step in range(steps):
        begin = step * 16
        parts = []
        for i in range(begin, begin + 16, 4):
            batch = {k: v[i : i + 4] for k, v in DATA.items()}
            parts.append(gradient(params, state, batch))
        losses.append(np.mean([value for (value, _), _ in parts]))
        mean = lambda *xs: sum(xs) / 4  # noqa: E731
        state = jax.tree.map(mean, *(left for (_, left), _ in parts))
        grads = jax.tree.map(mean, *(grad for _, grad in parts))
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
    return losses, params, state


@functools.cache
def expert_variables():
    return jax.tree.map(np.asarray, jax.jit(Experts().init)(jax.random.key(0), X[:4]))


@pytest.mark.parametrize("given", rows(["whole", "params and state", "frozen"]))
def test_what_linen_sows_is_read_by_the_loss_and_is_no_state(given):
    variables = expert_variables()
    own = variables
    if given == "params and state":
        own = {k: variables[k] for k in ("params", "batch_stats")}
    elif given == "frozen":
        own = freeze(variables)
    result = fit(Experts(), sown_losses, variables=own)
    losses, params, state = plain_flax(variables, 2)
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    assert sorted(result.state) == ["batch_stats", "params"]
    for ours, theirs in zip(
        jax.tree.leaves(result.state), jax.tree.leaves({**state, "params": params}), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    assert fit(Experts(), sown_losses, (3, 1), variables=own).sha256 == result.sha256


@pytest.mark.slow
def test_what_linen_sows_is_no_state_of_a_module_that_hxla_initialises():
    results = [fit(Experts(), sown_losses, counts) for counts in ((4,), (3, 1))]
    assert sorted(results[0].state) == ["batch_stats", "params"]
    assert results[0].sha256 == results[1].sha256


def test_variables_without_the_modules_state_are_refused():
    variables = {"params": expert_variables()["params"]}
    with pytest.raises(hxla.ConfigError, match=r"lacks the collections \['batch_stats'\]"):
        fit(Experts(), sown_losses, variables=variables)


class Sowing(nnx.Module):
    def __init__(self, kind):
        self.linear = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        self.kind = kind

    def __call__(self, x):
        y = self.linear(x)
        self.sow(self.kind, "size", jnp.mean(y**2))
        return y


class Balance(nnx.Intermediate):
    pass


class Other(nnx.Variable):
    pass


@pytest.mark.filterwarnings("ignore:.*sow.*:DeprecationWarning")
def test_what_nnx_sows_is_read_by_the_loss_and_is_no_state():
    def loss(model, batch):
        return squares(model, batch).mean() + model.size[0]

    model = Sowing(Balance)
    model(X)  # what is left of an earlier call is not carried on
    result = fit(model, loss, steps=1)
    plain = Sowing(Balance)
    batches = [{k: v[i : i + 4] for k, v in DATA.items()} for i in range(0, 16, 4)]
    expected = np.mean([squares(plain, b).mean() + np.mean(plain(b["x"]) ** 2) for b in batches])
    assert result.history.steps[0].loss == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(hxla.LossError, match=r"new: size.*\n.*derived from nnx\.Intermediate"):
        fit(Sowing(Other), loss)


# -- axes and shapes -----------------------------------------------------------------------------


class OverAnAxis(nn.Module):
    axis_name: str | None

    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)
        return nn.Dense(1)(norm(x))


class OverAnAxisToo(nnx.Module):
    def __init__(self, axis_name):
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize(
    "make", rows([OverAnAxis, OverAnAxisToo], OverAnAxisToo, ids=lambda make: make.__name__)
)
def test_an_axis_that_nothing_binds_is_the_microbatch_and_the_plan_says_so(make):
    def loss(model, batch):
        values = squares(model, batch)
        if over:
            place = jax.lax.axis_index("batch") + jax.lax.psum(1, "other")
            values = jax.lax.pmean(values, "batch") * place
        return values

    results = []
    for over in (None, "batch"):
        results.append(fit(make(over), loss, eval_data=DATA))
    alone, bound = results
    for a, b in zip(alone.history.steps, bound.history.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert alone.history.evaluations[0].loss == pytest.approx(
        bound.history.evaluations[0].loss, rel=1e-6
    )
    said = [reason for reason in bound.plan.reasons if "has one member, the microbatch" in reason]
    assert [reason.split()[1] for reason in said] == ["'batch'", "'other'"]
    assert "is of 4 examples" in said[0]


def test_tracing_a_linen_module_computes_nothing():
    batch = {"x": jax.ShapeDtypeStruct((4, 10**6), "float32")}
    before = num_compilations()
    graph = hxla.trace(nn.Dense(10**6), lambda model, batch: model(batch["x"]).mean(), batch)
    assert graph.task_graphs[0].param_bytes == 4 * (10**12 + 10**6)
    assert num_compilations() == before


def test_too_many_stages_names_the_parts_that_there_are():
    class Convolution(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(1, (2, 2), padding="VALID", use_bias=False)(x)

    batch = jax.ShapeDtypeStruct((4, 2, 2, 1), "float32")
    graph = hxla.trace(Convolution(), lambda model, batch: model(batch).mean(), batch)
    with pytest.raises(hxla.PlanError) as error:
        hxla.make_plan(graph, 8, stages=8)
    assert re.search("has 4 parts .* too few for 8 stages; use at most 4", str(error.value))
    assert "scan" not in str(error.value)
