"""Segments of copies that several devices cut: recomputation and ZeRO 2 and 3 beside `tensor`."""

import collections
import functools
import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hxla
from support import families
from support.blocks import Scanned, loss
from support.cut_copies import FORMS, job, leaves, of_pairs, planned, planned_pairs, trained
from support.inside.lower import OffloadedLeaf
from support.launched import start
from support.paths import TESTS
from support.relays import relayed
from support.tensor_gpt import STEPS, text

TENSOR = FORMS["tensor"]


@functools.cache
def of_stage_1():
    """Its plan, its result, and the bytes of optimizer state on its first device."""
    own = of_pairs(optax.adamw(1e-2), zero=1, recompute="none")
    plan = planned_pairs(own, 2)
    return plan, *trained(own, plan)


@pytest.mark.slow
def test_what_is_recomputed_moves_no_bit():
    """Beside one program without axes there is rounding."""
    plain, _ = trained(job(), planned(job(), 1, {}))
    sha256 = set()
    for recompute, copies, counts in (("none", 1, "even"), ("boundaries", 2, (3, 5))):
        own = job(recompute=recompute)
        plan = planned(own, copies, TENSOR, counts)
        assert plan.chain is not None
        found, _ = trained(own, plan)
        sha256.add((found.sha256, plan.numerics))
        for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(plain.state), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
    assert len(sha256) == 1


@pytest.mark.slow
def test_no_bit_depends_on_the_stage(tmp_path):
    """Nor on copies, counts, groups, waves, or on whose checkpoint a run goes on from."""
    plan, wanted, half = of_stage_1()
    forms, parts = [], []
    for memory, copies, counts, first in (
        ({"zero": 2, "shares": [3, 1]}, 2, (7, 1), 3 / 4),
        ({"zero": 3, "waves": 2, "shares": [2, 1, 1, 4]}, 4, (1, 2, 2, 3), 1 / 4),
        ({"zero": 2, "recompute": "none", "shard_groups": 2}, 4, (3, 0, 2, 3), 1 / 2),
    ):
        own = of_pairs(optax.adamw(1e-2), **memory)
        forms.append((own, planned_pairs(own, copies, counts)))
        parts.append(first)
        assert forms[-1][1].numerics == plan.numerics

    def held(session, _):
        state = leaves(session._store.held[0].opt_state)
        return sum(x.addressable_shards[0].data.nbytes for x in state)

    assert len(forms) == STEPS
    found = relayed(forms, tmp_path, look=held, each=1)
    assert found.losses == [r.loss for r in wanted.history.steps]
    assert found.sha256 == wanted.sha256
    # With what pads the granules.
    assert found.seen == [pytest.approx(2 * half * first, rel=0.05) for first in parts]


@pytest.mark.slow
def test_low_precision_and_evaluations():
    """Half of the bytes travel where kernels are read in 16 bits; evaluations read what is held."""
    sha256, losses = set(), set()
    for memory in ({"zero": 1, "recompute": "none"}, {"zero": 3, "shares": [1, 3]}):
        own = job(precision="bf16", **memory)
        with own.open(planned(own, 2, TENSOR), steps=2) as session:
            for _ in session:
                pass
            losses.add(session.evaluate(jax.tree.map(lambda x: x[:16], text())).loss)
            sharded = session._programs.sharded_params
            if sharded is not None:
                sent = {np.dtype(sharded._sent_dtype(u)).name for u in sharded._distinct}
                assert sent == {"uint16", "float32"}
            sha256.add(session.result().sha256)
    assert len(sha256) == len(losses) == 1


def layers(recompute, **memory):
    data = {"tokens": np.random.default_rng(0).integers(0, 11, (24, 7)).astype(np.int32)}
    return hxla.Job(
        Scanned(nnx.Rngs(0, dropout=1)),
        data,
        loss,
        optax.adam(1e-2),
        batch_size=8,
        config={"memory": {"recompute": recompute, **memory}} if recompute else {},
    )


