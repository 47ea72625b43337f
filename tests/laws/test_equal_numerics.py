"""Equal numerics, equal bits: random plans of three models, in one process and in several.

The plans are drawn with fixed seeds, so that a failure comes again.
"""

import collections
import dataclasses
import functools
import itertools
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from support import random_plans, tiers
from support.inside.plan import _plan, deciding
from support.random_plans import (
    BATCH,
    FORMS,
    RUN_FORMS,
    STEPS,
    Form,
    Outcome,
    Processes,
    Trial,
    job,
    run,
    trials,
)
from support.tiers import rows

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("every_program_is_cached")]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """From a number to so many real processes, which live on for the next plan."""
    started = {}

    def of(num):
        if num not in started or started[num].has_ended:
            started[num] = Processes(num, tmp_path_factory.mktemp(f"processes{num}"))
        return started[num]

    yield of
    for each in started.values():
        each.close()


@dataclasses.dataclass
class Ended:
    """A trial and how it ended."""

    trial: Trial
    outcome: Outcome


def check(ended):
    """Hold that plans of equal numerics gave equal bits."""
    groups = collections.defaultdict(list)
    for each in ended:
        groups[each.trial.plan.numerics].append(each)
    for numerics, [first, *others] in groups.items():
        losses = functools.reduce(lambda a, b: b | a, (e.outcome.losses for e in [first, *others]))
        for other in [first, *others]:
            same = other.outcome.sha256 == first.outcome.sha256
            expected = {step: losses[step] for step in other.outcome.losses}
            if not same or other.outcome.losses != expected:
                what = "\n".join(first.trial.plan.diff(other.trial.plan)) or "the same plan"
                raise AssertionError(
                    f"numerics {numerics}, {other.trial.processes} processes, resumed from "
                    f"{other.trial.resumes}: {other.outcome}, not {first.outcome}\n{what}"
                )


#: A pipeline. What else the whole tier runs here has its own tests in the quick one: chains that
#: share their state, `lower/test_layered.py`; real processes, `run/test_agreement.py`,
#: `lower/test_uneven_processes.py`, `lower/test_sums_over_host.py` and `plan/test_plan_files.py`.
QUICK = ("mlp-size=2-stages=2-chunks=2",)


@pytest.mark.parametrize("form", rows(RUN_FORMS, *(f for f in RUN_FORMS if str(f) in QUICK)))
def test_plans_of_equal_numerics_give_equal_bits(form, tmp_path, processes):
    ended = []
    drawn = trials(form)
    for number, trial in enumerate(drawn if tiers.is_all else drawn[:2]):
        folder = tmp_path / str(number) if trial.saves or trial.resumes is not None else None
        if trial.resumes is not None:
            shutil.copytree(tmp_path / str(trial.resumes), folder)
        if trial.processes == 1:
            outcomes = [run(form, trial, folder)]
        else:
            outcomes = processes(trial.processes).run(form, trial, folder)
        begun = drawn[trial.resumes].saves if trial.resumes is not None else 0
        assert all(sorted(o.losses) == list(range(begun + 1, STEPS + 1)) for o in outcomes)
        ended += [Ended(trial, outcome) for outcome in outcomes]
    assert len({each.trial.plan.numerics for each in ended}) == 1
    check(ended)


def test_numerics_are_as_few_as_the_law_says():
    drawn = {form: trials(form) for form in FORMS}
    assert sum(map(len, drawn.values())) >= 200
    numerics = {form: {t.plan.numerics for t in own} for form, own in drawn.items()}
    assert all(len(own) == 1 for own in numerics.values())
    assert len(set.union(*numerics.values())) == len(FORMS)
    every = [t for own in drawn.values() for t in own]
    assert {t.processes for t in every} == {1, 2, 3, 4}
    assert {len(t.plan.replicas) for t in every} == {1, 2, 3, 4}
    assert any(0 in t.plan.counts for t in every)
    assert {t.plan.placement.optimizer for t in every} == {"device", "host", "disk"}
    assert {t.plan.placement.parameters for t in every} == {"device", "host"}
    assert len({t.plan.placement.waves for t in every}) > 1
    for limbs in (1, 2):
        own = [t.plan for t in every if t.plan.sums.limbs == limbs]
        assert {plan.placement.zero for plan in own} == {0, 1, 2, 3}
        assert any(plan.placement.zero and len(set(plan.granules)) > 1 for plan in own)
        assert any(plan.pipeline is not None for plan in own)
        assert {plan.sums.over for plan in own} == {"device", "host"}
    assert any(t.resumes is not None and t.processes > 1 for t in every)
    assert any(t.resumes is not None and drawn_other(t, own) for own in drawn.values() for t in own)
    assert any(t.balance for t in every)
    assert {t.plan.replicas[0].executors for t in every} == {1, 2, 3}
    assert {t.plan.placement.zero for t in every if t.plan.replicas[0].executors > 1} == {
        0,
        1,
        2,
        3,
    }
    of_chains = [t.plan for t in every if t.plan.num_segments > 1]
    assert {plan.microbatches_per_call for plan in of_chains} == {1, 2, 3}
    assert {(t.plan.sums.over, t.processes > 1) for t in every} == {
        *itertools.product(("device", "host"), (False, True))
    }
    assert any(len({r.start_seconds for r in t.plan.replicas}) > 1 for t in every)
    pipelines = [t.plan.pipeline for t in every if t.plan.pipeline is not None]
    schedules = {p.schedule if isinstance(p.schedule, str) else "table" for p in pipelines}
    assert schedules == {"1f1b", "gpipe", "interleaved", "zb-h1", "table"}
    assert {p.num_chunks for p in pipelines} == {1, 2}


