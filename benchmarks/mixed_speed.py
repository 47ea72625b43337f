"""Tokens per second on unequal devices, beside what each device reaches alone.

    python benchmarks/mixed_speed.py [--meshes cpu-1.0-0.33 cpu-1.0-0.5 ...]

For each mesh: every device alone (same model, same global batch), then all together with planned
and with even counts, all in one go on the same machine. `fraction` is the joint speed over the sum
of the speeds alone. Writes benchmarks/results/mixed_speed.json.
"""

import argparse
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

import jax

from hxla import load_cluster

ROOT = pathlib.Path(__file__).parent.parent
parser = argparse.ArgumentParser()
parser.add_argument("--meshes", nargs="+", default=["cpu-1.0-0.33", "cpu-1.0-0.5", "cpu-1.0-1.0"])
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--dropout", default="0")
args = parser.parse_args()


def speed(folder, mesh, *options, steps):
    summary = pathlib.Path(folder, "summary.json")
    command = [sys.executable, "-m", "hxla", "run", "--mesh", mesh]
    command += [str(ROOT / "examples" / "train_gpt.py"), "--summary", str(summary)]
    command += ["--batch-size", str(args.batch_size), "--dropout", args.dropout]
    command += ["--steps", str(steps), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = json.loads(summary.read_text())
    seconds = statistics.median(run["seconds"][-max(2, 2 * steps // 3) :])
    return run["tokens_per_step"] / seconds, run


results = []
with tempfile.TemporaryDirectory() as folder:
    alone = {}
    for mesh in args.meshes:
        shares = [d.core_share for d in load_cluster(mesh).devices]
        for share in shares:
            if share not in alone:
                path = pathlib.Path(folder, "one.toml")
                path.write_text(f'name="one"\n[[device]]\nkind="cpu"\ncore_share={share}\n')
                alone[share], _ = speed(folder, str(path), steps=4)
        planned, run = speed(folder, mesh, steps=args.steps)
        even, even_run = speed(folder, mesh, "--split", "even", steps=5)
        attainable = sum(alone[s] for s in shares)
        row = {
            "mesh": mesh,
            "alone_tokens_per_second": {str(s): round(alone[s]) for s in shares},
            "planned_tokens_per_second": round(planned),
            "even_tokens_per_second": round(even),
            "fraction_planned": round(planned / attainable, 3),
            "fraction_even": round(even / attainable, 3),
            "speed_up": round(planned / even, 2),
            "counts": run["counts"][-1],
        }
        print(json.dumps(row), flush=True)
        results.append(row)

setting = {"jax": jax.__version__, "python": platform.python_version(), "arguments": vars(args)}
out = ROOT / "benchmarks" / "results" / "mixed_speed.json"
out.write_text(json.dumps({"setting": setting, "results": results}, indent=2) + "\n")
