"""One of the processes of several pipelines whose stages sit in nodes: steps by several starts."""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import time

import paced_links

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=pathlib.Path, help="for plans")
parser.add_argument("--nodes", nargs="+", type=int, help="a process that is in each; none: stay")
parser.add_argument("--starts", type=json.loads, help="by name, seconds of each copy")
parser.add_argument("--microbatches", type=int, help="of a copy")
parser.add_argument("--rows", type=int, help="of a microbatch")
parser.add_argument("--width", type=int)
parser.add_argument("--layers", type=int, help="of a stage, all of the same weights")
parser.add_argument("--rounds", type=int)
parser.add_argument("--apart", type=int, help="rounds in which the starts of this name run too")
args = parser.parse_args()

RANK, NUM_STAGES = int(os.environ["HXLA_PROCESS_ID"]), 2
if args.nodes:
    paced_links.enter(args.nodes[RANK % NUM_STAGES])  # before anything listens or connects there

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import hxla  # noqa: E402

NUM_COPIES = int(os.environ["HXLA_NUM_PROCESSES"]) // NUM_STAGES


def layers(kernel, x):
    """Many layers of few parameters: what copies sum is little beside what stages send."""
    layer = lambda x, _: (x + 0.1 * jnp.tanh(x @ kernel), None)  # noqa: E731
    return jax.lax.scan(layer, x, None, length=args.layers)[0]


class Model(nnx.Module):
    """Two stages that compute the same."""

    def __init__(self, rngs: nnx.Rngs):
        width = args.width
        self.parts = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(NUM_STAGES)])

    def __call__(self, x):
        for part in self.parts:
            with hxla.stage():
                x = layers(part.kernel[...], x)
        return x.mean(axis=(1, 2))


def loss(model, batch):
    """Of each example."""
    return (model(batch["x"]) - batch["y"]) ** 2


def seconds_of(run):
    """A median, after a run that compiles."""
    jax.block_until_ready(run())
    found = []
    for _ in range(12):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def computing_seconds(x):
    """Of a stage's forward and backward of a microbatch on this device, and nothing else."""
    kernel = jnp.eye(args.width)
    forward = jax.jit(lambda kernel, x: jax.vjp(layers, kernel, x))
    backward = jax.jit(lambda pull, x: pull(x))
    _, pull = forward(kernel, x)
    return [seconds_of(lambda: forward(kernel, x)), seconds_of(lambda: backward(pull, x))]


def with_starts(plan, starts):
    """The same plan, by way of a file."""
    told = json.loads(plan.to_json())
    for replica, seconds in zip(told["replicas"], starts, strict=True):
        replica["start_seconds"] = seconds
    path = args.folder / f"plan-{RANK}.json"
    path.write_text(json.dumps(told))
    return hxla.Plan.read(path)


rng, num = np.random.default_rng(0), NUM_COPIES * args.microbatches
data = {
    "x": rng.normal(size=(num, args.rows, args.width)).astype(np.float32),
    "y": rng.normal(size=num).astype(np.float32),
}
job = hxla.Job(Model(nnx.Rngs(0)), data, loss, optax.sgd(1e-3), batch_size=num)
plan = job.plan(microbatch_size=1)
assert [list(own.devices) for own in plan.replicas] == [
    list(range(first, first + NUM_STAGES)) for first in range(0, NUM_COPIES * NUM_STAGES, 2)
]
seconds = {name: [] for name in args.starts}
with contextlib.ExitStack() as stack:
    sessions = {}
    for name, starts in args.starts.items():
        opened = job.open(with_starts(plan, starts), steps=args.rounds + 1)
        sessions[name] = stack.enter_context(opened)
        sessions[name].step()
    computing = computing_seconds(jnp.asarray(data["x"][:1]))
    for n in range(args.rounds):
        names = [name for name in sessions if n < args.apart or name != "apart"]
        for name in names[:: -1 if n % 2 else 1]:
            jax.block_until_ready(jax.live_arrays())
            begun = time.perf_counter()
            sessions[name].step()
            jax.block_until_ready(jax.live_arrays())
            seconds[name].append(time.perf_counter() - begun)
            if RANK == 0:
                print(f"{n} {name}: {seconds[name][-1]:.3f} s", flush=True)
    bits = {own.result().sha256 for name, own in sessions.items() if name != "apart"}
assert len(bits) == 1, bits
own = {"rank": RANK, "computing_seconds": computing, "seconds": seconds}
(args.folder / f"found-{RANK}.json").write_text(json.dumps(own))
