"""How long a job takes until its first step is done, beside a jitted step of plain JAX.

    python benchmarks/startup.py [--rounds 5] [--leaves 1000]

A GPT of 36,000 parameters, a batch of 16 sequences, exact sums: plain JAX on one device, and hxla
on one, two, four and eight devices of one process, with a microbatch of 2. With `--leaves N` the
model is a chain of N scales of four numbers, on one device. Each is a process of its own, they take
turns, and JAX's compilation cache is off. The clock runs from when everything is
imported and the model is made until the loss of the first step is known: tracing, planning,
compilation, the first state, warming up, a step.

`seconds` are those of the clock, `cpu_seconds` those of all threads of the process: on a machine
that does other work besides they are the steadier ones. `import_cpu_seconds` are spent before, on
hxla's modules, which `import hxla` leaves to the first use. `silence_seconds` is the longest time
without a line on standard output. Writes benchmarks/results/startup.json, with `--leaves`
benchmarks/results/startup_leaves.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
import turns
from flax import nnx

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import gpt  # noqa: E402

import hxla  # noqa: E402

LENGTH, BATCH_SIZE, MICROBATCH_SIZE = 96, 16, 2
OPTIMIZER = optax.adamw(1e-3)
PLAIN = "plain JAX, 1 device"
COUNTS = {"hxla, 1 device": 1} | {f"hxla, {n} devices": n for n in (2, 4, 8)}
RATIOS = [
    ("hxla, 1 device", PLAIN),
    *((name, "hxla, 1 device") for name, n in COUNTS.items() if n > 1),
]
BEGIN, END = "begin", "end "


class Scales(nnx.Module):
    """One scale of four numbers after another."""

    def __init__(self, num: int):
        self.scales = nnx.List([nnx.Param(jnp.full(4, 1 + n / num)) for n in range(num)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Numbers of the same shape."""
        for scale in self.scales:
            x = jnp.sin(x * scale)
        return x


def squares(model: Scales, batch: Any) -> jax.Array:
    """Mean square of what comes out."""
    return jnp.mean(model(batch["x"]) ** 2)


def subject(leaves: int) -> tuple[Any, dict[str, np.ndarray], Any]:
    """Model, a batch and loss: a GPT, or so many leaves."""
    if leaves:
        x = np.random.default_rng(0).normal(size=(BATCH_SIZE, 4)).astype(np.float32)
        return Scales(leaves), {"x": x}, squares
    data = {"text": gpt.library(LENGTH)["text"][:BATCH_SIZE]}
    return gpt.GPT(nnx.Rngs(0), length=LENGTH, width=32, layers=2), data, gpt.loss


def by_hand(model: nnx.Module, data: dict[str, np.ndarray], loss_of: Any) -> float:
    """The loss of the first step of plain JAX."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            return loss_of(nnx.merge(graphdef, params, rest), batch)

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jax.jit(OPTIMIZER.init)(params)
    *_, loss = jax.jit(step, donate_argnums=(0, 1))(params, state, data)
    return float(loss)


def ours(model: nnx.Module, data: dict[str, np.ndarray], loss_of: Any) -> float:
    """The loss of the first step of hxla on all devices."""
    job = hxla.Job(model, data, loss_of, OPTIMIZER, batch_size=BATCH_SIZE, shuffle=False)
    plan = job.plan(microbatch_size=MICROBATCH_SIZE, counts="even")
    with job.open(plan, steps=1) as session:
        return session.step().loss


def child(name: str, leaves: int) -> None:
    """One start, told to the parent."""
    jax.config.update("jax_num_cpu_devices", COUNTS.get(name, 1))
    model, data, loss_of = subject(leaves)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    cpu = time.process_time()
    if name != PLAIN:
        _ = hxla.Job, hxla.Session
    import_cpu_seconds = time.process_time() - cpu
    print(BEGIN, flush=True)
    began, cpu = time.perf_counter(), time.process_time()
    loss = (by_hand if name == PLAIN else ours)(model, data, loss_of)
    told = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "import_cpu_seconds": import_cpu_seconds,
        "loss": loss,
    }
    print(END + json.dumps(told), flush=True)


def started(name: str, leaves: int) -> dict[str, float]:
    """What a process of its own tells, and how long it was silent.

    Raises:
        SystemExit: If it fails.
    """
    command = [sys.executable, __file__, "--child", name, "--leaves", str(leaves)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told: dict[str, float] = {}
    last, silences = time.perf_counter(), [0.0]
    for line in process.stdout:
        now = time.perf_counter()
        if line.startswith(BEGIN):
            silences = []
        else:
            silences.append(now - last)
        last = now
        if line.startswith(END):
            told = json.loads(line.removeprefix(END)) | {"silence_seconds": max(silences)}
    if process.wait() or not told:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    return told


def main() -> None:
    """All of them in turns, or one of them."""
    parser = results.parser(__doc__, "startup")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leaves", type=int, default=0, help="parameters of the chain of scales")
    parser.add_argument("--child", help="what one process does")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.leaves)
        return
    counts = ["hxla, 1 device"] if args.leaves else list(COUNTS)
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in (PLAIN, *counts)}
    for n in range(args.rounds):
        for name in list(taken)[:: -1 if n % 2 else 1]:
            taken[name].append(started(name, args.leaves))
        turns.check_alike({name: own[-1]["loss"] for name, own in taken.items()}, 1e-3)

    def each(name: str, what: str) -> list[float]:
        return [told[what] for told in taken[name]]

    rows = {
        name: {
            what: round(statistics.median(each(name, what)), 2)
            for what in ("seconds", "cpu_seconds", "import_cpu_seconds", "silence_seconds")
        }
        for name in taken
    }
    ratios = {
        what: {
            f"{a} / {b}": turns.over(each(a, what), each(b, what)) for a, b in RATIOS if a in taken
        }
        for what in ("seconds", "cpu_seconds")
    }
    for name, row in rows.items():
        print(f"{name:<22}" + "".join(f"{what} {value:>7.2f}  " for what, value in row.items()))
    out = args.out.with_stem("startup_leaves") if args.leaves else args.out
    results.write(out, {"leaves": args.leaves, "rows": rows, "ratios": ratios})


if __name__ == "__main__":
    main()
