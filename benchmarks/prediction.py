"""Predicted step times and memory beside measured ones: six mixed CPU clusters, three models.

    python benchmarks/prediction.py [--clusters ...] [--models ...]

For each pair one job of `hxla run` does what `hxla profile` does, and trains with the counts that
the profile's trial came to. They take turns of a step, for the machine's speed drifts by more
than the predictions are to be off. Then `hxla plan` predicts the step from the profile alone: no
figure of the training goes into it. A plan whose counts are others is asked for those that ran.
Memory is the plan's figure for each device beside what the programs that the training compiled say
of themselves. Each row is written to benchmarks/results/prediction.json at once; rows of other
pairs that it holds stay.
"""

import argparse
import contextlib
import io
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import jax

from hxla import Proposal
from hxla.__main__ import main
from hxla._core._statistics import middle_mean

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = str(ROOT / "benchmarks" / "prediction_script.py")
CLUSTERS = {
    "1.0": [1.0],
    "1.0-1.0": [1.0, 1.0],
    "1.0-0.5": [1.0, 0.5],
    "1.0-0.33": [1.0, 0.33],
    "0.7-0.4": [0.7, 0.4],
    "0.9-0.5-0.3": [0.9, 0.5, 0.3],
}
MODELS = ["gpt", "bert", "conv"]
parser = argparse.ArgumentParser()
parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
parser.add_argument("--models", nargs="+", default=MODELS)
parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/prediction.json")
args = parser.parse_args()


def planned(mesh, folder, file, model):
    """What `hxla plan` does, without a new process that imports everything anew."""
    options = ["--mesh", str(mesh), "--stages", "1", "--write", str(folder), "--profile", str(file)]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(["plan", *options, SCRIPT, model])
    del os.environ["HXLA_DRY"]
    return Proposal.from_json((folder / f"{mesh.stem}.json").read_text())


def parts(plan, counts):
    """A step with some counts as the plan's replay has it: the slowest device, and the rest."""
    devices = {d.device: d for d in plan.devices}
    busy = 0.0
    for i, count in enumerate(counts):
        if count:
            own = devices[i]
            micro = own.compute_seconds / own.num_microbatches
            busy = max(busy, count * micro + own.update_seconds)
    return busy, plan.devices[0].reduction_seconds


def one(folder, model, name):
    mesh = folder / f"{name}.toml"
    tables = [f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in CLUSTERS[name]]
    mesh.write_text(f'name = "{name}"\n' + "".join(tables))
    command = [sys.executable, "-m", "hxla", "run", "--mesh", mesh, SCRIPT, model]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        process = subprocess.Popen([*command, "--folder", folder], stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        process.wait()
    if process.returncode:
        raise SystemExit(f"{command}\n{(folder / 'log').read_text()[-6000:]}")
    plan = planned(mesh, folder, folder / "profile.json", model)
    ran = json.loads((folder / "run.json").read_text())
    devices = {d.device: d for d in plan.devices}
    own = [devices[i].num_microbatches if i in devices else 0 for i in range(len(CLUSTERS[name]))]
    assert math.isclose(sum(parts(plan, own)), plan.step_seconds, rel_tol=1e-6)
    busy, rest = parts(plan, ran["counts"])
    measured = middle_mean(ran["seconds"])
    measured_busy = max(map(middle_mean, zip(*ran["busy_seconds"], strict=True)))
    each = ran["microbatch_bytes"]
    memory = [
        (d.memory_bytes + (ran["counts"][i] - d.num_microbatches) * each) / ran["compiled_bytes"][i]
        - 1
        for i, d in sorted(devices.items())
    ]
    return {
        "cluster": name,
        "model": model,
        "planned_counts": own,
        "counts": ran["counts"],
        "steps": len(ran["seconds"]),
        "predicted_seconds": round(busy + rest, 4),
        "measured_seconds": round(measured, 4),
        "error": round((busy + rest) / measured - 1, 4),
        "predicted_busy": round(busy, 4),
        "measured_busy": round(measured_busy, 4),
        "steps_of_the_trial": [round(x, 3) for x in ran.get("trial_seconds", ())],
        "steps_of_the_run": [round(x, 3) for x in ran["seconds"]],
        "memory": [round(m, 6) for m in memory],
    }


def write(rows):
    order = [(c, m) for c in CLUSTERS for m in MODELS]
    rows = sorted(rows, key=lambda row: order.index((row["cluster"], row["model"])))
    errors = [abs(row["error"]) for row in rows]
    table = {
        "jax": jax.__version__,
        "mean_error": round(statistics.mean(errors), 4),
        "worst_error": round(max(errors), 4),
        "within_5_percent": f"{sum(e <= 0.05 for e in errors)} of {len(errors)}",
        "worst_memory_error": max(abs(m) for row in rows for m in row["memory"]),
        "rows": rows,
    }
    args.out.write_text(json.dumps(table, indent=1) + "\n")
    return {k: v for k, v in table.items() if k != "rows"}


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the job that runs
rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
with tempfile.TemporaryDirectory() as cache:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.pop("XLA_FLAGS", None)
    for name in args.clusters:
        for model in args.models:
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                row = one(pathlib.Path(folder), model, name)
            rows = [r for r in rows if (r["cluster"], r["model"]) != (name, model)] + [row]
            summary = write(rows)
            print(json.dumps(row), f"{time.monotonic() - began:.0f} s", flush=True)
print(json.dumps(summary))