def drawn_other(trial, own):
    """Whether it goes on with another number of copies."""
    return len(trial.plan.replicas) != len(own[trial.resumes].plan.replicas)


def test_bits_that_differ_are_found(monkeypatch):
    """Numerics that left out the size of a microbatch would say that these two are alike."""
    pair = [Trial(plan=Form(model="mlp", size=size).plan) for size in (1, 2)]
    ended = [Ended(trial, Outcome(str(i), {0: 1.0})) for i, trial in enumerate(pair)]
    check(ended)

    def less(plan):
        return deciding(plan) | {"microbatch_size": 0, "microbatches_per_call": 0}

    monkeypatch.setattr(_plan, "deciding", less)
    with pytest.raises(AssertionError, match="microbatch_size: 1 here, 2 there"):
        check(ended)


def nnx_functions(name):
    model = {"mlp": random_plans.Mlp, "conv": random_plans.Conv}[name](nnx.Rngs(0))
    graphdef, params, rngs, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)

    def fresh(key):
        leaves, treedef = jax.tree.flatten(rngs)
        keys = [
            jax.random.fold_in(key, i) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 0 * x
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, keys)

    def apply(params, rest, key, batch):
        module = nnx.merge(graphdef, params, fresh(key), rest, copy=True)
        out = job(name).loss(module, batch)
        return out, nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))

    return params, rest, apply


def linen_functions(name, first):
    own = job(name)
    bound = nn.init(lambda model, batch: own.loss(model, batch), own.model)
    keys = jax.random.split(jax.random.key(own.seed), 2)
    params = bound({"params": keys[0], "dropout": keys[1]}, first)["params"]
    run = nn.apply(lambda model, batch: own.loss(model, batch), own.model)

    def apply(params, rest, key, batch):
        return run({"params": params}, batch, rngs={"dropout": jax.random.fold_in(key, 1)}), rest

    return params, {}, apply


def plain(name, size):
    """Plain JAX, Flax and optax on one device: microbatch after microbatch, in floats."""
    own = job(name)
    rows = [np.arange(step * BATCH, (step + 1) * BATCH) for step in range(STEPS)]
    batches = [{k: x[r % len(x)] for k, x in own.data.items()} for r in rows]
    cut = lambda batch, m: {k: x[m * size : (m + 1) * size] for k, x in batch.items()}  # noqa: E731
    functions = linen_functions if name == "gpt" else lambda name, _: nnx_functions(name)
    params, rest, apply = functions(name, cut(batches[0], 0))

    def sums(params, rest, key, batch):
        out, new = apply(params, rest, key, batch)
        losses, weights = out if isinstance(out, tuple) else (out, None)
        if weights is None or isinstance(weights, dict):
            weights = jnp.ones(losses.shape)
        return (losses * weights).sum(), (weights.sum(), new)

    gradient = jax.jit(jax.value_and_grad(sums, has_aux=True))
    state, losses, sizes = own.optimizer.init(params), [], []
    for step, batch in enumerate(batches):
        total, weight, grads, states = 0.0, 0.0, [], []
        for m in range(BATCH // size):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(own.seed), step), m)
            (value, (own_weight, new)), grad = gradient(params, rest, key, cut(batch, m))
            total, weight = total + value, weight + own_weight
            grads.append(grad)
            states.append(new)
        losses.append(float(total / weight))
        mean = jax.tree.map(lambda *g: sum(g) / weight, *grads)  # noqa: B023
        sizes.append(jax.tree.map(lambda *g: sum(np.abs(x).max() for x in g) / weight, *grads))  # noqa: B023
        if (limit := own.config.get("communication", {}).get("clip_norm")) is not None:
            mean, _ = optax.clip_by_global_norm(limit).update(mean, optax.EmptyState())
        updates, state = own.optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
        rest = jax.tree.map(lambda *x: sum(x) / len(x), *states)
    largest = max(max(map(float, jax.tree.leaves(tree))) for tree in sizes)
    return losses, params, rest, largest


#: Additions, one after another, between a batch and any one gradient: rows and positions, and the
#: widths of the layers forth and back; and how far an error of a gradient moves an update.
ADDED = {"mlp": 8 + 2 * 56, "gpt": 8 * 6 + 2 * 104, "conv": 8 * 36 + 2 * 62}
MOVED = {"mlp": 1.0, "gpt": 1.0, "conv": 0.1 * 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt", "conv"])
def test_the_models_train_as_plain_jax_does(name):
    size = 2
    losses, params, rest, largest = plain(name, size)
    own = dataclasses.replace(job(name), shuffle=False)
    plan = Form(model=name, size=size).plan
    with own.open(plan, steps=STEPS) as session:
        np.testing.assert_allclose(
            [record.loss for record in session], losses, rtol=ADDED[name] * 2.0**-24
        )
        ours = jax.tree.map(np.asarray, (session.state.params, session.state.aux))
    tolerance = STEPS * MOVED[name] * ADDED[name] * 2.0**-24 * largest
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves((params, rest)), strict=True):
        np.testing.assert_allclose(a, b, rtol=STEPS * 2.0**-23, atol=tolerance)
