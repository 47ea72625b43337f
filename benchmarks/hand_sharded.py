"""Rules for data x tensor parallelism beside the same model sharded by hand in plain JAX.

    python benchmarks/hand_sharded.py [--rounds 6]

Eight fake devices on this machine's cores: only the ratio means anything. The plain step is one
`jax.jit` over the same mesh, with Megatron's PartitionSpecs written out and constraints on the
activations between heads and MLP; both bring the loss to the host in every step, and both keep
their heap pages, as `hxla run` sets it. hxla also looks for gradients that are not finite, in every
tensor, which the plain step does not.

Each runs with one microbatch per copy and step, and with as many as `hxla.train` chooses when it is
given no microbatch size (it measures some). The step that a user gets is that of hxla's own choice;
beside it stands the faster of the plain ones, which a user by hand would take.

All take turns of three steps, of which the first is not counted: it finds the caches full of
another program. Every second round of turns goes backwards. A ratio is the median over the rounds
of by hand's turn over ours in the same round: of wall-clock seconds, and of the CPU seconds that
the process used, which other work on the machine disturbs less. Also the time that tracing and
choosing patterns adds to compilation. Writes benchmarks/results/hand_sharded.json.
"""

import os
import sys

from hxla._launch._launcher import _KEEP_MEMORY

if not _KEEP_MEMORY.items() <= os.environ.items():  # read by malloc when a process starts
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _KEEP_MEMORY)
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hxla
from hxla._graph._trace import trace_functional
from hxla._lower._reduce import Reducer
from hxla._model._functional import functional, leaf_names
from hxla._run import _setup, _strategy
from hxla._run._step import Engine

ROOT = pathlib.Path(__file__).parent.parent
DATA, TENSOR, BATCH, LENGTH, WIDTH, HEADS, LAYERS, VOCABULARY = 2, 4, 32, 128, 256, 8, 4, 512
STEPS = 3
_ORDER = ("hxla exact", "by hand", "hxla float")
parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=6)
parser.add_argument(
    "--out", type=pathlib.Path, default=ROOT / "benchmarks/results/hand_sharded.json"
)
args = parser.parse_args()
mesh = jax.make_mesh((DATA, TENSOR), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec))) if by_hand else x


class Block(nnx.Module):
    def __init__(self, rngs):
        dense = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs)  # noqa: E731
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.query, self.key, self.value = (dense(WIDTH, WIDTH) for _ in range(3))
        self.attention = nnx.Dict(out=dense(WIDTH, WIDTH))
        self.up, self.down = dense(WIDTH, 4 * WIDTH), dense(4 * WIDTH, WIDTH)

    def __call__(self, x):
        B, T, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            constrain(f(y).reshape(B, T, HEADS, -1), "data", None, "tensor")
            for f in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, WIDTH)
        x = x + constrain(self.attention["out"](mixed), "data")
        hidden = constrain(jax.nn.gelu(self.up(self.norm2(x))), "data", None, "tensor")
        return x + constrain(self.down(hidden), "data")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.tok = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def batch_of(step):
    rng = np.random.default_rng(step)
    return {"tokens": rng.integers(0, VOCABULARY, (BATCH, LENGTH + 1)).astype(np.int32)}


optimizer = optax.adamw(1e-3)


def plain(num_cuts):
    """By hand: the specs that the rule set `decoder` gives, written out; gradients accumulated."""
    graphdef, params = nnx.split(Net(nnx.Rngs(0)))
    column, row = ("query", "key", "value", "up", "head"), ("out", "down", "tok")

    def spec(name):
        parts = name.split("/")
        if any(n in column for n in parts):
            return P(None, "tensor")
        return P("tensor") if any(n in row for n in parts) else P()

    named = jax.tree.unflatten(
        jax.tree.structure(params), [NamedSharding(mesh, spec(n)) for n in leaf_names(params)]
    )
    params = jax.device_put(params, named)
    state = optimizer.init(params)

    def step(params, state, tokens):
        def loss_of(p, part):
            return loss(nnx.merge(graphdef, p), {"tokens": part})

        parts = tokens.reshape(-1, num_cuts, LENGTH + 1)  # a part has examples of every device
        value, grads = jax.value_and_grad(loss_of)(params, parts[:, 0])
        for i in range(1, num_cuts):
            more, own = jax.value_and_grad(loss_of)(params, parts[:, i])
            value, grads = value + more, jax.tree.map(jnp.add, grads, own)
        value, grads = jax.tree.map(lambda x: x / num_cuts, (value, grads))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    run = jax.jit(step, donate_argnums=(0, 1), out_shardings=(named, None, None))
    held = [params, state]

    def once(n):
        tokens = jax.device_put(batch_of(n)["tokens"], NamedSharding(mesh, P("data")))
        *held[:], value = run(*held, tokens)
        jax.block_until_ready(held)
        return float(value)

    return once


