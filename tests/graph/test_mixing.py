"""Losses in which the part of an example reads others: found in the trace, and refused."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support.training import train_with

SIZE, BATCH = 4, 16


def model():
    return nnx.Linear(8, 4, rngs=nnx.Rngs(0))


def data():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(BATCH, 8)).astype(np.float32),
        "y": rng.normal(size=(BATCH, 4)).astype(np.float32),
        "class": rng.integers(0, 4, BATCH).astype(np.int32),
        "mask": rng.integers(0, 2, (BATCH, 4)).astype(np.float32),
    }


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]) ** 2


def logs(model, batch):
    return jax.nn.log_softmax(model(batch["x"]))


def contrastive(model, batch):
    found = model(batch["x"])
    found = found / jnp.linalg.norm(found, axis=-1, keepdims=True)
    labels = jnp.arange(len(found))
    return optax.softmax_cross_entropy_with_integer_labels(found @ found.T, labels).mean()


def one_by_one(model, batch):
    rows = jax.lax.map(lambda x: (model(x) ** 2).sum(), batch["x"])
    return rows.mean()


def attended(model, batch):
    """Each example's rows of a sequence read each other."""
    rows = jnp.stack([model(batch["x"]), model(batch["x"] + 1)], axis=1)
    weights = jax.nn.softmax(jnp.einsum("bic,bjc->bij", rows, rows))
    return (jnp.einsum("bij,bjc->bic", weights, rows) ** 2).mean()


#: Means over examples.
APART = {
    "of each example": lambda m, b: squares(m, b).mean(-1),
    "of each number": squares,
    "a mean": lambda m, b: squares(m, b).mean(),
    "a sum over a number": lambda m, b: squares(m, b).sum() / SIZE,
    "with weights": lambda m, b: (squares(m, b), b["mask"]),
    "cross entropy": lambda m, b: optax.softmax_cross_entropy_with_integer_labels(
        m(b["x"]), b["class"]
    ).mean(),
    "by an index": lambda m, b: -logs(m, b)[jnp.arange(SIZE), b["class"]].mean(),
    "along an axis": lambda m, b: -jnp.take_along_axis(logs(m, b), b["class"][:, None], 1).mean(),
    "one hot": lambda m, b: -(logs(m, b) * jax.nn.one_hot(b["class"], 4)).sum(-1).mean(),
    "of parameters too": lambda m, b: squares(m, b).mean() + (m.kernel[...] ** 2).sum(),
    "two means": lambda m, b: squares(m, b).mean(-1) + 0.1 * jnp.abs(m(b["x"])).mean(),
    "vmap": lambda m, b: jax.vmap(lambda x: jnp.sqrt((m(x) ** 2).sum()))(b["x"]),
    "one by one": one_by_one,
    "attention": attended,
    "of no elements": lambda m, b: (squares(m, b)[:, :0].sum() + squares(m, b)) ** 2,
    "flat": lambda m, b: jax.nn.logsumexp(m(b["x"]).reshape(SIZE * 2, 2), axis=-1).mean(),
}
#: Each with the operation that is named.
MIXED = {
    "contrastive": (contrastive, "dot_general"),
    "a mean over a mask": (
        lambda m, b: (squares(m, b) * b["mask"]).sum() / b["mask"].sum(),
        "div",
    ),
    "a maximum": (lambda m, b: squares(m, b).max(), "reduce_max"),
    "a root of a mean": (lambda m, b: jnp.sqrt(squares(m, b).mean()), "sqrt"),
    "a softmax over examples": (
        lambda m, b: (jax.nn.softmax(m(b["x"]), axis=0) * b["y"]).sum(),
        "reduce_max",
    ),
    "pairs": (lambda m, b: ((m(b["x"])[:, None] - m(b["x"])[None]) ** 2).mean(), "sub"),
    "centred": (lambda m, b: ((m(b["x"]) - m(b["x"]).mean(0)) ** 2).mean(), "integer_pow"),
    "ranks": (lambda m, b: (jnp.sort(m(b["x"]), axis=0)[0]).mean(), "sort"),
    "balance of experts": (
        lambda m, b: (jax.nn.softmax(m(b["x"])).mean(0) * b["mask"].mean(0)).sum(),
        "mul",
    ),
}


def graph(model, loss):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((SIZE, *x.shape[1:]), x.dtype), data())
    return hxla.trace(model, loss, shapes)


