"""Uses of scans over layers that cannot work: one error each, with its reason and a remedy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import hxla
from support import lowering, models
from support.scanned_models import LAYERS, VOCABULARY, WIDTH, LinenNet, data, job, run_plan, train
from support.tiers import rows


def own_gradient(run):
    own = jax.custom_vjp(run)
    own.defvjp(lambda x, v: jax.vjp(run, x, v), lambda pull, g: pull(g))
    return own


#: What may be around a scan over layers, and what a plan says of it then.
AROUND = {
    "a checkpoint": (jax.checkpoint, "put the checkpoint around the layer instead"),
    "a cond": (
        lambda run: lambda x, v: jax.lax.cond(v.sum() > 99, lambda x, v: x, run, x, v),
        "where it stands outside",
    ),
    "a scan": (
        lambda run: lambda x, v: jax.lax.scan(lambda x, _: (run(x, v), None), x, length=2)[0],
        "stack the parameters of the outer one too",
    ),
    "a function with its own gradient": (own_gradient, "where it stands outside"),
}


class Inside(nn.Module):
    """Layers whose scan is inside another equation, and some more in a loop."""

    around: str
    loop: int = 0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        v = self.param("v", nn.initializers.normal(0.1), (LAYERS, WIDTH, WIDTH))
        step = lambda x, v: (jnp.tanh(x @ v), None)  # noqa: E731
        x = AROUND[self.around][0](lambda x, v: jax.lax.scan(step, x, v)[0])(x, v)
        for _ in range(self.loop):
            x = jnp.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(VOCABULARY)(x), 0.0


@pytest.mark.parametrize("around", AROUND)
def test_a_plan_says_which_scan_over_layers_stays_whole_and_why(around):
    plan = job(Inside(around, loop=4)).plan(lowering.cpus(2), stages=2, microbatch_size=2)
    [said] = [r for r in plan.reasons if "stays whole" in r]
    remedy = AROUND[around][1]
    assert said.startswith("a scan over layers (test_scan_refusals.py:")
    assert f"stays whole inside {around}: " in said
    assert remedy in said
    assert said in plan.explain()
    assert not [r for r in planned_layers().reasons if "stays whole" in r]


class Ensemble(nn.Module):
    """Iterations that hand nothing on are no layers."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        w = self.param("w", nn.initializers.normal(0.1), (LAYERS, WIDTH, VOCABULARY))
        return jax.lax.map(lambda w: x @ w, w).mean(0), 0.0


class Recurrent(nn.Module):
    """A scan over time, alone."""

    @nn.compact
    def __call__(self, tokens):
        return nn.RNN(nn.LSTMCell(VOCABULARY))(jax.nn.one_hot(tokens, 4)), 0.0


