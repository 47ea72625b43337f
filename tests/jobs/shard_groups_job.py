"""Run by `hxla run` with four processes: a job with state shared out by all, and in groups."""

import functools
import json

import jax
import optax

from support.blocks import Layers, job

FORMS = {
    "by all": {"zero": 1, "recompute": "none", "shares": [1, 2, 3, 1]},
    "in groups": {"zero": 3, "recompute": "boundaries", "shard_groups": 2, "shares": [1, 2]},
}


def trained(memory):
    config = {"memory": memory, "communication": {"clip_norm": 0.3}}
    own = job(functools.partial(Layers, num=1), config, optax.adamw(1e-2))
    plan = own.plan(microbatch_size=1, counts="even").with_counts((3, 0, 4, 1))
    with own.open(plan, steps=2) as session:
        for _ in session:
            pass
        return {"sha256": session.result().sha256, "numerics": plan.numerics}


if __name__ == "__main__":
    told = {name: trained(memory) for name, memory in FORMS.items()}
    print(f"RESULT {jax.process_index()} {json.dumps(told)}", flush=True)
