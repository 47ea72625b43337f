"""Updates in groups: fewer temporaries, the same parameters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import hxla
from support import lowering, models
from support.inside.jax import balanced, in_groups
from support.inside.lower import UpdateInputs
from support.tiers import examples, rows
from support.training import train_with

NUM, SIDE = 8, 64
TENSOR_BYTES = SIDE * SIDE * 4


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_shape(params):
    return jax.tree.map(lambda x: "wide" if x.ndim > 1 else "flat", params)


OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "lamb": optax.lamb(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "clipped last": optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.1)),
    "masked": optax.chain(optax.masked(optax.adam(1e-2), matrices), optax.clip_by_global_norm(0.1)),
    "multi": optax.multi_transform({"wide": optax.adam(1e-2), "flat": optax.sgd(0.1)}, by_shape),
    "every second": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "stateless": optax.sgd(0.1),
}


@settings(max_examples=examples(30, 300))
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any), st.data())
def test_groups_are_consecutive_and_none_exceeds_its_share_by_a_tensor(sizes, data):
    num = data.draw(st.integers(1, len(sizes)))
    groups = balanced(sizes, num)
    assert len(groups) == num
    assert all(groups)
    assert [*itertools.chain(*groups)] == [*range(len(sizes))]
    largest = max(sum(sizes[i] for i in group) for group in groups)
    assert largest <= sum(sizes) / num + max(sizes) + 1e-6
    assert balanced([4] * 12, 3) == [range(4), range(4, 8), range(8, 12)]


def lowered(optimizer, num_groups, reduction="float", num=NUM, **options):
    """The programs of an update of equal tensors, and what the last of them is called with.

    With sums of floats it is one program, in which a global norm has to be made first.
    """
    params = [jnp.full((SIDE, SIDE), 0.01 * (i + 1)) for i in range(num)]
    made = lowering.programs(
        lambda params, aux, key, batch: (sum(x.sum() for x in params), jnp.zeros(2), aux),
        params,
        np.ones((1, 1), np.float32),
        optimizer=optimizer,
        num_groups=num_groups,
        reduction=reduction,
        **options,
    )
    sums = np.random.default_rng(0).normal(size=num * SIDE * SIDE).astype(np.float32)
    read = UpdateInputs([sums], [], np.zeros(num, np.int32), np.float32(2), np.float32(1))
    arguments = params, optimizer.init(params), [], read
    return made._updates.each[0].lower(*arguments), arguments


def temporary_tensors(optimizer, num_groups, *form, **options):
    programs, _ = lowered(optimizer, num_groups, *form, **options)
    temporaries = [p.compile().memory_analysis().temp_size_in_bytes for p in programs]
    return max(temporaries) / TENSOR_BYTES


UNCOUPLED = list(itertools.product(("adam", "adafactor", "multi", "stateless"), (1, 4)))


@pytest.mark.parametrize("case", rows(UNCOUPLED, ("adafactor", 1), ("multi", 4)))
def test_an_update_that_no_norm_couples_holds_two_tensors_at_most(case):
    name, num_groups = case
    assert temporary_tensors(OPTIMIZERS[name], num_groups) <= 2.1


NORMS = list(itertools.product(("adam", "clipped", "clipped last", "lamb", "masked"), (1, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_groups"), NORMS)
def test_a_norm_that_is_made_of_integers_couples_nothing(name, num_groups):
    own = OPTIMIZERS[name], num_groups, "exact"
    assert temporary_tensors(*own, num=12, update_clip_norm=0.1) <= 3.1


def test_an_update_after_a_norm_of_integers_couples_nothing():
    """Of the programs above the last, which a norm of floats would make hold all tensors."""
    num = 6
    [*_, update], _ = lowered(OPTIMIZERS["adam"], 3, "exact", num=num, update_clip_norm=0.1)
    assert update.compile().memory_analysis().temp_size_in_bytes <= 3.1 * TENSOR_BYTES


#: The optimizer with a global norm, the threshold of hxla's own, and the most tensors of groups.
COUPLED = [("clipped", None, 2.1), ("clipped last", None, 5.1), ("adam", 0.1, 2.1)]


@pytest.mark.parametrize("case", rows(COUPLED, COUPLED[0]))
def test_groups_make_again_what_a_global_norm_would_have_kept(case):
    name, clip_norm, most = case
    options = {} if clip_norm is None else {"update_clip_norm": clip_norm}
    whole = temporary_tensors(OPTIMIZERS[name], 1, **options)
    grouped = temporary_tensors(OPTIMIZERS[name], 4, **options)
    assert whole >= NUM
    assert grouped <= most


@pytest.mark.parametrize("name", rows(OPTIMIZERS, "masked"))
def test_groups_keep_donation_and_the_arithmetic(name):
    results, donated, num = [], set(), 4
    for num_groups in (1, 3, num):
        [program], arguments = lowered(OPTIMIZERS[name], num_groups, num=num, update_clip_norm=0.5)
        compiled = program.compile()
        donated.add(compiled.memory_analysis().alias_size_in_bytes)
        copies = jax.tree.map(lambda x: jnp.array(np.array(x)), arguments[:3])
        for _ in range(3):
            *copies, _ = compiled(*copies, *arguments[3:])
        results.append(jax.tree.leaves(copies))
    own = sum(x.nbytes for x in jax.tree.leaves(arguments[:2]) if x.size > 1)
    assert len(donated) == 1
    assert min(donated) >= own
    for whole, *grouped in zip(*results, strict=True):
        for other in grouped:
            np.testing.assert_allclose(other, whole, rtol=1e-6, atol=1e-7)


def test_results_in_no_group_are_made_too():
    def function(x, y):
        norm = jnp.sqrt(jnp.sum(x**2) + jnp.sum(y**2))
        return [x / norm, y / norm], {"norm": norm, "same": y, "other": jnp.cumsum(x), "one": 1.0}

    x, y = jnp.arange(1.0, 5.0), jnp.arange(2.0, 9.0)
    grouped, whole = in_groups(function, [[0], [1]])(x, y), function(x, y)
    jax.tree.map(np.testing.assert_array_equal, grouped, whole)


def test_a_branch_over_all_results_is_taken_once():
    def function(x, y):
        both = jax.lax.cond(x[0] > 0, lambda: (x + 1, y + 1), lambda: (x, y))
        return [2 * z for z in both]

    x = jnp.arange(4.0)
    text = str(jax.make_jaxpr(in_groups(function, [[0], [1]]))(x, x))
    assert text.count("cond[") == 1


def train(num_groups, loss=models.token_loss, **options):
    return train_with(
        models.NnxNet(nnx.Rngs(0)),
        models.tokens(),
        loss,
        OPTIMIZERS["clipped"],
        **dict(batch_size=16, microbatch_size=2, steps=6, shuffle=False) | options,
        config={"optimizer": {"num_apply_groups": num_groups}},
    )


@pytest.mark.slow
def test_grouped_updates_have_the_same_bits_on_any_devices_and_train_as_whole_ones():
    spreads = [(8,), (5, 3), (3, 3, 2)]
    grouped = [train(4, mesh=models.mesh(data=len(s)), counts=s) for s in spreads]
    assert len({r.sha256 for r in grouped}) == 1
    whole = train(1, mesh=models.mesh(data=2), counts=(5, 3))
    losses = [[s.loss for s in r.history.steps] for r in (grouped[0], whole)]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def train_dense(num_groups, steps, zero=0):
    return hxla.train(
        hxla.Job(
            lambda: models.Dense(nnx.Rngs(0)),
            models.regression(),
            models.squared_error,
            OPTIMIZERS["clipped"],
            batch_size=24,
            shuffle=False,
            config={"optimizer": {"num_apply_groups": num_groups}, "memory": {"zero": zero}},
        ),
        microbatch_size=3,
        steps=steps,
        mesh=models.mesh(data=2),
        counts=(7, 1),
    )


#: Groups, and the stage of ZeRO.
GROUPED = [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize("case", rows(GROUPED, (2, 0), (2, 1)))
def test_grouped_updates_train_as_optax_does(case):
    steps, data, optimizer = 4, models.regression(), OPTIMIZERS["clipped"]
    result = train_dense(case[0], steps, zero=case[1])
    graphdef, params = nnx.split(models.Dense(nnx.Rngs(0)))

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(
            lambda p: models.squared_error(nnx.merge(graphdef, p), batch).mean()
        )(params)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = optimizer.init(params), []
    for i in range(steps):
        batch = {k: v[i * 24 : (i + 1) * 24] for k, v in data.items()}
        value, params, state = step(params, state, batch)
        losses.append(float(value))
    np.testing.assert_allclose([s.loss for s in result.history.steps], losses, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(result.state), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_replicas_of_several_devices_update_in_groups():
    options = dict(loss=hxla.split(4)(models.token_loss), counts="even")
    grouped, whole = (train(num, **options) for num in (4, 1))
    assert len(grouped.plan.counts) == 2
    losses = [[s.loss for s in r.history.steps] for r in (grouped, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_more_groups_than_parameters_are_refused_with_both_numbers():
    with pytest.raises(hxla.ConfigError, match=r"num_apply_groups=100.*has 2 parameters.* 2 at"):
        train_dense(100, steps=1)
