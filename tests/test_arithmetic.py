"""The law behind equal bits: one compiled microbatch, whatever the spread."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from hxla._lower import _replicate
from hxla._lower._reduce import Reducer
from hxla._model._functional import functional
from hxla._run._step import Engine
from hxla._run._strategy import replicated

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def gpt():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import gpt as example
    finally:
        sys.path.remove(str(EXAMPLES))
    batch = {"text": np.zeros((2, example.LENGTH + 1), np.uint8)}
    return example.GPT(nnx.Rngs(0), dropout=0.1), example.loss, batch


def small(kind):
    model = models.NnxNet(nnx.Rngs(0)) if kind == "nnx" else models.LinenNet()
    return model, models.token_loss, {"tokens": models.tokens(2)["tokens"]}


@pytest.fixture(autouse=True)
def _compiled_here():
    """A program from the cache carries the positions of whoever compiled it first."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it looks at the setting once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


CASES = {"gpt": gpt, "nnx": lambda: small("nnx"), "linen": lambda: small("linen")}


def programs(case, devices, reduction="exact"):
    """Optimized HLO of a device's microbatch and update programs."""
    model, loss, batch = CASES[case]()
    engine = Engine(
        functional(model, loss, loss, variables=None, seed=0, example=batch),
        optax.adam(1e-3),
        Reducer(replicated(devices).replicas),
        batch=batch,
        num_microbatches=8,
        microbatch_size=2,
        seed=0,
        reduction=reduction,
    )
    engine.calibrate(batch, repeats=0)
    texts = [(s.micro.as_text(), s.update.as_text()) for s in engine._states]
    engine.close()
    return texts


@pytest.mark.parametrize("case", CASES)
def test_the_optimized_microbatch_is_the_same_program_in_every_spread(case):
    spreads = [jax.devices()[:1], jax.devices()[:2], jax.devices()[5:8]]
    # From one line: the text holds the positions of callers.
    (reference,), *others = [programs(case, devices) for devices in spreads]
    assert "dot" in reference[0]
    assert "exponential" in reference[0]  # the softmax whose division once differed
    assert [len(texts) for texts in others] == [2, 3]
    assert all(texts == reference for spread in others for texts in spread)


def test_the_comparison_sees_other_arithmetic():
    (exact,), (floats,) = (programs("nnx", jax.devices()[:1], r) for r in ("exact", "float"))
    assert exact[0] != floats[0]


def test_no_dot_of_a_dense_layer_on_cpu_has_both_operands_across():
    def sums_of(params, aux, key, batch):
        loss = jnp.sum(jnp.tanh(batch @ params["w"]))
        return loss, jnp.stack([loss, 1.0]), aux

    weights = jax.ShapeDtypeStruct((24, 40), np.float32)
    programs = _replicate.build(
        sums_of=sums_of,
        params={"w": weights},
        aux={},
        names=("w",),
        num_sums=2,
        optimizer=optax.sgd(1.0),
        num_microbatches=2,
        seed=0,
        reduction="exact",
        platform="cpu",
    )
    ints = [np.zeros(n, np.int32) for n in (1, 3)]
    batch = np.ones((16, 24), np.float32)
    lowered = programs.micro.lower([weights], [], jax.eval_shape(programs.zeros), *ints, batch)
    contracted = re.findall(r" dot\(.*lhs_contracting_dims=\{(\d)\}", lowered.compile().as_text())
    assert contracted == ["1", "1"]
