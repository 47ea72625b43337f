"""A job that `hxla run --elastic` runs in tests: a small net, whose processes print its SHA-256."""

import argparse
import json
import pathlib
import tempfile
import time

import jax
import numpy as np
import optax
from flax import nnx

import hxla
from support.inside.checkpoint import _hand_over


class Net(nnx.Module):
    """Enough arrays to be sliced, and small."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


def loss(model, batch):
    """Squares, each example by itself."""
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)


ONE, TWO = {"devices": 1}, {"tensor": 2}
#: By the number of devices.
UNLIKE = {2: [ONE, ONE], 3: [[ONE], [TWO]]}


def main():
    """Train, and print the SHA-256."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each step waits")
    parser.add_argument("--slow-until", help="file from whose appearance on it does not wait")
    parser.add_argument("--stop-when", help="file from whose appearance on it ends")
    parser.add_argument("--checkpoints")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--in-memory-every", type=int)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--unlike", action="store_true", help="stages of one and two devices")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument(
        "--any-cut", action="store_true", help="as many stages as devices, and the bits of any cut"
    )
    parser.add_argument(
        "--digests", help="file for the SHA-256 of the first part of the state after each step"
    )
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(256, 16)).astype(np.float32),
        "y": rng.normal(size=(256, 4)).astype(np.float32),
    }

    digests, num = [], jax.device_count()
    form = {}
    if args.any_cut and args.unlike and num > 1:
        form = {"stages": UNLIKE[num], "rules": "decoder"}
    elif args.any_cut:
        form = {"mesh": {"data": 1, "stage": num, "tensor": 1}, "rules": "decoder"}
    elif args.tensor > 1:
        form = {"mesh": {"data": num // args.tensor, "tensor": args.tensor}, "rules": "decoder"}
    elif args.unlike:
        form = {"stages": [ONE, TWO], "rules": "decoder"}
    elif args.stages:
        form = {"stages": [1.0] * args.stages}

    def pace(record, session):
        if not (args.slow_until and pathlib.Path(args.slow_until).exists()):
            time.sleep(args.slow)
        if args.stop_when and pathlib.Path(args.stop_when).exists():
            session.stop()
        if args.digests:
            with tempfile.TemporaryDirectory() as folder:
                state = f"{folder}/state"
                digests.append(_hand_over.leave_state(session._store.saved(), {}, state))

    result = hxla.train(
        hxla.Job(
            Net(nnx.Rngs(0)),
            data,
            loss,
            optax.adam(1e-2),
            batch_size=args.batch_size,
            config={
                "memory": {"zero": args.zero},
                "checkpoint": {"in_memory_every": args.in_memory_every},
                "numerics": {"cut": "any" if args.any_cut else "planned"},
            },
        ),
        microbatch_size=4,
        steps=args.steps,
        callbacks=[pace] if args.slow or args.digests else [],
        checkpoint_dir=args.checkpoints,
        checkpoint_every=args.checkpoint_every,
        **form,
    )
    if args.digests and jax.process_index() == 0:
        pathlib.Path(args.digests).write_text(json.dumps(digests))
    if jax.process_index() == 0:
        print(f"sha256 {result.sha256} after {result.step} steps", flush=True)


if __name__ == "__main__":
    main()
