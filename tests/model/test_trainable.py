"""`trainable=`: what is frozen has no gradient and no state, and is nowhere lost."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import lowering, models
from support.filled import filled
from support.tiers import rows
from support.training import train_with

STEPS, BATCH, MICROBATCH = 2, 32, 4


class Kept(nnx.Param):
    """What `nnx.LoRAParam` does not select."""


class Adapted(nnx.Module):
    """A frozen trunk of two layers with low-rank adapters, the second one's frozen, and a head."""

    def __init__(self, width=8):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [
                nnx.LoRALinear(
                    width, width, lora_rank=2, use_bias=False, lora_param_type=kind, rngs=rngs
                )
                for kind in (nnx.LoRAParam, Kept)
            ]
        )
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(self.norm(x))


def adapted():
    """A model without zeros, so that each trained parameter has a gradient."""
    return filled(Adapted)


class LinenAdapted(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.tanh(nn.Dense(8, name=f"trunk_{i}")(x))
        return nn.Dense(4, name="head")(x)


def data():
    return models.regression(64, inputs=8, outputs=4)


def train(model, trainable, optimizer=None, counts=(8,), **options):
    arguments = {"steps": STEPS, "counts": counts} | options
    if "mesh" not in arguments and "stages" not in arguments:
        arguments["mesh"] = models.mesh(data=len(counts))
    return train_with(
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
    state = jax.jit(optimizer.init)(own)

    @functools.partial(jax.grad, has_aux=True)
    def gradient(own, rest, batch):
        module = nnx.merge(graphdef, own, rest, copy=True)
        return models.squared_error(module, batch).mean(), nnx.split(module, trained, ...)[2]

    @jax.jit
    def train_step(own, rest, state, parts):
        each = jax.vmap(gradient, in_axes=(None, None, 0))(own, rest, parts)
        grads, rest = jax.tree.map(lambda x: x.mean(0), each)
        updates, state = optimizer.update(grads, state, own)
        return optax.apply_updates(own, updates), rest, state

    for step in range(STEPS):
        own_rows = np.arange(step * BATCH, (step + 1) * BATCH).reshape(-1, MICROBATCH) % 64
        own, rest, state = train_step(own, rest, state, {k: v[own_rows] for k, v in data().items()})
    return nnx.merge(graphdef, own, rest, copy=True)


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def close(ours, theirs, atol=1e-6):
    for a, b in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol)


#: The layer whose adapters are trained and the head are of one stage or of two.
SEVERAL = (nnx.LoRAParam, "head/kernel")
#: What `trainable` says, how nnx says it, and the number of parameters.
FILTERS = {
    "type": (nnx.LoRAParam, nnx.LoRAParam, 2),
    "pattern": ("head/", nnx.All(nnx.Param, nnx.PathContains("head")), 2),
    "several": (
        SEVERAL,
        nnx.Any(nnx.LoRAParam, lambda path, _: path[-2:] == ("head", "kernel")),
        3,
    ),
    "function": (
        lambda path, value: "norm" in path,
        nnx.All(nnx.Param, nnx.PathContains("norm")),
        2,
    ),
}


@functools.cache
def reference():
    """Several parameters, trained on one device."""
    return train(adapted(), SEVERAL)


def job(trainable):
    return hxla.Job(
        lambda: Adapted(),
        data(),
        models.squared_error,
        optax.adam(1e-2),
        batch_size=BATCH,
        trainable=trainable,
    )


def test_a_plan_says_how_many_parameters_are_trained():
    for trainable, filter_, _ in FILTERS.values():
        plan = job(trainable).plan(lowering.cpus(1), mesh={"data": 1}, microbatch_size=MICROBATCH)
        num, every = (
            sum(x.size for x in jax.tree.leaves(nnx.state(Adapted(), kind)))
            for kind in (filter_, nnx.Param)
        )
        assert f"trained: {num} of {every} parameters" in plan.explain()


@pytest.mark.parametrize("name", rows(FILTERS, "several"))
def test_what_is_trained_is_trained_and_resumed_as_in_a_loop_of_ones_own(name, tmp_path):
    trainable, filter_, num = FILTERS[name]
    num_sums = []

    def look(record, session):
        num_sums.append(len(session.state.exponents))

    alone = reference() if trainable is SEVERAL else train(adapted(), trainable)
    train(adapted(), trainable, counts=(3, 5), steps=1, checkpoint_dir=tmp_path)
    other = filled(Adapted, seed=1)  # what the checkpoint holds counts, also of what is frozen
    result = train(other, trainable, counts=(5, 3), checkpoint_dir=tmp_path, callbacks=[look])
    assert result.sha256 == alone.sha256
    assert num_sums == [num + 2]  # and of BatchNorm's two statistics
    expected = plain(adapted(), filter_)
    close(nnx.state(result.model, nnx.Not(nnx.RngState)), nnx.state(expected, ...))
    frozen = nnx.All(nnx.Param, nnx.Not(filter_))
    kept, before = (arrays(nnx.state(model, frozen)) for model in (result.model, adapted()))
    assert all((a == b).all() for a, b in zip(kept, before, strict=True))
    # A trace of what is trained.
    assert len(jax.tree.leaves(nnx.state(adapted(), filter_))) == num
    assert len(jax.tree.leaves(result.opt_state)) == num
    another = "norm/" if name == "pattern" else "head/"
    with pytest.raises(hxla.CheckpointError, match=r"missing in the checkpoint: opt_state"):
        train(adapted(), another, steps=5, checkpoint_dir=tmp_path)


SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "1f1b, recomputed": {"schedule": "1f1b", "recompute": True},
    "zb-h1": {"schedule": "zb-h1"},
}


@pytest.mark.parametrize("name", rows(SCHEDULES, "1f1b, recomputed"))
def test_stages_hold_what_is_frozen_and_sum_what_is_trained(name):
    """The second stage has frozen adapters with the shapes of the trained ones of the first."""
    config = {"cluster": {"visible_devices": [0, 1]}, "pipeline": SCHEDULES[name]}
    piped = train(adapted(), SEVERAL, stages=2, counts="even", config=config)
    close(piped.state, reference().state, atol=2e-6)


RULES = hxla.RuleSet(
    name="both",
    rules=(
        hxla.Rule(path=".*kernel", axes=((), ("tensor",))),
        hxla.Rule(path=".*lora_b", axes=((), ("tensor",))),
    ),
)


def test_rules_shard_what_is_frozen_too():
    plan = job(SEVERAL).plan(
        lowering.cpus(2), mesh={"data": 1, "tensor": 2}, rules=RULES, microbatch_size=MICROBATCH
    )
    sharded = {p.name for p in plan.parameters if ("tensor",) in p.spec}
    each = ("kernel", "lora/lora_b")
    assert sharded == {"head/kernel", *(f"layers/{i}/{name}" for i in (0, 1) for name in each)}


@pytest.mark.slow
def test_what_is_frozen_and_sharded_trains_as_on_one_device():
    mesh = models.mesh(data=1, tensor=2)
    result = train(adapted(), SEVERAL, rules=RULES, mesh=mesh, counts="even")
    kernel = result.state["layers"][0]["kernel"][...]
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 4)
    close(result.state, reference().state)


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
        train(adapted(), trainable)
