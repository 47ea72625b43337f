"""A GPT in a pipeline on throttled processes: planned against even cut, PyTorch, prediction, bound.

    python benchmarks/pipeline.py [--torch PYTHON] [--meshes cpu-1.0-1.0 ...]

On each mesh the stages of examples/gpt.py run as real processes, 1F1B with residuals kept, once
with the planner's cut and once with an even one. With an interpreter that has torch, further jobs
run PyTorch's 1F1B over Gloo on the same model in the same throttles
(benchmarks/torch_pipeline.py), one for every cut of its four layers into stages in the order of the
devices, so that its even cut and its best one are among them. The jobs take turns of a step, each
from the moment it may go on until its update is done in all its processes; ratios are medians over
the rounds.

Also each measured step over the one that was replayed from the pieces' own times, which the job
measured when it started, and the bound over the planned cut's step: the throughput of the devices'
speeds together on this schedule without any imbalance. Writes its meshes' rows of
benchmarks/results/pipeline.json.
"""

import itertools
import statistics
from typing import Any

import jobs
import results
import turns

import hxla

LENGTH, LAYERS = 128, 4  # of examples/gpt.py
PLANNED, EVEN = "hxla, planned cut", "hxla, even cut"


def cuts(num_stages: int) -> list[tuple[int, ...]]:
    """Every way to give each stage at least one layer."""
    places = itertools.combinations(range(1, LAYERS), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *inner, LAYERS))) for inner in places]


def measured(mesh: str, num: int, size: int, rounds: int, python: str | None) -> dict[str, Any]:
    """All jobs on one mesh."""
    num_stages = len(hxla.load_cluster(mesh).devices)
    options = ["--turns", rounds + 1, "--batch-size", num * size, "--microbatch-size", size]
    asked = {
        name: {"script": [jobs.GPT, *options, "--stages", stages], "mesh": mesh}
        for name, stages in ((PLANNED, num_stages), (EVEN, ",".join(["1"] * num_stages)))
    }
    peers = {}
    if python is not None:
        peers = {f"PyTorch, layers {','.join(map(str, cut))}": cut for cut in cuts(num_stages)}
    for name, cut in peers.items():
        own = [*options, "--cut", *cut]
        asked[name] = jobs.torch(python, "torch_pipeline.py", own, mesh=mesh)
    seconds, told = jobs.timed(asked, rounds)
    medians = turns.medians(seconds)
    row: dict[str, Any] = {
        "microbatches": num,
        "microbatch_size": size,
        "step_seconds": dict(medians),
        "tokens_per_second": {n: round(num * size * LENGTH / s) for n, s in medians.items()},
        "ratios": {f"{PLANNED} / {EVEN}": turns.over(seconds[EVEN], seconds[PLANNED])},
    }
    if peers:
        layers = LAYERS // num_stages
        even = next((n for n, c in peers.items() if set(c) == {layers}), None)
        best = min(peers, key=lambda n: statistics.median(seconds[n]))
        for label, name in (("PyTorch, its even cut", even), ("PyTorch, its best cut", best)):
            if name is not None:
                row["step_seconds"][label] = medians[name]
                row["ratios"][f"{PLANNED} / {label}"] = turns.over(seconds[name], seconds[PLANNED])
        row |= {"PyTorch's best cut": peers[best], "torch": told[best]["torch"]}
    for name in (PLANNED, EVEN):
        predicted, bound = told[name]["predicted_seconds"], told[name]["bound_seconds"]
        row[name] = {
            "measured / predicted": round(medians[name] / predicted, 4) if predicted else None,
            "bound / measured": round(bound / medians[name], 4) if bound else None,
            "sha256": told[name]["sha256"],
            "reasons": told[name]["reasons"],
        }
    row["last_losses"] = {name: each["losses"][-1] for name, each in told.items()}
    row["seconds"] = {name: [round(s, 4) for s in own] for name, own in seconds.items()}
    return row


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "pipeline")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--meshes", nargs="+", default=["cpu-1.0-1.0", "cpu-1.0-0.5"])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if args.torch is None:
        print("without --torch the comparison with PyTorch is left out", flush=True)
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        sizes = (args.microbatches, args.microbatch_size, args.rounds)
        rows[mesh] = results.row(measured(mesh, *sizes, args.torch))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
