"""`numerics.cut` of `any`: one `Plan.numerics`, and one SHA-256, however a microbatch is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.any_cut import (
    BATCH,
    MICRO,
    MODELS,
    STEPS,
    TIED,
    job,
    planned,
    planned_stages,
    trained,
)
from support.tiers import examples

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("every_program_is_cached")]

#: Each cut with other settings.
CUTS = {
    "tensor 2": ({"data": 1, "tensor": 2}, {}),
    "tensor 4": ({"data": 1, "tensor": 4}, {}),
    "data 2, tensor 2, zero 1": ({"data": 2, "tensor": 2}, {"zero": 1}),
}
CHAINS = {
    "data 1": ({"data": 1}, {"recompute": "none"}),
    "tensor 2": ({"data": 1, "tensor": 2}, {"recompute": "boundaries"}),
    "data 2, tensor 2, zero 2": ({"data": 2, "tensor": 2}, {"zero": 2}),
    "data 2, tensor 4, zero 3": ({"data": 2, "tensor": 4}, {"zero": 3}),
}
INTERLEAVED = {"schedule": "interleaved", "num_chunks": 2}
PIPELINES = {
    "stage 2, tensor 2": ({"data": 1, "stage": 2, "tensor": 2}, {}),
    "stage 3": ({"data": 2, "stage": 3}, {"pipeline": {"schedule": "gpipe"}}),
    "interleaved": ({"data": 1, "stage": 2}, {"pipeline": INTERLEAVED}),
    "data 2, stage 2, tensor 2, zero 1": ({"data": 2, "stage": 2, "tensor": 2}, {"zero": 1}),
}
ONE, TWO, FOUR = {"devices": 1}, {"tensor": 2}, {"tensor": 4}
UNLIKE = {
    "1 + 2": ([ONE, TWO], {}),
    "4 + 1 + 2": ([FOUR, ONE, TWO], {"recompute": "boundaries"}),
    "1 | 2": ([[ONE], [TWO]], {"pipeline": {"schedule": "gpipe"}}),
    "1 | 2 + 1 | 4": ([[ONE], [TWO, ONE], [FOUR]], {"recompute": "none"}),
}
FORMS = {"one program": CUTS, "chains": CHAINS, "pipelines": PIPELINES, "unlike stages": UNLIKE}


def outcome(name, cut, options):
    own = job(name, **options)
    make = planned if isinstance(cut, dict) else planned_stages
    plan = make(own, cut, rules=TIED if name == "tied" else "decoder")
    result = trained(own, plan)
    return plan.numerics, result.sha256, [step.loss for step in result.history.steps], result.state


@functools.cache
def on_one_device(name):
    return outcome(name, {"data": 1}, {})


def check_as_on_one_device(name, forms):
    for form in forms:
        assert outcome(name, *form)[:3] == on_one_device(name)[:3], form


def test_one_device_and_four_end_with_the_same_bits():
    meshes = {"data": 1}, {"data": 2, "tensor": 2}
    one, four = (outcome("mlp", mesh, {"clip": None}) for mesh in meshes)
    assert one[:3] == four[:3]


def test_one_program_a_chain_and_a_pipeline_end_with_the_same_bits():
    """Of a model whose embedding, and first values, are read in all parts."""
    chain = {"data": 1}, {"recompute": "boundaries"}
    check_as_on_one_device("tied", [({"data": 1, "stage": 3}, {}), chain])


def test_unlike_stages_and_replicas_end_with_the_same_bits():
    check_as_on_one_device("mlp", [([[ONE], [TWO, ONE]], {})])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("forms", FORMS)
def test_no_bit_depends_on_the_cut(name, forms):
    check_as_on_one_device(name, FORMS[forms].values())


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_any_cut(tmp_path):
    """Two stages, two replicas of two devices, unlike stages, three stages: as one device."""

    def train(cut, steps, folder):
        cut = {"mesh": models.mesh(**cut)} if isinstance(cut, dict) else {"stages": cut}
        own = job("decoder", cluster={"visible_devices": [0, 1, 2, 3]} if "stages" in cut else {})
        return hxla.train(
            own,
            **cut,
            rules="decoder",
            microbatch_size=MICRO,
            steps=steps,
            checkpoint_dir=folder,
        )

    stages = [[ONE], [ONE, TWO]]
    cuts = {"data": 1, "stage": 2}, {"data": 2, "tensor": 2}, stages
    for steps, cut in enumerate(cuts, 1):
        result = train(cut, steps, tmp_path)
    assert result.step == 3
    assert result.sha256 == train({"data": 1}, 3, None).sha256


def drawn(number):
    """A random plan with granules, and one of the same mesh and counts without."""
    random = np.random.default_rng(number)
    num = (1, 2, 4)[number % 3]
    copies = int(random.integers(1, min(4, 8 // num) + 1))
    counts = random.multinomial(BATCH // MICRO, [1 / copies] * copies).tolist()
    zero = int(random.integers(0, 2)) if copies > 1 else 0
    mesh = {"data": copies, "tensor": num}
    for cut in ("any", "planned"):
        own = job("mlp", cut=cut, clip=None, zero=zero)
        yield own, planned(own, mesh).with_counts(counts)


@pytest.mark.slow
def test_random_plans_have_one_sha256_and_without_it_numerics_that_tell_bits_apart():
    found = {True: [], False: []}
    for number in range(6):
        for own, plan in drawn(number):
            is_any = plan.axes[-1].granules is not None
            found[is_any].append((plan.numerics, trained(own, plan).sha256, plan.axes[-1].size))
    assert len({size for *_, size in found[True]}) == 3
    assert len({pair[:2] for pair in found[True]}) == 1
    pairs = {pair[:2] for pair in found[False]}
    assert len(pairs) == len({numerics for numerics, _ in pairs}) > 1


def drawn_stages(random):
    """A random plan of unlike stages or replicas on at most eight devices."""
    replicas, left = [], 8
    for _ in range(random.integers(1, 4)):
        stages = []
        for _ in range(random.integers(1, 4)):
            fitting = [table for table in (ONE, TWO, FOUR) if table.get("tensor", 1) <= left]
            if fitting:
                stages.append(fitting[random.integers(len(fitting))])
                left -= stages[-1].get("tensor", 1)
        replicas += [stages] * bool(stages)
    options = {"recompute": random.choice(["none", "boundaries"])}
    options["pipeline"] = {"schedule": random.choice(["gpipe", "1f1b"])}
    own = job("mlp", **options)
    if len(replicas) == 1:
        [stages] = replicas
        return own, planned_stages(own, stages if len(stages) > 1 else [*stages, ONE])
    counts = random.multinomial(BATCH // MICRO, [1 / len(replicas)] * len(replicas)).tolist()
    return own, planned_stages(own, replicas, counts=counts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(examples(1, 8)))
def test_random_plans_of_unlike_stages_have_one_sha256(seed):
    random = np.random.default_rng(seed)
    for _ in range(2):
        own, plan = drawn_stages(random)
        assert (plan.numerics, trained(own, plan).sha256) == on_one_device("mlp")[:2], (
            plan.explain()
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_without_it_numerics_differ_and_bits_too(name):
    """So the setting is what makes them equal."""
    found = set()
    for num in (1, 2):
        own = job(name, cut="planned")
        plan = planned(own, {"data": 1, "tensor": num})
        found.add((plan.numerics, trained(own, plan).sha256))
    assert len({numerics for numerics, _ in found}) == len({sha for _, sha in found}) == 2


def plain(name):
    """Plain JAX, Flax and optax on one device, microbatch after microbatch."""
    model_of, loss, data = MODELS[name]
    model, arrays = model_of(nnx.Rngs(0)), data()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def sums(params, batch):
        out = loss(nnx.merge(graphdef, params, rest), batch)
        losses, weights = out if isinstance(out, tuple) else (out, jnp.ones(out.shape))
        return (losses * weights).sum(), weights.sum()

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    state, losses = optimizer.init(params), []
    gradient = jax.jit(jax.value_and_grad(sums, has_aux=True))
    for step in range(STEPS):
        total = weight = 0.0
        grads = []
        for start in range(step * BATCH, (step + 1) * BATCH, MICRO):
            batch = {key: x[start : start + MICRO] for key, x in arrays.items()}
            (value, own_weight), grad = gradient(params, batch)
            total, weight = total + value, weight + own_weight
            grads.append(grad)
        losses.append(float(total / weight))
        mean = jax.tree.map(lambda *g: sum(g) / weight, *grads)  # noqa: B023
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return losses, params


@pytest.mark.slow
def test_a_decoder_trains_as_plain_jax_does():
    losses, params = plain("decoder")
    _, _, ours, state = outcome("decoder", *CUTS["tensor 4"])
    np.testing.assert_allclose(ours, losses, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(params), strict=True):
        # Adam's step is 1e-2, and its first ones are signs of gradients, which may be tiny.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


# -- initial values -----------------------------------------------------------------------------


class Spaced(nnx.Module):
    """Its table is made of constants, by products and sums."""

    def __init__(self, rngs):
        self.table = nnx.Param(jnp.linspace(0.5, 1.5, 32))
        self.first, self.last = nnx.Linear(6, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)) * self.table[...])


def test_initial_values_of_constants_depend_on_no_form():
    """XLA folded them in one form, and fused a product and a sum in another."""
    tables = []
    forms = [({"data": 1}, 0), ({"data": 2}, 3), ({"data": 1, "stage": 2}, 0)]
    for axes, zero in forms[: examples(2, 3)]:
        job = hxla.Job(
            lambda: Spaced(nnx.Rngs(0)),
            {"x": np.zeros((16, 6), np.float32)},
            lambda model, batch: model(batch["x"])[:, 0],
            optax.sgd(0.0),
            batch_size=8,
            config={"memory": {"zero": zero}},
        )
        mesh = models.mesh(**axes)
        plan = job.plan(mesh=mesh, microbatch_size=2)
        with job.open(plan, mesh=mesh, steps=1, quiet=True) as session:
            session.step()
            tables.append(np.asarray(session.result().state["table"][...]))
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])
