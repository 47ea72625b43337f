"""Sums of groups of microbatches, added up as integers on the host, beside one replica's own sum."""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent / "examples"))

import gpt
import jax
import numpy as np
import optax
from flax import nnx

import hxla

parser = argparse.ArgumentParser()
parser.add_argument("--dry", action="store_true")
args = parser.parse_args()
NUM = 8
width, layers, size = (32, 1, 2) if args.dry else (512, 4, 16)
text = gpt.library()["text"]
job = hxla.Job(
    gpt.GPT(nnx.Rngs(0), width=width, layers=layers),
    {"text": text},
    gpt.loss,
    optax.adamw(1e-3),
    batch_size=NUM * size,
)
with job.open(job.plan(microbatch_size=size), steps=1) as session:
    [runner], [held] = session._programs.runners, session._store.held
    exponents = session._stepper._exponents(0)

    def sums(ids):
        batches = [{"text": text[i * size : (i + 1) * size]} for i in ids]
        found, _ = runner.run(held.params, held.aux, None, exponents, 0, ids, batches)
        return jax.tree.map(np.asarray, found)

    whole = sums(range(NUM))
    groups = [[range(NUM)], [range(1), range(1, NUM)], [range(5), range(5, NUM)]]
    groups.append([range(i, i + 1) for i in reversed(range(NUM))])
    for own in groups:
        parts = [sums(ids) for ids in own]
        for i, limbs in enumerate(whole.values):
            for k, limb in enumerate(limbs):
                total = np.sum([part.values[i][k] for part in parts], axis=0, dtype=np.int32)
                assert (total == limb).all(), (own, i, k)
        assert (np.max([part.peaks_T for part in parts], axis=0) == whole.peaks_T).all(), own
        assert (np.sum([part.small_MS for part in parts], axis=0) == whole.small_MS).all(), own
print(f"the same integers in {len(groups)} groupings")
