"""A step of a tiny model beside plain JAX's one program: what is not the model's work.

    python benchmarks/tiny.py [--rounds 60] [--microbatches 32]

2,762 parameters, microbatches of 4 examples, Adam, on one CPU device. Plain JAX has one program
with a `lax.scan` over the microbatches and the update, called with batches in host memory. A step
of hxla is `Session.step` with exact sums as its plan has it, and with a call for each microbatch.
All take turns of ten steps, until the last update is done. In seconds of the wall and of the
processor, which the rest of the machine disturbs less. Writes benchmarks/results/tiny.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import plain
import results
import turns
from flax import nnx

import hxla

SIZE = 4  # examples of a microbatch
STEPS = 10  # of a turn
OPTIMIZER = optax.adam(1e-5)
PLAIN, EXACT, CALLS = "one program", "exact", "exact, a call for each microbatch"


class Net(nnx.Module):
    """One hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def loss(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared errors."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


def examples(num: int) -> dict[str, np.ndarray]:
    """Noise."""
    rng = np.random.default_rng(0)
    sizes = {"x": 32, "y": 10}
    return {k: rng.standard_normal((num, n)).astype(np.float32) for k, n in sizes.items()}


def ours(num: int, per_call: int | str) -> Callable[[], object]:
    """Steps of hxla with so many microbatches."""
    config = {"cluster": {"microbatches_per_call": per_call}}
    model, data = Net(nnx.Rngs(0)), examples(num * SIZE)
    job = hxla.Job(
        model, data, loss, OPTIMIZER, batch_size=num * SIZE, shuffle=False, config=config
    )
    session = job.open(job.plan(mesh={"data": 1}, microbatch_size=SIZE))

    def steps() -> float:
        for _ in range(STEPS):
            record = session.step()
        jax.block_until_ready(session.state.params)
        return record.loss

    return steps


def by_hand(num: int) -> Callable[[], object]:
    """Steps of plain JAX."""
    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return loss(nnx.merge(graphdef, params, rest), batch).mean()

    @jax.jit
    def step(params: Any, state: Any, parts: Any) -> Any:
        total, grads = plain.summed(jax.value_and_grad(mean_loss), params, parts)
        updates, state = OPTIMIZER.update(jax.tree.map(lambda x: x / num, grads), state, params)
        return total / num, optax.apply_updates(params, updates), state

    parts = jax.tree.map(lambda x: x.reshape(num, SIZE, -1), examples(num * SIZE))
    kept = [params, OPTIMIZER.init(params)]

    def steps() -> float:
        for _ in range(STEPS):
            value, *kept[:] = step(*kept, parts)
        jax.block_until_ready(kept)
        return float(value)

    return steps


def main() -> None:
    """Milliseconds of a step, and how many of plain JAX's."""
    parser = results.parser(__doc__, "tiny")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=32)
    args = parser.parse_args()
    num = args.microbatches
    runs = {PLAIN: by_hand(num), EXACT: ours(num, "auto"), CALLS: ours(num, 1)}
    result: dict[str, Any] = {"microbatches": num}
    for name, clock in {"": time.perf_counter, " of the processor": time.process_time}.items():
        seconds = turns.seconds_in_turns(runs, args.rounds, tolerance=1e-3, clock=clock)
        medians = turns.medians(seconds).items()
        result[f"step_seconds{name}"] = {k: float(f"{s / STEPS:.4g}") for k, s in medians}
        result[f"ratios{name}"] = {
            f"{own} / {PLAIN}": turns.over(seconds[own], seconds[PLAIN]) for own in (EXACT, CALLS)
        }
    results.write(args.out, result)


if __name__ == "__main__":
    main()
