"""The optimizer's state in host memory or on a disk: the same bits, fewer bytes on the device."""

import contextlib
import functools
import gc
import itertools
import mmap
import os
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import ConfigError
from support import families, shared_state
from support.inside.lower import DirectFile, _units
from support.launched import own_environment
from support.paths import JOBS
from support.tiers import rows
from support.zero_jobs import BY_ELEMENT, BY_PARAMETER, STEPS, close, job, planned, trained


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """So small that parameters are cut into slices."""
    monkeypatch.setattr(_units, "_LEAST_BYTES", 128)
    monkeypatch.setattr(_units, "_NUM_GROUPS", 5)


def memory(tier, **more):
    return {"offload": {"optimizer": tier}} | more


OPTIMIZERS = {name: BY_ELEMENT[name] for name in ("clipped", "narrow moments", "two sorts")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_bit_depends_on_where_the_state_is(name):
    found = {}
    for num, tier in ((1, "device"), (1, "disk"), (3, "host")):
        own = job(OPTIMIZERS[name](), memory=memory(tier))
        plan = planned(own, num)
        assert plan.placement.optimizer == tier
        found[num, tier] = trained(own, plan).sha256, plan.numerics
    assert len(set(found.values())) == 1, found


def muon(tier):
    own = job(BY_PARAMETER["muon"](), memory=memory(tier))
    return own, planned(own, 2)


def test_numerics_know_where_sums_inside_a_whole_parameter_are_made():
    assert muon("device")[1].numerics != muon("host")[1].numerics


@pytest.mark.slow
def test_sums_inside_a_whole_parameter_are_those_of_its_program():
    """Muon multiplies matrices: equal but for rounding."""
    close(*(trained(*muon(tier)) for tier in ("device", "host")))


@pytest.mark.slow
def test_a_checkpoint_of_one_tier_resumes_in_another(tmp_path):
    tiers = ("host", 3), ("disk", 2), ("device", 1), ("host", 1)
    jobs = [(job(BY_ELEMENT["adamw"](), memory=memory(tier)), num) for tier, num in tiers]
    wanted = trained(jobs[0][0], planned(*jobs[0]))
    for own, num in jobs[:STEPS]:
        with own.open(planned(own, num), steps=STEPS, checkpoint_dir=tmp_path) as session:
            session.step()
            session.save()
            found = session.result() if session.step_number == STEPS else None
    assert found.sha256 == wanted.sha256


def live_bytes():
    """Of all arrays, by kind of memory."""
    gc.collect()
    found, seen = {}, set()
    for x in jax.live_arrays():
        for shard in x.addressable_shards:
            place = shard.data.unsafe_buffer_pointer()
            if place not in seen:
                seen.add(place)
                kind = x.sharding.memory_kind
                found[kind] = found.get(kind, 0) + shard.data.nbytes
    return found


@pytest.mark.parametrize("tier", rows(["host", "disk"], "disk"))
def test_what_waits_elsewhere_is_not_on_the_device(tier):
    own = shared_state.job(shared_state.Few, {"memory": memory(tier)}, optax.adamw(1e-2))
    before = live_bytes()
    with own.open(shared_state.planned(own, 1), steps=2) as session:
        next(iter(session))
        after = live_bytes()
        num = sum(x.size for x in jax.tree.leaves(session.state.params))
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(session.state.opt_state)[1:]}
    assert kinds == {"pinned_host"}
    device, host = (after.get(k, 0) - before.get(k, 0) for k in ("device", "pinned_host"))
    assert device / num == pytest.approx(4 + 8, rel=0.06)  # parameters, and sums of two limbs
    assert host / num == pytest.approx(8 * (tier == "host"), rel=0.06)


