"""Metrics are merged over microbatches and replicas as the loss asks."""

import functools

import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models


def loss(model, batch):
    values = models.squared_error(model, batch)
    first = batch["x"][:, 0]
    return values, {
        "mean": hxla.metric(first),
        "sum": hxla.metric(first, "sum"),
        "max": hxla.metric(first, "max"),
        "min": hxla.metric(first, "min"),
        "each": hxla.metric(first, "concat"),
        "own": hxla.metric(first, "concat", over="local"),
        "own_mean": hxla.metric(first, "mean", over="local"),
        "count": hxla.metric(1.0, "sum"),
    }


SIZE = 24


@functools.cache
def job():
    data = models.regression()
    make, optimizer = lambda: models.Dense(nnx.Rngs(0)), optax.sgd(1e-2)
    return hxla.Job(make, data, loss, optimizer, batch_size=SIZE, shuffle=False)


def opened(counts):
    mesh = models.mesh(data=2)
    plan = job().plan(microbatch_size=3, mesh=mesh, counts=counts)
    return job().open(plan, mesh=mesh)


@pytest.mark.parametrize("counts", [(8, 0), (3, 5), (1, 7)])
def test_metrics_are_those_of_the_whole_batch(counts):
    with opened(counts) as session:
        found = session.step().metrics
    first = models.regression()["x"][:SIZE, 0]
    own = first[: 3 * counts[0]]
    np.testing.assert_array_equal(found["each"], first)
    np.testing.assert_array_equal(found["own"], own)
    np.testing.assert_allclose(found["mean"], first.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["own_mean"], own.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["sum"], first.sum(), rtol=1e-5, atol=1e-5)
    assert found["max"] == first.max()
    assert found["min"] == first.min()
    assert found["count"] == 8


def test_a_concatenation_of_an_evaluation_leaves_the_padding_out():
    part = {k: v[:20] for k, v in models.regression().items()}  # no multiple of the microbatch
    with opened((3, 5)) as session:
        evaluation = session.evaluate(part)
    np.testing.assert_array_equal(evaluation.metrics["each"], part["x"][:, 0])


def test_an_unknown_merge_is_refused():
    with pytest.raises(hxla.LossError, match="how is one of mean, sum"):
        hxla.metric(1.0, "median")


def test_a_matrix_cannot_be_concatenated():
    def wrong(model, batch):
        values = (model(batch["x"]) - batch["y"]) ** 2
        return values, {"m": hxla.metric(values, "concat")}

    with pytest.raises(hxla.LossError, match="one number for each example"):
        hxla.train(
            hxla.Job(
                models.Dense(nnx.Rngs(0)),
                models.regression(),
                wrong,
                optax.sgd(1e-2),
                batch_size=24,
            ),
            microbatch_size=3,
            steps=1,
        )
