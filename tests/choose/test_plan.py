"""`hxla plan` on real scripts and mesh files, and what its search proposes."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from hxla import LayerSize, LayerTime, Profile, Setting, load_cluster, load_profile
from support import models, profiles
from support.inside.choose import Alternative, ChainWork, propose, with_measured
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import gpt


def plan_command(tmp_path, *options):
    script = tmp_path / "script.py"
    script.write_text(profiles.SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "hxla", "plan", *options, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=profiles.ALONE,
    )


@pytest.mark.slow
def test_a_cluster_that_is_not_here_is_planned_for_and_compared(tmp_path):
    out = tmp_path / "out"
    ran = plan_command(
        tmp_path,
        *("--mesh", "whale-8v100-8p100", "--compare", "whale-4v100-4p100"),
        *("--write", str(tmp_path / "plan.json"), "--draw", str(out)),
    )
    assert ran.returncode == 0, ran.stderr
    assert "trained" not in ran.stdout
    assert "estimated from FLOPs at the data-sheet rate" in ran.stdout
    assert "x as fast" in ran.stdout
    found = hxla.Plan.read(tmp_path / "plan.json")
    assert sum(found.counts) == found.batch_size // found.microbatch_size
    assert found.prediction.step_seconds >= found.prediction.bound_seconds * (1 - 1e-9)
    for d in found.prediction.devices:
        parts = (d.compute_seconds, d.wait_seconds, d.reduction_seconds, d.update_seconds)
        assert sum(parts) == pytest.approx(found.prediction.step_seconds)
    traces = list(out.glob("whale-8v100-8p100-replica*.perfetto.json"))
    assert traces
    for path in traces:
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert events
    assert list(out.glob("whale-8v100-8p100-replica*.svg"))


@pytest.mark.slow
def test_a_measured_profile_is_planned_with(tmp_path):
    measured = profiles.profile_command(
        tmp_path, "--segments", "3", "--microbatch-sizes", "1,2", "--mesh", "cpu-1.0-0.5"
    )
    assert measured.returncode == 0, measured.stderr
    ran = plan_command(tmp_path, "--mesh", "cpu-1.0-0.5", "--profile", str(tmp_path / "p.json"))
    assert ran.returncode == 0, ran.stderr
    assert "cpu@0.5: measured" in ran.stdout
    file = tmp_path / "plan.json"
    alone = plan_command(
        tmp_path,
        *("--mesh", "cpu-1.0-0.5", "--profile", str(tmp_path / "p.json"), "--stages", "1"),
        *("--write", str(file)),
    )
    assert "memory from the compiled programs" in alone.stdout
    found = hxla.Plan.read(file)
    assert found.num_stages == 1
    whole = load_profile(tmp_path / "p.json")
    kinds = {d.rank: d.kind for d in found.devices}
    counts = {rank: r.num_microbatches for r in found.replicas for rank in r.devices}
    for d in found.prediction.devices:
        inputs = counts[d.rank] * found.microbatch_size * 2 * 64 * 4
        setting = Setting(kinds[d.rank], found.microbatch_size)
        assert d.memory_bytes == whole.peaks[setting] + inputs
        busy = counts[d.rank] * sum(t.forward + t.backward for t in whole.times[setting])
        assert d.compute_seconds == pytest.approx(busy)
    other = plan_command(tmp_path, "--mesh", "cpu-1.0-0.33", "--profile", str(tmp_path / "p.json"))
    assert other.returncode != 0
    assert "device kind 'cpu@0.33': the profile has no times" in other.stderr
    assert "hxla profile" in other.stderr


NODE = """
[[node]]
name = "a"
[node.link]
gigabytes_per_second = 300
latency_microseconds = 5
"""


def cluster(tmp_path, *gibibytes, kinds="01", node=""):
    text = f'name = "two"\n{node}\n'
    header = "[[node.device]]" if node else "[[device]]"
    for i, memory in zip(kinds, gibibytes, strict=True):
        text += f'{header}\nkind = "gpu{i}"\nmemory_gib = {memory}\n'
    (tmp_path / "two.toml").write_text(text)
    return load_cluster(str(tmp_path / "two.toml"))


def work(num_layers=4, parameter_bytes=2.0**20):
    size = LayerSize(parameter_bytes=parameter_bytes, output_bytes=8.0, stash_bytes=2.0**10)
    names = tuple(f"layer{i}" for i in range(num_layers))
    return ChainWork(
        layers=names,
        sizes={(1, 1): (size,) * num_layers},
        sent_bytes={},
        input_bytes={1: 0},
        batch_size=12,
        state_factor=4.0,
    )


def profile(*seconds, num_layers=4):
    """A layer's forward on each device; the backward takes as long."""
    names = tuple(f"layer{i}" for i in range(num_layers))
    times = {
        Setting(f"gpu{i}", 1): (LayerTime(forward=s, backward=s),) * num_layers
        for i, s in enumerate(seconds)
    }
    return Profile(model="net", layers=names, sizes={}, times=times)


