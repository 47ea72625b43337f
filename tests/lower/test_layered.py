"""Gradients and parameters shared out, segment by segment: ZeRO's stages 2 and 3."""

import collections
import dataclasses
import functools
import gc

import jax
import numpy as np
import optax
import pytest

import hxla
from support.blocks import Layers, Scanned, job, trained
from support.shared_state import planned, shared

#: Counts, shares, what is recomputed, and waves.
SPREADS = [
    (2, dict(num=2), {}),
    (2, dict(num=3, counts=(0, 5, 3)), {"shares": [1, 2, 3], "recompute": "none", "waves": 2}),
    (3, dict(num=2, counts=(7, 1)), {"recompute": "none"}),
    (3, dict(num=3, counts=(2, 0, 6)), {"shares": [4, 2, 1]}),
    (3, dict(num=2, counts=(1, 7)), {"waves": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon", "lookahead"])
def test_no_bit_depends_on_the_stage(name):
    make = {
        "adamw": lambda: optax.adamw(1e-2),
        "muon": lambda: optax.contrib.muon(1e-2),  # owns whole matrices
        # Its state begins as the parameters are.
        "lookahead": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9, debias=False)),
    }[name]
    clip = 0.3 if name == "adamw" else None
    one = shared(1, optimizer=make(), clip=clip)
    plan = planned(one, 2)
    wanted = trained(one, plan)
    for stage, spread, memory in SPREADS if name == "adamw" else SPREADS[2:3]:
        own = shared(stage, optimizer=make(), clip=clip, **memory)
        found = planned(own, **spread)
        assert found.placement.zero == stage
        if name != "muon":  # there it counts who owns a matrix
            assert found.numerics == plan.numerics
        losses, _, sha256 = trained(own, found)
        assert (losses, sha256) == (wanted[0], wanted[2]), (stage, spread, memory)


@pytest.mark.slow
def test_a_scan_over_layers_can_be_shared_out():
    wanted = trained(one := shared(1, Scanned), planned(one, 2))
    own = shared(3, Scanned)
    assert trained(own, planned(own, 2, (3, 5)))[2] == wanted[2]


def bytes_of_devices():
    """Of all live arrays, by device; several arrays may share a buffer."""
    gc.collect()
    buffers = {}
    for x in jax.live_arrays():
        for shard in x.addressable_shards:
            where = shard.device.id, shard.data.unsafe_buffer_pointer()
            buffers[where] = shard.data.nbytes
    found = collections.Counter()
    for (device, _), size in buffers.items():
        found[device] += size
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num", [2, 4])
def test_each_device_has_its_share_and_no_more(stage, num):
    """AdamW: 4 bytes a parameter, 8 of moments; int32 sums of two limbs while they are kept."""
    own = shared(stage) if stage else job(Layers, {}, optax.adamw(1e-2))
    before = bytes_of_devices()
    with own.open(planned(own, num), steps=2) as session:
        next(iter(session))
        after = bytes_of_devices()
        params = sum(x.size for x in jax.tree.leaves(session.state.params))
        share = 1 / num
        wanted = (
            params
            * {
                0: 4 + 8 + 8,
                1: 4 + 8 * share + 8,
                2: 4 + 8 * share,
                3: (4 + 8) * share,
            }[stage]
        )
        for device in range(num):
            # Granules have at least eight elements, so vectors of four devices are padded.
            small = 12 * 8 * 2 * len(jax.tree.leaves(session.state.params))
            assert abs(after[device] - before[device] - wanted) <= 0.03 * wanted + small


@pytest.mark.slow
def test_what_travels_does_not_grow_with_the_microbatches(monkeypatch):
    """Two gathers of the parameters and one reduce-scatter of the sums, for any counts."""
    from support.inside.lower import Reducer, ShardedParams

    calls = collections.Counter()

    def counted(cls, name):
        run = getattr(cls, name)

        @functools.wraps(run)
        def wrapped(self, k, *arguments, **named):
            calls[name, k] += 1
            return run(self, k, *arguments, **named)

        monkeypatch.setattr(cls, name, wrapped)

    counted(ShardedParams, "gather")
    counted(Reducer, "sum_group")
    counted(Reducer, "add_group")

    def calls_of(own, counts):
        with own.open(planned(own, 2, counts), steps=2) as session:
            steps = iter(session)
            next(steps)
            calls.clear()
            next(steps)
            return dict(calls)

    own = shared(3)
    found = {counts: calls_of(own, counts) for counts in ((4, 4), (1, 7))}
    assert found[4, 4] == found[1, 7]
    waves = calls_of(shared(3, waves=3), (1, 7))
    gathers = {k: n for (name, k), n in found[4, 4].items() if name == "gather"}
    last = max(gathers)
    assert gathers == {k: 1 if k == last else 2 for k in range(last + 1)}
    sums = [k for name, k in found[4, 4] if name == "sum_group"]
    assert all(found[4, 4]["sum_group", k] == 1 for k in sums)
    assert all(waves["add_group", k] == 2 and waves["sum_group", k] == 1 for k in sums)
    assert all(waves["gather", k] == 3 * gathers[k] for k in gathers if k != last)


@pytest.mark.slow
def test_a_checkpoint_of_shares_resumes_whole_and_evaluates(tmp_path):
    own = shared(3)
    held_out = {"tokens": np.random.default_rng(1).integers(0, 11, (8, 7)).astype(np.int32)}
    wanted = trained(own, planned(own, 2), steps=3)
    saved = {"checkpoint_dir": tmp_path}
    with own.open(planned(own, 2), steps=2, **saved) as session:
        for _ in session:
            pass
        session.save()
        shares = session.evaluate(held_out)
    one = shared(1)
    with one.open(planned(one, 3), steps=3, **saved) as session:
        assert session.evaluate(held_out).loss == shares.loss
        for _ in session:
            pass
        assert session.result().sha256 == wanted[2]


def test_memory_decides_what_waits_for_the_backward():
    def made(thousands, **memory):
        memory = {"zero": 3, "recompute": "auto"} | memory
        config = {"memory": memory, "communication": {"limbs": 1}}
        own = job(Layers, config, optax.adamw(1e-2))
        own = dataclasses.replace(own, batch_size=24)
        return planned(own, 2, memory_bytes=thousands * 1000)

    found = [made(10_000), made(150), made(106)]
    assert [any("+" in text for text in p.chain.sequence) for p in found] == [False, True, True]
    assert [p.placement.waves > 1 for p in found] == [False, False, True]
    assert len({p.numerics for p in found}) == 1
    for few in (dict(thousands=99), dict(thousands=106, waves=1)):
        with pytest.raises(hxla.PlanError, match="does not fit beside the state"):
            made(**few)
    with pytest.raises(hxla.PlanError, match=r"memory\.waves needs memory\.zero of 2 or 3"):
        made(10_000, zero=1, waves=2)


def test_a_stage_needs_segments_and_copies():
    own = shared(2)
    plan = planned(own, 2)
    with pytest.raises(hxla.PlanError, match="segment by segment, set `chain`, or use 1"):
        plan.replaced(chain=None)
    with pytest.raises(hxla.PlanError, match="nobody to share with"):
        planned(own, 1)


@pytest.mark.parametrize(
    ("memory", "stage", "words"),
    [
        (400, 0, "whole state"),
        (320, 1, "one program, the optimizer's state shared"),
        (200, 2, "all residuals wait"),
        (150, 3, "all residuals wait"),
        (130, 2, "forwards run again"),
        (120, 3, "forwards run again"),
    ],
)
def test_the_cheapest_form_that_fits_is_taken(memory, stage, words):
    """8,755 parameters of 4 bytes, sums and gradients of 8 and 4, AdamW's moments of 8."""
    own = job(Layers, {}, optax.adamw(1e-2))
    plan = planned(own, 2, memory_bytes=memory * 1000)
    assert plan.placement.zero == stage
    assert (plan.chain is not None) == ("program" not in words and stage > 0)
    if plan.chain is not None:
        assert any("+" in text for text in plan.chain.sequence) == ("again" in words)
    for device in plan.prediction.devices:
        assert device.memory_bytes == device.held.total <= memory * 1000
    told = plan.explain()
    assert "held at the peak" in told
    assert told.count("instead") == len(plan.runners_up)


def test_a_stage_that_is_asked_for_stays():
    asked = job(Layers, {"memory": {"zero": 0}}, optax.adamw(1e-2))
    assert planned(asked, 2, memory_bytes=400_000).chain is None
    with pytest.raises(hxla.PlanError, match=r"whole state.* needs .*parameters 34.2 KiB"):
        planned(asked, 2, memory_bytes=130_000)
