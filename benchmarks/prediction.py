"""Predicted step times and memory beside measured ones: six mixed CPU clusters, three models.

    python benchmarks/prediction.py [--clusters ...] [--models ...]

For each pair one job of `hxla run` does what `hxla profile` does, trains with the counts of the
plan of one stage that `hxla plan` makes meanwhile, and profiles again. The machine's speed drifts
by more than the predictions are to be off, so what is compared with the training is the mean of
what the profiles before and after it predict. No figure of the training goes into its prediction.
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
WARM_STEPS = 3
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
    """A step with some counts as the plan's replay has it: the slowest device and the sum."""
    devices = {d.device: d for d in plan.devices}
    each = {i: d.compute_seconds / d.num_microbatches for i, d in devices.items()}
    busy = [c * each[i] + devices[i].update_seconds if c else 0.0 for i, c in enumerate(counts)]
    return busy, max(d.reduction_seconds for d in plan.devices)


def one(folder, model, name):
    mesh = folder / f"{name}.toml"
    tables = [f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in CLUSTERS[name]]
    mesh.write_text(f'name = "{name}"\n' + "".join(tables))
    command = [sys.executable, "-m", "hxla", "run", "--mesh", mesh, SCRIPT, model]
    before, log = folder / "before.json", folder / "log"
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("w"))
        process = subprocess.Popen([*command, "--folder", folder], stdout=out, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        while process.poll() is None and not before.exists():
            time.sleep(0.05)
        if before.exists():
            plan = planned(mesh, folder, before, model)
            counts = {d.device: d.num_microbatches for d in plan.devices}
            split = [counts.get(i, 0) for i in range(len(CLUSTERS[name]))]
            steps = WARM_STEPS + max(12, min(100, math.ceil(6 / plan.step_seconds)))
            part = folder / "split.part"
            part.write_text(json.dumps({"split": split, "steps": steps}))
            part.rename(folder / "split.json")
        process.wait()
    if process.returncode:
        raise SystemExit(f"{command}\n{log.read_text()[-6000:]}")
    ran = json.loads((folder / "run.json").read_text())
    predictions = [
        parts(p, split) for p in (plan, planned(mesh, folder, folder / "after.json", model))
    ]
    predicted = [max(busy) + rest for busy, rest in predictions]
    assert math.isclose(predicted[0], plan.step_seconds, rel_tol=1e-6)
    measured = statistics.median(ran["seconds"][WARM_STEPS:])
    held = {d.device: d.memory_bytes for d in plan.devices}
    memory = [held[i] / b - 1 for i, b in enumerate(ran["compiled_bytes"]) if i in held]
    error = statistics.mean(predicted) / measured - 1
    busy = [
        statistics.median(b[i] for b in ran["busy_seconds"][WARM_STEPS:]) for i in range(len(split))
    ]
    return {
        "cluster": name,
        "model": model,
        "counts": split,
        "predicted_seconds": round(statistics.mean(predicted), 4),
        "measured_seconds": round(measured, 4),
        "error": round(error, 4),
        "predictions": [round(p, 4) for p in predicted],
        "predicted_busy": [
            round(statistics.mean(b), 4) for b in zip(*(b for b, _ in predictions), strict=True)
        ],
        "measured_busy": [round(b, 4) for b in busy],
        "predicted_rest": round(statistics.mean(r for _, r in predictions), 4),
        "measured_rest": round(measured - max(busy), 4),
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
