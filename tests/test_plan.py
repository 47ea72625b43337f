"""`hxla plan` on real scripts and mesh files; a proposal is a value."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import test_profile

import hxla
from hxla._cluster._mesh_file import load_cluster
from hxla._plan._proposal import Proposal, compare
from hxla._planner._propose import Work, propose
from hxla._profile._profile import LayerSize, LayerTime, Profile, Setting
from hxla._profile._profile_file import load_profile


def plan_command(tmp_path, *options):
    script = tmp_path / "script.py"
    script.write_text(test_profile.SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "hxla", "plan", *options, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=test_profile.ALONE,
    )


def test_a_cluster_that_is_not_here_is_planned_for_and_compared(tmp_path):
    out = tmp_path / "out"
    ran = plan_command(
        tmp_path,
        *("--mesh", "whale-8v100-8p100", "--compare", "whale-4v100-4p100", "--write", str(out)),
    )
    assert ran.returncode == 0, ran.stderr
    assert "trained" not in ran.stdout
    assert "estimated from FLOPs at the data-sheet rate" in ran.stdout
    assert "x as fast" in ran.stdout
    found = Proposal.from_json((out / "whale-8v100-8p100.json").read_text())
    assert sum({d.replica: d.num_microbatches for d in found.devices}.values()) == (
        found.batch_size // found.microbatch_size
    )
    assert len({d.device for d in found.devices}) == len(found.devices)
    assert len(found.devices) == found.num_replicas * found.num_stages * found.tensor
    assert found.closed_form_seconds >= found.bound_seconds * (1 - 1e-9)
    for d in found.devices:
        parts = (d.compute_seconds, d.wait_seconds, d.reduction_seconds, d.update_seconds)
        assert sum(parts) == pytest.approx(found.step_seconds)
    traces = list(out.glob("whale-8v100-8p100-replica*.perfetto.json"))
    assert traces
    for path in traces:
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert events
    assert list(out.glob("whale-8v100-8p100-replica*.png"))


def test_a_measured_profile_is_planned_with(tmp_path):
    measured = test_profile.profile_command(
        tmp_path, "--segments", "3", "--microbatch-sizes", "1,2", "--mesh", "cpu-1.0-0.5"
    )
    assert measured.returncode == 0, measured.stderr
    ran = plan_command(tmp_path, "--mesh", "cpu-1.0-0.5", "--profile", str(tmp_path / "p.json"))
    assert ran.returncode == 0, ran.stderr
    assert "cpu@0.5: measured" in ran.stdout
    alone = plan_command(
        tmp_path,
        *("--mesh", "cpu-1.0-0.5", "--profile", str(tmp_path / "p.json"), "--stages", "1"),
        *("--write", str(tmp_path / "out")),
    )
    assert "memory from the compiled programs" in alone.stdout
    found = Proposal.from_json((tmp_path / "out" / "cpu-1.0-0.5.json").read_text())
    assert found.num_stages == 1
    whole = load_profile(tmp_path / "p.json")
    for d in found.devices:
        inputs = d.num_microbatches * found.microbatch_size * 2 * 64 * 4
        peak = whole.peaks[Setting(d.kind, found.microbatch_size)]
        assert d.memory_bytes == peak + inputs
        micro = whole.times[Setting(d.kind, found.microbatch_size)]
        busy = d.num_microbatches * sum(t.forward + t.backward for t in micro)
        assert d.compute_seconds == pytest.approx(busy)
    other = plan_command(tmp_path, "--mesh", "cpu-1.0-0.33", "--profile", str(tmp_path / "p.json"))
    assert other.returncode != 0
    assert "device kind 'cpu@0.33': the profile has no times" in other.stderr
    assert "hxla profile" in other.stderr


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
    return Work(
        model="net",
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
    found, timelines = propose(work(), cluster(tmp_path, 1, 1), profile(1.0, 3.0))
    assert (found.num_replicas, found.num_stages) == (2, 1)
    assert [d.num_microbatches for d in found.devices] == [9, 3]
    assert found.step_seconds == pytest.approx(9 * 4 * 2 * 1.0)
    assert found.closed_form_seconds == pytest.approx(found.step_seconds)
    assert found.gap == pytest.approx(0, abs=0.02)
    assert len(timelines) == 2


def test_a_model_that_fits_no_device_becomes_stages(tmp_path):
    """16 MiB of state in two devices of 12 MiB and a bit for what is in flight."""
    found, _ = propose(work(), cluster(tmp_path, 12.1 / 1024, 12.1 / 1024), profile(1.0, 1.0))
    assert (found.num_replicas, found.num_stages) == (1, 2)
    assert [(d.first_layer, d.last_layer) for d in found.devices] == [(0, 1), (2, 3)]
    # 1F1B: (microbatches + stages - 1) times what a stage takes.
    assert found.step_seconds == pytest.approx((12 + 1) * 2 * 2 * 1.0)
    assert all(0 < d.memory_bytes <= d.capacity_bytes for d in found.devices)


def test_a_model_that_fits_nowhere_is_refused_with_the_missing_bytes(tmp_path):
    # 4 times 2 MiB and two microbatches of 2 KiB in flight, in 3 MiB.
    assert 4 * 2**21 + 2 * 2 * 2**10 - 3 * 2**20 == 5_246_976
    with pytest.raises(hxla.PlanError, match=r"stage 0 of 2.*lacks 5,246,976 bytes"):
        propose(work(), cluster(tmp_path, 3 / 1024, 3 / 1024), profile(1.0, 1.0))


NODE = """
[[node]]
name = "a"
[node.link]
gigabytes_per_second = 300
latency_microseconds = 5
"""


def test_tensor_parallelism_is_tried_where_its_transfers_can_be_counted(tmp_path):
    """Else it would seem faster than copies, whose sum is counted."""
    small = LayerSize(parameter_bytes=2.0**19, output_bytes=8.0, stash_bytes=2.0**9)
    split = work()
    split = dataclasses.replace(
        split,
        sizes=split.sizes | {(1, 2): (small,) * 4},
        sent_bytes={(1, 2): (2.0**20,) * 4},
        batch_size=1,  # so that a copy leaves one of the two devices idle
    )
    two, measured = cluster(tmp_path, 1, 1, kinds="00"), profile(1.0)
    found, _ = propose(split, two, measured)
    assert found.tensor == 1
    assert "gpu0: no link described, so tensor parallelism is not tried" in found.reasons
    asked, _ = propose(split, two, measured, uncounted=True)
    assert asked.tensor == 2
    assert asked.step_seconds == pytest.approx(found.step_seconds / 2)
    linked, _ = propose(split, cluster(tmp_path, 1, 1, kinds="00", node=NODE), measured)
    assert linked.tensor == 2
    assert asked.step_seconds < linked.step_seconds < found.step_seconds


def test_proposals_are_values(tmp_path):
    first, _ = propose(work(), cluster(tmp_path, 1, 1), profile(1.0, 3.0))
    again, _ = propose(work(), cluster(tmp_path, 1, 1), profile(1.0, 3.0))
    assert first.fingerprint() == again.fingerprint()
    assert Proposal.from_json(first.to_json()) == first
    faster, _ = propose(work(), cluster(tmp_path, 1, 1), profile(1.0, 1.0))
    text = compare(first, faster)
    assert "the second is 1.50x as fast" in text
    assert math.isclose(first.step_seconds / faster.step_seconds, 1.5)
    with pytest.raises(hxla.PlanError, match="this is no plan"):
        Proposal.from_json("{}")
