"""One contender of gpt_speed.py or sums.py: hxla, or plain Flax under `jax.jit`, on the same GPT.

    python gpt_run.py {hxla-exact,hxla-float,plain} --size 124m --turns F --rounds N --out FILE

The arithmetic is the same: parameters in float32, cast to bfloat16 for the model, logits in
float32. The plain loop is a good user's: donated state, one program, gradients of microbatches
added up by `lax.scan`.
"""

import argparse
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "examples")]

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from turns import take_turn

import hxla

# Vocabulary, positions, width, heads, layers; sequences of a microbatch, microbatches.
SIZES = {
    "124m": (50304, 1024, 768, 12, 12, 8, 8),
    "30m": (50304, 512, 384, 6, 6, 16, 8),
    "tiny": (64, 16, 32, 2, 1, 2, 2),
}
parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["hxla-exact", "hxla-float", "plain"])
parser.add_argument("--size", choices=SIZES, required=True)
parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
parser.add_argument("--turns", required=True)
parser.add_argument("--rounds", type=int, required=True)
parser.add_argument("--steps", type=int, default=4, help="of a turn")
parser.add_argument("--out", type=pathlib.Path, required=True)
args = parser.parse_args()
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, MICRO, M = SIZES[args.size]
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
# As words are: few of them often. 512 sequences; steps go round.
ranks = np.random.default_rng(0).zipf(1.1, (512, LENGTH + 1))
text = (ranks % min(VOCABULARY, 50257)).astype(np.int32)


def make():
    sizes = {"vocabulary": VOCABULARY, "length": LENGTH, "width": WIDTH, "heads": HEADS}
    return gpt.GPT(nnx.Rngs(0), **sizes, layers=LAYERS)


def loss(model, batch):
    graphdef, state = nnx.split(model)
    cast = lambda x: x.astype(args.dtype) if x.dtype == jnp.float32 else x  # noqa: E731
    text_BT = batch["text"]
    logits_BTV = nnx.merge(graphdef, jax.tree.map(cast, state))(text_BT[:, :-1])
    labels_BT = text_BT[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV.astype(jnp.float32), labels_BT
    ).mean()


def batch(n):
    rows = np.arange(n * M * MICRO, (n + 1) * M * MICRO) % len(text)
    return {"text": text[rows]}


def ours(reduction):
    """A step, and what to wait for."""
    job = hxla.Job(make(), {"text": text}, loss, optimizer, batch_size=M * MICRO)
    session = job.open(job.plan(microbatch_size=MICRO, reduction=reduction))

    def step(n):
        return session.step(batch(n)).loss

    return step, lambda: jax.block_until_ready(jax.tree.leaves(session.state.params))


def plain():
    """A step, and what to wait for."""
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
    state = [params, optimizer.init(params)]

    def value(params, text_BT):
        return loss(nnx.merge(graphdef, params, rest), {"text": text_BT})

    def run(params, opt_state, text_BT):
        def add(total, part_BT):
            found, grads = jax.value_and_grad(value)(params, part_BT)
            return jax.tree.map(jnp.add, total, (found, grads)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, text_BT.reshape(M, MICRO, -1))
        found, grads = jax.tree.map(lambda x: x / M, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return found, optax.apply_updates(params, updates), opt_state

    compiled = jax.jit(run, donate_argnums=(0, 1))
    last = []

    def step(n):
        last[:] = [float(x) for x in last]  # the loss of the step before, as one prints it
        found, *state[:] = compiled(*state, batch(n)["text"])
        last.append(found)
        return found

    return step, lambda: jax.block_until_ready(state)


def main():
    begun = time.perf_counter()
    step, wait = plain() if args.kind == "plain" else ours(args.kind.removeprefix("hxla-"))
    losses = [float(step(0))]
    wait()
    ready = time.perf_counter() - begun
    seconds = []
    for turn in range(args.rounds):
        take_turn(args.turns, 0)
        begun = time.perf_counter()
        for n in range(args.steps):
            found = step(1 + turn * args.steps + n)
        wait()
        seconds.append((time.perf_counter() - begun) / args.steps)
        losses.append(float(found))
    stats = jax.devices()[0].memory_stats() or {}
    told = {
        "seconds_per_step": seconds,
        "tokens_per_step": M * MICRO * LENGTH,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "seconds_to_first_step": ready,
        "losses": losses,
    }
    args.out.write_text(json.dumps(told))


main()
