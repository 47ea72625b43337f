"""What exact sums cost, and how much of it is XLA's deterministic kernels.

Exact sums ask XLA for deterministic operations; without autotuning and atomic additions these may
be slower by themselves. The third contender has float sums and deterministic operations. And the
gradient of an embedding, alone: XLA makes it deterministic by sorting every single number.
"""

import pathlib
import statistics
import sys

from contest import contest
from report import Report, arguments

HERE = pathlib.Path(__file__).parent
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"
args = arguments()
report = Report(args.out)
size, rounds, steps = ("tiny", 2, 1) if args.dry else ("30m", 4, 4)


def job(kind: str, flags: str = "") -> list[str]:
    own = [sys.executable, str(HERE / "gpt_run.py"), kind, "--size", size, "--steps", str(steps)]
    own += ["--dtype", "float32"] if args.dry else []
    return ["env", f"XLA_FLAGS={flags}", *own] if flags else own


commands = {"hxla-float": job("hxla-float"), "hxla-exact": job("hxla-exact")}
if not args.dry:
    commands["deterministic float"] = job("hxla-float", DETERMINISTIC)
found = contest(commands, report, rounds=rounds, seconds=900 if args.dry else 80)
seconds = {n: statistics.median(told["seconds_per_step"][1:]) for n, told in found.items()}
for name in ("hxla-float", "deterministic float"):
    if name in seconds and "hxla-exact" in seconds:
        report.row(
            f"exact sums beside {name.removeprefix('hxla-')} sums: seconds per step",
            f"{seconds['hxla-exact']:.4f}",
            f"{seconds[name]:.4f}",
            f"{seconds[name] / seconds['hxla-exact']:.3f}x",
        )


def embedding_gradient() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    height, width, rows = (64, 8, 32) if args.dry else (50304, 768, 8192)
    table = jnp.zeros((height, width))
    ids = np.random.default_rng(0).integers(0, height, rows)
    grad = jax.random.normal(jax.random.key(0), (rows, width))
    ways = {"as XLA likes": {}, "deterministic": {"xla_gpu_exclude_nondeterministic_ops": True}}
    took = {}
    for name, options in ways.items():
        own = {} if args.dry else options
        run = jax.jit(lambda t, g: t.at[ids].add(g), compiler_options=own)
        took[name] = _seconds(lambda run=run: run(table, grad))
    one_hot = jax.jit(lambda g: jax.nn.one_hot(ids, height, axis=0) @ g)
    took["as a product"] = _seconds(lambda: one_hot(grad))
    report.detail("embedding", took)
    for name in ("as XLA likes", "as a product"):
        report.row(
            f"gradient of an embedding, deterministic beside {name}",
            f"{1e3 * took['deterministic']:.3f} ms",
            f"{1e3 * took[name]:.3f} ms",
            f"{took[name] / took['deterministic']:.3f}x",
        )


def _seconds(run) -> float:
    """Of one call among many that are in flight."""
    import time

    import jax

    jax.block_until_ready(run())
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready([run() for _ in range(10)])
        times.append((time.perf_counter() - begun) / 10)
    return statistics.median(times)


report.attempt("gradient of an embedding", embedding_gradient)
