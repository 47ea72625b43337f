"""A model that no device holds: real processes, each in a cgroup that would kill it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import psutil
import pytest

ROOT = pathlib.Path(__file__).parent.parent
WIDTH, LAYERS, STEPS = 3072, 5, 20
NUM_PARAMS = LAYERS * 8 * WIDTH**2
WHOLE_BYTES = 20 * NUM_PARAMS  # parameters 4, two limbs of gradients' sums 8, Adam's state 8
LIMIT = WHOLE_BYTES // 3


def start(tmp_path, num_devices, limit):
    """The job, as many processes as devices, each with a limit of its memory."""
    mesh = tmp_path / f"{num_devices}.toml"
    mesh.write_text(
        f'name = "small"\n[[device]]\nkind = "cpu"\ncount = {num_devices}\n'
        f"core_share = {2 / num_devices}\nmemory_gib = {0.9 * limit / 2**30}\n"
    )
    options = {"limit": limit, "width": WIDTH, "layers": LAYERS, "steps": STEPS}
    options |= {"devices": num_devices, "checkpoints": tmp_path / "checkpoints"}
    return subprocess.Popen(
        [sys.executable, "-m", "hxla", "run", "--mesh", str(mesh)]
        + [str(ROOT / "tests/large_model.py")]
        + [word for name, value in options.items() for word in (f"--{name}", str(value))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)},
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
    job = start(tmp_path, 4, LIMIT)
    before = []
    for line in job.stdout:
        before.append(line)
        if "[0] saved" in line:
            break
    for child in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
        child.kill()
    job.wait()
    assert "saved" in before[-1], "".join(before[-40:])
    out, _ = start(tmp_path, 4, LIMIT).communicate(timeout=900)
    first = check(out, 4)
    [*_, newest] = sorted((tmp_path / "checkpoints").iterdir(), key=lambda p: int(p.name))
    newest.rename(tmp_path / newest.name)  # the last step's: resume from the middle again
    out, _ = start(tmp_path, 2, 2 * LIMIT).communicate(timeout=900)
    again = check(out, 2)
    assert again["evaluation"] == pytest.approx(first["evaluation"], rel=1e-4)


def check(out, num_devices):
    """Every process trained to the end within its memory, as the plan said."""
    told = [json.loads(text) for text in re.findall(r"told (\{.*\})", out)]
    assert len(told) == num_devices, out[-6000:]
    for process in told:
        assert process["step"] == STEPS
        assert process["peak"] == pytest.approx(process["predicted"], rel=0.1)
    print(json.dumps({"whole": WHOLE_BYTES, "limit": LIMIT, "told": told}))
    losses = [float(text) for text in re.findall(r"\[0\] loss \d+ ([\d.]+)", out)]
    assert losses[-1] < losses[0]
    return told[0]
