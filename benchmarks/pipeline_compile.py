"""Opening a pipelined session beside an unpipelined one: above all it compiles.

    python benchmarks/pipeline_compile.py

A GPT of 8 blocks, exact sums, in 2, 4 and 8 stages with 16 microbatches, and in 8 stages with 64.
`open` takes the processor's seconds of `Job.open`, with nothing cached: lowering, compilation, the
first state, and one microbatch to warm up. `compile` are the seconds that XLA says its
compilations took (jax.monitoring); several run at once, and other work beside disturbs them.
Writes benchmarks/results/pipeline_compile.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import pathlib
import sys
import time

import jax
import optax
import results
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import gpt

import hxla

SIZES = [(1, 16), (2, 16), (4, 16), (8, 16), (8, 64), (1, 16)]
COMPILED: list[float] = []


def listen(event: str, seconds: float, **_: str | int) -> None:
    """Collects what each compilation took."""
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


def opened(num_stages: int, num_microbatches: int) -> tuple[float, float]:
    """Processor seconds of opening a session, and seconds of its compilations."""
    job = hxla.Job(
        gpt.GPT(nnx.Rngs(0), layers=8, width=128),
        gpt.library(),
        gpt.loss,
        optax.adamw(1e-3),
        batch_size=num_microbatches,
        config={"cluster": {"visible_devices": list(range(num_stages))}},
    )
    plan = job.plan(stages=num_stages if num_stages > 1 else None, microbatch_size=1, counts="even")
    jax.clear_caches()
    COMPILED.clear()
    began = time.process_time()
    with job.open(plan):
        return time.process_time() - began, sum(COMPILED)


def main() -> None:
    """All sizes, in one go."""
    parser = results.parser(__doc__, "pipeline_compile")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="the first so many")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.monitoring.register_event_duration_secs_listener(listen)
    taken = [(size, opened(*size)) for size in SIZES[: args.sizes]]
    bases = [seconds for size, seconds in taken if size == SIZES[0]]
    base = [sum(each) / len(bases) for each in zip(*bases, strict=True)]
    rows = [
        {
            "stages": stages,
            "microbatches": num,
            "open_cpu_seconds": round(own[0], 2),
            "compile_seconds": round(own[1], 2),
            "open / unpipelined": round(own[0] / base[0], 2),
            "compile / unpipelined": round(own[1] / base[1], 2),
        }
        for (stages, num), own in taken
    ]
    results.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
