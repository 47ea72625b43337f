"""Counts that follow the devices, beside the best fixed ones that can be found by trying them.

    hxla run --mesh cpu-1.0-0.5 benchmarks/counts.py
    hxla run --mesh cpu-1.0-1.0 benchmarks/counts.py --runs 10
    hxla run --mesh cpu-4-unequal benchmarks/counts.py

The model of examples/gpt.py trains some steps with measured counts, several times anew, and each
run's last counts, even ones and all that are a move or two of one microbatch away from them take
turns of a step, until its update is done. `share` is the speed of a run's counts over that of the
best ones, the mean of its turns with the median's robustness: the middle half of them. Writes its
mesh's row of benchmarks/results/counts.json.
"""

import contextlib
import itertools
import os
import pathlib
import statistics
import sys
import time

import jax
import optax
import results
from flax import nnx

import hxla

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import gpt

parser = results.parser(__doc__, "counts")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--microbatch-size", type=int, default=4)
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--steps", type=int, default=14, help="of a run")
parser.add_argument("--rounds", type=int, default=12)
args = parser.parse_args()

job = hxla.Job(
    gpt.GPT(nnx.Rngs(0)),
    gpt.library(),
    gpt.loss,
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3)),
    batch_size=args.batch_size,
)
plan = job.plan(microbatch_size=args.microbatch_size)


def run():
    """The counts of every step of a run in which they follow the devices."""
    with job.open(plan, steps=args.steps, balance=True) as session:
        return [record.counts for record in session]


def near(counts):
    """Counts that are a move of one microbatch away."""
    for giver, taker in itertools.permutations(range(len(counts)), 2):
        moved = list(counts)
        moved[giver] -= 1
        moved[taker] += 1
        if moved[giver] > 0:
            yield tuple(moved)


def middle(seconds):
    """The mean of the middle half."""
    quarter = len(seconds) // 4
    return statistics.mean(sorted(seconds)[quarter : len(seconds) - quarter])


runs = [run() for _ in range(args.runs)]
ends = {counts[-1] for counts in runs}
tried = {plan.counts, *ends}
for counts in list(ends):
    tried |= set(near(counts))
    if len(counts) == 2:
        tried |= {two for one in near(counts) for two in near(one)}
seconds = {counts: [] for counts in sorted(tried)}
with contextlib.ExitStack() as stack:
    sessions = {c: stack.enter_context(job.open(plan.with_counts(c))) for c in seconds}
    for n in range(args.rounds + 1):
        for counts in list(seconds)[:: -1 if n % 2 else 1]:
            began = time.perf_counter()
            sessions[counts].step()
            jax.block_until_ready(sessions[counts].state.params)
            if n:  # the first round warms up
                seconds[counts].append(time.perf_counter() - began)
if jax.process_index() == 0:
    speed = {counts: 1 / middle(own) for counts, own in seconds.items()}
    best = max(speed, key=speed.__getitem__)
    mesh = pathlib.Path(os.environ["HXLA_MESH"]).stem
    rows = results.read(args.out).get("meshes", {})
    rows[mesh] = results.row(
        {
            "batch_size": args.batch_size,
            "best": best,
            "runs": [
                {
                    "counts": counts[-1],
                    "moves": sum(a != b for a, b in itertools.pairwise(counts)),
                    "share of the best": round(speed[counts[-1]] / speed[best], 4),
                    "over even": round(speed[counts[-1]] / speed[plan.counts], 4),
                }
                for counts in runs
            ],
            "examples_per_second": {
                "/".join(map(str, c)): round(args.batch_size * s, 2) for c, s in speed.items()
            },
        }
    )
    results.write(args.out, {"meshes": rows})