def test_a_model_that_fits_everywhere_is_copied_and_its_microbatches_follow_the_speeds(tmp_path):
    """Two copies of 9 and 3 microbatches; the closed formula of data parallelism."""
    linked = cluster(tmp_path, 1, 1, node=NODE)
    found, timelines = propose(work(), linked, profile(1.0, 3.0))
    assert (found.replicas, found.cuts) == (((0,), (1,)), (0,))
    assert found.counts == (9, 3)
    known = found.prediction
    assert known.step_seconds == pytest.approx(9 * 4 * 2 * 1.0, rel=1e-5)
    assert known.gap == pytest.approx(0, abs=0.02)
    assert len(timelines) == 2


def test_no_stages_are_proposed_over_links_that_nobody_knows(tmp_path):
    """Free transfers and an expensive sum would make a pipeline of two stages look fastest."""
    names = ("gpu0", "gpu1")
    slow_sum = dataclasses.replace(profile(1.0, 1.0), reductions={" + ".join(names): 50.0})
    unlinked, linked = cluster(tmp_path, 1, 1), cluster(tmp_path, 1, 1, node=NODE)
    found, _ = propose(work(), unlinked, slow_sum)
    assert len(found.cuts) == 1
    assert any(line.startswith("no pipeline is proposed: some links") for line in found.reasons)
    known, _ = propose(work(), linked, slow_sum)
    assert known.prediction.gap >= 0
    assert not any(line.startswith("no pipeline is proposed") for line in known.reasons)


def test_devices_that_would_slow_a_job_down_are_left_out_unless_they_must_take_part(tmp_path):
    """With a sum of 200 s one device alone is faster, and a replica on each is next."""
    slow_sum = dataclasses.replace(profile(1.0, 3.0), reductions={"gpu0 + gpu1": 200.0})
    linked, _ = with_measured(cluster(tmp_path, 1, 1), [measured(1.0)])
    found, _ = propose(work(), linked, slow_sum)
    assert found.replicas == ((0,),)
    assert any("#1 has no part: with it the step would not be shorter" in r for r in found.reasons)
    found, _ = propose(work(), linked, slow_sum, all_devices=True)
    assert (found.replicas, found.counts) == (((0,), (1,)), (9, 3))
    assert found.prediction.step_seconds == pytest.approx(9 * 4 * 2 + 200.0)
    [line] = [line for line in found.reasons if "leaves devices out" in line]
    assert line.startswith("microbatches of 1, 1 stage, 1 x 12 microbatches would take 96 s")


def measured(seconds, *, mesh="two", kinds=("gpu0", "gpu1")):
    link = hxla.Link(bytes_per_second=1e15, latency_seconds=seconds, source="measured")
    return hxla.MeasuredLink(kinds=kinds, in_node=True, mesh=mesh, link=link)


