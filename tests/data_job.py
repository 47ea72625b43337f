"""A job that `hxla run` runs in tests: every example that its data makes is written to a file."""

import argparse
import os
import time

import grain
import jax
import numpy as np
import optax
from absl import flags
from flax import nnx

import hxla

BATCH_SIZE = 8
WORDS = "loader processes:"


class Make:
    """Makes an example in Python, and tells of it."""

    def __init__(self, told, seconds=0.0):
        self.told, self.seconds = told, seconds

    def __call__(self, i):
        """Example `i`."""
        if self.told:
            with open(self.told, "a") as file:
                file.write(f"{os.getpid()} {i}\n")
        time.sleep(self.seconds)
        x = np.random.default_rng(int(i)).normal(size=16).astype(np.float32)
        return {"x": x, "y": x[:4] ** 2}


class Stream:
    """Global batches whose position can be kept."""

    def __init__(self, make):
        self.make, self.next = make, 0

    def __iter__(self):
        return self

    def __next__(self):
        first, self.next = self.next, self.next + BATCH_SIZE
        examples = [self.make(i) for i in range(first, self.next)]
        return {k: np.stack([e[k] for e in examples]) for k in ("x", "y")}

    def get_state(self):
        """With what JSON has not."""
        return {"next": (np.int64(self.next), b"bytes")}

    def set_state(self, state):
        """As it was."""
        number, data = state["next"]
        assert data == b"bytes"
        self.next = int(number)


def generated(make):
    """Global batches whose position cannot be kept."""
    yield from Stream(make)


def dataset(make, num_workers):
    """Global batches of Grain, whose examples are made in processes of their own."""
    examples = grain.MapDataset.range(100_000).map(make).to_iter_dataset()
    if num_workers:
        flags.FLAGS.mark_as_parsed()  # Grain reads some before it starts processes
        options = grain.MultiprocessingOptions(num_workers=num_workers)
        examples = examples.mp_prefetch(options)
    return examples.batch(BATCH_SIZE)


def loss(model, batch):
    """Squares."""
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)


def main():
    """Train, and print the SHA-256."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=("stream", "generator", "grain", "function"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--loaders", type=int, default=0, help="processes of Grain's")
    parser.add_argument("--workers", type=int, default=0, help="of hxla's")
    parser.add_argument("--told", help="file for the examples that are made")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each step waits")
    parser.add_argument("--example-seconds", type=float, default=0.0)
    parser.add_argument("--checkpoints")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--alone", action="store_true", help="each process reads for itself")
    args = parser.parse_args()
    make = Make(args.told, args.example_seconds)
    data = {
        "stream": lambda: Stream(make),
        "generator": lambda: generated(make),
        "grain": lambda: dataset(make, args.loaders),
        "function": lambda: make,  # sent to hxla's workers
    }[args.data]()
    seconds = []

    def pace(record, session):
        seconds.append(record.seconds)
        time.sleep(args.slow)

    result = hxla.train(
        nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
        data,
        loss,
        optax.sgd(1e-2),
        batch_size=BATCH_SIZE,
        microbatch_size=2,
        counts="even",
        steps=args.steps,
        callbacks=[pace],
        checkpoint_dir=args.checkpoints,
        checkpoint_every=args.checkpoint_every,
        config={"data": {"share": not args.alone, "workers": args.workers}},
    )
    if jax.process_index() == 0:
        late = seconds[len(seconds) // 2 :]
        print(f"seconds of a step {sum(late) / len(late):.4f}", flush=True)
        print(f"sha256 {result.sha256} after {result.step} steps", flush=True)


if __name__ == "__main__":
    main()
