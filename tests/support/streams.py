"""Batches whose examples are made in Python, each written to a file as it is made."""

import os
import time

import grain
import numpy as np
from absl import flags

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
