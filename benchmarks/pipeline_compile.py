"""Compilation of a pipelined step beside that of the unpipelined one.

    python benchmarks/pipeline_compile.py

A GPT of 8 blocks, exact sums, in 2, 4 and 8 stages with 16 microbatches, and in 8 stages with 64;
what one device compiles for a step (microbatch and update) against what a pipeline does (slots,
ticks, sums and update). Processor seconds, so that other work beside disturbs little.
Writes benchmarks/results/pipeline_compile.json.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
import pathlib
import sys
import time

import jax
import optax
from flax import nnx

import hxla
from hxla._run._step import Engine

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import gpt  # noqa: E402

SPENT: list[float] = []


def timed(self: Engine, batch: object) -> None:
    """`Engine._compile`, with nothing cached."""
    jax.clear_caches()
    start = time.process_time()
    COMPILE(self, batch)
    SPENT.append(time.process_time() - start)


COMPILE, Engine._compile = Engine._compile, timed


def seconds(num_devices: int, num_microbatches: int) -> float:
    """Processor seconds of one job's compilation."""
    SPENT.clear()
    hxla.train(
        gpt.GPT(nnx.Rngs(0), layers=8, width=128),
        gpt.library(),
        gpt.loss,
        optax.adamw(1e-3),
        batch_size=num_microbatches,
        microbatch_size=1,
        steps=1,
        counts="even",
        stages=num_devices if num_devices > 1 else None,
        config={"cluster": {"visible_devices": list(range(num_devices))}},
    )
    return SPENT[0]


def main() -> None:
    """All sizes, in one go."""
    jax.config.update("jax_enable_compilation_cache", False)
    sizes = [(1, 16), (2, 16), (4, 16), (8, 16), (8, 64), (1, 16)]
    taken = [(*size, seconds(*size)) for size in sizes]
    one = (taken[0][2] + taken[-1][2]) / 2
    rows = [
        {"stages": n, "microbatches": m, "cpu_seconds": round(s, 2), "ratio": round(s / one, 2)}
        for n, m, s in taken
    ]
    for row in rows:
        print(row)
    result = {"jax": jax.__version__, "rows": rows}
    path = ROOT / "benchmarks" / "results" / "pipeline_compile.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