def test_a_measured_link_decides_whether_stages_pay(tmp_path):
    """Each microbatch crosses the boundary twice; replicas pay for a sum once."""
    names = ("gpu0", "gpu1")
    sums = dataclasses.replace(profile(1.0, 1.0), reductions={" + ".join(names): 10.0}, form="")
    plain = cluster(tmp_path, 1, 1)
    fast, lines = with_measured(plain, [measured(1e-6)])
    assert fast.link(0, 1).latency_seconds == 1e-6
    assert lines == ("link in a node: 1e+06 GB/s, 1 us measured",)
    # Filling and emptying stages costs what a sum costs, so replicas win by the pipeline's fill.
    assert len(propose(work(), fast, sums)[0].cuts) == 1
    small = cluster(tmp_path, 12.1 / 1024, 12.1 / 1024)
    quick = propose(work(), with_measured(small, [measured(1e-6)])[0], sums)[0]
    slow = propose(work(), with_measured(small, [measured(2.0)])[0], sums)[0]
    assert (len(quick.cuts), len(slow.cuts)) == (2, 2)
    steps = [x.prediction.step_seconds for x in (quick, slow)]
    assert steps[0] == pytest.approx((12 + 1) * 2 * 2 * 1.0 + 10.0, rel=1e-4)
    assert steps[1] == pytest.approx(steps[0] + 12 * 2 * 2.0, rel=1e-4)


def test_a_described_link_is_corrected_only_by_its_own_mesh(tmp_path):
    described = cluster(tmp_path, 1, 1, node=NODE)
    same, lines = with_measured(described, [measured(3e-4)])
    assert same.link(0, 1).source == "measured"
    assert lines == (
        "link in a node: 1e+06 GB/s, 300 us measured, 300 GB/s, 5 us described: "
        "the measured one counts",
    )
    other, lines = with_measured(described, [measured(3e-4, mesh="elsewhere")])
    assert other.link(0, 1) == described.link(0, 1)
    assert lines == ()
    kinds, lines = with_measured(cluster(tmp_path, 1, 1), [measured(1e-4, kinds=("cpu", "cpu"))])
    assert kinds.link(0, 1) is None
    assert lines == ()


def test_a_model_that_fits_no_device_becomes_stages(tmp_path):
    """16 MiB of state in two devices of 12 MiB and a bit for what is in flight."""
    found, _ = propose(work(), cluster(tmp_path, 12.1 / 1024, 12.1 / 1024), profile(1.0, 1.0))
    assert (found.replicas, found.cuts) == (((0, 1),), (0, 2))
    # 1F1B: (microbatches + stages - 1) times what a stage takes.
    assert found.prediction.step_seconds == pytest.approx((12 + 1) * 2 * 2 * 1.0)
    assert all(0 < d.memory_bytes <= d.capacity_bytes for d in found.prediction.devices)


def large_job(num):
    """A job of `num` equal layers, whose products fill all cards. Nothing is allocated."""
    model = nnx.eval_shape(
        lambda: nnx.Sequential(*(nnx.Linear(4096, 4096, rngs=nnx.Rngs(0)) for _ in range(num)))
    )
    rows = jax.ShapeDtypeStruct((65536, 4096), np.float32)
    return hxla.Job(
        model, {"x": rows, "y": rows}, models.squared_error, optax.sgd(1e-2), batch_size=65536
    )


def described_speeds(mesh):
    """In any unit."""
    devices = load_cluster(mesh).devices
    if devices[0].kind == "cpu":
        return [device.core_share for device in devices]
    return [device.product_rate("model").flops_per_second for device in devices]


