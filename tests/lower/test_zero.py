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
    largest_bits_of,
    largest_in_rows,
    reduce_scatter,
    row_sums,
    value_of,
    values_of,
)
from support.inside.plan import Shares
from support.inside.session import rehearse
from support.relays import EACH, relayed, straight
from support.tiers import rows
from support.zero_jobs import (
    BATCH,
    BY_ELEMENT,
    BY_PARAMETER,
    STEPS,
    close,
    cluster,
    data,
    job,
    linear_job,
    loss,
    planned,
    trained,
)

pytestmark = pytest.mark.optimized

#: Shares of copies, and their counts.
SPREADS = [
    ([1, 2, 3], (2, 9, 1)),
    ([1, 1, 1], (4, 4, 4)),
    ([5, 1], (6, 6)),
    ([1, 1, 9], (12, 0, 0)),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_bits_do_not_depend_on_who_owns_what(name, tmp_path):
    """One form of the job goes on from the checkpoint of another; LAMB sums over parameters."""
    make, clip = BY_ELEMENT[name], {"clip_norm": 0.3} if name in ("adamw", "lion") else {}
    whole = job(make(), communication=clip)
    plan = planned(whole, 3)
    assert plan.placement.zero == 0
    forms = [(whole, planned(whole, 1))]
    for shares, counts in SPREADS if name == "adamw" else SPREADS[:1]:
        own = job(make(), communication=clip, memory={"zero": 1, "shares": shares})
        forms.append((own, planned(own, len(shares)).with_counts(counts)))
        assert forms[-1][1].placement.zero == 1
        assert forms[-1][1].placement.whole == ()
    if name == "adamw":
        forms.append((whole, planned(whole, 2)))
    assert {form.numerics for _, form in forms} == {plan.numerics}
    wanted = straight(whole, plan, len(forms))
    found = relayed(forms, tmp_path)
    assert found.losses == wanted.losses
    assert found.sha256 == wanted.sha256


def by_optax(optimizer, steps):
    """The parameters that plain JAX ends with, the whole batch at once on one device."""
    graphdef, params = nnx.split(nnx.Linear(6, 7, rngs=nnx.Rngs(0)))
    state, batches = optimizer.init(params), data()

    @jax.jit
    def step(params, state, batch):
        value = lambda p: loss(nnx.merge(graphdef, p), batch).mean()  # noqa: E731
        updates, state = optimizer.update(jax.grad(value)(params), state, params)
        return optax.apply_updates(params, updates), state

    for k in range(steps):
        place = slice(k % STEPS * BATCH, (k % STEPS + 1) * BATCH)
        params, state = step(params, state, {key: x[place] for key, x in batches.items()})
    return params


def near(state, params):
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2))


@pytest.fixture(scope="module")
def of_owners(tmp_path_factory):
    """A job whose three copies share the state; then one copy goes on from their checkpoint."""
    clip = {"clip_norm": 0.3}
    whole = linear_job(optax.adam(1e-2), communication=clip)
    own = linear_job(optax.adam(1e-2), communication=clip, memory={"zero": 1, "shares": [1, 2, 5]})
    forms = [(own, planned(own, 3).with_counts((2, 9, 1))), (whole, planned(whole, 1))]
    assert forms[0][1].numerics == planned(whole, 3).numerics

    def look(session, _):
        held = [
            [x.size for x in jax.tree.leaves(copy.opt_state) if x.ndim]
            for copy in session._store.held
        ]
        return held, taken_apart(session) if len(held) > 1 else None

    wanted = straight(whole, planned(whole, 3), len(forms))
    return wanted, relayed(forms, tmp_path_factory.mktemp("owners"), look=look)


def taken_apart(session):
    """Programs that were compiled when its state was taken apart, as in a change of members."""
    store, counts = session._store, [num_compilations()]
    rehearse(types.SimpleNamespace(is_waited_for=True), store, session._job)
    counts.append(num_compilations())
    rehearse(types.SimpleNamespace(is_waited_for=False), store, session._job)
    counts.append(num_compilations())
    store.load(store.saved())
    counts.append(num_compilations())
    return np.diff(counts)


def test_no_bit_depends_on_owners_or_on_whose_checkpoint_it_was(of_owners):
    wanted, found = of_owners
    assert found.losses == wanted.losses
    assert found.sha256 == wanted.sha256


