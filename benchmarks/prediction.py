"""Predicted step times and memory beside measured ones: six mixed CPU clusters, three models.

    python benchmarks/prediction.py [--clusters ...] [--models ...]

For each pair, in one go: `hxla profile` measures the model on the cluster, `hxla plan` makes the
best plan of one stage, `hxla run` trains with that plan's counts, and `hxla profile` measures
again. The machine's speed drifts by more than the predictions are to be off, so what is compared
with the run is the mean of what the profiles before and after it predict. No figure of the training
run goes into its prediction. Memory is the plan's figure for each device beside what the programs
that the run compiled say of themselves. Each row is written to benchmarks/results/prediction.json
at once; rows of other pairs that it holds stay.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax

from hxla import Proposal

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


def hxla(*arguments):
    command = [sys.executable, "-m", "hxla", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")


def parts(plan, counts):
    """A step with some counts as the plan's replay has it: the slowest device and the sum."""
    devices = {d.device: d for d in plan.devices}
    each = {i: d.compute_seconds / d.num_microbatches for i, d in devices.items()}
    busy = [c * each[i] + devices[i].update_seconds if c else 0.0 for i, c in enumerate(counts)]
    return busy, max(d.reduction_seconds for d in plan.devices)


def one(folder, model, name):
    mesh, summary = folder / f"{name}.toml", folder / "run.json"
    tables = [f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in CLUSTERS[name]]
    mesh.write_text(f'name = "{name}"\n' + "".join(tables))
    measure = ["profile", "--mesh", mesh, "--segments", 3, "--write"]
    search = ["plan", "--mesh", mesh, "--stages", 1, "--write", folder, "--profile"]

    def planned(file):
        hxla(*search, file, SCRIPT, model)
        return Proposal.from_json((folder / f"{name}.json").read_text())

    for file in (before := folder / "before.json", after := folder / "after.json"):
        file.unlink(missing_ok=True)
    hxla(*measure, before, SCRIPT, model)
    plan = planned(before)
    counts = dict.fromkeys(range(len(CLUSTERS[name])), 0)
    counts.update({d.device: d.num_microbatches for d in plan.devices})
    split = [counts[d] for d in sorted(counts)]
    steps = WARM_STEPS + max(12, min(100, math.ceil(6 / plan.step_seconds)))
    own = ["--steps", steps, "--split", ",".join(map(str, split)), "--summary", summary]
    hxla("run", "--mesh", mesh, SCRIPT, model, *own)
    hxla(*measure, after, SCRIPT, model)
    ran = json.loads(summary.read_text())
    predictions = [parts(p, split) for p in (plan, planned(after))]
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


rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
with tempfile.TemporaryDirectory() as text:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{text}/cache"
    os.environ.pop("XLA_FLAGS", None)
    for name in args.clusters:
        for model in args.models:
            began = time.monotonic()
            row = one(pathlib.Path(text), model, name)
            rows = [r for r in rows if (r["cluster"], r["model"]) != (name, model)] + [row]
            summary = write(rows)
            print(json.dumps(row), f"{time.monotonic() - began:.0f} s", flush=True)
print(json.dumps(summary))