@pytest.mark.parametrize("mesh", ["workstation-3090-4090", "cpu-1.0-0.33", "cpu-1.0-1.0"])
def test_stages_for_devices_that_are_not_here_follow_their_described_speeds(mesh):
    """Eight equal layers: the best of all cuts, by trying each."""
    plan = large_job(8).plan(mesh, stages=2, microbatch_size=8192)
    speeds = described_speeds(mesh)
    first, second = (speeds[rank] for rank in plan.replicas[0].devices)
    slowest = {n: max(n / first, (8 - n) / second) for n in range(1, 8)}
    [num, rest] = plan.pipeline.cut
    assert num + rest == 8
    assert slowest[num] == min(slowest.values())
    said = "estimated from FLOPs and the described speeds" in plan.explain()
    assert said == (len(set(speeds)) == 2)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "tensor": 2}, {"data": 1, "tensor": 8}])
def test_counts_for_devices_that_are_not_here_follow_their_described_speeds(axes):
    """Four V100 and four P100: one microbatch more on any would end later than the last.

    To a tenth: a part of each microbatch takes its time by the speed of memory.
    """
    columns = hxla.Rule(path=".*kernel", axes=((), ("tensor",)), rank=2)
    rules = hxla.RuleSet(name="columns", rules=(columns,)) if "tensor" in axes else None
    job, mesh = large_job(2), "whale-4v100-4p100"
    plan = job.plan(mesh, mesh=axes, rules=rules, microbatch_size=1024)
    speeds = described_speeds(mesh)
    slowest = [min(speeds[rank] for rank in replica.devices) for replica in plan.replicas]
    ends = [count / speed for count, speed in zip(plan.counts, slowest, strict=True)]
    later = [(count + 1) / speed for count, speed in zip(plan.counts, slowest, strict=True)]
    assert sum(plan.counts) == 64
    assert max(ends) <= 1.1 * min(later)
    even = job.plan(mesh, mesh=axes, rules=rules, microbatch_size=1024, counts="even")
    assert len(set(even.counts)) == 1


def test_a_model_that_fits_nowhere_is_refused_with_the_missing_bytes(tmp_path):
    # 4 times 2 MiB and two microbatches of 2 KiB in flight, in 3 MiB.
    assert 4 * 2**21 + 2 * 2 * 2**10 - 3 * 2**20 == 5_246_976
    with pytest.raises(hxla.PlanError, match=r"stage 0 of 2.*lacks 5,246,976 bytes"):
        propose(work(), cluster(tmp_path, 3 / 1024, 3 / 1024), profile(1.0, 1.0))


def shared_by_two(**changes):
    """The work with layers that a group of two shares, and what that sends."""
    small = LayerSize(parameter_bytes=2.0**19, output_bytes=8.0, stash_bytes=2.0**9)
    return dataclasses.replace(work(), sizes=work().sizes | {(1, 2): (small,) * 4}, **changes)


def test_tensor_parallelism_is_tried_where_its_transfers_can_be_counted(tmp_path):
    """Else it would seem faster than copies, whose sum is counted."""
    split = shared_by_two(
        sent_bytes={(1, 2): (2.0**20,) * 4},
        batch_size=1,  # so that a copy leaves one of the two devices idle
    )
    two, measured = cluster(tmp_path, 1, 1, kinds="00"), profile(1.0)
    found, _ = propose(split, two, measured)
    assert found.alternative.tensor == 1
    assert "gpu0: no link described, so tensor parallelism is not tried" in found.reasons
    asked, _ = propose(split, two, measured, uncounted=True)
    assert asked.alternative.tensor == 2
    whole, halved = found.prediction.step_seconds, asked.prediction.step_seconds
    assert halved == pytest.approx(whole / 2)
    linked, _ = propose(split, cluster(tmp_path, 1, 1, kinds="00", node=NODE), measured)
    assert linked.alternative.tensor == 2
    assert halved < linked.prediction.step_seconds < whole


