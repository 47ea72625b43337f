"""Optimizers that treat parameters as a whole, and jobs that train with them."""

import functools

import optax

import hxla
from support import cut_copies, families
from support.tensor_gpt import BATCH, gpt, text

CLIP = 0.5


#: Products of whole matrices, sums over whole parameters, means of rows and columns, and what ties
#: all parameters together.
OPTIMIZERS = {
    "muon": lambda: optax.contrib.muon(1e-2),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "if finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
}


def of_pairs(name, **memory):
    """A job of few parameters, which `cut_copies.PAIRS` cuts."""
    return cut_copies.of_pairs(OPTIMIZERS[name](), **memory)


def of_gpt(name, **memory):
    """A job with vectors beside its matrices."""
    return hxla.Job(
        functools.partial(gpt, layers=1),
        text(),
        families.token_loss,
        OPTIMIZERS[name](),
        batch_size=BATCH,
        shuffle=False,
        config={"memory": memory, "communication": {"clip_norm": CLIP}},
    )
