"""A large vocabulary: what a microbatch reads of a table is all that it adds to the sums."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import lowering

HEIGHT, WIDTH = 512, 4


class Words(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(HEIGHT, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, text):
        return self.out(jnp.tanh(self.embed(text)).mean(1))[:, 0]


def by_rows(model, batch):
    return ((model(batch["text"]) - batch["y"]) ** 2).mean()


def whole(model, batch):
    """The same numbers and gradients, of a table that is also read as a whole."""
    return by_rows(model, batch) + 0.0 * model.embed.embedding[...].sum()


def trained(loss, counts):
    rng = np.random.default_rng(0)
    # Few words, so that microbatches, and examples of one, meet in their rows.
    data = {
        "text": rng.integers(0, HEIGHT, (12, 3)).astype(np.int32) % 7 * 70,
        "y": rng.normal(size=12).astype(np.float32),
    }
    job = hxla.Job(
        Words(nnx.Rngs(0)),
        data,
        loss,
        optax.adamw(1e-2),
        batch_size=12,
        config={"cluster": {"visible_devices": list(range(len(counts)))}},
    )
    plan = job.plan(microbatch_size=2, counts=list(counts))
    with job.open(plan, steps=3) as session:
        losses = [record.loss for record in session]
        return losses, session.result().sha256


@functools.cache
def reference():
    return trained(whole, (6,))


@pytest.mark.parametrize("counts", [(6,), pytest.param((5, 1), marks=pytest.mark.slow)])
def test_rows_are_summed_to_the_bits_of_whole_gradients(counts):
    assert trained(by_rows, counts) == reference()


def micro(reads_all):
    """The compiled program of a microbatch."""

    def sums_of(params, aux, key, batch):
        loss = (jnp.take(params["table"], batch, axis=0) * params["scale"]).sum()
        if reads_all:
            loss += params["table"].sum()
        return loss, jnp.stack([loss, 1.0]), aux

    params = {
        "scale": jax.ShapeDtypeStruct((WIDTH,), np.float32),
        "table": jax.ShapeDtypeStruct((HEIGHT, WIDTH), np.float32),
    }
    made = lowering.programs(sums_of, params, jax.ShapeDtypeStruct((8,), np.int32))
    return made._lowered(0)[0].compile().as_text()


def floats_made(text):
    """The float arrays of a table's shape that a program makes."""
    made = re.findall(rf"= f32\[{HEIGHT},{WIDTH}\]\S* (\w[\w-]*)\(", text)
    return [name for name in made if name != "parameter"]


def test_a_microbatch_makes_no_whole_gradient_of_a_table():
    assert floats_made(micro(reads_all=True))
    assert not floats_made(micro(reads_all=False))


def test_totals_of_one_device_are_not_joined_to_one_vector():
    def sums_of(params, aux, key, batch):
        loss = sum(x.sum() for x in params.values()) * batch.sum()
        return loss, jnp.stack([loss, 1.0]), aux

    shapes = {"large": (200, 200), "other": (300, 100), "a": (3,), "b": (3,)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((2,), np.float32)

    def joined(num_devices):
        made = lowering.programs(sums_of, params, batch, num_devices=num_devices)
        texts = [program.compile().as_text() for program in made.reducer.lower()]
        return [bool(re.search(r"\[\d{5,}\]\S* concatenate\(", text)) for text in texts]

    assert joined(1) == [False]
    assert joined(2) == [True]
