"""Compiling a decoder whose layers are one scan beside the same layers written as a loop.

    python benchmarks/scanned_layers.py [--layers 24] [--cuts 1,1 3,1 ...] [--rounds 7]

The decoder of examples/gpt.py with 24 layers (width 32, 16 tokens), in 2, 3, 4 and 8 stages of even
and uneven shares of the work, exact sums, a microbatch of one example. For each cut the scanned one
and the loop are planned and opened in turns with nothing cached. `open` takes the processor's
seconds of `Job.open`: lowering, compilation, the first state and a microbatch to warm up. `compile`
are the seconds that XLA says its compilations took (jax.monitoring); several run at once.

Then the processor's seconds of a step of each cut of the scanned one (width 128, 128 tokens, 16
microbatches), all sessions in turns and with the same losses. All of a step's work is counted, what
it waits is not. So what uneven stages take beyond as many even ones is what their slots cost: rows
are copied to and from the stages that store them, and cut out of slots as long as the longest
stage's. Writes benchmarks/results/scanned_layers.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
import results
import turns
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import gpt
from scanned_gpt import ScannedGPT

import hxla

CUTS = ["1,1", "3,1", "1,1,1", "1,2,3", "1,1,1,1", "1,1,2,1", "1,1,1,1,1,1,1,1", "2,1,1,1,1,1,1,1"]
LENGTH, WIDTH, BATCH_SIZE = 16, 32, 16
STEP_LENGTH, STEP_WIDTH = 128, 128
MODELS: dict[str, Callable[..., nnx.Module]] = {"scanned": ScannedGPT, "loop": gpt.GPT}
COMPILED: list[float] = []


def listen(event: str, seconds: float, **_: str | int) -> None:
    """Collects what each compilation took."""
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


def job_of(name: str, cut: str, layers: int, length: int, width: int) -> hxla.Job:
    """A job of one of the two models on as many fake devices as there are stages."""
    return hxla.Job(
        MODELS[name](nnx.Rngs(0), layers=layers, length=length, width=width),
        gpt.library(length),
        gpt.loss,
        optax.adamw(1e-3),
        batch_size=BATCH_SIZE,
        shuffle=False,
        config={"cluster": {"visible_devices": list(range(len(shares_of(cut))))}},
    )


def shares_of(cut: str) -> list[float]:
    """Of the stages."""
    return [float(x) for x in cut.split(",")]


def planned(job: hxla.Job, cut: str) -> hxla.Plan:
    """Stages with these shares of the work."""
    return job.plan(stages=shares_of(cut), microbatch_size=1, counts="even")


def opened(name: str, cut: str, layers: int) -> dict[str, float]:
    """What opening a session takes."""
    job = job_of(name, cut, layers, LENGTH, WIDTH)
    plan = planned(job, cut)
    jax.clear_caches()
    COMPILED.clear()
    began, cpu_began = time.perf_counter(), time.process_time()
    with job.open(plan):
        return {
            "open_seconds": time.perf_counter() - began,
            "open_cpu_seconds": time.process_time() - cpu_began,
            "compile_seconds": sum(COMPILED),
        }


def steps(cuts: Sequence[str], layers: int, num_rounds: int) -> dict[str, Any]:
    """Steps of all cuts in turns."""
    with contextlib.ExitStack() as stack:

        def of_cut(cut: str) -> Callable[[], float]:
            job = job_of("scanned", cut, layers, STEP_LENGTH, STEP_WIDTH)
            session = stack.enter_context(job.open(planned(job, cut)))

            def step() -> float:
                record = session.step()
                jax.block_until_ready(session.state.params)
                return record.loss

            return step

        runs = {cut: of_cut(cut) for cut in cuts}
        clock = time.process_time
        seconds = turns.seconds_in_turns(runs, num_rounds, tolerance=1e-3, clock=clock)
    even = {len(shares_of(cut)): cut for cut in cuts if len(set(shares_of(cut))) == 1}
    pairs = [(cut, even.get(len(shares_of(cut)))) for cut in cuts]
    return {
        "step_cpu_seconds": turns.medians(seconds),
        "ratios": {
            f"{cut} / {other}": turns.over(seconds[cut], seconds[other])
            for cut, other in pairs
            if other not in (None, cut)
        },
    }


def main() -> None:
    """All cuts."""
    parser = results.parser(__doc__, "scanned_layers")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--cuts", nargs="+", default=CUTS, help="shares of the stages")
    parser.add_argument("--rounds", type=int, default=7, help="of steps")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    jax.monitoring.register_event_duration_secs_listener(listen)
    rows = {}
    for n, cut in enumerate(args.cuts):
        names = list(MODELS)[:: -1 if n % 2 else 1]
        seconds = {name: opened(name, cut, args.layers) for name in names}
        rows[cut] = {
            name: {k: round(s, 2) for k, s in own.items()} for name, own in seconds.items()
        }
        rows[cut]["scanned / loop"] = {
            k: round(s / seconds["loop"][k], 3) for k, s in seconds["scanned"].items()
        }
        print(cut, rows[cut], flush=True)
    result = {"layers": args.layers, "rows": rows}
    results.write(args.out, result | {"steps": steps(args.cuts, args.layers, args.rounds)})


if __name__ == "__main__":
    main()
