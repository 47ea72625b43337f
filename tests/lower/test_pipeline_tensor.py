"""Stages that are split over several devices each: tensor parallelism inside a pipeline."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hxla
from hxla import testing
from support import families, models
from support.inside.inspect import _shapes
from support.inside.lower import _pipeline, check_permutes, make_slots
from support.inside.plan import storage_specs
from support.tensor_gpt import BATCH, HIDDEN, LENGTH, MICRO, STEPS, WIDTH, gpt, text
from support.tiers import rows
from support.training import train_with


class Mlp(nnx.Module):
    """Two parts, each column and then row parallel; the second has other sizes."""

    def __init__(self, rngs, scopes):
        dense = lambda i, o: nnx.Linear(i, o, rngs=rngs)  # noqa: E731
        self.up1, self.down1 = dense(6, HIDDEN), dense(HIDDEN, WIDTH)
        self.up2, self.down2 = dense(WIDTH, 2 * HIDDEN), dense(2 * HIDDEN, 3)
        self.scopes = scopes

    def __call__(self, x):
        with self.scopes():
            x = self.down1(jnp.tanh(self.up1(x)))
        with self.scopes():
            return self.down2(jnp.tanh(self.up2(x)))


def mlp(scopes=hxla.replicate):
    return Mlp(nnx.Rngs(0), scopes)


def vectors():
    return models.regression(STEPS * BATCH)


def split_in_two():
    return hxla.split(2)


def on_mesh(**axes):
    return {"mesh": models.mesh(**axes), "rules": "decoder"}


def visible(num):
    return {"config": {"cluster": {"visible_devices": list(range(num))}}}


# For each model: how it is made, its loss and data; then on one device and on pipelines of 2 x 2.
MODELS = {
    "annotated mlp": (
        lambda: mlp(split_in_two),
        models.squared_error,
        vectors,
        lambda pipelines: visible(4 * pipelines),
    ),
    "gpt by rules": (
        gpt,
        families.token_loss,
        text,
        lambda pipelines: on_mesh(data=pipelines, stage=2, tensor=2),
    ),
}


def trained(model, loss, data, counts="even", **options):
    return train_with(
        model,
        data,
        loss,
        optax.sgd(0.3, momentum=0.9),
        batch_size=BATCH,
        microbatch_size=MICRO,
        steps=STEPS,
        shuffle=False,
        counts=counts,
        **options,
    )


def reference(model, loss, data):
    """Plain JAX on one device: losses and parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.sgd(0.3, momentum=0.9)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        mean = lambda p: loss(nnx.merge(graphdef, p, rest), batch).mean()  # noqa: E731
        value, grads = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    losses = []
    for i in range(STEPS):
        batch = {k: v[i * BATCH : (i + 1) * BATCH] for k, v in data.items()}
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    return losses, params


@pytest.fixture
def programs(monkeypatch):
    """What pipelines compile: slots filled, ticks, sums collected."""
    found = []
    adopt = _pipeline.Pipeline.adopt

    def record(self, compiled):
        found.append(list(compiled))
        adopt(self, compiled)

    monkeypatch.setattr(_pipeline.Pipeline, "adopt", record)
    return found


def shapes(collectives):
    return [_shapes.arrays(array)[0][1] for c in collectives for array in c.arrays]


def of_pipelines(name, num, counts="even"):
    make, loss, data, devices = MODELS[name]
    return trained(make(), loss, data(), counts, **devices(num))


