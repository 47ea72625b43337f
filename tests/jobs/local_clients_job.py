"""Run by `hxla run`: trains on the one device of each process that is to train.

What is told besides bits: whether these devices know their own process only.
"""

import json
import sys

import jax
import optax
from flax import nnx

import hxla
from support import zero_jobs


def job(over, zero):
    return hxla.Job(
        lambda: zero_jobs.Model(nnx.Rngs(0)),
        zero_jobs.data(),
        zero_jobs.loss,
        optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2)),
        batch_size=zero_jobs.BATCH,
        config={"communication": {"over": over}, "memory": {"zero": zero}},
    )


def trained(over, zero, folder=None, steps=zero_jobs.STEPS):
    own = job(over, zero)
    plan = own.plan(microbatch_size=2, counts="even")
    options = {} if folder is None else {"checkpoint_dir": folder}
    with own.open(plan.with_counts((7, 4, 1)), steps=steps, **options) as session:
        for _ in session:
            pass
        loss = session.evaluate(zero_jobs.data())
        result = session.result()
        [device] = session._store.held[0].params[0].devices()
    here = jax.local_devices(backend="cpu")[0].client
    return {
        "sha256": result.sha256,
        "loss": float(loss[0] if isinstance(loss, tuple) else loss.loss),
        "first step": result.history.steps[0].step,
        "apart": device.client is not here,
        "process": jax.process_index(),
        "measured": min(own.plan(microbatch_size=2).counts),
    }


if __name__ == "__main__":
    over, *folder = sys.argv[1:]
    told = {str(zero): trained(over, zero) for zero in (0, 1)}
    if folder:
        trained(over, 1, folder[0], steps=1)
        told["resumed"] = trained(over, 1, folder[0])
    print(f"RESULT {jax.process_index()} {json.dumps(told)}", flush=True)
