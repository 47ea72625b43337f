"""Predicted step times beside measured ones: shared state, uneven splits and pipelines.

    python benchmarks/prediction_forms.py [--forms zero split pipeline] [--meshes 1.0-0.5 ...]

Two GPT of benchmarks/prediction_script.py on processes with shares of a core.

`zero` is data parallelism with `memory.zero` of 1, 2 and 3, profiled, planned and trained as in
benchmarks/prediction.py. A `split` of one wide layer is planned by a profile of its devices, each
alone, and of the split itself. A `pipeline` is predicted by a job of it that measures the pieces
before its first step, and the update in a few steps: the training comes between two such jobs,
which have its plan, and the mean of their predictions is held against the mean of the middle half
of its steps. Each row is written to benchmarks/results/prediction_forms.json at once; rows of
others that it holds stay.

Where the predictions before and after the training are more than a tenth apart, other work has
disturbed them, and the row is no verdict: the summary counts the others.
"""

import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import jobs
import prediction
import results

UNLIKE = [[1.0, 0.5], [0.7, 0.4], [0.9, 0.5, 0.3]]
#: Meshes of each form; a pipeline has the planned cut on some and an even one on others.
MESHES = {
    "zero 1": UNLIKE,
    "zero 2": UNLIKE,
    "zero 3": UNLIKE,
    "split": [[1.0, 0.5], [1.0, 0.33], [0.7, 0.4]],
    "pipeline": [[1.0, 1.0], [1.0, 0.5], [0.7, 0.4], [0.45] * 4],
    "pipeline, even cut": [[1.0, 1.0], [1.0, 0.5], [0.9, 0.5, 0.3], [0.45] * 4],
}
MODEL, SETTLING = "gpt", 4


def steps_of(job: jobs.Job) -> dict[str, Any]:
    """One turn of a job, and what it says."""
    try:
        job.wait()
        job.step()
        return job.finish()
    finally:
        job.close()


def measured_by_itself(
    folder: pathlib.Path, form: str, shares: Sequence[float], chunk: int
) -> dict[str, Any]:
    """A pipeline."""
    mesh, plan = str(prediction.mesh_of(shares, folder)), folder / "plan.json"
    even = ",".join(["1"] * len(shares))
    option = {
        "pipeline": ["--stages", str(len(shares))],
        "pipeline, even cut": ["--stages", even],
    }[form]

    def job(name: str, num: int, options: Sequence[str] = ()) -> dict[str, Any]:
        script = [prediction.SCRIPT, MODEL, "--turns", "1", "--chunk", str(num), *options]
        own = plan if plan.exists() else None
        return steps_of(jobs.Job(folder / name, script, mesh=mesh, plan=own))

    before = job("before", SETTLING, option)
    plan.write_text(before["plan"])
    told = job("training", chunk)
    after = job("after", SETTLING)
    steps = [before["predicted_seconds"], after["predicted_seconds"]]
    step, measured = statistics.mean(steps), prediction.middle_mean(told["seconds"])
    return {
        "steps": len(told["seconds"]),
        "predicted_seconds": round(step, 4),
        "measured_seconds": round(measured, 4),
        "error": round(step / measured - 1, 4),
        "predicted_by_each_profile": [round(s, 4) for s in steps],
        "reasons": before["reasons"],
        "seconds": [round(s, 4) for s in told["seconds"]],
    }


def one(folder: pathlib.Path, form: str, shares: Sequence[float], chunk: int) -> dict[str, Any]:
    """One form on one mesh."""
    if form.startswith("pipeline"):
        return measured_by_itself(folder, form, shares, chunk)
    _, _, stage = form.partition("zero ")
    return prediction.one(
        folder,
        MODEL if stage else "wide",
        shares,
        rounds=1,
        chunk=chunk,
        settings={"HXLA_MEMORY_ZERO": stage} if stage else {},
        form=[] if stage else ["--tensor", str(len(shares))],
    )


def is_disturbed(row: dict[str, Any]) -> bool:
    """Whether the machine was another one before the training than after it."""
    steps = row["predicted_by_each_profile"]
    return max(steps) > 1.1 * min(steps)


def main() -> None:
    """Every form on its meshes."""
    parser = results.parser(__doc__, "prediction_forms")
    parser.add_argument("--forms", nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--meshes", nargs="+", help="of these only, such as 1.0-0.5")
    parser.add_argument("--chunk", type=int, default=32, help="steps of the training")
    args = parser.parse_args()
    order = [(form, "-".join(map(str, m))) for form, meshes in MESHES.items() for m in meshes]
    rows = {(r["form"], r["cluster"]): r for r in results.read(args.out).get("rows", ())}
    for form, mesh in order:
        if form not in args.forms or (args.meshes and mesh not in args.meshes):
            continue
        shares = [float(share) for share in mesh.split("-")]
        with tempfile.TemporaryDirectory() as folder:
            found = one(pathlib.Path(folder), form, shares, args.chunk)
        rows[form, mesh] = results.row({"form": form, **found, "cluster": mesh})
        own = [rows[pair] for pair in order if pair in rows]
        errors = [abs(row["error"]) for row in own if not is_disturbed(row)]
        summary = {
            "within_10_percent": f"{sum(e <= 0.1 for e in errors)} of {len(errors)}",
            "disturbed": len(own) - len(errors),
        }
        results.write(args.out, {**summary, "rows": own})


if __name__ == "__main__":
    main()