@pytest.mark.slow
def test_a_scan_over_layers_is_cut_both_ways():
    """Rows of stacked parameters, which the devices of a copy cut in another dimension."""
    one = layers(None)
    wanted, _ = trained(one, planned(one, 1, {}))
    sha256 = set()
    for zero in (1, 3):
        own = layers("boundaries", zero=zero)
        plan = planned(own, 2, TENSOR)
        assert any("tensor" in names for p in plan.parameters for names in p.spec)
        assert len(plan.chain.segments) > 2
        found, _ = trained(own, plan)
        sha256.add(found.sha256)
        for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted.state), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-4)
    assert len(sha256) == 1


@pytest.mark.slow
def test_what_waits_is_cut():
    """What crosses between segments, and what lies in the midst of one, is not on each device."""

    def programs(num):
        config = {"memory": {"recompute": "none"}}
        own = families.gpt_job(8, optax.sgd(0.1), config, width=64, length=32, layers=2)
        plan = planned(own, 1, {"tensor": num} if num > 1 else {})
        with own.open(plan, steps=1) as session:
            [runner] = session._programs.runners
            return runner, runner.costs()

    _, whole = programs(1)
    runner, cut = programs(2)
    pairs = list(zip(whole, cut, strict=True))
    assert all(b.input_bytes <= 0.51 * a.input_bytes for a, b in pairs if a.input_bytes)
    layer = max(range(len(whole)), key=lambda i: whole[i].residuals[0].num_bytes)
    kept = [costs[layer].residuals[0].num_bytes for costs in (whole, cut)]
    # The normalised inputs of attention and feed-forward layer are whole.
    assert 0.5 * kept[0] <= kept[1] < 0.7 * kept[0]
    residuals = runner._programs._residuals[layer]
    assert P(None, None, "tensor") in [x.sharding.spec for x in residuals]
    # A parameter is there anyway, though it stands behind a constraint in the program.
    known = {*map(tuple, runner._spec.graph.param_shapes)}
    assert not known & {x.shape for x in residuals if len(x.shape) == 2 and 64 in x.shape}


@pytest.mark.slow
def test_what_travels_between_copies_does_not_grow_with_the_microbatches():
    """Gathers and sums of stage 3 are of each device's own parts, once for a segment."""
    counted = {}
    for size in (2, 4):
        own = job(zero=3)
        cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 4)
        mesh = {"data": 2, **TENSOR}
        plan = own.plan(cluster, microbatch_size=size, mesh=mesh, rules="decoder")
        with own.open(plan, steps=1) as session:
            made = session._programs
            sums, gathers = made.reducer.programs, made.sharded_params._gathers.values()
            found = collections.Counter()
            for program in (*sums, *gathers):
                for what, groups in re.findall(
                    r"= \S+ (all-gather|collective-permute|all-reduce|reduce-scatter)\(.*?"
                    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\S+?),",
                    program.as_text(),
                ):
                    found[what, groups] += 1
            counted[size] = found
            whole = sum(p.num_bytes for p in plan.parameters)
            parts = [
                made.sharded_params.num_bytes(g) for g in range(made.sharded_params.num_groups)
            ]
            assert max(parts) < whole / 2
    assert counted[2] == counted[4]
    # Devices 0 and 1 are a copy: nothing here goes between them but small numbers.
    permutes = [groups for what, groups in counted[2] if what == "collective-permute"]
    assert permutes
    assert all(pair == "{{0,2},{1,3},{2,0},{3,1}}" or "0,1" not in pair for pair in permutes)


@pytest.mark.slow
def test_memory_decides_what_waits_and_who_has_what():
    own = families.gpt_job(16, optax.adamw(1e-3), width=128, length=64, layers=4)

    def plan(memory_bytes):
        devices = (hxla.Device(kind="cpu", memory_bytes=memory_bytes),) * 4
        cluster = hxla.Cluster(name="", devices=devices)
        mesh = {"data": 2, **TENSOR}
        return own.plan(cluster, microbatch_size=2, mesh=mesh, rules="decoder", counts="even")

    roomy, tight = plan(30_000_000), plan(8_000_000)
    assert (roomy.placement.zero, roomy.chain) == (0, None)
    assert tight.placement.zero > 1
    assert tight.chain is not None
    with own.open(tight, steps=1) as session:
        next(iter(session))
        assert session.running_plan.memory_bytes < 8_000_000
        estimated = tight.prediction.devices[0].memory_bytes
        assert session.running_plan.memory_bytes == pytest.approx(estimated, rel=0.25)
    with pytest.raises(hxla.PlanError, match="does not fit beside the state") as caught:
        plan(3_000_000)
    assert "offload" not in str(caught.value)


