"""A model that no device holds: real processes, each in a cgroup that would kill it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import psutil
import pytest

from support.launched import own_environment
from support.paths import JOBS

WIDTH, LAYERS = 2560, 5
NUM_PARAMS = LAYERS * 8 * WIDTH**2
WHOLE_BYTES = 20 * NUM_PARAMS  # parameters 4, two limbs of gradients' sums 8, Adam's state 8
LIMIT = WHOLE_BYTES // 3


def start(tmp_path, num_devices, limit, **others):
    """The job, as many processes as devices, each with a limit of its memory."""
    mesh = tmp_path / f"{num_devices}.toml"
    mesh.write_text(
        f'name = "small"\n[[device]]\nkind = "cpu"\ncount = {num_devices}\n'
        f"core_share = {2 / num_devices}\nmemory_gib = {0.9 * limit / 2**30}\n"
    )
    options = {"limit": limit, "width": WIDTH, "layers": LAYERS, "devices": num_devices}
    options |= {"checkpoints": tmp_path / "checkpoints"} | others
    return subprocess.Popen(
        [sys.executable, "-m", "hxla", "run", "--mesh", str(mesh)]
        + [str(JOBS / "large_model.py")]
        + [word for name, value in options.items() for word in (f"--{name}", str(value))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=own_environment(),
    )


def memory_cgroups():
    lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    v1 = [line for line in lines if "memory" in line.split(":")[1].split(",")]
    base = "/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup"
    path = (v1 or lines)[0].split(":", 2)[2]
    return pathlib.Path(base, path.lstrip("/"))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(memory_cgroups(), os.W_OK), reason="no cgroup with a memory limit may be made"
)
def test_a_model_that_no_device_holds_trains_is_killed_and_resumes_on_fewer(tmp_path):
    job = start(tmp_path, 4, LIMIT, steps=1000, save_at=8)
    lines = []
    for line in job.stdout:
        lines.append(line)
        if "".join(lines[-8:]).count("told") == 4:  # of every process: kill it in a later step
            break
    for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
        process.kill()
    job.wait()
    out = "".join(lines)
    check(out, 4)
    [saved] = re.findall(r"\[0\] saved 8 ([\d.]+)", out)
    losses = [float(text) for text in re.findall(r"\[0\] loss \d+ ([\d.]+)", out)]
    assert losses[7] < losses[0]

    out, _ = start(tmp_path, 2, 2 * LIMIT, steps=12, save_at=10).communicate(timeout=900)
    check(out, 2)
    [resumed] = re.findall(r"\[0\] resumed 8 ([\d.]+)", out)
    assert float(resumed) == pytest.approx(float(saved), rel=1e-4)
    assert out.count("ended") == 2


@pytest.mark.slow
@pytest.mark.skipif(
    not os.access(memory_cgroups(), os.W_OK), reason="no cgroup with a memory limit may be made"
)
def test_a_model_that_no_copy_could_hold_shares_its_state_out_by_itself(tmp_path):
    """Nobody said ZeRO, or recomputation: the state is three times a device's memory.

    What a process has besides, the interpreter's and the compiler's, is 0.3 GB of the 1.1 here.
    """
    width, layers = 768, 36
    whole = 20 * layers * 8 * width**2
    options = {"axis": "data", "width": width, "layers": layers, "steps": 2, "save_at": 2}
    out, _ = start(tmp_path, 4, whole // 3, **options).communicate(timeout=900)
    assert "[0] stage 3" in out, out[-6000:]
    told = [json.loads(text) for text in re.findall(r"told (\{.*\})", out)]
    print(json.dumps({"whole": whole, "limit": whole // 3, "told": told}))
    assert len(told) == 4, out[-6000:]
    assert all(0.8 * whole / 3 < process["of limit"] <= whole / 3 for process in told)
    losses = [float(text) for text in re.findall(r"\[0\] loss \d+ ([\d.]+)", out)]
    assert losses[1] < losses[0]


def check(out, num_devices):
    """Every process kept to its memory, and needed what the plan said."""
    told = [json.loads(text) for text in re.findall(r"told (\{.*\})", out)]
    print(json.dumps({"whole": WHOLE_BYTES, "limit": LIMIT, "told": told}))
    assert len(told) == num_devices, out[-6000:]
    for process in told:
        assert process["peak"] == pytest.approx(process["predicted"], rel=0.05)
