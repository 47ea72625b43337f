"""Step and seconds of `hxla plan`, for seven models on four built-in clusters.

    OMP_NUM_THREADS=1 python benchmarks/plans.py [--models BERT-Large ...] [--meshes MESH ...]

The whole command, on one core: imports, tracing, the search, and completing the plan. Nothing is
measured on any device, times are estimated from data sheets. Processor seconds are given beside
those of the clock, for the latter say little where other work runs. A model that fits no plan is
refused, which is a row too. Models: plan_script.py. Each row is written to
benchmarks/results/plans.json at once; rows of others that it holds stay.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import plan_script
import results

import hxla

SCRIPT = pathlib.Path(__file__).with_name("plan_script.py")
MESHES = (
    "whale-8v100-8p100",
    "whale-4v100-4p100",
    "easyscale-v100-p100-t4",
    "workstation-3090-4090",
)


def planned(model: str, mesh: str) -> dict[str, Any]:
    """One model on one cluster."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = pathlib.Path(folder) / "plan.json", pathlib.Path(folder) / "log"
        command = ["-m", "hxla", "plan", "--mesh", mesh, "--write", str(out), str(SCRIPT), model]
        began = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            _, status, used = os.wait4(process.pid, 0)
        row: dict[str, Any] = {
            "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
            "wall_seconds": round(time.perf_counter() - began, 1),
            "peak_bytes": used.ru_maxrss * 1024,
        }
        if status:
            lines = log.read_text().strip().splitlines()
            return row | {"refused": lines[-1][:300] if lines else f"status {status}"}
        plan = hxla.Plan.read(out)
    known = plan.prediction
    assert known is not None
    ranks = {rank for replica in plan.replicas for rank in replica.devices}
    idle = sorted(set(range(len(hxla.load_cluster(mesh).devices))) - ranks)
    return row | {
        "of the summed speeds": round(known.bound_seconds / known.step_seconds, 3) or None,
        "step_seconds": known.step_seconds,
        "microbatch_size": plan.microbatch_size,
        "stages": plan.num_stages,
        "tensor": plan.axis_sizes.get("tensor", 1),
        "copies": len(plan.replicas),
        "idle": idle,
        "why_idle": [reason for reason in plan.reasons if "have no part" in reason],
    }


def main() -> None:
    """Every model on every cluster that is asked for."""
    parser = results.parser(__doc__, "plans")
    parser.add_argument("--models", nargs="+", default=list(plan_script.JOBS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = results.read(args.out).get("rows", {})
    for model in args.models:
        for mesh in args.meshes:
            name = f"{model}, {mesh}"
            rows[name] = results.row(planned(model, mesh))
            print(name, rows[name], flush=True)
            results.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
