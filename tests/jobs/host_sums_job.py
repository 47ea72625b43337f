"""Run by `hxla run` with two devices in each process: trains on the second of each.

So the devices that train are none of those that hosts add on.
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hxla
from support import zero_jobs
from support.inside.lower import Store, _lower, _updates

COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|collective-\w+|all-to-all)[.\w-]*\("
)
NUM = jax.process_count()


class Model(nnx.Module):
    """A matrix, a scalar, and statistics of a batch."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(6, 7, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(7, use_bias=False, use_scale=False, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.gain * self.norm(self.inner(x))


def job(over, zero, model=Model):
    return hxla.Job(
        lambda: model(nnx.Rngs(0)),
        zero_jobs.data(),
        zero_jobs.loss,
        optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-2)),
        batch_size=zero_jobs.BATCH,
        config={
            "communication": {"over": over},
            "memory": {"zero": zero, "shares": [*range(2, 2 + NUM)] if zero else "auto"},
            "cluster": {"visible_devices": [*range(1, 2 * NUM, 2)]},
        },
    )


def collectives(programs):
    return sum(len(COLLECTIVE.findall(program.as_text())) for program in programs)


def programs_of(session):
    """Collectives in the programs of the devices that train, and in those of the hosts."""
    own = session._programs
    of_parts, num = own.runners[0]._programs.of, own.runners[0].num_parts
    on_devices = [program for i in range(num) for program in of_parts(i).values()]
    on_devices += own._updates.each[0].compiled
    between = list(own.reducer.programs)
    if own.sharded_params is not None:
        between += own.sharded_params._gathers.values()
        on_devices += [program for [program] in own.sharded_params._unflats.values()]
    if own.gather is not None:
        between += own.gather._programs
        on_devices += [program for [program] in own.gather._unflat]
    mesh, trained = own.reducer.arrays.devices, [r.devices[0] for r in own.reducer.replicas]
    return {
        "devices": collectives(on_devices),
        "between": collectives(between),
        "apart": not {*mesh} & {*trained},
        "local": session._store.held[0].params[0].devices() == {jax.local_devices()[1]},
    }


def trained(over, zero, folder=None, steps=zero_jobs.STEPS, model=Model):
    """From the checkpoint that is in the folder, or from the start."""
    own = job(over, zero, model)
    plan = own.plan(microbatch_size=2, counts="even")
    options = {} if folder is None else {"checkpoint_dir": folder}
    with own.open(plan.with_counts((7, 5)), steps=steps, **options) as session:
        for _ in session:
            pass
        told = programs_of(session)
        result = session.result()
        alike = (session._store.checksums() == session._store.checksums()[0]).all()
    begun = result.history.steps[0].step
    return told | {"sha256": result.sha256, "alike": bool(alike), "first step": begun}


class Unlike(Model):
    """A model that another process would make otherwise."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.gain.value = self.gain.value + jax.process_index() * 2.0**-20


def on_unlike_devices():
    """Processes that start from other bits and round the statistics in their own way."""
    _lower.are_unlike = lambda kinds: True
    usual, hand_on, handed = _updates.new_aux, Store.hand_on, []

    def rounded_otherwise(*arguments):
        found = usual(*arguments)
        return [x * np.float32(1 + jax.process_index() * 2.0**-20) for x in found]

    def watched(store):
        before = [np.array(x) for x in store.held[0].leaves()]
        hand_on(store)
        after = map(np.asarray, store.held[0].leaves())
        handed.append(any((a != b).any() for a, b in zip(before, after, strict=True)))

    _updates.new_aux, Store.hand_on = rounded_otherwise, watched
    told = trained("host", 1, model=Unlike)
    return told | {"handed": sum(handed)}


if __name__ == "__main__":
    folder, is_all = pathlib.Path(sys.argv[1]), sys.argv[2] == "all"
    told = {"device 1": trained("device", 1)}
    if is_all:
        for over, other in (("device", "host"), ("host", "device")):
            trained(over, 0, folder / over, steps=1)
            told[f"{other} 0"] = trained(other, 0, folder / over)
        told |= {"whole": trained("host", 0), "host 1": trained("host", 1)}
        told |= {"host 3": trained("host", 3), "device 3": trained("device", 3)}
    told["unlike"] = on_unlike_devices()
    print(f"RESULT {jax.process_index()} {json.dumps(told)}", flush=True)
