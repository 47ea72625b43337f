"""What hxla's loop over microbatches costs where a microbatch itself is almost no work.

    python benchmarks/dispatch.py [--rounds 30] [--microbatches 512]

A model of 3,201 parameters on one CPU device. A step of hxla with M microbatches, until its update
is done, over M; less what plain JAX takes for the bare program of a microbatch, compiled ahead and
called M times back to back with batches that lie on the device: loss and gradients, added to
float32 sums that are donated. What is left is hxla's own: handing over a microbatch's batch and
program, the scales and peaks of exact sums, and the step's fixed part, which a second session with
four times as many microbatches tells apart.

For comparison, plain JAX with a `lax.scan` over the same microbatches, dispatched once a step, and
hxla with calls of 32 microbatches (`cluster.microbatches_per_call`). All take turns of a step. The
same again in seconds of the processor that the thread spent which hands out the work: these the
rest of the machine disturbs little, but they leave out what other threads do. Last, where that
thread's time goes, by cProfile, which makes Python's part of it look larger than it is. Writes
benchmarks/results/dispatch.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import cProfile
import pathlib
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain
import results
import turns
from flax import nnx

import hxla

WIDTH, HIDDEN, SIZE = 16, 64, 2  # SIZE: examples of a microbatch
PER_CALL = 32
MORE = 4  # times as many microbatches in the second session
OPTIMIZER = optax.sgd(1e-3)


class Net(nnx.Module):
    """Two hidden layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, HIDDEN // 2, rngs=rngs)
        self.last = nnx.Linear(HIDDEN // 2, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))[:, 0]


def loss(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def examples(num: int) -> dict[str, np.ndarray]:
    """Noise."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num, WIDTH)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


def ours(num: int, reduction: str, per_call: int = 1) -> Callable[[], object]:
    """A step of hxla with so many microbatches."""
    data, config = examples(num * SIZE), {"cluster": {"microbatches_per_call": per_call}}
    model = Net(nnx.Rngs(0))
    job = hxla.Job(
        model, data, loss, OPTIMIZER, batch_size=num * SIZE, shuffle=False, config=config
    )
    session = job.open(job.plan(mesh={"data": 1}, microbatch_size=SIZE, reduction=reduction))

    def step() -> None:
        session.step()
        jax.block_until_ready(session.state.params)

    return step


def bare(num: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Plain JAX's sums of so many microbatches: called one by one, and as one loop."""
    graphdef, state = nnx.split(Net(nnx.Rngs(0)))
    params, treedef = jax.tree.flatten(state)  # a call with a flat list is a third faster

    def mean_loss(params: list[jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return loss(nnx.merge(graphdef, jax.tree.unflatten(treedef, params)), batch)

    gradient = jax.value_and_grad(mean_loss)
    parts = jax.tree.map(lambda x: x.reshape(num, SIZE, *x.shape[1:]), examples(num * SIZE))
    batches = [jax.device_put(jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(num)]

    def add(sums: list[jax.Array], params: list[jax.Array], batch: Any) -> list[jax.Array]:
        value, grads = gradient(params, batch)
        return [a + b for a, b in zip(sums, [value, *grads], strict=True)]

    zeros = jax.jit(lambda: [jnp.zeros(()), *map(jnp.zeros_like, params)])
    called = jax.jit(add, donate_argnums=0).lower(zeros(), params, batches[0]).compile()
    looped = jax.jit(lambda params, parts: plain.summed(gradient, params, parts))
    placed = jax.device_put(parts)

    def one_by_one() -> None:
        sums = zeros()
        for batch in batches:
            sums = called(sums, params, batch)
        jax.block_until_ready(sums)

    return one_by_one, lambda: jax.block_until_ready(looped(params, placed))


def profiled(step: Callable[[], object], num: int, rounds: int) -> list[dict[str, Any]]:
    """The functions in which this thread spends most of a step, in microseconds a microbatch."""
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for _ in range(rounds):
        step()
    profile.disable()
    each = 1e6 / (rounds * num)
    found = [
        {
            "function": f"{'/'.join(pathlib.Path(file).parts[-3:])}:{line} {name}",
            "own": round(own * each, 2),
            "with what it calls": round(whole * each, 2),
        }
        for (file, line, name), (_, _, own, whole, _) in pstats.Stats(profile).stats.items()
    ]
    return sorted(found, key=lambda row: -row["own"])[:12]


def main() -> None:
    """Microseconds of a microbatch."""
    parser = results.parser(__doc__, "dispatch")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=512)
    args = parser.parse_args()
    num = args.microbatches
    called, looped = bare(num)
    runs = {"bare program": called, "one scan": looped}
    for reduction in ("exact", "float"):
        runs[reduction] = ours(num, reduction)
        runs[f"{reduction}, more"] = ours(num * MORE, reduction)
        runs[f"{reduction}, in calls"] = ours(num, reduction, PER_CALL)
    seconds = turns.seconds_in_turns(runs, args.rounds)

    def microseconds(own: list[float], num: int) -> float:
        return round(statistics.median(own) / num * 1e6, 2)

    device = [s / num for s in seconds["bare program"]]
    rows = {
        "bare program, called back to back": microseconds(seconds["bare program"], num),
        "one scan over all": microseconds(seconds["one scan"], num),
    }
    for reduction in ("exact", "float"):
        less, more = seconds[reduction], seconds[f"{reduction}, more"]
        each = [(b - a) / ((MORE - 1) * num) for a, b in zip(less, more, strict=True)]
        rows |= {
            f"step of hxla over its microbatches, {reduction} sums": microseconds(less, num),
            f"the same in calls of {PER_CALL}, {reduction} sums": microseconds(
                seconds[f"{reduction}, in calls"], num
            ),
            f"overhead of a microbatch, {reduction} sums": microseconds(
                [s / num - d for s, d in zip(less, device, strict=True)], 1
            ),
            f"overhead without the step's fixed part, {reduction} sums": microseconds(
                [s - d for s, d in zip(each, device, strict=True)], 1
            ),
            f"fixed part of a step, {reduction} sums": microseconds(
                [a - s * num for a, s in zip(less, each, strict=True)], 1
            ),
        }
    few = {name: runs[name] for name in ("bare program", "exact", "float")}
    spent = turns.seconds_in_turns(few, args.rounds, clock=time.thread_time)
    params = nnx.state(Net(nnx.Rngs(0)))
    result = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "microbatches": num,
        "microseconds": rows,
        "microseconds of the thread's processor time": {
            name: microseconds(own, num) for name, own in spent.items()
        },
        "where an exact step spends them": profiled(runs["exact"], num, min(args.rounds, 10)),
        "step_seconds": turns.medians(seconds),
    }
    results.write(args.out, result)


if __name__ == "__main__":
    main()
