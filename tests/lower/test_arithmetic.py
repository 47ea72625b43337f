"""The law behind equal bits: one compiled microbatch, whatever the spread."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import hxla
from support import lowering, models
from support.paths import EXAMPLES

pytestmark = pytest.mark.optimized


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


def text(program):
    """Optimized HLO without its tables of files and lines, which are numbered anew when loaded."""
    lines = re.sub(r", metadata=\{[^}]*\}", "", program.as_text()).splitlines()
    return "\n".join(line for line in lines if not re.match(r"\d+ ", line))


def programs(case, devices, reduction="exact"):
    """Optimized HLO of a device's microbatch and update programs."""
    model, loss, batch = CASES[case]()
    data = jax.tree.map(lambda x: np.concatenate([x] * 8), batch)
    job = hxla.Job(model, data, loss, optax.adam(1e-3), batch_size=16)
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    plan = job.plan(microbatch_size=2, mesh=mesh, counts="even", reduction=reduction)
    with job.open(plan, mesh=mesh) as session:
        found = session._programs
        found.compile_each()  # a step of one device is one program
        runners = [text(runner._programs.of(0)["loss"]) for runner in found.runners]
        updates = [text(own.compiled[-1]) for own in found._updates.each]
    return list(zip(runners, updates, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_optimized_microbatch_is_the_same_program_in_every_spread(case):
    spreads = [jax.devices()[:1], jax.devices()[:2], jax.devices()[5:8]]
    # From one line: the text holds the positions of callers.
    (reference,), *others = [programs(case, devices) for devices in spreads]
    assert "dot" in reference[0]
    assert "exponential" in reference[0]  # the softmax whose division once differed
    assert [len(texts) for texts in others] == [2, 3]
    assert all(texts == reference for spread in others for texts in spread)


@pytest.mark.slow
def test_the_comparison_sees_other_arithmetic():
    (exact,), (floats,) = (programs("nnx", jax.devices()[:1], r) for r in ("exact", "float"))
    assert exact[0] != floats[0]


def test_no_dot_of_a_dense_layer_on_cpu_has_both_operands_across():
    def sums_of(params, aux, key, batch):
        loss = jnp.sum(jnp.tanh(batch @ params["w"]))
        return loss, jnp.stack([loss, 1.0]), aux

    weights = jax.ShapeDtypeStruct((24, 40), np.float32)
    batch = jax.ShapeDtypeStruct((16, 24), np.float32)
    made = lowering.programs(sums_of, {"w": weights}, batch)
    lowered, *_ = made._lowered(0)
    contracted = re.findall(r" dot\(.*lhs_contracting_dims=\{(\d)\}", lowered.compile().as_text())
    assert contracted == ["1", "1"]
