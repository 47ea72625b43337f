"""Gradients and parameters shared out, segment by segment: ZeRO's stages 2 and 3."""

import collections
import dataclasses
import functools
import re
import tempfile
import threading

import jax
import numpy as np
import optax
import pytest

import hxla
from support.blocks import Layers, Scanned, job, trained
from support.inside.lower import _units
from support.inside.session import _step
from support.relays import bytes_of_devices, relayed, straight
from support.shared_state import WIDTH, Few, planned, shared
from support.tiers import rows

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("every_program_is_cached")]

HELD_OUT = {"tokens": np.random.default_rng(1).integers(0, 11, (8, 7)).astype(np.int32)}


def on_host(optimizer="device", parameters=False, stash=False):
    """What waits elsewhere: the optimizer's state where it is said, the others in host memory."""
    offload = {"optimizer": optimizer}
    offload |= {"parameters": "host"} if parameters else {}
    return {"offload": offload | ({"stash": "host"} if stash else {})}


def form(stage, counts, word=None, **memory):
    """A form of the job: a stage of ZeRO, the microbatches of each copy, and where state waits."""
    own = shared(stage, Few, clip=0.3, **memory)
    own = dataclasses.replace(own, precision=word or "model")
    return own, planned(own, len(counts), counts)


#: Jobs that go on from form to form. Each form: its stage, its counts, and what of its memory.
RELAYS = {
    "bf16": [
        (3, (2, 6), {**on_host("disk", parameters=True), "shares": [2, 1], "waves": 2}),
        (3, (3, 0, 4, 1), {**on_host(stash=True), "shard_groups": 2, "recompute": "none"}),
    ],
    "stages": [
        (2, (4, 4), {}),
        (2, (0, 5, 3), {"shares": [1, 2, 3], "recompute": "none", "waves": 2}),
        (3, (7, 1), {"recompute": "none"}),
        (3, (2, 0, 6), {"shares": [4, 2, 1]}),
        (3, (1, 7), {"waves": 3}),
        (1, (3, 5), {}),
    ],
    "optimizers elsewhere": [
        (2, (3, 5), on_host("host")),
        (3, (5, 3), on_host("disk")),
        (1, (3, 0, 4, 1), {**on_host("host"), "shard_groups": 2, "shares": [1, 3]}),
    ],
    "parameters elsewhere": [
        (3, (4, 4), on_host(parameters=True)),
        (3, (7, 1), {**on_host("host", parameters=True), "recompute": "none"}),
        (1, (4, 4), {}),
        (3, (1, 7), on_host("host", parameters=True, stash=True)),
    ],
    "a stash elsewhere": [
        (1, (5, 3), {**on_host(stash=True), "recompute": "none"}),
        (1, (0, 8), on_host(stash=True)),
        (2, (3, 5), {**on_host(stash=True), "shares": [1, 3]}),
        (3, (7, 1), {**on_host(stash=True), "recompute": "none"}),
        (3, (2, 0, 6), {**on_host("disk", True, True), "shares": [4, 2, 1], "waves": 3}),
    ],
    "groups": [
        (2, (3, 0, 4, 1), {"shard_groups": 2, "waves": 2}),
        (3, (3, 0, 4, 1), {"shard_groups": 2, "shares": [3, 2]}),
        (2, (2, 2, 2, 2), {}),
        (3, (1, 1, 4, 2), {"shard_groups": 2, "waves": 2, "recompute": "none"}),
        (1, (3, 0, 4, 1), {"shard_groups": 2}),
    ],
    "over the host": [
        (3, (2, 6), {"over": "host"}),
        (3, (5, 0, 3), {**on_host(parameters=True), "over": "host", "shares": [1, 3, 2]}),
        (2, (4, 4), {"over": "host"}),
    ],
    "fp16": [(3, (3, 5), {"shares": [1, 3]}), (1, (4, 4), {})],
}
WORDS = ("bf16", "fp16")


def look(session, before):
    """What a session has on each device after a step, and what its gathers bring."""
    after, sharded = bytes_of_devices(), session._programs.sharded_params
    gathers = []
    if sharded is not None:  # besides, there may be those of an evaluation
        units = {sharded._same[u] for units, _ in sharded._of_group for u in units}
        gathers = [sharded._gathers[u].as_text() for u in sorted(units)]
    params = jax.tree.leaves(session.state.params)
    return {
        "bytes": {place: size - before.get(place, 0) for place, size in after.items()},
        "of params": {x.sharding.memory_kind for x in params if x.size > 16},
        "gathers": gathers,
    }


