"""A small model of parameters of every rank, and jobs whose copies share its optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla

STEPS, BATCH = 3, 24


class Model(nnx.Module):
    """Matrices, vectors, a scalar, and BatchNorm's statistics."""

    def __init__(self, rngs):
        self.a = nnx.Linear(6, 10, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(10, rngs=rngs)
        self.b = nnx.Linear(10, 7, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.gain * self.b(nnx.gelu(self.norm(self.a(x))))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(BATCH * STEPS, 6)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ rng.normal(size=(6, 7))).astype(np.float32)}


def no_vectors(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def by_name(tree):
    label = lambda path, x: "fast" if "a" in str(path[0]) else "slow"  # noqa: E731
    return jax.tree_util.tree_map_with_path(label, tree)


#: Those that treat each element by itself.
BY_ELEMENT = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=no_vectors),
    "lion": lambda: optax.lion(1e-2),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True),
    "scheduled": lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 9)),
    "two sorts": lambda: optax.multi_transform(
        {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-2, momentum=0.5)}, by_name
    ),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2)),
    "narrow moments": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}


#: Those that look at a whole parameter.
BY_PARAMETER = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def job(optimizer, **config):
    model = lambda: Model(nnx.Rngs(0))  # noqa: E731
    return hxla.Job(model, data(), loss, optimizer, batch_size=BATCH, config=config)


def linear_job(optimizer, **config):
    """Of a matrix and a vector, whose programs are compiled soon."""
    model = lambda: nnx.Linear(6, 7, rngs=nnx.Rngs(0))  # noqa: E731
    options = {"batch_size": BATCH, "shuffle": False, "config": config}
    return hxla.Job(model, data(), loss, optimizer, **options)


def cluster(num, **known):
    return hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", **known),) * num)


def planned(job, num, **options):
    options = {"mesh": {"data": num}} | options
    return job.plan(cluster(num), microbatch_size=2, counts="even", **options)


def trained(job, plan, **options):
    with job.open(plan, steps=STEPS, **options) as session:
        for _ in session:
            pass
        return session.result()


def close(found, wanted):
    """Equal but for rounding, which the small gradients of an optimizer like Adam make larger."""
    for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)  # an update moves by 1e-2