CODE = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
import hxla
hxla.join()
import jax, optax
from support.cut_copies import of_pairs, planned_pairs, trained
for weights in (None, "first.safetensors"):
    own = of_pairs(optax.adamw(1e-2), zero=3, shares=[1, 2], weights=weights)
    found, _ = trained(own, planned_pairs(own, 2, (5, 3)))
    if jax.process_index() == 0:
        print("RESULT", json.dumps([found.sha256, [r.loss for r in found.history.steps]]))
"""


@pytest.mark.slow
def test_a_process_for_each_device(tmp_path):
    """What is made where it lies, and what is read from a file."""
    path = tmp_path / "first.safetensors"
    hxla.save_weights(path, of_stage_1()[1].state)
    own = of_pairs(optax.adamw(1e-2), zero=1, recompute="none", weights=path)
    results = [of_stage_1()[1], trained(own, planned_pairs(own, 2))[0]]
    wanted = [[found.sha256, [r.loss for r in found.history.steps]] for found in results]
    assert wanted[0] != wanted[1]
    out, err = start(tmp_path, CODE, "-n", "4").communicate(timeout=900)
    told = re.findall(r"\[0\] RESULT (.*)", out)
    assert [json.loads(text) for text in told] == wanted, out[-3000:] + err[-3000:]


@pytest.mark.slow
def test_what_waits_on_hosts_moves_no_bit():
    plan, wanted, _ = of_stage_1()
    places = {"optimizer": "host", "stash": "host", "parameters": "host"}
    own = of_pairs(optax.adamw(1e-2), zero=3, shares=[3, 1], waves=2, offload=places)
    other = planned_pairs(own, 2, (3, 5))
    assert other.numerics == plan.numerics
    assert (other.placement.stash, other.placement.parameters) == ("host", "host")
    with own.open(other, steps=STEPS) as session:
        for _ in session:
            pass
        held = session._store.held[0]
        kinds = {x.sharding.memory_kind for x in held.params}
        assert session.result().sha256 == wanted.sha256
    assert kinds == {"pinned_host"}
    assert any(isinstance(x, OffloadedLeaf) for x in jax.tree.leaves(held.opt_state))


def test_later_generations_keep_what_bits_depend_on(monkeypatch):
    """A chain stays one where there is room for one program, and copies that are cut share nothing
    by themselves."""
    from support.inside.choose import _memory_layout
    from support.inside.launch import Pinned

    roomy = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", memory_bytes=1 << 30),) * 2)
    own = job()
    plan = own.plan(roomy, microbatch_size=4, mesh={"data": 2}, counts="even")
    assert plan.chain is None
    for is_chain in (False, True):
        monkeypatch.setattr(_memory_layout, "pinned", lambda c=is_chain: Pinned(is_chain=c))
        again = own.plan(roomy, microbatch_size=4, mesh={"data": 2}, counts="even")
        assert (again.chain is not None) == is_chain
    cut = own.plan(roomy, microbatch_size=4, mesh={"data": 1, **TENSOR}, rules="decoder")
    tight = int(0.9 * cut.prediction.devices[0].memory_bytes)
    small = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", memory_bytes=tight),) * 4)

    def stage():
        mesh = {"data": 2, **TENSOR}
        return own.plan(small, microbatch_size=4, mesh=mesh, rules="decoder").placement.zero

    assert stage() > 0
    monkeypatch.setattr(_memory_layout, "own_member", lambda: "a member")
    with pytest.raises(hxla.PlanError, match="does not fit"):
        stage()


def test_attention_is_cut_where_its_heads_are():
    """However jax takes queries, keys and values apart."""
    own = families.gpt_job(8, optax.sgd(0.1), width=32, length=16, layers=1)
    plan = planned(own, 1, TENSOR)
    with own.open(plan, steps=1) as session:
        [runner] = session._programs.runners
        text = runner._programs.of(0)["loss"].as_text()
    # Scores of each device's two of four heads, of four examples with 16 positions.
    assert "f32[4,2,16,16]" in text
    assert "f32[4,4,16,16]" not in text
