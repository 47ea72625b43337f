"""hxla on two equal processes beside plain JAX as a good user writes it.

    hxla run --mesh cpu-1.0-1.0 benchmarks/plain_jax.py [--rounds 9]

The model of examples/gpt.py, the same data, the same optimizer, the same microbatches. The plain
step is `jax.shard_map` over the processes, a local `lax.scan` over the microbatches, one `psum` and
the update; under `jax.jit` with donation, in float32, its batches on their devices beforehand. hxla
runs with exact and with float sums.

hxla writes some dots of a gradient so that a CPU computes them faster, which is no merit of how it
shares the work. So plain JAX runs a second time with its dots written in the same way
(benchmarks/dots.py), and what comes of that is a row of its own.

Last, each with microbatches of its own choice: hxla of the size that it measures and chooses, plain
JAX of the fastest of `--sizes`.

All take turns of a step in the same processes, each until its update is done; their losses must
agree. Writes benchmarks/results/plain_jax.json.
"""

import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
import dots  # noqa: E402
import plain  # noqa: E402
import results  # noqa: E402
import turns  # noqa: E402
from gpt import GPT, library, loss  # noqa: E402

import hxla  # noqa: E402

BATCH_SIZE = 64
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
DATA = library()
EXACT, FLOAT, PLAIN = "hxla, exact sums", "hxla, float sums", "plain JAX"
REWRITTEN = "plain JAX, dots rewritten"
CHOSEN, BEST = "hxla, exact sums, its own choice", "plain JAX, its fastest"

Run = Callable[[], float]


def by_hand(microbatch_size: int, *, rewritten: bool = False) -> Run:
    """A step of plain JAX."""
    graphdef, params, rest = nnx.split(GPT(nnx.Rngs(0)), nnx.Param, ...)

    def mean_loss(params: nnx.State, text: jax.Array) -> jax.Array:
        return loss(nnx.merge(graphdef, params, rest), {"text": text})

    gradient = jax.value_and_grad(mean_loss)
    return plain.data_parallel(
        dots.uncrossed(gradient) if rewritten else gradient,
        params,
        OPTIMIZER,
        DATA["text"],
        jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)),
        batch_size=BATCH_SIZE,
        microbatch_size=microbatch_size,
    )


def ours(job: hxla.Job, plan: hxla.Plan) -> Run:
    """A step of hxla."""
    session = job.open(plan)

    def step() -> float:
        record = session.step()
        jax.block_until_ready(session.state.params)
        return record.loss

    return step


def fastest(sizes: Sequence[int]) -> int:
    """The microbatch size with which plain JAX is fastest, by two steps of each."""
    tried = turns.seconds_in_turns({str(n): by_hand(n) for n in sizes}, 2)
    mine = min(sizes, key=lambda n: statistics.median(tried[str(n)]))
    return int(multihost_utils.broadcast_one_to_all(np.int32(mine)))  # all must take the same


def main() -> None:
    """With the same microbatches, and each with its own."""
    parser = results.parser(__doc__, "plain_jax")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 32], help="plain JAX's")
    args = parser.parse_args()
    size = args.microbatch_size
    job = hxla.Job(GPT(nnx.Rngs(0)), DATA, loss, OPTIMIZER, batch_size=BATCH_SIZE, shuffle=False)

    def planned(size: int | None, reduction: str) -> hxla.Plan:
        return job.plan(microbatch_size=size, counts="even", reduction=reduction)

    chosen, best = planned(None, "exact"), fastest(args.sizes)
    runs = {
        EXACT: ours(job, planned(size, "exact")),
        FLOAT: ours(job, planned(size, "float")),
        PLAIN: by_hand(size),
        REWRITTEN: by_hand(size, rewritten=True),
    }
    if chosen.microbatch_size != size:
        runs[CHOSEN] = ours(job, chosen)
    if best != size:
        runs[BEST] = by_hand(best)
    seconds = turns.seconds_in_turns(runs, args.rounds, tolerance=1e-3)
    seconds[CHOSEN] = seconds.get(CHOSEN, seconds[EXACT])
    seconds[BEST] = seconds.get(BEST, seconds[PLAIN])
    pairs = [
        (EXACT, PLAIN),
        (FLOAT, PLAIN),
        (REWRITTEN, PLAIN),
        (EXACT, REWRITTEN),
        (FLOAT, REWRITTEN),
        (EXACT, FLOAT),
        (CHOSEN, BEST),
    ]
    if jax.process_index() == 0:
        sizes = dict.fromkeys((EXACT, FLOAT, PLAIN, REWRITTEN), size)
        result = {
            "batch_size": BATCH_SIZE,
            "microbatch_sizes": sizes | {CHOSEN: chosen.microbatch_size, BEST: best},
            "step_seconds": turns.medians(seconds),
            "ratios": {f"{a} / {b}": turns.over(seconds[b], seconds[a]) for a, b in pairs},
            "seconds": {name: [round(s, 4) for s in own] for name, own in seconds.items()},
        }
        results.write(args.out, result)


if __name__ == "__main__":
    main()
