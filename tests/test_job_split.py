"""Replicas that would span real processes: not built yet, and said so."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import jax, models, optax, hxla
from flax import nnx

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

result = hxla.train(
    Net(nnx.Rngs(0)), models.tokens(), models.token_loss, optax.adam(1e-2),
    batch_size=16, microbatch_size=2, steps=6, seed=3, split={split!r},
    eval_data=models.tokens(20), checkpoint_dir={folder!r},
)
print("sha256", result.sha256, round(result.history.evaluations[-1].loss, 5))
print("cut", [r for r in result.plan.reasons if r.startswith("parameter")])
"""


@pytest.mark.slow
def test_a_split_over_processes_is_refused_by_every_one_of_them(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests"), split="even", folder=None))
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", "run", "-n", "2", str(script)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 1
    assert "would span processes [0, 1]" in ran.stdout + ran.stderr
