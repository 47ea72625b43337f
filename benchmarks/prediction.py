"""Predicted step times beside measured ones: six mixed CPU clusters, three models.

    python benchmarks/prediction.py [--clusters ...] [--models ...]

For each pair `hxla profile` measures the model on the cluster, `hxla plan` predicts the step of the
best plan of one stage, and `hxla run` trains with that plan's counts; all in one go. No figure of
the training run goes into its prediction. Writes benchmarks/results/prediction.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

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
parser = argparse.ArgumentParser()
parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
parser.add_argument("--models", nargs="+", default=["gpt", "bert", "conv"])
parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results/prediction.json")
args = parser.parse_args()


def hxla(*arguments):
    command = [sys.executable, "-m", "hxla", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")


def one(folder, model, name):
    mesh, profile, summary = folder / f"{name}.toml", folder / "profile.json", folder / "run.json"
    tables = [f'[[device]]\nkind = "cpu"\ncore_share = {share}\n' for share in CLUSTERS[name]]
    mesh.write_text(f'name = "{name}"\n' + "".join(tables))
    profile.unlink(missing_ok=True)
    hxla("profile", "--mesh", mesh, "--write", profile, "--segments", 3, SCRIPT, model)
    hxla(
        "plan",
        "--mesh",
        mesh,
        "--profile",
        profile,
        "--stages",
        1,
        "--write",
        folder,
        SCRIPT,
        model,
    )
    plan = Proposal.from_json((folder / f"{name}.json").read_text())
    counts = dict.fromkeys(range(len(CLUSTERS[name])), 0)
    counts.update({d.device: d.num_microbatches for d in plan.devices})
    split = ",".join(str(counts[d]) for d in sorted(counts))
    hxla("run", "--mesh", mesh, SCRIPT, model, "--split", split, "--summary", summary)
    measured = statistics.median(json.loads(summary.read_text())["seconds"][2:])
    return {
        "cluster": name,
        "model": model,
        "counts": split,
        "predicted_seconds": round(plan.step_seconds, 4),
        "measured_seconds": round(measured, 4),
        "error": round(plan.step_seconds / measured - 1, 4),
    }


rows = []
with tempfile.TemporaryDirectory() as text:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{text}/cache"
    os.environ.pop("XLA_FLAGS", None)
    for name in args.clusters:
        for model in args.models:
            rows.append(one(pathlib.Path(text), model, name))
            print(json.dumps(rows[-1]), flush=True)
errors = [abs(row["error"]) for row in rows]
table = {
    "jax": jax.__version__,
    "mean_error": round(statistics.mean(errors), 4),
    "worst_error": round(max(errors), 4),
    "rows": rows,
}
print(json.dumps({k: v for k, v in table.items() if k != "rows"}))
args.out.write_text(json.dumps(table, indent=1) + "\n")