def test_what_cannot_wait_elsewhere_is_refused(tmp_path):
    def plan(num, **options):
        own = job(options.pop("optimizer", optax.adam(1e-2)), memory=options)
        return planned(own, num)

    with pytest.raises(hxla.PlanError, match=r"memory.zero=0: memory.offload.optimizer='host'"):
        plan(2, zero=0, offload={"optimizer": "host"})
    with pytest.raises(hxla.PlanError, match=r"optimizer='disk': .*trust ratios.*'device'"):
        plan(2, optimizer=optax.lamb(1e-2), offload={"optimizer": "disk"})
    with pytest.raises(hxla.ConfigError, match=r"memory.offload.optimizer: .*'tape'"):
        plan(2, offload={"optimizer": "tape"})
    with pytest.raises(hxla.ConfigError, match=r"memory.offload.optimiser: .*'optimizer'"):
        plan(2, offload={"optimiser": "host"})
    whole = plan(2)
    with pytest.raises(hxla.PlanError, match=r"placement.optimizer: .*set placement.zero to 1"):
        whole.replaced(placement=whole.placement.model_copy(update={"optimizer": "host"}))
    own = job(optax.adam(1e-2), memory={"offload": {"optimizer": "disk", "directory": "/nowhere"}})
    with pytest.raises(ConfigError, match=r"directory /nowhere cannot be used: No such file"):
        own.open(planned(own, 1), steps=1)


def test_a_disk_that_is_too_small_is_said_with_its_room(tmp_path):
    free = os.statvfs(tmp_path)
    too_many = free.f_blocks * free.f_frsize * 2
    words = rf"{tmp_path} has too little room; .* needs {too_many:,} bytes there, [\d,]+ are free"
    with pytest.raises(ConfigError, match=words):
        DirectFile(str(tmp_path), too_many)
    ran = start("disk", tmp_path, 2, 1 << 16)
    out, _ = ran.communicate(timeout=300)
    assert ran.returncode != 0
    assert re.search(rf"ConfigError: .*{tmp_path} has too little room: File too large", out), out
    assert "did 1" not in out


def test_a_file_keeps_what_was_written(tmp_path):
    file = DirectFile(str(tmp_path), 1 << 16)
    assert not list(tmp_path.iterdir())  # it has no name
    given = memoryview(mmap.mmap(-1, 8192))
    given[:] = np.random.default_rng(0).bytes(8192)
    file.write(given, 4096)
    found = memoryview(mmap.mmap(-1, 8192))
    file.read(found, 4096)
    assert bytes(found) == bytes(given)
    file.close()


# -- real processes ------------------------------------------------------------------------------


