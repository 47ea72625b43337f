"""A process of a small job whose optimizer state waits elsewhere; prints what it ends with.

python tests/jobs/offload_job.py TIER FOLDER STEPS [most bytes of a file]
"""

import pathlib
import resource
import sys

import numpy as np
import optax
from flax import nnx

import hxla
from support.inside.lower import _units

WIDTH = 256


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, WIDTH, rngs=rngs)
        self.middle = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.down = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.middle(nnx.tanh(self.up(x)))))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def main():
    tier, folder, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    for most in map(int, sys.argv[4:]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    _units._LEAST_BYTES, _units._NUM_GROUPS = 1 << 14, 6
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=(64, n)).astype(np.float32) for k, n in (("x", 16), ("y", 4))}
    offload = {"optimizer": tier, "directory": str(folder)}
    result = hxla.train(
        hxla.Job(
            lambda: Model(nnx.Rngs(0)),
            data,
            loss,
            optax.adamw(1e-2),
            batch_size=16,
            config={"memory": {"offload": offload}},
        ),
        microbatch_size=4,
        counts="even",
        steps=steps,
        checkpoint_dir=folder / "checkpoints",
        checkpoint_every=4,
        callbacks=[lambda record, session: print("did", record.step, flush=True)],
    )
    print("sha256", result.sha256, result.plan.numerics, flush=True)


main()
