"""Jobs whose copies are cut by tensor and stage axes and share their state."""

import functools

import jax
import numpy as np
import optax
from flax import nnx

import hxla
from support import blocks, families
from support.tensor_gpt import BATCH, MICRO, STEPS, gpt, text

FORMS = {
    "tensor": {"tensor": 2},
    "stage": {"stage": 2},
    "stage and tensor": {"stage": 2, "tensor": 2},
}


def job(optimizer=None, precision="model", weights=None, **memory):
    return hxla.Job(
        functools.partial(gpt, layers=1),
        text(),
        families.token_loss,
        optimizer or optax.adamw(1e-2),
        batch_size=BATCH,
        precision=precision,
        weights=weights,
        config={"memory": memory, "communication": {"clip_norm": 0.5}},
    )


WIDTH = 16


class Pair(nnx.Module):
    """Two matrices, of which tensor ranks have columns and rows."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Pairs(nnx.Module):
    """Few parameters, so that its programs are compiled soon."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Pair(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


PAIRS = hxla.RuleSet(
    name="pairs",
    rules=(
        hxla.Rule(path=".*/up/kernel", axes=((), ("tensor",))),
        hxla.Rule(path=".*/down/kernel", axes=(("tensor",), ())),
    ),
)


def of_pairs(optimizer, weights=None, **memory):
    """A job whose copies `PAIRS` cuts."""
    config = {"memory": memory, "communication": {"clip_norm": 0.5}}
    return hxla.Job(
        lambda: Pairs(nnx.Rngs(0)),
        blocks.data(),
        blocks.loss,
        optimizer,
        batch_size=blocks.BATCH,
        shuffle=False,
        weights=weights,
        config=config,
    )


def planned_pairs(own, copies, counts="even", axes=FORMS["tensor"]):
    """Each cut by two devices, or as `axes` say."""
    mesh = {"data": copies, **axes}
    cluster = hxla.Cluster(
        name="", devices=(hxla.Device(kind="cpu"),) * int(np.prod([*mesh.values()]))
    )
    rules = PAIRS if "tensor" in axes else None
    plan = own.plan(cluster, microbatch_size=1, mesh=mesh, rules=rules)
    return plan if counts == "even" else plan.with_counts(counts)


def planned(own, copies, axes, counts="even"):
    mesh = {"data": copies, **axes}
    num = int(np.prod([*mesh.values()]))
    devices = (hxla.Device(kind="cpu"),) * num
    rules = "decoder" if "tensor" in axes else None
    plan = own.plan(
        hxla.Cluster(name="", devices=devices), microbatch_size=MICRO, mesh=mesh, rules=rules
    )
    return plan if counts == "even" else plan.with_counts(counts)


def trained(own, plan, steps=STEPS, **options):
    with own.open(plan, steps=steps, **options) as session:
        for _ in session:
            pass
        if options and steps < STEPS:
            session.save()
        held = session._store.held[0].opt_state
        return session.result(), sum(x.addressable_shards[0].data.nbytes for x in leaves(held))


def leaves(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.size > 1]