@pytest.mark.parametrize("name", rows(MODELS, "annotated mlp"))
def test_split_stages_train_as_one_device_does(name, programs):
    make, loss, data, _ = MODELS[name]
    losses, params = reference(make(), loss, data())
    two = of_pipelines(name, 2, (5, 3))
    assert two.plan.counts == (5, 3)
    assert len(programs) == 2
    np.testing.assert_allclose([s.loss for s in two.history.steps], losses, rtol=2e-6)
    found = jax.tree.leaves(nnx.state(two.model, nnx.Param))
    for got, expected in zip(found, jax.tree.leaves(params), strict=True):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * largest)
    assert any("forwards are recomputed: stages of 2 devices" in r for r in two.plan.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_pipelines_of_split_stages_end_with_the_bits_of_one(name, programs):
    assert of_pipelines(name, 2, (5, 3)).sha256 == of_pipelines(name, 1).sha256
    assert len(programs) == 3


@pytest.mark.slow
def test_the_collectives_of_a_split_stage_are_megatrons(programs):
    trained(gpt(), families.token_loss, text(), stages=2, **on_mesh(data=1, stage=2, tensor=2))
    fill, ticks, finish, *_ = (hxla.inspect(program).main for program in programs[0])
    activation = (MICRO, LENGTH, WIDTH)

    testing.assert_collectives(
        programs[0][1], all_gather=2, reduce_scatter=0, all_to_all=0, collective_permute=2
    )
    # Each device of a stage sends and keeps its half of a boundary, which actions gather.
    assert set(shapes(ticks.select("collective-permute"))) == {(np.prod(activation) // 2,)}
    gathers = ticks.select("all-gather")
    assert all(c.axes == ("tensor",) for c in gathers)
    assert shapes(gathers) == [(np.prod(activation),)] * 2
    # Within a stage a permute would wait for devices that took another action.
    permutes = sorted(c.groups for c in ticks.select("collective-permute"))
    assert permutes == [((0, 2), (1, 3)), ((2, 0), (3, 1))]
    reduces = ticks.select("all-reduce")
    assert all(c.axes == ("tensor",) for c in reduces)
    large = [s for s in shapes(reduces) if s == activation]
    # Forward: the vocabulary's lookup, attention and MLP of the first block. Its backward: again
    # but for the last, whose result is not needed, and two for the gradients. The last stage:
    # attention and MLP, two for their gradients, one for that of the tied logits.
    assert len(large) == 3 + (2 + 2) + (2 + 2 + 1)
    small = [s for s in shapes(reduces) if s != activation]
    # The softmax over a cut vocabulary: its largest, its sum, the label's logit.
    assert len(small) == 3
    assert all(np.prod(s) == MICRO * LENGTH for s in small)

    assert [(c.kind, c.axes) for c in fill.select(None)] == [("all-to-all", ("stage",))]
    assert sorted((c.kind, c.axes) for c in finish.select(None)) == [
        ("all-reduce", ("tensor",)),
        ("all-to-all", ("stage",)),
    ]
    [(num_peaks,)] = shapes(finish.select("all-reduce"))
    assert num_peaks < 20


@pytest.mark.slow
def test_dropout_and_batch_statistics_are_those_of_one_device():
    def run(**options):
        net = models.NnxNet(nnx.Rngs(0))
        return trained(net, models.token_loss, models.tokens(STEPS * BATCH), **options)

    rules = hxla.RuleSet(
        name="net",
        rules=(
            hxla.Rule(path=".*(query|key|value)/kernel", axes=((), ("tensor",), ())),
            hxla.Rule(path=".*attention/out/kernel", axes=(("tensor",), (), ())),
            hxla.Rule(path="embed/embedding", axes=(("tensor",), ())),
        ),
    )
    alone = run(**visible(1))
    split = run(mesh=models.mesh(data=1, stage=2, tensor=2), rules=rules, stages=2)
    for a, b in zip(alone.history.steps, split.history.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    is_stat = lambda r: jax.tree.leaves(nnx.state(r.model, nnx.BatchStat))  # noqa: E731
    for a, b in zip(is_stat(alone), is_stat(split), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_storage_is_cut_over_stages_and_over_the_devices_of_each():
    shapes = [(8, 6), (4, 6), (6,), (2,)]
    inner = [P("tensor"), P(None, "tensor"), P(), P("tensor")]
    specs = storage_specs(shapes, inner, {"tensor": 2}, 2)
    assert specs == [
        P(("tensor", "stage")),
        P("stage", "tensor"),
        P("stage"),
        P("tensor"),  # one element on each device of a stage: every stage has it
    ]
    slots = make_slots(shapes, [np.float32] * 4, [[0, 2], [1, 3]], specs, [("tensor", 2)])
    assert {s.shape: s.piece for s in slots.slots} == {
        (8, 6): (4, 6),
        (4, 6): (4, 3),
        (6,): (6,),
        (2,): (1,),
    }
    # Parameters of one shape that are cut unlike each other have slots of their own.
    specs = storage_specs([(4, 4), (4, 4)], inner[:2], {"tensor": 2}, 2)
    two = make_slots([(4, 4), (4, 4)], [np.float32] * 2, [[0], [1]], specs, [("tensor", 2)])
    assert [s.params for s in two.slots] == [(0, None), (None, 1)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": {"pipeline": {"schedule": "zb-h1"}}}, hxla.ConfigError, "need residuals"),
        ({"stages": 4}, hxla.ConfigError, "stages=4 need a mesh axis 'stage' of that size"),
        (
            {"mesh": {"data": 1, "stage": 2, "fsdp": 2}},
            hxla.PlanError,
            "mesh axes fsdp would cut the batch inside a stage",
        ),
        (
            {"mesh": {"data": 1, "tensor": 2}, "stages": 2},
            hxla.ConfigError,
            "stages=2 need a mesh axis 'stage' of that size, the mesh has none",
        ),
    ],
)
def test_what_split_stages_cannot_do_is_refused(options, error, message):
    axes = options.pop("mesh", {"data": 1, "stage": 2, "tensor": 2})
    with pytest.raises(error, match=re.escape(message)):
        trained(nnx.eval_shape(gpt), families.token_loss, text(), **on_mesh(**axes), **options)


def test_a_permute_that_only_one_stage_would_come_to_is_refused():
    permute = "%p = f32[4] collective-permute(%x), channel_id=1, source_target_pairs={}, metadata\n"
    check_permutes(permute.format("{{0,2},{1,3}}") + permute.format("{{0,0},{3,1}}"), 2)
    with pytest.raises(hxla.PlanError, match="between devices 3 and 2 of one stage"):
        check_permutes(permute.format("{{0,2}}") + permute.format("{{1,3},{3,2}}"), 2)


def test_a_staged_mesh_does_not_go_with_counts_of_annotations():
    with pytest.raises(hxla.ConfigError, match=r"cuts a model that annotations cut already"):
        trained(
            nnx.eval_shape(lambda: mlp(split_in_two)),
            models.squared_error,
            vectors(),
            mesh=models.mesh(data=1, stage=2, tensor=2),
        )
