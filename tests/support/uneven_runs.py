"""Trains the small models of uneven splits."""

import numpy as np
import optax
from flax import nnx

import hxla
from support import models


def train(mesh, **given):
    num = int(np.prod([len(s) if isinstance(s, tuple) else s for s in mesh.values()]))
    return hxla.train(
        models.NnxNet(nnx.Rngs(0), heads=8),
        models.tokens(),
        models.token_loss,
        given.pop("optimizer", None) or optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5)),
        batch_size=8,
        microbatch_size=4,
        seed=1,
        rules="decoder" if "tensor" in mesh else None,
        mesh=mesh,
        eval_data=models.tokens(8),
        config={"cluster": {"visible_devices": list(range(num))}},
        **given,
    )
