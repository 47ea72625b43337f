"""Jobs whose copies are cut by tensor and stage axes and share their state."""

import functools

import jax
import numpy as np
import optax

import hxla
from support import families
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
