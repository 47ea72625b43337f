"""What a device holds at most in a step, beside what the plan says of it."""

import collections
import gc
import math

import jax
import optax
import pytest
from flax import nnx

import hxla
from support import families
from support.inside.lower import extra_bytes


def live_bytes(device=0):
    """Of the arrays on a device, not its host; several may share a buffer."""
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "device"]
    shards = [s for x in arrays for s in x.addressable_shards if s.device.id == device]
    return sum({s.data.unsafe_buffer_pointer(): s.data.nbytes for s in shards}.values())


SIZES = {"width": 64, "length": 32, "layers": 2}
ALL_ON_HOST = {"stash": "host", "parameters": "host", "optimizer": "host"}


@pytest.fixture
def peak(monkeypatch):
    """By device, bytes of live arrays and of what a program needs beside them, the most of any."""
    found = collections.Counter()
    run = jax.stages.Compiled.__call__

    def watched(self, *arguments, **named):
        jax.block_until_ready(jax.live_arrays())
        for device in {d.id for s in jax.tree.leaves(self.output_shardings) for d in s.device_set}:
            found[device] = max(found[device], live_bytes(device) + extra_bytes(self))
        return run(self, *arguments, **named)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", watched)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "limbs", "memory"),
    [
        (2, 2, {"zero": 0}),
        (2, 2, {"zero": 1, "recompute": "none"}),
        (2, 2, {"zero": 2, "recompute": "none"}),
        (2, 1, {"zero": 3, "recompute": "boundaries"}),
        (4, 1, {"zero": 3, "recompute": "boundaries", "waves": 2, "shares": [3, 1, 1, 1]}),
        (4, 2, {"zero": 1, "shard_groups": 2}),
        (4, 2, {"zero": 3, "recompute": "boundaries", "shard_groups": 2, "waves": 2}),
        (2, 2, {"zero": 1, "recompute": "boundaries", "offload": {"stash": "host"}}),
        (2, 2, {"zero": 3, "recompute": "none", "offload": ALL_ON_HOST}),
    ],
    ids=str,
)
def test_a_step_needs_what_the_plan_says(num, limbs, memory, peak):
    own = families.gpt_job(
        8 * num,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        {"memory": memory, "communication": {"limbs": limbs}},
        **SIZES,
    )
    assert bytes_of_a_step(own, copies(own, num), peak) == pytest.approx(1, rel=0.03)


def copies(own, num):
    """A plan of so many, each on a device."""
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * num)
    return own.plan(cluster, microbatch_size=2, mesh={"data": num}, counts="even")


def bytes_of_a_step(own, plan, peak, num_steps=2):
    """What the second step of a plan takes at most, in that which its session says."""
    gc.collect()
    # The user's arrays leave the device while a session is open.
    before = live_bytes() - sum(x.nbytes for x in jax.tree.leaves(nnx.state(own.model)))
    with own.open(plan, steps=num_steps) as session:
        steps = iter(session)
        next(steps)
        gc.collect()
        peak[0] = 0
        next(steps)
        return (peak[0] - before) / session.running_plan.memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_of_islands_does_too(momentum, peak):
    """Of a step without a meeting."""
    config = {"memory": {"zero": 0}, "islands": {"every": 3, "momentum": momentum}}
    own = families.gpt_job(16, optax.adamw(1e-3), config, **SIZES)
    assert bytes_of_a_step(own, copies(own, 2), peak, 3) == pytest.approx(1, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [(1, 0), (2, 1)])
