"""The programs of a pipeline: their gradients, memory, size and collectives, without a training."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import lowering
from support.inside.jax import num_compilations
from support.inside.lower import Limbs, Pipeline, extra_bytes, num_terms
from support.tiers import rows

LAYERS, WIDTH, SIZE = 8, 16, 4
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def loss(params, batch):
    x = batch
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).sum()


def weights():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.4 for _ in range(LAYERS)]


@dataclasses.dataclass
class Programs:
    """A pipeline over the first devices, its three programs compiled."""

    pipeline: Pipeline
    params: list
    compiled: list

    @property
    def texts(self):
        return [program.as_text() for program in self.compiled]

    def run(self, ids):
        exponents = np.full(LAYERS, 8, np.int32)
        batches = [batch(i) for i in ids]
        sums, _ = self.pipeline.run(self.params, [], None, exponents, 0, ids, batches)
        return jax.tree.map(np.asarray, sums)


def batch(i):
    return np.random.default_rng(i).normal(size=(SIZE, WIDTH)).astype(np.float32)


def build(num_microbatches, num_stages=4, reduction="exact", **how):
    def run(params, aux, key, batch):
        value = loss(params, batch)
        return value, jnp.stack([value, 1.0]), aux

    made = lowering.programs(
        run,
        weights(),
        batch(0),
        num_microbatches=num_microbatches,
        stages={"num": num_stages, **how},
        reduction=reduction,
    )
    [pipeline] = made.runners
    params = pipeline.replica.put_tree(weights(), list(pipeline.spec.slots.specs))
    compiled = [program.compile() for program in made._lowered(0)[:-1]]
    pipeline.adopt(compiled)
    return Programs(pipeline, params, compiled)


#: The number of stages, the schedule, and whether forwards are recomputed.
PIPELINES = {
    "2 interleaved": (2, {"schedule": "interleaved", "num_chunks": 2}),
    "3 gpipe": (3, {"schedule": "gpipe"}),
    "3 zb-h1": (3, {"schedule": "zb-h1"}),
    "4 1f1b, recomputed": (4, {"schedule": "1f1b", "recompute": True}),
    "8 1f1b": (8, {"schedule": "1f1b"}),
}


@pytest.mark.parametrize("name", rows(PIPELINES, "2 interleaved", "3 zb-h1"))
def test_float_sums_are_the_gradients_of_the_whole(name):
    num_stages, how = PIPELINES[name]
    made = build(4, num_stages, reduction="float", **how)
    sums = made.run(range(4))
    expected, total = [0.0] * LAYERS, []
    gradient = jax.jit(jax.value_and_grad(loss))
    for i in range(4):
        value, grads = gradient(weights(), batch(i))
        expected = [a + b for a, b in zip(expected, grads, strict=True)]
        total.append(value)
    np.testing.assert_allclose(sums.small_MS.view(np.float32)[:, 0], total, rtol=1e-6)
    # An element is a sum of products whose factors have passed a dot in each layer, forward and
    # back; each of these roundings is half a unit in the last place of what is largest.
    roundings = 4 * SIZE + 2 * LAYERS * WIDTH
    for (ours,), theirs in zip(sums.values, expected, strict=True):
        allowed = roundings * np.finfo(np.float32).eps / 2 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=allowed, rtol=0)


@functools.cache
def of_two_stages():
    return build(8, num_stages=2)


def test_any_count_up_to_the_most_runs_without_compiling_and_sums_to_the_same_bits():
    made = of_two_stages()
    assert len(made.compiled) == 5
    whole = made.run(range(8))
    before = num_compilations()
    first, second = made.run(range(5)), made.run(range(5, 8))
    assert num_compilations() == before
    for a, b, c in zip(
        jax.tree.leaves(first.values),
        jax.tree.leaves(second.values),
        jax.tree.leaves(whole.values),
        strict=True,
    ):
        assert np.array_equal(a + b, c)
    assert np.array_equal(first.small_MS + second.small_MS, whole.small_MS)
    assert np.abs(whole.values[0][0]).max() > 0


@pytest.mark.parametrize("num_stages", rows([2, 4], 2))
def test_collectives_over_the_stages(num_stages):
    """Two permutes for each set of boundaries, of which a tick takes one; one exact sum a step."""
    num_sets = {2: 1, 4: 3}[num_stages]
    made = of_two_stages() if num_stages == 2 else build(8, num_stages)
    found = [
        collections.Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", text))
        for text in made.texts
    ]
    assert found[0] == {"all-to-all": 1}
    assert found[1] == {"collective-permute": 2 * num_sets}
    assert found[2] == {"all-to-all": 1}  # the exact sum


def own_bytes(made):
    """What the ticks take and keep."""
    _, ticks, *_ = made.compiled
    return made.pipeline.kept_bytes + extra_bytes(ticks)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_grows_with_microbatches_under_gpipe_and_not_under_1f1b(recompute):
    few, many = 8, 32
    one = {n: build(n, schedule="1f1b", recompute=recompute) for n in (few, many)}
    grown = own_bytes(one[many]) - own_bytes(one[few])
    assert abs(grown) < 1024
    all_first = {n: build(n, schedule="gpipe", recompute=recompute) for n in (few, many)}
    kept = SIZE * WIDTH * 4
    grown = own_bytes(all_first[many]) - own_bytes(all_first[few])
    assert grown > (many - few) * kept * 0.99
    # The ticks' text does not grow either, nor do the other programs'.
    for made in (one, all_first):
        counts = [[len(re.findall(" = ", text)) for text in made[n].texts] for n in (few, many)]
        assert counts[0] == counts[1]


def test_a_parameter_that_two_chunks_of_a_stage_read_has_a_term_for_each():
    """Exact sums leave room for all terms: both chunks add to the stage's one slot."""

    def run(params, aux, key, batch):
        (w,) = params
        x = batch
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x.sum(), jnp.stack([x.sum(), 1.0]), aux

    made = lowering.programs(
        run,
        weights()[:1],
        batch(0),
        num_microbatches=4,
        stages={"num": 2, "schedule": "interleaved", "num_chunks": 2},
    )
    [spec] = [runner.spec for runner in made.runners]
    assert all(part.segment.params == (0,) for part in spec.parts)
    assert num_terms(spec.graph, spec.parts, 4) == 4 * 4
    assert made.contribution.limbs == Limbs(2, 4 * 4)
