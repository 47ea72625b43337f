"""The optimizer's state shared out between copies of the model: the same bits, fewer bytes."""

import fractions
import functools
import json
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hxla
from hxla import MemoryConfig
from support.inside.jax import independent, num_compilations
from support.inside.lower import (
    Chunks,
    _chunks,
    all_gather,
    digits_of,
    exponents_for,
    reduce_scatter,
    value_of,
)
from support.inside.plan import Shares
from support.inside.run import rehearse
from support.zero_jobs import (
    BATCH,
    BY_ELEMENT,
    BY_PARAMETER,
    STEPS,
    close,
    cluster,
    data,
    job,
    loss,
    planned,
    trained,
)

SHARES = [[1, 1, 1], [1, 2, 3], [4, 2, 1], [1, 1, 9]]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_bits_do_not_depend_on_who_owns_what(name):
    make, clip = BY_ELEMENT[name], {"clip_norm": 0.3} if name in ("adamw", "lion") else {}
    plain = job(make(), communication=clip)
    plan = planned(plain, 3)
    assert plan.placement.zero == 0
    wanted = trained(plain, plan)
    assert trained(plain, planned(plain, 1)).sha256 == wanted.sha256
    for i, shares in enumerate(SHARES):
        own = job(make(), communication=clip, memory={"zero": 1, "shares": shares})
        shared = planned(own, 3).with_counts(((4, 4, 4), (2, 9, 1), (0, 5, 7), (12, 0, 0))[i])
        assert shared.placement.zero == 1
        assert shared.placement.whole == ()
        assert shared.numerics == plan.numerics
        found = trained(own, shared)
        assert found.sha256 == wanted.sha256
        assert found.history.steps[-1].loss == wanted.history.steps[-1].loss


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_PARAMETER)
def test_what_the_optimizer_treats_as_a_whole_has_one_owner(name):
    make = BY_PARAMETER[name]
    plain = job(make())
    wanted = trained(plain, planned(plain, 2))
    own = job(make(), memory={"zero": 1, "shares": [3, 1]})
    plan = planned(own, 2)
    assert "a/kernel" in plan.placement.whole
    assert plan.numerics != planned(plain, 2).numerics
    close(trained(own, plan), wanted)


def test_what_ties_all_parameters_together_is_said():
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 3)
    plan = planned(job(optimizer, memory={"zero": 1}), 2)
    assert any("ties all parameters together" in reason for reason in plan.reasons)
    assert len(plan.placement.whole) == 6


@pytest.mark.parametrize("offload", ["device", "host"])
def test_a_copy_may_own_nothing(offload):
    """What it sends is zeros, made where it is."""
    linear = lambda: nnx.Linear(6, 7, rngs=nnx.Rngs(0))  # noqa: E731
    optimizer = optax.apply_if_finite(optax.adam(1e-2), 3)
    found = []
    for memory in ({}, {"zero": 1, "offload": {"optimizer": offload}}):
        config = {"memory": memory}
        own = hxla.Job(linear, data(), loss, optimizer, batch_size=BATCH, config=config)
        found.append(trained(own, planned(own, 2)))
    close(*found)


