"""Trains the model of examples/gpt.py in turns of a step as a good user of plain JAX shards it.

Parameters and optimizer state are cut over all devices, layers are one scan with `nnx.remat`, XLA
gathers a layer's parameters where they are read, and microbatches are a scan that adds gradients.
`fsdp.py` starts it.
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import gpt  # noqa: E402
from plain import summed  # noqa: E402
from scanned_gpt import ScannedGPT  # noqa: E402
from turns import take_turn  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the turns")
parser.add_argument("--turns", type=int, required=True, help="steps after the first one")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--microbatch-size", type=int, default=2, help="of a device")
args = parser.parse_args()


num = jax.device_count()
mesh = jax.make_mesh((num,), ("data",), axis_types=(AxisType.Auto,))
graphdef, params, others = nnx.split(ScannedGPT(nnx.Rngs(0), remat=True), nnx.Param, ...)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))


def sharding(x: jax.Array) -> NamedSharding:
    """Over its last dimension that divides: the first of a stack is that of the layers."""
    dims = [d for d in range(x.ndim) if x.shape[d] % num == 0 and x.shape[d] >= num]
    spec = P(*[None] * dims[-1], "data") if dims else P()
    return NamedSharding(mesh, spec)


def mean_loss(params: nnx.State, text: jax.Array) -> jax.Array:
    """Of one microbatch on all devices."""
    return gpt.loss(nnx.merge(graphdef, params, jax.tree.map(lambda x: x, others)), {"text": text})


like = jax.tree.map(sharding, params)
state_like = jax.tree.map(sharding, jax.eval_shape(optimizer.init, params))


def step(params, state, batch):
    """All microbatches, and an update."""
    size = args.microbatch_size * num
    parts = batch.reshape(size, -1, *batch.shape[1:]).swapaxes(0, 1)
    cut = NamedSharding(mesh, P(None, "data"))
    parts = jax.lax.with_sharding_constraint(parts, cut)

    def gradient(params, part):
        loss, grads = jax.value_and_grad(mean_loss)(params, part)
        return loss, jax.lax.with_sharding_constraint(grads, like)

    loss, grads = summed(gradient, params, parts)
    grads = jax.tree.map(lambda g: g / parts.shape[0], grads)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss / parts.shape[0]


placed = jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), params, like)
held = [placed, jax.jit(optimizer.init, out_shardings=state_like)(placed)]
text = np.random.default_rng(0).permutation(gpt.library()["text"])
share = args.batch_size // jax.process_count()
rows = NamedSharding(mesh, P("data"))


def batch_of(n: int) -> jax.Array:
    """This process's examples of a step."""
    start = n * args.batch_size + jax.process_index() * share
    own = text[start : start + share]
    return jax.make_array_from_process_local_data(rows, own)


run = (
    jax.jit(step, donate_argnums=(0, 1), out_shardings=(like, state_like, None))
    .lower(*held, batch_of(0))
    .compile()
)
memory = run.memory_analysis()
losses = []
for n in range(args.turns + 1):
    *held, loss = run(*held, batch_of(n))
    losses.append(round(float(loss), 4))
    jax.block_until_ready(held)
    take_turn(args.folder, jax.process_index())
if jax.process_index() == 0:
    told = {
        "losses": losses,
        "memory_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    }
    print("RESULT " + json.dumps(told))
