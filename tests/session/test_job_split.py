"""Replicas that span real processes."""

import os
import re
import subprocess
import sys

import pytest

from support.launched import PATIENCE_SECONDS
from support.paths import PYTHONPATH

SCRIPT = """
import jax, numpy as np, optax, hxla
from flax import nnx
from support import models
from jax.experimental.multihost_utils import process_allgather

class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(models.VOCABULARY, 16, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, models.VOCABULARY, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        with hxla.split(2):
            return self.down(self.dropout(jax.nn.gelu(self.up(x))))

seen = {{}}

def callback(record, session):
    params = session.state.params
    seen["spread"] = sum(not x.is_fully_addressable for x in jax.tree.leaves(params))
    if record.step == 6:
        seen["whole"] = jax.tree.leaves(session.gather(params))

job = hxla.Job(
    Net(nnx.Rngs(0)), models.tokens(), models.token_loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), batch_size=16, seed=3,
)
result = hxla.train(
    job, microbatch_size=2, steps=6, counts={counts!r},
    eval_data=models.tokens(20), checkpoint_dir={folder!r}, checkpoint_every=3,
    callbacks=[callback],
)
final = process_allgather(nnx.state(result.model, nnx.Param), tiled=True)
same = map(np.array_equal, seen["whole"], jax.tree.leaves(final))
print("callback saw", seen["spread"], all(same))
print("sha256", result.sha256, round(result.history.evaluations[-1].loss, 5))
print("cut", [r for r in result.plan.reasons if r.startswith("parameter")])
"""


def run(tmp_path, name, counts, *launcher, devices=1):
    script = tmp_path / f"{name}.py"
    folder = str(tmp_path / name)
    script.write_text(SCRIPT.format(counts=counts, folder=folder))
    env = os.environ | {
        "PYTHONPATH": PYTHONPATH,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_cpu_multi_thread_eigen=false",
    }
    ran = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        env=env,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert "up/kernel" in ran.stdout
    seen = re.findall(r"callback saw (\d+) (\w+)", ran.stdout)
    assert seen
    assert all((int(spread) > 0, same) == (bool(launcher), "True") for spread, same in seen)
    return re.findall(r"sha256 (\w+) ([\d.]+)", ran.stdout)


@pytest.mark.slow
def test_a_split_over_processes_gives_the_bits_of_a_split_within_one(tmp_path):
    (one,) = run(tmp_path, "one", [4, 4], devices=4)
    four = run(tmp_path, "four", [5, 3], "-m", "hxla", "run", "-n", "4")
    assert len(four) == 4
    assert set(four) == {one}