def test_sums_to_which_segments_add_are_there_once(spread, peak):
    """Of a large table, which the first segment reads and the last; copies, and ZeRO's stage."""
    num, zero = spread
    config = {"memory": {"recompute": "boundaries", "zero": zero}}
    sizes = {**SIZES, "layers": 1, "vocabulary": 4096}
    own = families.gpt_job(4 * num, optax.adamw(1e-3), config, **sizes)
    assert bytes_of_a_step(own, copies(own, num), peak) == pytest.approx(1, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "memory"),
    [
        (optax.adamw, {"zero": 0, "recompute": "none"}),
        (optax.adamw, {"zero": 1, "recompute": "boundaries"}),
        (optax.adamw, {"zero": 2, "recompute": "none"}),
        (optax.adamw, {"zero": 3, "recompute": "boundaries", "waves": 2}),
        (optax.adamw, {"zero": 1, "offload": {"optimizer": "host"}}),
        (optax.adamw, {"zero": 3, "recompute": "none", "offload": ALL_ON_HOST}),
        (optax.contrib.muon, {"zero": 3, "recompute": "boundaries", "shares": [3, 1]}),
        (optax.contrib.muon, {"zero": 1, "offload": {"optimizer": "host"}}),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else x.__name__,
)
def test_a_step_of_copies_that_are_cut_does_too(optimizer, memory, peak):
    own = families.gpt_job(16, optimizer(1e-3), {"memory": memory}, **SIZES)
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 4)
    plan = own.plan(
        cluster,
        microbatch_size=2,
        mesh={"data": 2, "tensor": 2},
        rules="decoder",
        counts="even",
    )
    # The plan allows for two messages of whole matrices beside a group that comes from the host.
    whole = optimizer is optax.contrib.muon and "offload" in memory
    least = 0.93 if whole else 0.97
    assert least < bytes_of_a_step(own, plan, peak) < 1.03


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "memory"),
    [
        ({"stage": 2}, {"zero": 1}),
        ({"stage": 2}, {"zero": 3}),
        ({"stage": 2, "tensor": 2}, {"zero": 2}),
        ({"stage": 2, "tensor": 2}, {"zero": 3, "offload": {"optimizer": "host"}}),
    ],
    ids=str,
)
def test_a_step_of_pipelines_does_too(axes, memory, peak):
    own = families.gpt_job(16, optax.adamw(1e-3), {"memory": memory}, **SIZES)
    mesh = {"data": 2, **axes}
    cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * math.prod(mesh.values()))
    rules = "decoder" if "tensor" in axes else None
    plan = own.plan(cluster, microbatch_size=2, mesh=mesh, rules=rules, counts="even")
    assert bytes_of_a_step(own, plan, peak) == pytest.approx(1, rel=0.03)


ALONE, TENSOR = {"devices": 1}, {"tensor": 2}
UNLIKE = {
    "alone": ([ALONE, ALONE, ALONE], None),
    "tensor": ([ALONE, TENSOR, {"data": 2}], "decoder"),
    "uneven": ([TENSOR, {"tensor": (2, 1)}], "decoder"),
    "replicas": ([[ALONE], [ALONE, {"data": 2}]], None),
}


@pytest.mark.parametrize("recompute", ["none", "boundaries"])
@pytest.mark.parametrize(
    "stages", [x if x == "tensor" else pytest.param(x, marks=pytest.mark.slow) for x in UNLIKE]
)
def test_each_device_of_unlike_stages_needs_what_its_session_says(stages, recompute, peak):
    forms, rules = UNLIKE[stages]
    config = {"memory": {"recompute": recompute}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    own = families.gpt_job(16, optimizer, config, **{**SIZES, "length": 128})
    device = hxla.Device(kind="cpu", memory_bytes=1 << 30)
    every = [s for x in forms for s in (x if isinstance(x, list) else [x])]
    num = sum(2 if s != ALONE else 1 for s in every)
    cluster = hxla.Cluster(name="", devices=(device,) * num)
    plan = own.plan(cluster, microbatch_size=2, stages=forms, rules=rules, counts="even")
    gc.collect()
    before = [live_bytes(device) for device in range(num)]
    before[0] -= sum(x.nbytes for x in jax.tree.leaves(nnx.state(own.model)))
    with own.open(plan, steps=2) as session:
        steps = iter(session)
        next(steps)
        gc.collect()
        peak.clear()
        next(steps)
        told = [x.memory_bytes for x in session.plan.prediction.devices]
    measured = [peak[device] - before[device] for device in range(num)]
    assert told == pytest.approx(measured, rel=0.03)
    estimated = [x.memory_bytes for x in plan.prediction.devices]
    assert estimated == pytest.approx(measured, rel=0.25)


@pytest.mark.slow
def test_little_is_whole_at_a_time():
    """Where the optimizer treats parameters as a whole, ZeRO 1 takes less than whole state."""
    found = []
    for zero in (0, 1):
        config = {"memory": {"zero": zero}}
        own = families.gpt_job(16, optax.contrib.muon(1e-3), config, **SIZES)
        cluster = hxla.Cluster(name="", devices=(hxla.Device(kind="cpu"),) * 4)
        mesh = {"data": 2, "tensor": 2}
        plan = own.plan(cluster, microbatch_size=2, mesh=mesh, rules="decoder", counts="even")
        with own.open(plan, steps=1) as session:
            found.append(session.running_plan.memory_bytes)
            largest = max(p.num_bytes for p in plan.parameters)
            update = session._programs._updates.each[0].extra_bytes()
    assert found[1] < 0.75 * found[0]
    assert update < 16 * largest  # of one matrix: itself, its gradient, products, and parts of all
