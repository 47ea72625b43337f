"""A step of a model with a large vocabulary, of which a batch reads few words, beside plain JAX.

    python benchmarks/vocabulary.py [--rounds 10] [--height 200000]

An embedding of 200,000 words of 16 numbers, a batch of 16 examples of 8 words in microbatches of 4,
one device, AdamW. Plain JAX is one jitted step of the whole batch that donates its state. Both run
in one process in turns, so each round's ratio is of like conditions. `seconds` are those of the
clock, `cpu_seconds` those of all threads of the process: on a machine that does other work besides
they are the steadier ones. Writes benchmarks/results/vocabulary.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
import turns
from flax import nnx

import hxla

WIDTH, BATCH_SIZE, MICROBATCH_SIZE, NUM_STEPS = 16, 16, 4, 10
OPTIMIZER = optax.adamw(1e-3)


class Words(nnx.Module):
    """The mean of its words' rows, and a linear layer."""

    def __init__(self, height: int):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(height, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """A number for each text, float32[examples]."""
        return self.out(self.embed(text).mean(1))[:, 0]


def loss(model: Words, batch: Any) -> jax.Array:
    """Squared errors."""
    return jnp.mean((model(batch["text"]) - batch["y"]) ** 2)


class Plain:
    """Plain JAX, as a good user writes it."""

    def __init__(self, model: Words, batch: Any):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def step(params: Any, state: Any, batch: Any) -> Any:
            def of(params: Any) -> jax.Array:
                return loss(nnx.merge(graphdef, params, rest), batch)

            value, grads = jax.value_and_grad(of)(params)
            updates, state = OPTIMIZER.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self._params = jax.tree.map(jnp.array, params)  # its own: hxla reads the model's
        self._state, self._batch = jax.jit(OPTIMIZER.init)(self._params), batch
        self._step = jax.jit(step, donate_argnums=(0, 1))

    def step(self) -> float:
        """One step, done."""
        self._params, self._state, value = self._step(self._params, self._state, self._batch)
        jax.block_until_ready((self._params, self._state))
        return float(value)


def main() -> None:
    """Both in turns."""
    parser = results.parser(__doc__, "vocabulary")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--height", type=int, default=200_000, help="words of the vocabulary")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    data = {
        "text": rng.integers(0, args.height, (BATCH_SIZE, 8)).astype(np.int32),
        "y": rng.normal(size=BATCH_SIZE).astype(np.float32),
    }
    model = Words(args.height)
    plain = Plain(model, data)
    job = hxla.Job(model, data, loss, OPTIMIZER, batch_size=BATCH_SIZE, shuffle=False)
    plan = job.plan(microbatch_size=MICROBATCH_SIZE)
    spent: dict[str, dict[str, list[float]]] = {}
    with job.open(plan, steps=(args.rounds + 1) * NUM_STEPS) as session:
        steps = {"plain JAX": plain.step, "hxla": lambda: session.step().loss}
        for n in range(-1, args.rounds):  # the first turn of each warms up
            losses = {}
            for name in list(steps)[:: -1 if n % 2 else 1]:
                began, cpu = time.perf_counter(), time.process_time()
                for _ in range(NUM_STEPS):
                    losses[name] = steps[name]()
                taken = time.perf_counter() - began, time.process_time() - cpu
                for what, seconds in zip(("seconds", "cpu_seconds"), taken, strict=True):
                    if n >= 0:
                        own = spent.setdefault(what, {}).setdefault(name, [])
                        own.append(seconds / NUM_STEPS)
            turns.check_alike(losses, 1e-3)
    ratios = {
        what: {"hxla / plain JAX": turns.over(own["hxla"], own["plain JAX"])}
        for what, own in spent.items()
    }
    rows = {what: turns.medians(own) for what, own in spent.items()}
    results.write(args.out, {"height": args.height, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
