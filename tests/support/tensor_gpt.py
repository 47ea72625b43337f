"""A small GPT whose layers two tensor ranks can share, and its text."""

import numpy as np
from flax import nnx

from support import families

WIDTH, HIDDEN, HEADS, LENGTH, VOCABULARY = 32, 64, 4, 16, 64


BATCH, MICRO, STEPS = 32, 4, 3


def gpt(layers=2):
    size = {"vocabulary": VOCABULARY, "length": LENGTH, "width": WIDTH, "heads": HEADS}
    return families.example("gpt").GPT(nnx.Rngs(0), layers=layers, **size)


def text():
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (STEPS * BATCH, LENGTH + 1))
    return {"text": rows.astype(np.int32)}