@functools.cache
def told(name):
    """Of a relay, and of the same job in one form from the first step to the last."""
    word = name if name in WORDS else None
    forms = [form(stage, counts, word, **memory) for stage, counts, memory in RELAYS[name]]
    one = form(1, (4, 4), word)
    for (stage, _, memory), (_, plan) in zip(RELAYS[name], forms, strict=True):
        offload, placed = memory.get("offload", {}), plan.placement
        assert placed.zero == stage
        assert placed.shard_groups == memory.get("shard_groups", 1)
        for what in ("optimizer", "parameters", "stash"):
            assert getattr(placed, what) == offload.get(what, "device")
        assert plan.numerics == one[1].numerics
    wanted = straight(*one, len(forms), HELD_OUT)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        # So small that parameters are cut into slices.
        patch.setattr(_units, "_LEAST_BYTES", 512)
        patch.setattr(_units, "_NUM_GROUPS", 2)
        return wanted, relayed(forms, folder, HELD_OUT, look)


def test_a_wave_waits_for_those_that_measure_the_wave_before(monkeypatch):
    """A wave donates the arrays that show when the wave before it is done."""
    watched = _step.watched

    def late(*args):
        threading.Event().wait(0.5)
        return watched(*args)

    monkeypatch.setattr(_step, "watched", late)
    own, plan = form(2, (4, 4), waves=2)
    with own.open(plan, steps=2) as session:
        records = [session.step() for _ in range(2)]
    assert all(min(record.busy_seconds) > 0 for record in records)


@pytest.mark.parametrize("name", rows(RELAYS, "bf16"))
def test_no_bit_depends_on_the_stage_or_on_where_state_waits(name):
    """A global norm, too, counts each element of the state once."""
    wanted, found = told(name)
    assert found.losses == wanted.losses
    assert found.sha256 == wanted.sha256
    # An evaluation reads what is trained, and the next form finds what the last one left.
    assert found.evaluations[1:-1:2] == found.evaluations[2::2]
    assert found.evaluations[-1] == wanted.evaluations[-1]
    assert found.evaluations[0] == wanted.evaluations[0]
    # What a user gets is where programs read it.
    assert {x.sharding.memory_kind for x in jax.tree.leaves(found.state)} == {"device"}


@pytest.mark.parametrize("form", rows([(s, n) for s in range(4) for n in (2, 4)], (2, 2)))
def test_each_device_has_its_share_and_no_more(form):
    """AdamW: 4 bytes a parameter, 8 of moments; int32 sums of two limbs while they are kept."""
    stage, num = form
    own = shared(stage, Few) if stage else job(Few, {}, optax.adamw(1e-2))
    before = bytes_of_devices()
    with own.open(planned(own, num), steps=2) as session:
        session.step()
        after = bytes_of_devices()
        leaves = jax.tree.leaves(session.state.params)
        share = 1 / num
        bytes_each = {
            0: 4 + 8 + 8,
            1: 4 + 8 * share + 8,
            2: 4 + 8 * share,
            3: (4 + 8) * share,
        }[stage]
        wanted = bytes_each * sum(x.size for x in leaves)
        # Granules have at least eight elements, so vectors of four devices are padded.
        small = 12 * 8 * 2 * len(leaves)
        for device in range(num):
            held = after[device, "device"] - before.get((device, "device"), 0)
            assert abs(held - wanted) <= 0.03 * wanted + small


#: Of the embedding, two matrices and what no segment reads.
SIZES = (11 * WIDTH, WIDTH**2, WIDTH**2, 3)


def test_each_device_has_what_its_form_says_and_no_more():
    """AdamW: 4 bytes a parameter, 8 of moments; sums of two limbs are let go of after a step."""
    spare = 1280  # a share has at least eight elements, and there are counts and decisions
    (away, grouped), total = told("bf16")[1].seen, sum(SIZES)
    for form, of_device, of_host in (
        (away, (0, 0), (4 * 2 / 3, 4 * 1 / 3)),
        (grouped, ((4 + 8) / 2,) * 4, (0,) * 4),
    ):
        for kind, each in (("device", of_device), ("pinned_host", of_host)):
            sizes = [form["bytes"].get((device, kind), 0) for device in range(len(each))]
            wanted = [size * total for size in each]
            assert sizes == pytest.approx(wanted, rel=0.03, abs=spare), kind
    assert (away["of params"], grouped["of params"]) == ({"pinned_host"}, {"device"})