@pytest.mark.parametrize("name", APART)
def test_a_mean_over_examples_is_none_that_mixes_them(name):
    assert graph(model(), APART[name]).mixes == ""


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_is_found_with_its_line(name):
    loss, operation = MIXED[name]
    found = graph(model(), loss).mixes
    assert found.startswith(operation)
    if name != "ranks":  # jax keeps no line of it
        assert "test_mixing.py:" in found


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class LinenNormalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))


@pytest.mark.parametrize("make", [lambda: Normalized(nnx.Rngs(0)), LinenNormalized])
def test_batch_norm_is_no_mixing_and_is_told(make):
    assert graph(make(), squares).mixes == ""
    assert graph(make(), contrastive).mixes.startswith("dot_general")
    job = hxla.Job(make(), data(), squares, optax.sgd(0.1), batch_size=BATCH)
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 2)
    reasons = job.plan(cluster, microbatch_size=SIZE, mesh={"data": 2}, counts="even").reasons
    assert any("BatchNorm takes its statistics over a microbatch, 4 ex" in r for r in reasons)


@pytest.mark.parametrize("loss", [squares, contrastive])
def test_scales_of_float8_are_no_mixing(loss):
    """A product in float8 reads its whole operand for a scale, which belongs to a microbatch."""
    job = hxla.Job(
        model(),
        data(),
        loss,
        optax.sgd(0.1),
        batch_size=BATCH,
        precision="fp8",
        config={"cluster": {"visible_devices": [0]}},
    )
    if loss is squares:
        assert job.plan(microbatch_size=SIZE, counts=[BATCH // SIZE]).precision.products == "float8"
        return
    with pytest.raises(hxla.LossError, match="mixes examples: dot_general"):
        job.plan(microbatch_size=SIZE, counts=[BATCH // SIZE])


def trained(size, **options):
    return train_with(
        model(),
        data(),
        contrastive,
        optax.sgd(0.1),
        batch_size=BATCH,
        microbatch_size=size,
        steps=1,
        shuffle=False,
        config={"cluster": {"visible_devices": [0]}},
        **options,
    ).model.kernel[...]


def by_jax(size):
    """A step of plain JAX over the mean of the losses of microbatches."""
    made, whole = model(), data()

    def mean(made):
        cut = jax.tree.map(lambda x: jnp.split(x, BATCH // size), whole)
        parts = [{name: x[k] for name, x in cut.items()} for k in range(BATCH // size)]
        return sum(contrastive(made, part) for part in parts) / len(parts)

    gradient = nnx.grad(mean)(made)
    return made.kernel[...] - 0.1 * gradient.kernel[...]


def test_a_loss_that_mixes_examples_is_refused_unless_it_is_whole_or_meant():
    job = hxla.Job(model(), data(), contrastive, optax.sgd(0.1), batch_size=BATCH)
    with pytest.raises(
        hxla.LossError, match=r"the loss mixes examples: dot_general .*_mixing\.py:"
    ):
        job.graph(SIZE)
    assert job.graph(BATCH).mixes
    np.testing.assert_allclose(trained(SIZE, mixes_examples=True), by_jax(SIZE), atol=1e-6)
    assert np.abs(by_jax(BATCH) - by_jax(SIZE)).max() > 1e-3


def test_statistics_of_a_batch_of_ones_own_are_named_with_their_line_and_remedy():
    def loss(model, batch):
        out = model(batch["x"])
        return (((out - out.mean(0)) / jnp.sqrt(out.var(0) + 1e-5)) ** 2).sum(-1)

    job = hxla.Job(model(), data(), loss, optax.sgd(0.1), batch_size=BATCH)
    with pytest.raises(hxla.LossError) as refused:
        job.graph(SIZE)
    assert re.search(r"mixes examples: \w+ \(.*test_mixing\.py:\d+\)", str(refused.value))
    assert "as in Flax's BatchNorm" in str(refused.value)
    means = hxla.Job(model(), data(), loss, optax.sgd(0.1), batch_size=BATCH, mixes_examples=True)
    assert means.graph(SIZE).mixes


@pytest.mark.slow
def test_a_loss_over_the_whole_batch_is_that_of_plain_jax():
    np.testing.assert_allclose(trained(BATCH), by_jax(BATCH), atol=1e-6)
