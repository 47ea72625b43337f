"""Jobs whose copies share their state: ZeRO's stages 1 to 3."""

import optax

import hxla
from support.blocks import Layers, job


def cluster(num, **known):
    return hxla.Cluster(name="", devices=(hxla.Device(kind="cpu", **known),) * num)


def planned(own, num, counts=None, **known):
    plan = own.plan(
        cluster(num, **known),
        auto=False,
        microbatch_size=1,
        mesh={"data": num},
        counts="even",
    )
    return plan if counts is None else plan.with_counts(counts)


def shared(stage, model=Layers, optimizer=None, clip=None, **memory):
    memory = {"zero": stage, "recompute": "boundaries"} | memory
    config = {"memory": memory, "communication": {"clip_norm": clip}}
    return job(model, config, optimizer or optax.adamw(1e-2))
