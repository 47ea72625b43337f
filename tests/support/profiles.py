"""`hxla profile` on a small script."""

import os
import subprocess
import sys

# Without the fake devices of this process.
ALONE = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


SCRIPT = """
import numpy as np, optax, hxla
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])
    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=1)

data = {"x": np.ones((32, 64), np.float32), "y": np.zeros((32, 64), np.float32)}
hxla.train(hxla.Job(Net(nnx.Rngs(0)), data, loss, optax.adam(1e-3), batch_size=16), steps=3)
print("trained")
"""


def profile_command(tmp_path, *options, text=SCRIPT, flags=""):
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "hxla", "profile", "--write", str(tmp_path / "p.json")]
    return subprocess.run(
        [*command, *options, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**ALONE, "XLA_FLAGS": flags},
    )
