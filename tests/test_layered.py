"""Gradients and parameters shared out, segment by segment: ZeRO's stages 2 and 3."""

import collections
import functools
import gc

import jax
import numpy as np
import optax
import pytest
from test_chain import Layers, Scanned, job, trained

import hxla


def cluster(num, **known):
    return hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", **known),) * num)


def planned(own, num, counts=None, **known):
    plan = own.plan(
        cluster(num, **known),
        auto=False,
        microbatch_size=1,
        mesh={"data": num},
        counts="even",
    )
    return plan if counts is None else plan.with_counts(counts)


def shared(stage, model=Layers, optimizer=None, clip=None, **memory):
    memory = {"zero": stage, "recompute": "boundaries"} | memory
    config = {"memory": memory, "communication": {"clip_norm": clip}}
    return job(model, config, optimizer or optax.adamw(1e-2))


#: Counts, shares and what is recomputed.
SPREADS = [
    (2, dict(num=2), {}),
    (2, dict(num=3, counts=(0, 5, 3)), {"shares": [1, 2, 3], "recompute": "none"}),
    (3, dict(num=2, counts=(7, 1)), {"recompute": "none"}),
    (3, dict(num=3, counts=(2, 0, 6)), {"shares": [4, 2, 1]}),
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


def test_what_travels_does_not_grow_with_the_microbatches(monkeypatch):
    """Two gathers of the parameters and one reduce-scatter of the sums, for any counts."""
    from hxla._lower._sharded_params import ShardedParams
    from hxla._lower._sum import Reducer

    calls = collections.Counter()

    def counted(cls, name):
        run = getattr(cls, name)

        @functools.wraps(run)
        def wrapped(self, k, *arguments):
            calls[name, k] += 1
            return run(self, k, *arguments)

        monkeypatch.setattr(cls, name, wrapped)

    counted(ShardedParams, "gather")
    counted(Reducer, "sum_group")
    own = shared(3)
    found = {}
    for counts in ((4, 4), (1, 7)):
        with own.open(planned(own, 2, counts), steps=2) as session:
            steps = iter(session)
            next(steps)
            calls.clear()
            next(steps)
            found[counts] = dict(calls)
    assert found[4, 4] == found[1, 7]
    gathers = {k: n for (name, k), n in found[4, 4].items() if name == "gather"}
    last = max(gathers)
    assert gathers == {k: 1 if k == last else 2 for k in range(last + 1)}
    assert all(n == 1 for (name, _), n in found[4, 4].items() if name == "sum_group")


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
    own = job(Layers, {"memory": {"zero": 3, "recompute": "auto"}}, optax.adamw(1e-2))
    much = planned(own, 2, memory_bytes=10_000_000)
    assert not any("+" in text for text in much.chain.sequence)
    with pytest.raises(hxla.PlanError, match="boundaries of 4 microbatches"):
        planned(own, 2, memory_bytes=95_000)


def test_a_stage_needs_segments_and_copies():
    own = shared(2)
    plan = planned(own, 2)
    with pytest.raises(hxla.PlanError, match="segment by segment, set `chain`, or use 1"):
        plan.replaced(chain=None)
    with pytest.raises(hxla.PlanError, match="nobody to share with"):
        planned(own, 1)