def test_each_copy_holds_its_share_of_the_state(of_owners):
    [held, _], _ = of_owners[1].seen
    for moments, share in zip(held, (1, 2, 5), strict=True):
        granules = [max(-(-size // 8), 8) for size in (42, 7)]  # 8: the least
        assert sorted(moments) == sorted(2 * [share * g for g in granules])


def test_a_state_that_was_taken_apart_once_is_so_again_without_compiling(of_owners):
    """What is rehearsed while a change of members is prepared pauses nobody later."""
    [_, (waited_for, rehearsed, again)], _ = of_owners[1].seen
    assert (waited_for, again) == (0, 0)
    assert rehearsed > 0


@pytest.mark.parametrize("name", rows(BY_PARAMETER))
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


@functools.cache
def if_finite(tier=None):
    """Trained with an optimizer that ties all parameters together: one copy owns all of them."""
    memory = {} if tier is None else {"zero": 1, "offload": {"optimizer": tier}}
    own = linear_job(optax.apply_if_finite(optax.adam(1e-2), 3), memory=memory)
    return trained(own, planned(own, 2))


@pytest.mark.parametrize("tier", rows(["device", "host"], "device"))
def test_a_copy_may_own_nothing(tier):
    """What it sends is zeros, made where it is."""
    close(if_finite(tier), if_finite())


def test_clipping_is_that_of_optax(of_owners):
    """Said to the job, or a part of the optimizer."""
    near(of_owners[0].state, by_optax(CLIPPED, 2 * EACH))
    one = linear_job(CLIPPED, memory={"zero": 1})
    near(trained(one, planned(one, 2)).state, by_optax(CLIPPED, STEPS))


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
    "shares alone": ({"shares": (1, 2, 3)}, "placement.shares: only ZeRO's stages"),
    "too few shares": ({"zero": 1, "shares": (1, 2)}, "placement.shares: 2 for 3 replicas"),
    "nothing": ({"zero": 1, "shares": (1, 0, 1)}, "placement.shares.1: .*greater than 0"),
    "negative": ({"zero": 1, "shares": (1, -1, 1)}, "placement.shares.1: .*greater than 0"),
    "a stage beyond": ({"zero": 4}, "placement.zero"),
    "an owner of nothing": ({"zero": 1, "whole": ("x",)}, "no parameter 'x'"),
    "whole without zero": ({"whole": ("b/bias",)}, "placement.whole: only ZeRO's stages"),
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
    with pytest.raises(hxla.PlanError, match="one replica has nobody to share with"):
        planned(job(optax.adam(1e-2), memory={"zero": 1}), 1)
    with pytest.raises(hxla.PlanError, match=r"memory.shares needs memory.zero"):
        planned(job(optax.adam(1e-2), memory={"shares": [1, 2]}), 2)
    with pytest.raises(hxla.PlanError, match=r"memory.waves: replicas .* by stage, which run all"):
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
    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, **specs))
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


@pytest.mark.parametrize("seed", rows(range(6), 1))
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


@pytest.mark.parametrize(
    "lengths", rows([[5, 2, 9, 1], [1, 9, 2, 0, 3], [7, 1, 1, 8]], [1, 9, 2, 0, 3])
)
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


@pytest.mark.parametrize("seed", rows(range(6), 0, 5))
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


def test_the_largest_magnitudes_of_arrays_found_together():
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((3,), (5000,), (9, 1000))]
    arrays += [np.float32([1, -np.inf]), np.float32([-np.nan, np.inf]), np.zeros((0,), np.float32)]
    bits = largest_bits_of([largest_in_rows(jnp.asarray(x)) for x in arrays])
    found = np.asarray(bits).view(np.float32)
    wanted = [np.max(np.abs(x), initial=0) for x in arrays]
    np.testing.assert_array_equal(found, np.float32(wanted))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e18])
def test_a_sum_is_right_and_does_not_depend_on_the_parts(scale):
    rng = np.random.default_rng(7)
    for size in (1, 1000, 20011):
        x = (rng.standard_t(2, size=size) * scale).astype(np.float32)
        [exponent] = exponents_for(np.array([np.abs(x).max()]))

        def digits(part, exponent=exponent):
            rows = [row_sums(jnp.asarray(part), exponent)]
            [on_cpu], [elsewhere] = (digits_of(rows, on_cpu=x) for x in (True, False))
            np.testing.assert_array_equal(on_cpu, elsewhere)
            return np.asarray(on_cpu)

        found = value_of(digits(x), exponent)
        assert values_of(digits(x)[None], np.array([exponent]))[0] == found
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
