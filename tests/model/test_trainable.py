"""`trainable=`: what is frozen has no gradient and no state, and is nowhere lost."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models

STEPS, BATCH, MICROBATCH = 3, 32, 4


class Adapted(nnx.Module):
    """A frozen trunk of layers with low-rank adapters, and a head."""

    def __init__(self, layers=4, width=8):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [
                nnx.LoRALinear(width, width, lora_rank=2, use_bias=False, rngs=rngs)
                for _ in range(layers)
            ]
        )
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 3, rngs=rngs)
        for layer in self.layers:  # as they start, one of the two would have no gradient
            layer.lora.lora_b[...] = 0.3 * jax.random.normal(rngs.params(), (2, width))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(self.norm(x))


class LinenAdapted(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.tanh(nn.Dense(8, name=f"trunk_{i}")(x))
        return nn.Dense(3, name="head")(x)


def data():
    return models.regression(64, inputs=8)


def train(model, trainable, optimizer=None, counts=(8,), **options):
    arguments = {"steps": STEPS, "counts": counts} | options
    if "mesh" not in arguments and "stages" not in arguments:
        arguments["mesh"] = models.mesh(data=len(counts))
    return hxla.train(
        model,
        data(),
        models.squared_error,
        optimizer or optax.sgd(0.05, momentum=0.9),
        batch_size=BATCH,
        microbatch_size=MICROBATCH,
        shuffle=False,
        trainable=trainable,
        **arguments,
    )


def plain(model, trained):
    """A user's own loop: gradients of the parameters of a filter; BatchNorm by microbatches."""
    graphdef, own, rest = nnx.split(model, trained, ...)
    optimizer = optax.sgd(0.05, momentum=0.9)
    state = optimizer.init(own)

    def loss(own, rest, batch):
        module = nnx.merge(graphdef, own, rest, copy=True)
        return models.squared_error(module, batch).mean(), nnx.split(module, trained, ...)[2]

    for step in range(STEPS):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % 64
        parts = [
            {k: v[rows[i : i + MICROBATCH]] for k, v in data().items()}
            for i in range(0, BATCH, MICROBATCH)
        ]
        each = [jax.grad(loss, has_aux=True)(own, rest, part) for part in parts]
        grads, rest = jax.tree.map(lambda *x: sum(x) / len(x), *each)
        updates, state = optimizer.update(grads, state, own)
        own = optax.apply_updates(own, updates)
    return nnx.merge(graphdef, own, rest, copy=True)


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def close(ours, theirs, atol=1e-6):
    for a, b in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol)