def test_clipping_is_that_of_optax():
    """Against plain JAX on one device: the whole batch at once, and optax's own transformation."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2))
    graphdef, params = nnx.split(nnx.Linear(6, 7, rngs=nnx.Rngs(0)))
    state, batches = optimizer.init(params), data()
    for step in range(STEPS):
        batch = {k: v[step * BATCH : (step + 1) * BATCH] for k, v in batches.items()}
        value = lambda p: loss(nnx.merge(graphdef, p), batch).mean()  # noqa: B023, E731
        updates, state = optimizer.update(jax.grad(value)(params), state, params)
        params = optax.apply_updates(params, updates)
    options = {"batch_size": BATCH, "config": {"memory": {"zero": 1}}, "shuffle": False}
    linear = lambda: nnx.Linear(6, 7, rngs=nnx.Rngs(0))  # noqa: E731
    for own, clip in ((optimizer, None), (optax.adam(1e-2), 0.3)):
        options["config"]["communication"] = {"clip_norm": clip}
        one = hxla.Job(linear, data(), loss, own, **options)
        found = trained(one, planned(one, 2)).state
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_each_copy_holds_its_share_of_the_state():
    shares = (1, 2, 5)
    own = job(optax.adam(1e-2), memory={"zero": 1, "shares": list(shares)})
    sizes = [60, 10, 10, 70, 7, 1]
    with own.open(planned(own, 3), steps=1) as session:
        for copy, held in enumerate(session._store.held):
            moments = [x.size for x in jax.tree.leaves(held.opt_state) if x.ndim]
            granules = [max(-(-size // sum(shares)), 8) for size in sizes]  # 8: the least
            assert sorted(moments) == sorted(2 * [shares[copy] * g for g in granules])


def test_a_state_that_was_taken_apart_once_is_so_again_without_compiling():
    """As in a change of members: what is rehearsed while one is prepared pauses nobody later."""
    own = job(optax.adam(1e-2), memory={"zero": 1, "shares": [1, 2, 5]})
    plan = planned(own, 3)
    with own.open(plan, steps=STEPS) as session:
        next(iter(session))
        store, begun = session._store, num_compilations()
        rehearse(types.SimpleNamespace(is_waited_for=True), store, session._job)
        assert num_compilations() == begun
        rehearse(types.SimpleNamespace(is_waited_for=False), store, session._job)
        compiled = num_compilations()
        assert compiled > begun
        store.load(store.saved())
        assert num_compilations() == compiled
        for _ in session:
            pass
        assert session.result().sha256 == trained(own, plan).sha256


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_shares(tmp_path):
    make = BY_ELEMENT["adamw"]
    even = job(make(), memory={"zero": 1})
    wanted = trained(even, planned(even, 3))
    for i, (num, before, after) in enumerate(
        [(3, [1, 2, 3], [1, 5, 1]), (2, [5, 1], None), (3, None, [2, 1, 1])]
    ):
        folder, own = tmp_path / str(i), []
        for shares in (before, after):
            memory = {"zero": 0} if shares is None else {"zero": 1, "shares": shares}
            own.append(job(make(), memory=memory))
        with own[0].open(planned(own[0], num), steps=STEPS, checkpoint_dir=folder) as session:
            session.step()
            session.save()
        found = trained(own[1], planned(own[1], num), checkpoint_dir=folder)
        assert len(found.history.steps) == STEPS - 1
        assert found.sha256 == wanted.sha256


def test_shares_follow_speed_as_far_as_memory_holds_them():
    own = job(optax.adam(1e-2), memory={"zero": 1})
    sizes = ((1.0, None), (0.5, None))

    def planned_on(*devices):
        made = [
            hxla.Device(kind="cpu", core_share=share, memory_bytes=memory)
            for share, memory in devices
        ]
        own_cluster = hxla.Cluster(name="", devices=made)
        options = {"mesh": {"data": 2}, "microbatch_size": 2, "counts": "even"}
        return own.plan(own_cluster, **options)

    def shares(*devices):
        return planned_on(*devices).placement.shares

    assert shares(*sizes) == (2, 1)
    assert shares((1.0, None), (1.0, None)) == ()
    held = planned_on((1.0, 1 << 20), (0.5, 1 << 20)).prediction.devices[0].held
    # Of 158 parameters' 632 bytes the values and two limbs; while they are summed two limbs that
    # travel, half as much again of the others', a word of what comes back. Half of the totals, for
    # which sums are let go where that is too much. The state has 1268 bytes.
    least = 632 * (1 + 2 + 2 * 1.5 + 1) + held.activations
    assert held.total == least + 632 / 2 + held.optimizer
    assert shares((1.0, int(least + 400)), (0.5, int(least + 1568))) == (7, 17)
    with pytest.raises(hxla.PlanError, match="lacks"):
        shares((1.0, 1900), (0.5, 2000))


def test_zero_is_chosen_where_the_state_does_not_fit():
    own = job(optax.adam(1e-2))
    options = {"mesh": {"data": 2}, "microbatch_size": 2, "counts": "even"}
    roomy = own.plan(cluster(2, memory_bytes=1 << 20), **options)
    needed = int(roomy.prediction.devices[0].held.total)
    tight = own.plan(cluster(2, memory_bytes=needed - 200), **options)
    assert (roomy.placement.zero, tight.placement.zero) == (0, 1)


HOSTILE = {
    "shares alone": ({"shares": (1, 2, 3)}, "placement.shares: they are of ZeRO's stages"),
    "too few shares": ({"zero": 1, "shares": (1, 2)}, "placement.shares: 2 for 3 copies"),
    "nothing": ({"zero": 1, "shares": (1, 0, 1)}, "placement.shares.1: .*greater than 0"),
    "negative": ({"zero": 1, "shares": (1, -1, 1)}, "placement.shares.1: .*greater than 0"),
    "a stage beyond": ({"zero": 4}, "placement.zero"),
    "an owner of nothing": ({"zero": 1, "whole": ("x",)}, "no parameter 'x'"),
    "whole without zero": ({"whole": ("b/bias",)}, "placement.whole: it is of ZeRO's stages"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plan_with_wrong_shares_is_refused(name):
    fields, words = HOSTILE[name]
    plan = planned(job(optax.adam(1e-2)), 3)
    table = plan.model_dump(mode="json")
    table["placement"] |= fields
    with pytest.raises(hxla.PlanError, match=words):
        hxla.Plan.from_json(json.dumps(table))


def test_wrong_settings_are_refused():
    with pytest.raises(hxla.PlanError, match="one copy of the model has nobody to share with"):
        planned(job(optax.adam(1e-2), memory={"zero": 1}), 1)
    with pytest.raises(hxla.PlanError, match=r"memory.shares needs memory.zero"):
        planned(job(optax.adam(1e-2), memory={"shares": [1, 2]}), 2)
    with pytest.raises(hxla.PlanError, match=r"memory.waves: copies .* by stage, which run all"):
        planned(job(optax.adam(1e-2), memory={"zero": 2, "waves": 2}), 4, mesh=None, stages=2)
    with pytest.raises(hxla.ConfigError, match=r"memory.zero"):
        planned(job(optax.adam(1e-2), memory={"zero": 7}), 2)
    assert MemoryConfig().zero is None


def test_an_edited_list_of_whole_parameters_is_refused():
    own = job(optax.adam(1e-2), memory={"zero": 1})
    plan = planned(own, 2)
    placed = plan.placement.model_copy(update={"whole": ("b/bias",)})
    with pytest.raises(
        hxla.PlanError, match="treats no parameter as a whole, the plan says b/bias"
    ):
        own.open(plan.replaced(placement=placed), steps=1)


# -- the parts ----------------------------------------------------------------------------------


def over_copies(run, num, *arrays):
    mesh = jax.make_mesh((num,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return mapped, mapped(*arrays)


def sent_elements(closed):
    """Elements on all links, of permutes in the order of the program."""
    total = 0
    for eqn in closed.eqns:
        if eqn.primitive.name == "ppermute":
            total += eqn.invars[0].aval.size * len(eqn.params["perm"])
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += sent_elements(inner)
    return total


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_chunks_of_any_length_are_summed_and_gathered(seed):
    rng = random.Random(seed)
    num = rng.randint(2, 6)
    lengths = [rng.choice((0, 1, 3, 8, 8, 20)) for _ in range(num - 1)] + [9]
    total = sum(lengths)
    rows = np.random.default_rng(seed).integers(-100, 100, (num, total)).astype(np.int32)

    def scatter(row):
        return reduce_scatter(row.reshape(-1), lengths, "data", jnp.int32, True)[None]

    program, found = over_copies(scatter, num, rows)
    ends = np.cumsum(lengths)
    wanted = np.split(rows.sum(axis=0), ends[:-1])
    for own, part in zip(np.asarray(found), wanted, strict=True):
        np.testing.assert_array_equal(own[: len(part)], part)
    # Each chunk goes to all copies but one: no fewer bytes can do it.
    assert sent_elements(jax.make_jaxpr(program)(rows).jaxpr) == (num - 1) * total

    def gather(own):
        return all_gather(own.reshape(-1), lengths, "data")[None]

    wide = np.stack([np.pad(part, (0, max(lengths) - len(part))) for part in wanted])
    program, found = over_copies(gather, num, wide)
    for own in np.asarray(found):
        np.testing.assert_array_equal(own, rows.sum(axis=0))
    if len(set(lengths)) > 1:
        assert sent_elements(jax.make_jaxpr(program)(wide).jaxpr) == (num - 1) * total


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[5, 2, 9, 1], [1, 9, 2, 0, 3], [7, 1, 1, 8]])
def test_chunks_of_more_lengths_than_ranges_keep_to_themselves(lengths, monkeypatch):
    monkeypatch.setattr(_chunks, "ring_layers", functools.partial(_chunks.ring_layers, most=2))
    num, total = len(lengths), sum(lengths)
    rows = np.arange(num * total, dtype=np.int32).reshape(num, total)
    wanted = np.split(rows.sum(axis=0), np.cumsum(lengths)[:-1])

    def both(row):
        own = reduce_scatter(row.reshape(-1), lengths, "data", jnp.int32, True)
        return all_gather(own, lengths, "data")[None]

    _, found = over_copies(both, num, rows)
    for own in np.asarray(found):
        np.testing.assert_array_equal(own, np.concatenate(wanted))


@pytest.mark.parametrize("seed", range(6))
def test_chunks_hold_every_element_once(seed):
    rng = random.Random(seed)
    num = rng.randint(1, 5)
    granules = (*(rng.randrange(4) for _ in range(num - 1)), rng.randint(1, 3))
    shapes = [rng.choice([(), (3,), (4, 5), (17,), (2, 3, 4)]) for _ in range(5)]
    able = [c for c, g in enumerate(granules) if g]
    owners = tuple(rng.choice([None, None, rng.choice(able)]) for _ in shapes)
    arrays = [np.arange(np.prod(s, dtype=int), dtype=np.float32).reshape(s) + 1 for s in shapes]
    chunks = Chunks(Shares(granules, owners), tuple(range(5)), tuple(x.size for x in arrays))
    flat = chunks.flat([jnp.asarray(x) for x in arrays])
    assert flat.shape == (sum(chunks.lengths),)
    for x, back in zip(arrays, chunks.unflat(flat, shapes), strict=True):
        np.testing.assert_array_equal(x, back)
    own = np.split(np.asarray(flat), np.cumsum(chunks.lengths)[:-1])
    for copy, part in enumerate(own):
        padded = jnp.pad(part, (0, chunks.longest - part.size))
        pieces = chunks.pieces(padded, copy)
        np.testing.assert_array_equal(chunks.chunk(pieces, copy), padded)
        first = chunks.shares.firsts[copy]
        for i, x in enumerate(arrays):
            if owners[i] is None:
                wanted = chunks.shares.piece(jnp.asarray(x), granules[copy], first)
            else:
                wanted = x.reshape(-1) if owners[i] == copy else x.reshape(-1)[:0]
            np.testing.assert_array_equal(pieces[i], wanted)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e18])
def test_a_sum_is_right_and_does_not_depend_on_the_parts(scale):
    rng = np.random.default_rng(7)
    for size in (1, 1000, 20011):
        x = (rng.standard_t(2, size=size) * scale).astype(np.float32)
        [exponent] = exponents_for(np.array([np.abs(x).max()]))

        def digits(part, exponent=exponent):
            return np.asarray(digits_of(jnp.asarray(part), exponent))

        found = value_of(digits(x), exponent)
        exact = float(sum(fractions.Fraction(float(v)) for v in x))
        assert abs(float(found) - exact) <= 1e-7 * abs(exact) + 1e-12 * np.abs(x).max()
        parted = sum(digits(part) for part in np.array_split(x, 5))
        assert value_of(parted, exponent) == found


def test_what_depends_on_what_is_found():
    def step(a, b, count, grad_a, grad_b):
        rate = 0.1 / (count + 1)
        return a - rate * grad_a / jnp.linalg.norm(grad_a), b - grad_b @ b.T @ b, count + 1

    arrays = [jax.ShapeDtypeStruct((3, 4), "float32")] * 2 + [jax.ShapeDtypeStruct((), "float32")]
    found = independent(step, arrays, arrays[:2], [0, 1])
    assert found.domain_of == (0, 1, None, 0, 1)
    assert found.slices == (True, False)
    assert len(found.sums) == 1
