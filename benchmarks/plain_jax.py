"""hxla on two equal processes beside a hand-written plain-JAX loop, and exact beside float sums.

    hxla run --mesh cpu-1.0-1.0 benchmarks/plain_jax.py [--rounds 8]

The plain loop is `jax.jit` over a `data` mesh: parameters replicated, batch sharded, gradients
averaged by the partitioner; once with the whole local batch at a time and once with `lax.scan` over
the same microbatches. The four take turns, step by step, in the same processes.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT, library, loss  # noqa: E402

from hxla._lower._reduce import Reducer  # noqa: E402
from hxla._model._functional import functional  # noqa: E402
from hxla._run import _setup, _strategy  # noqa: E402
from hxla._run._step import Engine  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=8)
parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/plain_jax.json")
args = parser.parse_args()
BATCH, MICRO = 64, 2
M, D = BATCH // MICRO, jax.device_count()
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
text = library()["text"]
graphdef, params, rest = nnx.split(GPT(nnx.Rngs(0)), nnx.Param, ...)
mesh = jax.make_mesh((D,), ("data",), axis_types=(AxisType.Auto,))
sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())


def plain(scan):
    def mean(p, t):
        return loss(nnx.merge(graphdef, p, rest), {"text": t})

    def step(p, s, t):
        if scan:
            parts = t.reshape(D, M // D, MICRO, -1).swapaxes(0, 1).reshape(M // D, D * MICRO, -1)
            zero = jax.tree.map(jnp.zeros_like, p)
            add = lambda acc, part: (jax.tree.map(jnp.add, acc, jax.grad(mean)(p, part)), None)  # noqa: E731
            grads, _ = jax.lax.scan(add, zero, parts)
            grads = jax.tree.map(lambda g: g / (M // D), grads)
        else:
            grads = jax.grad(mean)(p, t)
        updates, s = optimizer.update(grads, s, p)
        return optax.apply_updates(p, updates), s

    run = jax.jit(step, donate_argnums=(0, 1), out_shardings=(replicated, replicated))
    host = jax.tree.map(np.asarray, params)
    p = jax.device_put(host, replicated)
    state = [p, jax.jit(optimizer.init, out_shardings=replicated)(p)]

    def once(n):
        local = text[n * BATCH : (n + 1) * BATCH]
        own = local[jax.process_index() * BATCH // D :][: BATCH // D]
        t = jax.make_array_from_process_local_data(sharded, own, local.shape)
        state[:] = run(*state, t)
        jax.block_until_ready(state)

    return once


def ours(reduction):
    first = {"text": text[:MICRO]}
    model = functional(GPT(nnx.Rngs(0)), loss, loss, variables=None, seed=0, example=first)
    reducer = Reducer(_strategy.replicated(jax.devices()).replicas)
    engine = Engine(
        model,
        optimizer,
        reducer,
        batch=first,
        num_microbatches=M,
        microbatch_size=MICRO,
        seed=0,
        reduction=reduction,
    )
    engine.calibrate(first, repeats=0)
    ids = _setup.own_ids((M // D,) * D, reducer)

    def once(n):
        at = lambda i: n * BATCH + i * MICRO  # noqa: E731
        batches = [[{"text": text[at(i) : at(i) + MICRO]} for i in own] for own in ids]
        engine.update(engine.accumulate(n, ids, batches))
        jax.block_until_ready(jax.tree.leaves(engine.params))

    return once


runs = {
    "hxla exact": ours("exact"),
    "hxla float": ours("float"),
    "plain JAX, whole batch": plain(scan=False),
    "plain JAX, scan over microbatches": plain(scan=True),
}
seconds = {name: [] for name in runs}
for n in range(args.rounds + 1):
    for name, once in runs.items():
        begun = time.perf_counter()
        once(n)
        seconds[name].append(time.perf_counter() - begun)
if jax.process_index() == 0:
    median = {name: round(statistics.median(s[1:]), 4) for name, s in seconds.items()}
    best = min(v for k, v in median.items() if k.startswith("plain"))
    rows = {
        "seconds_per_step": median,
        "hxla exact over the faster plain loop": round(best / median["hxla exact"], 3),
        "cost of exact over float": round(median["hxla exact"] / median["hxla float"] - 1, 4),
    }
    print(json.dumps(rows, indent=2))
    args.out.write_text(json.dumps(rows, indent=2) + "\n")
