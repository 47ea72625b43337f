"""State that copies share where devices of unlike speed have parts of unlike sizes."""

import functools
import json
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import models
from support.tiers import rows
from support.uneven_runs import SevenUnits

pytestmark = pytest.mark.optimized

BATCH, MICRO, STEPS = 16, 4, 3
SHARES = (2, 1)
OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    # What it makes of a gradient of zero would fill the padding, and its norm would count that.
    "shifted": lambda: optax.chain(
        optax.stateless(lambda grads, _: jax.tree.map(lambda x: x + 0.1, grads)),
        optax.clip_by_global_norm(0.5),
        optax.sgd(0.5, momentum=0.9),
    ),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    # Of whole matrices, each with one owner.
    "muon": lambda: optax.contrib.muon(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
}


def job(optimizer="adamw", batch_size=BATCH, **memory):
    return hxla.Job(
        lambda: SevenUnits(nnx.Rngs(0)),
        models.regression(),
        models.squared_error,
        OPTIMIZERS[optimizer](),
        batch_size=batch_size,
        shuffle=False,
        config={"memory": memory},
    )


def planned(own, copies, counts="even", shares=SHARES):
    mesh = {"data": copies, "tensor": shares} if shares else {"data": copies}
    devices = (hxla.Device(kind="cpu"),) * (copies * len(shares or (1,)))
    cluster = hxla.Cluster(name="", devices=devices)
    plan = own.plan(cluster, microbatch_size=MICRO, mesh=mesh)
    return plan if counts == "even" else plan.with_counts(counts)


def trained(own, plan, steps=STEPS, **options):
    """The result, and for each device of the first copy the bytes of the parts of its state."""
    with own.open(plan, steps=steps, **options) as session:
        for _ in session:
            pass
        if options:
            session.save()
        arrays = session._store.held[0]
        return session.result(), [bytes_of(arrays.params), bytes_of(arrays.opt_state)]


def bytes_of(tree):
    """On each device, in order."""
    found = {}
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            rank = shard.device.id
            found[rank] = found.get(rank, 0) + shard.data.nbytes
    return [found[rank] for rank in sorted(found)]


@functools.cache
def plain(optimizer):
    """Losses and parameters of a loop in jax and optax, on one device."""
    graphdef, params = nnx.split(SevenUnits(nnx.Rngs(0)), nnx.Param)
    optimizer = OPTIMIZERS[optimizer]()
    state, losses, data = optimizer.init(nnx.to_pure_dict(params)), [], models.regression()
    params = nnx.to_pure_dict(params)

    def loss(params, batch):
        model = nnx.merge(graphdef, nnx.State(params))
        return models.squared_error(model, batch).mean()

    for k in range(STEPS):
        batch = {key: x[k * BATCH : (k + 1) * BATCH] for key, x in data.items()}
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return losses, jax.tree.leaves(params)