def ours(reduction, num_cuts, times):
    def first_batch(size):
        return {"tokens": batch_of(0)["tokens"][:size]}

    first = first_batch(1)
    model = functional(Net(nnx.Rngs(0)), loss, loss, variables=None, seed=0, example=first)
    begun = time.perf_counter()
    strategy = _strategy.from_mesh(trace_functional(model, first), mesh, hxla.load_rules("decoder"))
    times["tracing and planning"] = time.perf_counter() - begun

    def shard(*arguments):
        begun = time.perf_counter()
        sharded = strategy.shard(*arguments)
        times["tracing and planning"] += time.perf_counter() - begun
        return sharded

    reducer = Reducer(strategy.replicas)
    begun = time.perf_counter()
    found = _setup.choose(
        lambda size: Engine(
            model,
            optimizer,
            reducer,
            batch=first_batch(size),
            num_microbatches=BATCH // size,
            microbatch_size=size,
            seed=0,
            reduction=reduction,
            shard=shard,
        ),
        first_batch,
        reducer,
        batch_size=BATCH,
        microbatch_size=num_cuts and BATCH // DATA // num_cuts,
        measure=num_cuts is None,
    )
    engine, size = found.engine, found.microbatch_size
    times["all of it, compilation included"] = time.perf_counter() - begun
    num_cuts = BATCH // DATA // size
    ids = _setup.own_ids((num_cuts,) * DATA, reducer)

    def once(n):
        tokens = batch_of(n)["tokens"]
        batches = [[{"tokens": tokens[i * size : (i + 1) * size]} for i in own] for own in ids]
        outcome = engine.accumulate(n, ids, batches)
        engine.update(outcome)
        jax.block_until_ready(jax.tree.leaves(engine.params))
        return outcome.loss

    return num_cuts, once


by_hand = False
exact_times = {}
CUTS, own_choice = ours("exact", None, {})
own = {
    "hxla exact, 1": ours("exact", 1, exact_times)[1],
    "hxla float, 1": ours("float", 1, {})[1],
    f"hxla exact, {CUTS}": own_choice,
    f"hxla float, {CUTS}": ours("float", CUTS, {})[1],
}
by_hand = True  # the others are traced already
own |= {"by hand, 1": plain(1), f"by hand, {CUTS}": plain(CUTS)}
# What is compared runs side by side: the machine's speed drifts.
runs = {f"{who}, {n}": own[f"{who}, {n}"] for n in (1, CUTS) for who in _ORDER}
seconds = {name: [] for name in runs}
cpu_seconds = {name: [] for name in runs}
losses = {name: [] for name in runs}
for turn in range(args.rounds):
    for name in list(runs)[:: -1 if turn % 2 else 1]:
        for n in range(turn * STEPS, (turn + 1) * STEPS):
            if n % STEPS == 1:
                begun, begun_cpu = time.perf_counter(), time.process_time()
            losses[name].append(runs[name](n))
        seconds[name].append((time.perf_counter() - begun) / (STEPS - 1))
        cpu_seconds[name].append((time.process_time() - begun_cpu) / (STEPS - 1))


def medians(times):
    return {name: round(statistics.median(s), 4) for name, s in times.items()}


def speed(times, name, other):
    """How many times as fast as another."""
    pairs = zip(times[other], times[name], strict=True)
    return round(statistics.median(hand / own for hand, own in pairs), 3)


planning = exact_times["tracing and planning"]
compiling = exact_times["all of it, compilation included"] - planning
rows = {
    "mesh": {"data": DATA, "tensor": TENSOR},
    "seconds_per_step": medians(seconds),
    "cpu_seconds_per_step": medians(cpu_seconds),
    "last_losses": {name: round(values[-1], 4) for name, values in losses.items()},
    "microbatches that hxla chooses": CUTS,
    **{
        f"hxla {r}, {n} over by hand, {m}{what}": speed(t, f"hxla {r}, {n}", f"by hand, {m}")
        for what, t in (("", seconds), (", CPU seconds", cpu_seconds))
        for r in ("exact", "float")
        for n, m in ((CUTS, 1), (CUTS, CUTS), (1, 1))
    },
    "tracing_and_planning_seconds": round(planning, 3),
    "compilation_seconds": round(compiling, 3),
    "tracing and planning over compilation": round(planning / compiling, 4),
}
print(json.dumps(rows, indent=2))
args.out.write_text(json.dumps(rows, indent=2) + "\n")