def start(tier, folder, steps, *more, num=1):
    words = [str(JOBS / "offload_job.py"), tier, str(folder), str(steps), *map(str, more)]
    launch = ["-m", "hxla", "run", "-n", str(num)] if num > 1 else []
    return subprocess.Popen(
        [sys.executable, *launch, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=own_environment(),
    )


@functools.cache
def ended(run):
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out[-4000:]
    return re.findall(r"sha256 (\w+) (\w+)", out)[0]


@pytest.mark.slow
def test_processes_end_with_the_same_bits(tmp_path):
    places = ("device", 1), ("host", 2), ("disk", 2)
    runs = []
    for tier, num in places:
        folder = tmp_path / f"{tier}{num}"
        folder.mkdir()
        runs.append(ended(start(tier, folder, 6, num=num)))
    assert len(set(runs)) == 1, runs


@pytest.mark.slow
def test_a_kill_while_the_disk_is_written_loses_no_checkpoint(tmp_path):
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    wanted = ended(start("device", tmp_path / "whole", 24))
    job = start("disk", tmp_path / "killed", 10**6)
    for line in job.stdout:
        if line.startswith("did 14"):
            break
    job.kill()  # it is in the midst of reads and writes: hardly anything else takes time
    job.wait()
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left == ["checkpoints"]  # its working state went with it
    steps = [
        int(path.name)
        for path in (tmp_path / "killed/checkpoints").iterdir()
        if path.name.isdigit()
    ]
    assert steps
    assert max(steps) >= 8
    assert ended(start("disk", tmp_path / "killed", 24)) == wanted


# -- the planner ---------------------------------------------------------------------------------


def plan_for(num, room, host=1 << 20, optimizer=optax.adam):
    """On devices that are described, for shapes: 158 parameters."""
    rates = (hxla.Rate(dtype="float32", flops_per_second=1e12),)
    known = {"memory_bytes": room, "rates": rates}
    if host is not None:
        known |= {"host_memory_bytes": host, "host_bytes_per_second": 1e9}
    device = hxla.Device(kind="cpu", **known)
    cluster = hxla.Cluster(name="", devices=(device,) * num)
    options = {"mesh": {"data": num}, "microbatch_size": 2, "counts": "even"}
    alone = {"offload": {"stash": "device", "parameters": "device"}}
    return job(optimizer(1e-2), memory=alone).plan(cluster, auto=False, **options)


@pytest.mark.parametrize("num", [1, 2])
def test_state_goes_to_the_host_where_nothing_else_fits(num):
    plan = plan_for(num, 1 << 20)
    assert (plan.placement.zero, plan.placement.optimizer) == (0, "device")
    words = r"does not fit.*memory.offload.optimizer = 'host'"
    room, enough = 1000, int(plan.prediction.devices[0].memory_bytes)
    while enough - room > 50:  # what no plan fits that keeps the state on the device
        middle = (room + enough) // 2
        try:
            plan_for(num, middle, None)
            enough = middle
        except hxla.PlanError:
            room = middle
    with pytest.raises(hxla.PlanError, match=words):
        plan_for(num, room, 300)
    with pytest.raises(hxla.PlanError, match="does not fit"):
        plan_for(num, room, optimizer=optax.lamb)
    found = plan_for(num, room)
    assert (found.placement.zero >= 1, found.placement.optimizer) == (True, "host")
    assert found.prediction.devices[0].memory_bytes <= room
    [said] = [reason for reason in found.reasons if reason.startswith("offload")]
    moved = 2 * 1268 / num  # 8 bytes of 158 parameters, and a count
    assert f"{moved / 1e9:.3g} s" in said
    assert "ZeRO-Infinity" in said


def test_what_the_host_lacks_is_said():
    own = job(optax.adam(1e-2), memory=memory("host"))
    device = hxla.Device(kind="cpu", host_memory_bytes=1000)
    options = {"mesh": {"data": 1}, "microbatch_size": 2}
    with pytest.raises(hxla.PlanError, match=r"would keep 1,268 bytes .* in the 1,000 of its host"):
        own.plan(hxla.Cluster(name="", devices=(device,)), **options)


@pytest.mark.slow
def test_what_else_may_wait_is_tried_where_nothing_fits():
    """The choice is among what fits by the user's word, and nothing is moved needlessly."""
    gpt = families.example("gpt")
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), width=64, length=32, layers=6))
    data = {"text": jax.ShapeDtypeStruct((64, 33), np.uint8)}
    rates = (hxla.Rate(dtype="float32", flops_per_second=1e12),)

    def plan(room, **offload):
        own = hxla.Job(
            model,
            data,
            gpt.loss,
            optax.adam(1e-3),
            batch_size=64,
            config={"memory": {"offload": offload}},
        )
        device = hxla.Device(
            kind="a card",
            memory_bytes=room,
            rates=rates,
            host_memory_bytes=1 << 30,
            host_bytes_per_second=1e9,
        )
        cluster = hxla.Cluster(name="", devices=(device,) * 2)
        options = {"mesh": {"data": 2}, "microbatch_size": 4, "counts": "even"}
        return own.plan(cluster, auto=False, **options)

    def places(plan):
        return plan.placement.optimizer, plan.placement.stash, plan.placement.parameters

    tiers = [*itertools.product(("device", "host"), repeat=3)]
    found = set()
    for room in (5_000_000, 4_000_000, 3_300_000, 3_000_000, 2_000_000):
        fit = []
        for optimizer, stash, parameters in tiers:
            with contextlib.suppress(hxla.PlanError):
                own = plan(room, optimizer=optimizer, stash=stash, parameters=parameters)
                fit.append(places(own))
        if not fit:
            with pytest.raises(hxla.PlanError, match="does not fit"):
                plan(room)
            continue
        own = plan(room)
        assert places(own) in fit
        assert own.prediction.devices[0].memory_bytes <= room
        if ("device",) * 3 in fit:
            assert places(own) == ("device",) * 3
        found.add(places(own))
    assert len(found) == 4
