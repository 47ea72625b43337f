"""Predicted step times and memory beside measured ones: six mixed CPU clusters, three models.

    python benchmarks/prediction.py [--clusters ...] [--models ...]

For each pair `hxla profile` measures, `hxla plan` makes a plan of what was measured and of nothing
else, and `hxla run --plan` trains with it. A shared machine's speed drifts by more than predictions
are to be off, so the training comes between two profiles, or with `--rounds` in parts between more
of them, and stands still while one runs. Predicted is the mean over the profiles, each asked for
the counts that ran. Measured is the mean of the middle half of the training's steps, which follow
one another as in any training; the first of each part does not count, for it waited.

Memory is the plan's figure for each device beside what the programs that the training compiled say
of themselves. Each row is written to benchmarks/results/prediction.json at once; rows of other
pairs that it holds stay.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jobs
import results

import hxla

SCRIPT = jobs.ROOT / "benchmarks" / "prediction_script.py"
CLUSTERS = {
    "1.0": [1.0],
    "1.0-1.0": [1.0, 1.0],
    "1.0-0.5": [1.0, 0.5],
    "1.0-0.33": [1.0, 0.33],
    "0.7-0.4": [0.7, 0.4],
    "0.9-0.5-0.3": [0.9, 0.5, 0.3],
}
MODELS = ["gpt", "bert", "conv"]


def middle_mean(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest quarter."""
    cut = len(values) // 4
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def command(*arguments: object, folder: pathlib.Path, settings: Mapping[str, str]) -> None:
    """Run `hxla` and say what it said only if it fails."""
    ran = subprocess.run(
        [sys.executable, "-m", "hxla", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(jobs.ROOT)} | dict(settings),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(
            f"hxla {' '.join(map(str, arguments))}\n{(ran.stdout + ran.stderr)[-6000:]}"
        )


def planned(
    mesh: pathlib.Path,
    model: str,
    name: str,
    settings: Mapping[str, str],
    form: Sequence[str] = (),
) -> pathlib.Path:
    """Profile, and plan by the profile; returns the plan's file, which lies beside the mesh's.

    Args:
        mesh: Its file.
        model: Of the script.
        name: Of the plan's file.
        settings: Of hxla, in the environment.
        form: Options of the script that say what the plan is of; none: copies of one device.
    """
    folder = mesh.parent
    profile, plan = folder / f"profile-{name}.json", folder / f"plan-{name}.json"
    where, script = ["--mesh", mesh], [SCRIPT, "none", model]
    options = ["--segments", 1, "--write", profile]
    command("profile", *where, *options, *script, *form, folder=folder, settings=settings)
    options = [*([] if form else ["--stages", 1, "--segments", 1]), "--profile", profile]
    options += ["--write", plan]
    command("plan", *where, *options, *script, *form, folder=folder, settings=settings)
    return plan


def counts_by_rank(plan: hxla.Plan) -> dict[int, int]:
    """Microbatches of each device, all of which hold a whole copy of the model."""
    return {replica.devices[0]: replica.num_microbatches for replica in plan.replicas}


def predicted(plan: hxla.Plan, counts: dict[int, int]) -> float | None:
    """A step with some counts: the slowest device, and the rest; None if one is not planned."""
    if plan.axes:
        return plan.prediction.step_seconds
    own, devices = counts_by_rank(plan), {d.rank: d for d in plan.prediction.devices}
    if not {rank for rank, count in counts.items() if count} <= {r for r, c in own.items() if c}:
        return None
    busy = [
        count * devices[rank].compute_seconds / own[rank] + devices[rank].update_seconds
        for rank, count in counts.items()
        if count
    ]
    return max(busy) + plan.prediction.devices[0].reduction_seconds


def mesh_of(shares: Sequence[float], folder: pathlib.Path) -> pathlib.Path:
    """A mesh file of processes with these shares of a core."""
    name = "-".join(map(str, shares))
    tables = [f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in shares]
    mesh = folder / f"{name}.toml"
    mesh.write_text(f'name = "{name}"\n' + "".join(tables))
    return mesh


def one(
    folder: pathlib.Path,
    model: str,
    shares: Sequence[float],
    *,
    rounds: int,
    chunk: int,
    settings: Mapping[str, str],
    form: Sequence[str] = (),
) -> dict[str, Any]:
    """One pair, with some settings of hxla in the environment; for the form see `planned`."""
    mesh, turn = mesh_of(shares, folder), folder / "turns"
    files = [planned(mesh, model, "0", settings, form)]
    job = jobs.Job(
        turn,
        [SCRIPT, model, "--turns", str(rounds), "--chunk", str(chunk)],
        mesh=str(mesh),
        plan=files[0],
        settings=settings,
    )
    try:
        job.wait()
        for n in range(rounds):
            job.step()
            files.append(planned(mesh, model, str(n + 1), settings, form))
        told = job.finish()
    finally:
        job.close()
    plans = [hxla.Plan.read(file) for file in files]
    counts = counts_by_rank(plans[0])
    steps = [s for plan in plans if (s := predicted(plan, counts)) is not None]
    step, measured = statistics.mean(steps), middle_mean(told["seconds"])
    return {
        "cluster": mesh.stem,
        "model": model,
        "counts": told["counts"],
        "steps": len(told["seconds"]),
        "predicted_seconds": round(step, 4),
        "measured_seconds": round(measured, 4),
        "error": round(step / measured - 1, 4),
        "predicted_by_each_profile": [round(s, 4) for s in steps],
        "memory": [
            round(d.memory_bytes / told["memory_bytes"][str(d.rank)] - 1, 6)
            for d in plans[0].prediction.devices
            if d.memory_bytes
        ],
        "seconds": [round(s, 4) for s in told["seconds"]],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all rows."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "mean_error": round(statistics.mean(errors), 4),
        "worst_error": round(max(errors), 4),
        "within_5_percent": f"{sum(e <= 0.05 for e in errors)} of {len(errors)}",
        "worst_memory_error": max(abs(m) for row in rows for m in row["memory"]),
    }


def main() -> None:
    """Every pair."""
    parser = results.parser(__doc__, "prediction")
    parser.add_argument("--clusters", nargs="+", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=1, help="chunks, between profiles")
    parser.add_argument("--chunk", type=int, default=40, help="steps of a chunk")
    args = parser.parse_args()
    order = [(c, m) for c in CLUSTERS for m in MODELS]
    rows = {(r["cluster"], r["model"]): r for r in results.read(args.out).get("rows", ())}
    for name in args.clusters:
        for model in args.models:
            with tempfile.TemporaryDirectory() as folder:
                row = one(
                    pathlib.Path(folder),
                    model,
                    CLUSTERS[name],
                    rounds=args.rounds,
                    chunk=args.chunk,
                    settings={},
                )
            rows[name, model] = results.row(row)
            found = [rows[pair] for pair in order if pair in rows]
            results.write(args.out, {**summary(found), "rows": found})


if __name__ == "__main__":
    main()