def test_tensor_parallelism_waits_for_each_of_its_collectives(tmp_path):
    """Small microbatches meet often: what an all-reduce takes at least counts for each."""
    split = shared_by_two(
        sent_bytes={(1, 2): (1.0,) * 4},
        num_collectives={(1, 2): (1.5,) * 4},
        batch_size=1,
    )
    plain, times = cluster(tmp_path, 1, 1, kinds="00"), profile(1.0)
    steps = {}
    for seconds in (0.0, 0.5, 100.0):
        met = hxla.Link(bytes_per_second=1e15, latency_seconds=1e-6, all_reduce_seconds=seconds)
        link = hxla.MeasuredLink(kinds=("gpu0", "gpu0"), in_node=True, mesh="two", link=met)
        found, _ = propose(split, with_measured(plain, [link])[0], times)
        steps[seconds] = found.prediction.step_seconds
        assert found.alternative.tensor == (1 if seconds == 100.0 else 2)
    assert steps[0.5] == pytest.approx(steps[0.0] + 4 * 1.5 * 0.5)


def test_the_search_keeps_to_plans_that_can_be_run(tmp_path):
    """Alone, a device runs no forward again; stages of several devices always do."""
    split = shared_by_two(sent_bytes={(1, 2): (8.0,) * 4})
    four = cluster(tmp_path, *[20 / 1024] * 4, kinds="0000", node=NODE)
    found, _ = propose(split, four, profile(1.0), all_devices=True)
    assert sum(map(len, found.replicas)) == 4
    for stages in (1, 2):
        found, _ = propose(split, four, profile(1.0), max_stages=stages)
        own = found.alternative
        assert own in (Alternative(1), Alternative(1, 2)) or len(found.cuts) > 1
        assert not (own.tensor > 1 and len(found.cuts) > 1 and not own.recompute)


def test_a_loop_of_the_users_own_gets_the_plan_of_hxla_run(tmp_path, monkeypatch):
    data = {"x": np.ones((8, 3), np.float32)}
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    loss = lambda model, batch: model(batch["x"]).mean()  # noqa: E731
    devices = {"cluster": {"visible_devices": [0, 1]}}
    job = hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8, config=devices)
    plan = job.plan(mesh={"data": 2}, microbatch_size=2, counts=(3, 1))
    plan.write(tmp_path / "plan.json")
    monkeypatch.setenv("HXLA_PLAN", str(tmp_path / "plan.json"))
    assert job.plan(microbatch_size=1) == plan
    trained = hxla.train(
        hxla.Job(model, data, loss, optax.sgd(0.1), batch_size=8, config=devices),
        steps=1,
        plan="auto",
    )
    assert trained.plan.counts == plan.counts
    assert job.plan("cpu-1.0-0.5", mesh={"data": 2}, microbatch_size=1).counts == (6, 2)
    with pytest.raises(hxla.ConfigError, match=r"but the script opens another plan"):
        job.open(plan.with_counts((1, 3)), steps=1)


@pytest.mark.slow
def test_a_model_of_which_only_single_examples_fit_is_planned_with_them():
    """Sizes that suit two devices and 256 examples begin with 2."""
    model = nnx.eval_shape(
        lambda: gpt.GPT(nnx.Rngs(0), vocabulary=256, length=256, width=32, heads=2, layers=4)
    )
    text = jax.ShapeDtypeStruct((256, 257), np.int32)
    job = hxla.Job(model, {"text": text}, gpt.loss, optax.sgd(0.1), batch_size=256)
    link = hxla.Link(bytes_per_second=1e10, latency_seconds=1e-5)
    device = hxla.Device(
        kind="A",
        memory_bytes=4 * 2**20,
        memory_bytes_per_second=1e12,
        rates=(hxla.Rate(dtype="float32", flops_per_second=1e13),),
    )
    cluster = hxla.Cluster(
        name="small", devices=(device,) * 2, nodes=(hxla.Node(name="here", link=link),)
    )
    plan = job.plan(cluster)
    assert plan.microbatch_size == 1
    assert any("finer ones were tried" in reason for reason in plan.reasons)
    assert all(d.memory_bytes <= d.capacity_bytes for d in plan.prediction.devices)
