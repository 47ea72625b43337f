"""What an optimizer treats as a whole, where several devices cut each copy of the model."""

import functools
import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from support import blocks, families
from support.cut_copies import FORMS, Pairs, leaves, planned, planned_pairs, trained
from support.launched import start
from support.paths import TESTS
from support.tensor_gpt import BATCH, STEPS, gpt, text
from support.whole_optimizers import CLIP, OPTIMIZERS, of_gpt, of_pairs

TENSOR = FORMS["tensor"]
WHOLE = ("muon", "adafactor", "if finite")


def by_optax(optimizer, model, loss, data, batch):
    """The parameters that a loop in optax ends with, on one device."""
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optimizer)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        mean = lambda p: loss(nnx.merge(graphdef, p, rest), batch).mean()  # noqa: E731
        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    for k in range(STEPS):
        place = slice(k * batch, (k + 1) * batch)
        params, state = step(params, state, {key: x[place] for key, x in data.items()})
    return jax.tree.leaves(params)


@functools.cache
def plain(name):
    model = Pairs(nnx.Rngs(0))
    return by_optax(OPTIMIZERS[name](), model, blocks.loss, blocks.data(), blocks.BATCH)


def close(found, wanted):
    """But for rounding, of updates of 1e-2 each."""
    for a, b in zip(jax.tree.leaves(found.state), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@functools.cache
def of_stage_1(name):
    """Its plan and its result, beside optax on one device, where there is rounding."""
    own = of_pairs(name, zero=1, recompute="none")
    plan = planned_pairs(own, 2)
    result, _ = trained(own, plan)
    close(result, plain(name))
    return plan, result


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_bit_depends_on_who_has_what(name):
    """Stages, shares, counts, copies, groups and waves."""
    spreads = [
        ({"zero": 3, "shares": [1, 2, 1, 4], "waves": 2}, 4, (3, 0, 2, 3)),
        ({"zero": 2, "shares": [3, 1], "recompute": "boundaries"}, 2, (7, 1)),
        ({"zero": 3, "shard_groups": 2}, 4, (1, 2, 2, 3)),
    ]
    first, wanted = of_stage_1(name)
    for memory, copies, counts in spreads if name == "muon" else spreads[:1]:
        own = of_pairs(name, **memory)
        plan = planned_pairs(own, copies, counts)
        assert bool(plan.placement.whole) == (name in WHOLE)
        assert plan.numerics == first.numerics
        assert trained(own, plan)[0].sha256 == wanted.sha256
    whole = planned_pairs(of_pairs(name, zero=0), 2)
    assert whole.numerics != first.numerics


@pytest.mark.slow
def test_state_that_waits_on_hosts_moves_no_bit():
    """Though a copy's parameters are updated some at a time there."""
    memory = {"offload": {"optimizer": "host"}, "recompute": "none", "shares": [2, 1]}
    own = of_pairs("muon", zero=1, **memory)
    plan = planned_pairs(own, 2, (3, 5))
    first, wanted = of_stage_1("muon")
    assert (first.placement.optimizer, plan.placement.optimizer) == ("device", "host")
    assert plan.numerics == first.numerics
    assert trained(own, plan)[0].sha256 == wanted.sha256


@pytest.mark.slow
@pytest.mark.parametrize("axes", [FORMS["stage"], FORMS["stage and tensor"]], ids=str)
def test_stages_too(axes):
    """A parameter that stages cut between steps is put together from all of them."""
    found = set()
    for memory, counts in (({"zero": 1}, "even"), ({"zero": 3, "shares": [3, 1]}, (3, 5))):
        own = of_pairs("muon", **memory)
        plan = planned_pairs(own, 2, counts, axes)
        result, _ = trained(own, plan)
        close(result, plain("muon"))
        found.add((result.sha256, plan.numerics))
    assert len(found) == 1


def cuts_of_whole(plan):
    """The axes that cut each parameter which the optimizer treats as a whole."""
    cuts = {p.name: {axis for axes in p.spec for axis in axes} for p in plan.parameters}
    return [cuts[name] for name in plan.placement.whole]


def of_two_axes():
    own = of_gpt("muon", zero=1)
    return own, planned(own, 2, {"fsdp": 2, **TENSOR})


def test_several_axes_and_none_cut_what_is_whole():
    assert {"fsdp", "tensor"} in cuts_of_whole(of_two_axes()[1])
    assert set() in cuts_of_whole(planned(of_gpt("muon", zero=1), 2, TENSOR))


@pytest.mark.slow
def test_what_several_axes_cut_trains_as_plain_jax_does():
    model = gpt(layers=1)
    wanted = by_optax(OPTIMIZERS["muon"](), model, families.token_loss, text(), BATCH)
    close(trained(*of_two_axes())[0], wanted)


@pytest.mark.slow
def test_each_device_has_its_part_of_the_state():
    """All copies together have what each has without ZeRO, and a number for what is another's."""
    own, bytes_of = of_pairs("muon", zero=0), []
    with own.open(planned_pairs(own, 2), steps=1) as session:
        state = session._store.held[0].opt_state
        whole = sum(x.addressable_shards[0].data.nbytes for x in leaves(state))
    own = of_pairs("muon", zero=1)
    with own.open(planned_pairs(own, 2), steps=1) as session:
        for held in session._store.held:
            shards = [x.addressable_shards[0].data for x in leaves(held.opt_state)]
            bytes_of.append(sum(x.nbytes for x in shards))
    assert sum(bytes_of) == pytest.approx(whole, rel=0.02)
    assert max(bytes_of) < 0.6 * whole


@pytest.mark.slow
def test_a_checkpoint_knows_nothing_of_owners(tmp_path):
    """From whole state there is rounding, from other shares there is none."""
    name = "adafactor"  # whose moments have other shapes than parameters
    before, after = of_pairs(name, zero=3, shares=[1, 2]), of_pairs(name, zero=1, recompute="none")
    _, wanted = of_stage_1(name)
    for folder, first in ("whole", of_pairs(name, zero=0)), ("shares", before):
        trained(first, planned_pairs(first, 2), steps=2, checkpoint_dir=tmp_path / folder)
        found, _ = trained(after, planned_pairs(after, 4), checkpoint_dir=tmp_path / folder)
        assert [s.step for s in found.history.steps] == [3]
        close(found, plain(name))
        assert (found.sha256 == wanted.sha256) == (folder == "shares")


CODE = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import hxla
hxla.join()
import jax
from support.cut_copies import planned_pairs, trained
from support.whole_optimizers import of_pairs
for name in ("muon", "adafactor"):
    own = of_pairs(name, zero=3, shares=[1, 2])
    found, _ = trained(own, planned_pairs(own, 2, (5, 3)))
    if jax.process_index() == 0:
        print("RESULT", json.dumps([found.sha256, [r.loss for r in found.history.steps]]))
"""


@pytest.mark.slow
def test_a_process_for_each_device(tmp_path):
    wanted = []
    for name in ("muon", "adafactor"):
        _, found = of_stage_1(name)
        wanted.append([found.sha256, [r.loss for r in found.history.steps]])
    out, err = start(tmp_path, CODE, "-n", "4").communicate(timeout=900)
    told = re.findall(r"\[0\] RESULT (.*)", out)
    assert [json.loads(text) for text in told] == wanted, out[-3000:] + err[-3000:]
