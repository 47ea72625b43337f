"""Models that no machine here could hold are planned for clusters that are only described."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hxla
from support import families
from support.paths import PYTHONPATH, ROOT

gpt = families.example("gpt")

#: It also writes the most memory that it had: what Linux tells its parent counts the parent's too.
SCRIPT = """
import atexit, pathlib, sys
peak = pathlib.Path({peak!r})
status = pathlib.Path("/proc/self/status")
atexit.register(lambda: peak.write_text(status.read_text().split("VmHWM:")[1].split()[0]))
sys.path.insert(0, {examples!r})
import numpy as np, optax
from flax import nnx
import hxla
import gpt

data = {{"text": np.broadcast_to(np.int32(0), (1536, 2049))}}
model = nnx.eval_shape(
    lambda: gpt.GPT(
        nnx.Rngs(0), vocabulary=50304, length=2048, width={width}, heads={heads}, layers={layers}
    )
)
hxla.train(
    hxla.Job(model, data, gpt.loss, optax.adam(1e-4), batch_size={batch_size}),
    steps=1, microbatch_size=1,
)
"""
DECODERS = {  # 12 width^2 parameters in a layer, and the embedding
    "13e9": {"width": 5120, "heads": 40, "layers": 40},
    "100e9": {"width": 10240, "heads": 80, "layers": 80},
}


def large_mesh(path):
    """768 devices of three kinds on 96 nodes, as of data sheets."""
    cards = [("A100-80", 80, 2039, 19.5, 200), ("A100-40", 40, 1555, 19.5, 200)]
    cards += [("V100-32", 32, 900, 15.7, 68.28)]
    lines = ['name = "mixed-768"']
    for kind, memory, bandwidth, rate, link in cards:
        for i in range(32):
            lines += [f'[[node]]\nname = "{kind}-{i}"']
            lines += [f"[node.link]\ngigabytes_per_second = {link}\nlatency_microseconds = 3.4"]
            lines += [f'[[node.device]]\nkind = "{kind}"\ncount = 8\nmemory_gib = {memory}']
            lines += [f"memory_gigabytes_per_second = {bandwidth}"]
            lines += [f"[node.device.rates]\nfloat32 = {{ teraflops_per_second = {rate} }}"]
    lines += ["[[link]]\ngigabytes_per_second = 12.5\nlatency_microseconds = 14.0"]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "mesh", "batch_size"),
    [("13e9", "whale-8v100-8p100", 256), ("100e9", "768", 1536)],
)
def test_a_decoder_is_planned_in_little_memory(decoder, mesh, batch_size, tmp_path):
    examples = str(ROOT / "examples")
    script, out = tmp_path / "script.py", tmp_path / "plan.json"
    peak = tmp_path / "peak"
    own = {"examples": examples, "batch_size": batch_size, "peak": str(peak)}
    script.write_text(SCRIPT.format(**own, **DECODERS[decoder]))
    if mesh == "768":
        mesh = large_mesh(tmp_path / "mesh.toml")
    command = ["-m", "hxla", "plan", "--mesh", mesh, "--write", str(out)]
    subprocess.run(
        [sys.executable, *command, str(script)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        check=True,
    )
    assert int(peak.read_text()) * 1024 < 4e9
    plan = hxla.Plan.read(out)
    assert json.loads(out.read_text())["batch_size"] == batch_size
    assert sum(plan.counts) == batch_size
    fits = [device.memory_bytes <= device.capacity_bytes for device in plan.prediction.devices]
    assert all(fits)
    # What a device holds of the parameters, gradients' sums and Adam's state is known.
    names = DECODERS[decoder]
    least = 12 * names["width"] ** 2 * names["layers"]
    whole = sum(device.memory_bytes for device in plan.prediction.devices) / len(plan.counts)
    assert whole > 16 * least


def test_a_model_larger_than_all_devices_is_refused_with_what_is_lacking():
    sizes = {"width": 16384, "heads": 128, "layers": 1}
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), vocabulary=50304, length=2048, **sizes))
    data = {"text": jax.ShapeDtypeStruct((256, 2049), np.int32)}
    job = hxla.Job(model, data, gpt.loss, optax.adam(1e-4), batch_size=256)
    with pytest.raises(hxla.PlanError, match=r"no pipeline fits these devices.*lacks [\d,]+ bytes"):
        job.plan("workstation-3090-4090", auto=True, microbatch_size=1)


@pytest.mark.slow
def test_the_command_refuses_it_without_a_traceback(tmp_path):
    script = tmp_path / "script.py"
    own = {"examples": str(ROOT / "examples"), "batch_size": 256, "peak": str(tmp_path / "peak")}
    text = SCRIPT.format(**own, width=16384, heads=128, layers=2)
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "hxla", "plan", "--mesh", "workstation-3090-4090", str(script)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "no pipeline fits these devices" in done.stderr
    assert "Traceback" not in done.stderr
