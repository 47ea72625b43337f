"""In all forms of a step the scatters of a GPU's programs have a fixed order of additions.

The programs are lowered for CPUs, as if these added in any order.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import lowering
from support.inside.job import JobContext
from support.inside.lower import _compile, lower
from support.racing import racing_scatters
from support.tiers import rows

WORDS, LENGTH, WIDTH, SIZE = 12, 6, 8, 2


class Mixed(nnx.Module):
    """A lookup that meets, a pool, a sort, and sums by segment."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.wq = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, text):
        h = jnp.tanh(self.wq(self.embed(text)))
        h = nnx.max_pool(h, (3,), (2,), "SAME")
        h = jnp.tanh(self.outer(jnp.sort(h, axis=1) * h))
        by_word = jax.vmap(lambda h, ids: jax.ops.segment_sum(h, ids, 3))(h, text[:, :3] % 3)
        return self.head(by_word.mean(1))


def loss(model, batch):
    logs = jax.nn.log_softmax(model(batch["text"]))
    return -jnp.take_along_axis(logs, batch["label"][:, None], axis=1)[:, 0]


RNG = np.random.default_rng(0)
DATA = {
    "text": (RNG.integers(0, WORDS, (32, LENGTH)) % 5).astype(np.int32),
    "label": RNG.integers(0, 5, 32).astype(np.int32),
}
RULES = {"rules": "decoder"}
#: By form the settings of a job and of its plan.
FORMS = {
    "one program": ({}, {"mesh": {"data": 1}}),
    "a chain": ({"memory": {"recompute": "boundaries"}}, {"mesh": {"data": 1}}),
    "stages": ({}, {"mesh": {"stage": 2}}),
    "tensor": ({}, {"mesh": {"tensor": 2}} | RULES),
    "zero 3": ({"memory": {"zero": 3}}, {"mesh": {"data": 2}}),
    "several a call": ({"cluster": {"microbatches_per_call": 2}}, {"mesh": {"data": 1}}),
    "shards of unlike sizes": ({}, {"mesh": {"tensor": (5, 3)}} | RULES),
}


def job_of(config):
    optimizer = optax.adam(1e-2)
    return hxla.Job(Mixed(nnx.Rngs(0)), DATA, loss, optimizer, batch_size=8, config=config)


def racing(config, asked):
    """How many scatters of floats of a step's programs may meet."""
    job = job_of(config)
    num = math.prod(n if isinstance(n, int) else len(n) for n in asked["mesh"].values())
    plan = job.plan(lowering.cpus(num), **asked, auto=False, microbatch_size=SIZE)
    devices = tuple(jax.devices()[:num])
    programs = lower(JobContext(job).training(SIZE, 0), job.graph(SIZE), plan, devices)
    return racing_scatters(" ".join(p.as_text() for p in programs._lowered(0)))


@pytest.fixture
def as_on_gpus(monkeypatch):
    monkeypatch.setattr(_compile, "_GPUS", frozenset({"cpu"}))


@pytest.mark.parametrize("form", rows(FORMS, "one program", "stages"))
def test_no_scatter_of_any_form_is_left_to_chance(form, request):
    assert racing(*FORMS[form]) >= 3
    request.getfixturevalue("as_on_gpus")
    assert racing(*FORMS[form]) == 0