FILTERS = {
    "type": (nnx.LoRAParam, nnx.LoRAParam),
    "pattern": ("head/", nnx.All(nnx.Param, nnx.PathContains("head"))),
    "several": (
        [nnx.LoRAParam, "head/kernel"],
        nnx.Any(nnx.LoRAParam, lambda path, _: path[-2:] == ("head", "kernel")),
    ),
    "function": (
        lambda path, value: "norm" in path,
        nnx.All(nnx.Param, nnx.PathContains("norm")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_what_is_trained_is_trained_as_in_a_loop_of_ones_own(name):
    trainable, filter_ = FILTERS[name]
    result = train(Adapted(), trainable, counts=(5, 3))
    expected = plain(Adapted(), filter_)
    close(nnx.state(result.model, nnx.Not(nnx.RngState)), nnx.state(expected, ...))
    frozen = nnx.All(nnx.Param, nnx.Not(filter_))
    kept, before = (arrays(nnx.state(model, frozen)) for model in (result.model, Adapted()))
    assert all((a == b).all() for a, b in zip(kept, before, strict=True))
    # A trace of what is trained.
    num = len(jax.tree.leaves(nnx.state(Adapted(), filter_)))
    assert len(jax.tree.leaves(result.opt_state)) == num
    assert f"trained: {num} of 16 parameters" in result.plan.explain()
    assert train(Adapted(), trainable).sha256 == result.sha256


def test_frozen_parameters_join_no_sum():
    job = hxla.Job(
        Adapted(),
        data(),
        models.squared_error,
        optax.adam(1e-2),
        batch_size=BATCH,
        trainable=nnx.LoRAParam,
    )
    mesh = models.mesh(data=1)
    plan = job.plan(microbatch_size=MICROBATCH, mesh=mesh)
    with job.open(plan, mesh=mesh) as session:
        shapes = {x.shape for x in jax.tree.leaves(session._stepper._sums[0].values)}
        # Eight adapters of 16 elements, and BatchNorm's two statistics of 8.
        assert shapes == {(8, 16), (2, 8)}
        assert len(session.state.exponents) == 8 + 2


@pytest.mark.slow
def test_linen_parameters_are_named_by_patterns():
    module = LinenAdapted()
    variables = module.init(jax.random.key(0), jnp.zeros((1, 8)))
    result = train(module, "head/", variables=variables, counts=(5, 3))
    for name, own in variables["params"].items():
        same = jax.tree.map(lambda a, b: bool((a == b).all()), own, result.state["params"][name])
        assert all(jax.tree.leaves(same)) == (name != "head")
    assert {*result.opt_state[0].trace} == {"head"}
    piped = train(
        module, r"trunk_\d/kernel", variables=variables, stages=2, counts="even",
        config={"cluster": {"visible_devices": [0, 1]}},
    )  # fmt: skip
    close(piped.state, train(module, r"trunk_\d/kernel", variables=variables).state)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_stages_hold_what_is_frozen_and_sum_what_is_trained(schedule, recompute):
    if schedule == "zb-h1" and recompute:
        pytest.skip("zb-h1 keeps what the second half of a backward needs")
    config = {
        "cluster": {"visible_devices": [0, 1]},
        "pipeline": {"schedule": schedule, "recompute": recompute},
    }
    # One stage has adapters and the head, the other a frozen layer of the adapters' own shapes.
    trainable = ["layers/[01]/lora", "head/"]
    piped = train(Adapted(), trainable, stages=2, counts="even", config=config)
    close(piped.state, train(Adapted(), trainable).state, atol=2e-6)


def test_rules_cut_what_is_frozen_too():
    rule = hxla.Rule(path=".*kernel", axes=((), ("tensor",)))
    wide = hxla.Rule(path=".*lora_b", axes=((), ("tensor",)))
    rules = hxla.RuleSet(name="both", rules=(rule, wide))
    mesh = models.mesh(data=1, tensor=2)

    class Even(Adapted):
        def __init__(self):
            super().__init__()
            self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return super().__call__(x)[:, :3]

    result = train(Even(), nnx.LoRAParam, rules=rules, mesh=mesh, counts="even")
    kernel = result.state["layers"][0]["kernel"][...]
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 4)
    close(result.state, train(Even(), nnx.LoRAParam).state)


def test_a_checkpoint_holds_what_is_frozen_and_is_no_other_selections(tmp_path):
    whole = train(Adapted(), nnx.LoRAParam)
    train(Adapted(), nnx.LoRAParam, steps=1, checkpoint_dir=tmp_path)
    other = Adapted()
    other.layers[0].kernel[...] *= 0  # what the checkpoint holds counts
    resumed = train(other, nnx.LoRAParam, counts=(3, 5), checkpoint_dir=tmp_path)
    assert resumed.sha256 == whole.sha256
    with pytest.raises(hxla.CheckpointError, match=r"missing in the checkpoint: opt_state"):
        train(Adapted(), "head/", steps=5, checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        ("haed/", r"'haed/' \(the nearest path is 'head/"),
        (["head/", nnx.RngKey], r"RngKey"),
        (lambda path, value: False, "names no parameter"),
        ("(", "no pattern"),
        (7, r"trainable=7"),
    ],
)
def test_a_selection_that_names_nothing_is_refused(trainable, words):
    with pytest.raises(hxla.ConfigError, match=words):
        train(Adapted(), trainable)