class Widening(nn.Module):
    """Layers that hand on more than they are given."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        w = self.param("w", nn.initializers.ones, (LAYERS, WIDTH, 2 * WIDTH))
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], 0.0


class NormInside(nn.Module):
    """Layers with a norm over columns that has a gradient of its own."""

    @nn.compact
    def __call__(self, tokens):
        def norm(x):
            return x / (1 + jnp.abs(x).sum(-1, keepdims=True))

        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        w = self.param("w", nn.initializers.normal(0.1), (LAYERS, WIDTH, WIDTH))
        step = lambda x, w: (own_gradient(lambda x, _: norm(x))(x @ w, 0.0), None)  # noqa: E731
        return nn.Dense(VOCABULARY)(jax.lax.scan(step, x, w)[0]), 0.0


class StagesInside(nn.Module):
    """Each iteration annotated as two stages."""

    @nn.compact
    def __call__(self, tokens):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                with hxla.stage():
                    x = nn.Dense(WIDTH)(x)
                with hxla.stage():
                    return nn.Dense(WIDTH)(x), None

        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(VOCABULARY)(scan()(x, None)[0]), 0.0


def planned(model, num_stages=2, num_devices=None, **options):
    own = {"stages": (1,) * num_stages, "microbatch_size": 2} | options
    return job(model).plan(lowering.cpus(num_devices or num_stages), **own)


@functools.cache
def planned_layers():
    """Two stages of the usual layers."""
    return planned(LinenNet())


def edited(change):
    """A plan of two stages with its segments changed by hand, and run."""
    plan = planned_layers()
    segments = change(plan.pipeline.segments)
    pipeline = plan.pipeline.model_copy(update={"segments": tuple(segments)})
    run_plan(LinenNet(), plan.replaced(pipeline=pipeline, prediction=None))


def with_first(segments, index, first):
    out = list(segments)
    out[index] = out[index].model_copy(update={"first": first})
    return out


def with_cut_layers():
    """A plan whose stages cut a stacked kernel between its layers, over `tensor`."""
    net, options = models.SplitLayers(LAYERS, VOCABULARY), {"loss": models.token_loss}
    own = hxla.Job(net, data(24), models.token_loss, optax.sgd(0.1), batch_size=8)
    mesh = {"data": 1, "stage": 2, "tensor": 2}
    plan = own.plan(lowering.cpus(4), mesh=mesh, microbatch_size=2)
    layouts = tuple(
        p.model_copy(update={"spec": (("tensor",), ("stage",), ())})
        if p.name == "layers/Dense_0/kernel"
        else p
        for p in plan.parameters
    )
    wrong = plan.replaced(parameters=layouts, prediction=None)
    train(net, None, 4, plan=wrong, counts=None, microbatch_size=None, **options)


def by_rules(*rules):
    mesh = {"data": 1, "stage": 2, "tensor": 2}
    made = hxla.RuleSet(name="mine", rules=rules)
    planned(LinenNet(), 2, 4, stages=None, mesh=mesh, rules=made)


def in_unlike_parts(model, rule, shares=(2, 1)):
    mesh, made = {"data": 1, "tensor": shares}, hxla.RuleSet(name="mine", rules=(rule,))
    planned(model, 1, len(shares), stages=None, mesh=mesh, rules=made)


def resumed_with_other_layers(folder):
    train(LinenNet(), (1, 1), steps=1, checkpoint_dir=folder, checkpoint_every=1)
    train(LinenNet(layers=8), (1, 1), steps=2, checkpoint_dir=folder, checkpoint_every=1)


PLAN = hxla.PlanError
HOSTILE = {
    "more stages than layers": (
        lambda _: planned(LinenNet(layers=2), 16, microbatch_size=1),
        PLAN,
        r"parts that can be told apart.* use at most",
    ),
    "more chunks than layers": (
        lambda _: train(
            LinenNet(layers=2),
            4,
            config={
                "cluster": {"visible_devices": [0, 1, 2, 3]},
                "pipeline": {"schedule": "interleaved", "num_chunks": 4},
            },
        ),
        PLAN,
        r"parts that can be told apart.* too few for 16 stages",
    ),
    "iterations that hand nothing on": (
        lambda _: planned(Ensemble(), 8),
        PLAN,
        r"a scan, .*, is one: it hands nothing from one iteration to the next",
    ),
    "a scan over time": (
        lambda _: planned(Recurrent(), 8),
        PLAN,
        r"a scan, .*, is one: it takes no slices of parameters",
    ),
    "a checkpoint around all layers": (
        lambda _: planned(Inside("a checkpoint"), 8),
        PLAN,
        r"stays whole inside a checkpoint: put the checkpoint around the layer.*too few",
    ),
    "a cond around all layers": (
        lambda _: planned(Inside("a cond"), 8),
        PLAN,
        r"stays whole inside a cond.*too few for 8 stages",
    ),
    "layers that hand on another shape": (
        lambda _: planned(Widening()),
        (TypeError, hxla.LossError),
        r"carry input and carry output must have equal types",
    ),
    "a body that a split into unlike parts cannot enter": (
        lambda _: in_unlike_parts(NormInside(), hxla.Rule(path="w$", axes=((), ("tensor",)))),
        PLAN,
        r"custom_vjp_call in NormInside .*unlike parts: leave it out of the split",
    ),
    "a layer's units in two splits": (
        lambda _: in_unlike_parts(
            LinenNet(), hxla.Rule(path="Dense_0/kernel", axes=(("tensor",), ("tensor",)))
        ),
        hxla.AnnotationError,
        r"stacked in dimension 0: axis 'tensor' cuts two dimensions; leave one out",
    ),
    "more devices than a layer has units": (
        lambda _: in_unlike_parts(
            LinenNet(), hxla.Rule(path="Dense_0/kernel", axes=((), ("tensor",))), (2, *[1] * 32)
        ),
        PLAN,
        r"Dense_0/kernel.*32 whole units.*cannot be cut over 33 devices; ask for fewer",
    ),
    "stages annotated inside an iteration, and asked for": (
        lambda _: planned(StagesInside()),
        hxla.ConfigError,
        r"stages=2 cuts a model that annotations cut already",
    ),
    "a stacked kernel cut between its layers": (
        lambda _: with_cut_layers(),
        PLAN,
        r"layers/Dense_0/kernel.spec: 'tensor' cuts dimension 0.*stacked",
    ),
    "a rule that counts the stacked dimension": (
        lambda _: by_rules(hxla.Rule(path=".*kernel$", axes=((), (), ("tensor",)))),
        hxla.AnnotationError,
        r"layers are stacked in dimension 0: the rule has 3 dimensions",
    ),
    "a plan of another number of layers": (
        lambda _: run_plan(LinenNet(layers=8), planned_layers()),
        PLAN,
        r"parameters.layers/Dense_0/bias",
    ),
    "a cut behind the last iteration": (
        lambda _: edited(lambda own: with_first(own, -1, 99)),
        PLAN,
        r"the loss has no equation 99",
    ),
    "two parts from the same iteration": (
        lambda _: edited(lambda own: with_first(own, 1, 0)),
        PLAN,
        r"must grow from 0",
    ),
    "a checkpoint of another number of layers": (
        resumed_with_other_layers,
        hxla.CheckpointError,
        r"layers\.Dense_0\.bias: float32\[6, .* float32\[8, ",
    ),
}


@pytest.mark.parametrize(
    "name", rows(HOSTILE, *(HOSTILE.keys() - {"a checkpoint of another number of layers"}))
)
def test_a_hostile_use_of_a_scan_gives_one_error_with_its_reason(name, tmp_path):
    use, error, message = HOSTILE[name]
    with pytest.raises(error, match="(?s)" + message):
        use(tmp_path)