def sent(gathers):
    """Elements that all-gathers of compiled programs bring, by dtype; and whose they are."""
    found, groups = collections.Counter(), set()
    for text in gathers:
        for dtype, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", text):
            found[dtype] += int(np.prod([int(n) for n in shape.split(",") if n]))
        groups |= set(re.findall(r"all-gather\(.*?replica_groups=(\S+?), dimensions", text))
    return found, groups


def test_parameters_travel_in_16_bits_where_only_low_products_read_them():
    """Rows of the embedding are looked up in 32 bits, too, and the blocks are alike."""
    found, _ = sent(told("bf16")[1].seen[1]["gathers"])
    low, rest = WIDTH**2 + 11 * WIDTH, 11 * WIDTH + 3
    assert set(found) == {"u16", "f32"}
    assert low <= found["u16"] <= low + 16 * 4
    assert rest - 3 <= found["f32"] <= rest + 16 * 4


def test_parameters_are_gathered_inside_a_group():
    """Of the compiled programs those that gather have the devices of one group in each."""
    _, groups = sent(told("bf16")[1].seen[1]["gathers"])
    assert groups
    assert groups <= {"{{0,1},{2,3}}", "[2,2]<=[4]"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "lookahead"])
def test_no_bit_of_other_optimizers_depends_on_the_stage(name):
    make = {
        "muon": lambda: optax.contrib.muon(1e-2),  # owns whole matrices
        # Its state begins as the parameters are.
        "lookahead": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9, debias=False)),
    }[name]
    one = shared(1, Few, optimizer=make())
    wanted = trained(one, planned(one, 2))
    own = shared(3, Few, optimizer=make(), recompute="none")
    plan = planned(own, 2, (7, 1))
    if name != "muon":  # there it counts who owns a matrix
        assert plan.numerics == planned(one, 2).numerics
    losses, _, sha256 = trained(own, plan)
    assert (losses, sha256) == (wanted[0], wanted[2])


@pytest.mark.slow
def test_a_scan_over_layers_can_be_shared_out():
    wanted = trained(one := shared(1, Scanned), planned(one, 2))
    own = shared(3, Scanned)
    assert trained(own, planned(own, 2, (3, 5)))[2] == wanted[2]


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


def test_a_stage_needs_copies():
    with pytest.raises(hxla.PlanError, match="nobody to share with"):
        planned(shared(2), 1)


@pytest.mark.parametrize(
    ("memory", "stage", "words"),
    [
        (400, 0, "state not sharded"),
        (320, 1, "one program, the optimizer's state shared"),
        (200, 2, "all residuals wait"),
        (150, 3, "all residuals wait"),
        (130, 2, "forwards are recomputed"),
        (120, 3, "forwards are recomputed"),
    ],
)
def test_the_cheapest_form_that_fits_is_taken(memory, stage, words):
    """8,755 parameters of 4 bytes, sums and gradients of 8 and 4, AdamW's moments of 8."""
    own = job(Layers, {}, optax.adamw(1e-2))
    plan = planned(own, 2, memory_bytes=memory * 1000)
    assert plan.placement.zero == stage
    assert (plan.chain is not None) == ("program" not in words and stage > 0)
    if plan.chain is not None:
        assert any("+" in text for text in plan.chain.sequence) == ("recomputed" in words)
    for device in plan.prediction.devices:
        assert device.memory_bytes == device.held.total <= memory * 1000
    told = plan.explain()
    assert "memory at the peak" in told
    assert told.count("instead") == len(plan.runners_up)


def test_a_stage_that_is_asked_for_stays():
    asked = job(Layers, {"memory": {"zero": 0}}, optax.adamw(1e-2))
    assert planned(asked, 2, memory_bytes=400_000).chain is None
    with pytest.raises(hxla.PlanError, match=r"state not sharded.* needs .*parameters 34.2 KiB"):
        planned(asked, 2, memory_bytes=130_000)