def assert_plain(result, optimizer):
    losses, params = plain(optimizer)
    np.testing.assert_allclose([r.loss for r in result.history.steps], losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(nnx.to_pure_dict(result.state)), params, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@functools.cache
def whole(optimizer):
    """With all of the state on every copy."""
    own = job(optimizer, zero=0)
    plan = planned(own, 2)
    assert plan.is_uneven
    return plan, trained(own, plan)[0]


HOST = {"optimizer": "host", "parameters": "host"}
#: What of the memory, the copies, and the microbatches of each.
SPREADS = {
    "zero 1": ({"zero": 1}, 2, (3, 1)),
    "unlike shares": ({"zero": 1, "shares": [3, 1]}, 2, (4, 0)),
    "optimizer on host": ({"zero": 1, "offload": {"optimizer": "host"}}, 2, (1, 3)),
    "optimizer on disk": ({"zero": 1, "offload": {"optimizer": "disk"}}, 2, (2, 2)),
    "groups": ({"zero": 1, "shard_groups": 2}, 4, (1, 1, 0, 2)),
    "zero 2": ({"zero": 2, "shares": [1, 2]}, 2, (1, 3)),
    "waves": ({"zero": 2, "waves": 2}, 2, (2, 2)),
    "zero 3": ({"zero": 3}, 2, (3, 1)),
    "zero 3 in groups": ({"zero": 3, "shard_groups": 2, "waves": 2}, 4, (1, 2, 0, 1)),
    "all on host": ({"zero": 3, "shares": [2, 1], "offload": HOST}, 2, (2, 2)),
}


@pytest.mark.parametrize("name", rows(SPREADS, "unlike shares"))
def test_no_bit_depends_on_who_has_what(name):
    memory, copies, counts = SPREADS[name]
    own = job(**memory)
    plan = planned(own, copies, counts)
    assert (plan.placement.zero, plan.placement.waves) == (memory["zero"], memory.get("waves", 1))
    plan_of_whole, wanted = whole("adamw")
    assert plan.numerics == plan_of_whole.numerics
    found, _ = trained(own, plan)
    assert found.sha256 == wanted.sha256
    assert_plain(found, "adamw")


CASES = [(name, zero) for name in OPTIMIZERS if name != "adamw" for zero in (1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "zero"), CASES)
def test_an_optimizer_sees_no_padding(name, zero):
    own = job(name, zero=zero)
    plan = planned(own, 2)
    found, _ = trained(own, plan)
    assert_plain(found, name)
    plan_of_whole, wanted = whole(name)
    assert (plan.numerics == plan_of_whole.numerics) == (not plan.placement.whole)
    assert bool(plan.placement.whole) == (name in ("muon", "adafactor"))
    if not plan.placement.whole:
        assert found.sha256 == wanted.sha256


def bytes_as_planned(plan):
    """Of a device's parameters, and of its moments: a granule has eight elements at least."""
    num = sum(plan.granules)
    sizes = list(map(math.prod, plan.device_shapes))
    parts = [max(-(-size // num), 8) * plan.granules[0] for size in sizes]
    if plan.placement.zero < 3:
        assert 4 * sum(sizes) == plan.device_parameter_bytes
    params = sizes if plan.placement.zero < 3 else parts
    count = 4  # of steps
    return 4 * sum(params), 8 * sum(parts) + count


@pytest.mark.parametrize("zero", rows([1, 2, 3], 3))
def test_each_device_has_its_part_as_planned(zero):
    own = job(zero=zero)
    plan = planned(own, 2)
    params, state = trained(own, plan)[1]
    expected, moments = bytes_as_planned(plan)
    assert params == [expected] * 2
    assert state == [moments] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_knows_nothing_of_sizes_and_shares(name, tmp_path):
    """Each run of a step goes on with the state in another form."""
    forms = [
        ({"zero": 1, "shares": [3, 1]}, 2, SHARES),
        ({"zero": 3}, 2, (1, 3)),
        ({"zero": 0}, 1, ()),
    ]
    for steps, (memory, copies, shares) in enumerate(forms, 1):
        own = job(name, **memory)
        plan = planned(own, copies, shares=shares)
        found, _ = trained(own, plan, steps, checkpoint_dir=tmp_path)
        assert found.history.steps[0].step == steps
    _, params = plain(name)
    for a, b in zip(jax.tree.leaves(nnx.to_pure_dict(found.state)), params, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("zero", rows([1, 3], 3))
def test_a_resumed_run_ends_with_the_same_bits(zero, tmp_path):
    own = job(zero=zero)
    trained(own, planned(own, 2), 2, checkpoint_dir=tmp_path)
    other = job(zero=4 - zero, shares=[1, 2])
    found, _ = trained(other, planned(other, 2), checkpoint_dir=tmp_path)
    assert found.history.steps[0].step == 3
    assert found.sha256 == whole("adamw")[1].sha256


def test_a_plan_of_shared_parts_is_read_again():
    plan = planned(job(zero=3, shares=[3, 1]), 2)
    assert hxla.Plan.from_json(json.dumps(json.loads(plan.to_json()))) == plan
