"""The models of examples/ that encode and decode: what they compute, learn, and need when large."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.families import example

t5, lstm, vit = map(example, ("t5", "lstm", "vit"))
VOCABULARY, LENGTH, WORDS = 32, 8, 16


def make(name):
    if name == "t5":
        return t5.T5(nnx.Rngs(0), vocabulary=VOCABULARY, width=32, hidden=64, layers=1)
    return lstm.Translator(nnx.Rngs(0), vocabulary=VOCABULARY, width=32, layers=3)


@functools.cache
def called(name):
    """The model as one program of its source and target."""
    run = nnx.jit(lambda model, *batch: model(*batch))
    return functools.partial(run, nnx.jit(make, static_argnums=0)(name))


def reversals(num):
    """Random words and the same from behind: without the source the target is noise."""
    source = np.random.default_rng(0).integers(2, 2 + WORDS, (num, LENGTH)).astype(np.int32)
    return {"source": source, "target": source[:, ::-1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "lstm"])
def test_a_token_is_told_by_the_source_and_what_was_before_it_only(name):
    model, batch = called(name), reversals(2)
    logits = model(batch["source"], batch["target"])
    other = batch["target"].copy()
    other[:, 5] = 1
    changed = np.abs(model(batch["source"], other) - logits).max((0, 2)) > 1e-4
    assert changed.tolist() == [False] * 5 + [True] * 3
    other = batch["source"].copy()
    other[:, 5] = 1
    assert (np.abs(model(other, batch["target"]) - logits).max((0, 2)) > 1e-4).all()


@pytest.mark.slow
def test_padding_behind_a_source_changes_nothing():
    model, batch = called("lstm"), reversals(2)
    padded = np.pad(batch["source"], ((0, 0), (0, 3)))
    np.testing.assert_allclose(
        model(padded, batch["target"]), model(batch["source"], batch["target"]), atol=1e-5
    )
    values, weights = lstm.loss(model, {"source": padded, "target": padded})
    assert values.shape == weights.shape == (2, LENGTH + 3)
    assert weights.tolist() == [[1.0] * LENGTH + [0.0] * 3] * 2


def test_positions_fall_into_the_buckets_of_t5():
    """Near ones by themselves, far ones by their logarithm, up to 128 (Raffel et al., 2.1)."""
    ahead = np.arange(-200, 201)
    encoder, decoder = (np.asarray(t5.bucket(jnp.asarray(ahead), d)) for d in (False, True))

    def wanted(distance, num):
        near = num // 2
        if distance < near:
            return distance
        # The bucket whose lower end, in equal steps of the logarithm, lies at or before it.
        ends = [near * (128 / near) ** (k / (num - near)) for k in range(num - near)]
        return near + sum(distance >= end - 1e-4 for end in ends) - 1

    assert encoder.tolist() == [wanted(abs(a), 16) + 16 * (a > 0) for a in ahead]
    assert decoder.tolist() == [wanted(max(-a, 0), 32) for a in ahead]


def trained(model, data, loss, rate, steps):
    return hxla.train(
        hxla.Job(model, data, loss, optax.adam(rate), batch_size=64),
        microbatch_size=16,
        steps=steps,
        mesh=models.mesh(data=2),
    ).history.steps


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rate"), [("t5", 5e-3), ("lstm", 1e-2)])
def test_an_encoder_decoder_learns_what_only_the_source_tells(name, rate):
    steps = trained(make(name), reversals(4096), example(name).loss, rate, 160)
    assert steps[0].loss > 3
    assert steps[-1].loss < 0.7 * math.log(WORDS)


@pytest.mark.slow
def test_a_vision_transformer_learns_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    image = (digits.images[..., None] / 16).astype(np.float32)
    data = {"image": image, "label": digits.target.astype(np.int32)}
    model = vit.VisionTransformer(nnx.Rngs(0), width=32, hidden=64)
    steps = trained(model, data, vit.loss, 3e-3, 80)
    assert steps[0].loss > 2
    assert np.mean([s.metrics["accuracy"] for s in steps[-5:]]) > 0.65


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


T5_LARGE = {"vocabulary": 32_128, "width": 1024, "hidden": 4096, "heads": 16, "layers": 24}
VIT_LARGE = {"image": 224, "channels": 3, "patch": 16, "classes": 1000}
VIT_LARGE |= {"width": 1024, "hidden": 4096, "heads": 16, "layers": 24}
GNMT = {"vocabulary": 32_000, "width": 1024, "layers": 8}
#: An LSTM of 1024 and of as many inputs, or twice as many.
CELL, WIDE = 4 * 1024 * (2 * 1024 + 1), 4 * 1024 * (3 * 1024 + 1)
PUBLISHED = {
    # The parameters of the checkpoint "t5-large".
    "encoder_decoder": (
        lambda: t5.T5(nnx.Rngs(0), 0.1, **T5_LARGE),
        t5.loss,
        {"source": ints(8, 512), "target": ints(8, 114)},
        737_668_096,
    ),
    # Embeddings, the encoder, the decoder, the attention and the projection.
    "lstm": (
        lambda: lstm.Translator(nnx.Rngs(0), 0.2, **GNMT),
        lstm.loss,
        {"source": ints(8, 50), "target": ints(8, 50)},
        2 * 32_000 * 1024
        + (2 * CELL + WIDE + 6 * CELL)
        + (CELL + 7 * WIDE)
        + (2 * 1024 * 1024 + 2 * 1024)
        + 1025 * 32_000,
    ),
    # The parameters of torchvision's "vit_l_16".
    "vit": (
        lambda: vit.VisionTransformer(nnx.Rngs(0), 0.1, **VIT_LARGE),
        vit.loss,
        {"image": jax.ShapeDtypeStruct((8, 224, 224, 3), np.float32), "label": ints(8)},
        304_326_632,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rules", PUBLISHED)
def test_a_model_of_published_size_is_cut_by_its_rules(rules):
    make, loss, batch, num_parameters = PUBLISHED[rules]
    graph = hxla.trace(nnx.eval_shape(make), loss, batch)
    plan = hxla.make_plan(graph, mesh={"data": 1, "fsdp": 2, "tensor": 4}, rules=rules)
    assert plan.parameter_bytes == 4 * num_parameters
    assert plan.device_parameter_bytes < 1.02 * plan.parameter_bytes / 8
    assert not [w for w in plan.reasons if w.startswith("no rule")]
