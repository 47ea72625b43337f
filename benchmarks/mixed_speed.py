"""Tokens per second on unequal devices, beside what each device reaches alone.

    python benchmarks/mixed_speed.py [--meshes cpu-1.0-0.33 cpu-1.0-0.5 ...]

For each mesh and round: every device alone (same model, same global batch), then all together with
planned and with even counts, all in one go on the same machine. `fraction` is the joint speed over
the sum of the speeds alone, the median over rounds; a shared machine changes its speed from minute
to minute, so figures are only compared within a round. Writes its meshes' rows of
benchmarks/results/mixed_speed.json.
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
DEFAULT = ["cpu-1.0-0.33", "cpu-1.0-0.5", "cpu-1.0-1.0", "cpu-4-unequal"]
parser = argparse.ArgumentParser()
parser.add_argument("--meshes", nargs="+", default=DEFAULT)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument(
    "--out", type=pathlib.Path, default=ROOT / "benchmarks/results/mixed_speed.json"
)
args = parser.parse_args()


def speed(folder, mesh, *options, steps):
    summary = pathlib.Path(folder, "summary.json")
    command = [sys.executable, "-m", "hxla", "run", "--mesh", mesh]
    command += [str(ROOT / "examples" / "train_gpt.py"), "--summary", str(summary)]
    command += ["--batch-size", str(args.batch_size), "--dropout", "0"]
    command += ["--steps", str(steps), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = json.loads(summary.read_text())
    seconds = statistics.median(run["seconds"][max(1, steps // 4) :])
    return run["tokens_per_step"] / seconds, run["counts"][-1]


def one_round(folder, mesh, shares):
    alone = {}
    for share in sorted(set(shares), reverse=True):
        path = pathlib.Path(folder, "one.toml")
        path.write_text(f'name="one"\n[[device]]\nkind="cpu"\ncore_share={share}\n')
        alone[str(share)], _ = speed(folder, str(path), steps=max(3, round(7 * share)))
    planned, counts = speed(folder, mesh, steps=11)
    even, _ = speed(folder, mesh, "--split", "even", steps=4)
    attainable = sum(alone[str(s)] for s in shares)
    return {
        "alone_tokens_per_second": {s: round(v) for s, v in alone.items()},
        "planned_tokens_per_second": round(planned),
        "even_tokens_per_second": round(even),
        "fraction_planned": round(planned / attainable, 3),
        "fraction_even": round(even / attainable, 3),
        "speed_up": round(planned / even, 2),
        "counts": counts,
    }


setting = {"jax": jax.__version__, "python": platform.python_version()}
results = {}
with tempfile.TemporaryDirectory() as folder:
    for mesh in args.meshes:
        shares = [d.core_share for d in load_cluster(mesh).devices]
        row = {"mesh": mesh, "batch_size": args.batch_size, **setting, "rounds": []}
        for _ in range(args.rounds):
            row["rounds"].append(one_round(folder, mesh, shares))
            print(json.dumps(row["rounds"][-1]), flush=True)
        for key in ("fraction_planned", "fraction_even", "speed_up"):
            row[key] = statistics.median(r[key] for r in row["rounds"])
        print(json.dumps({k: v for k, v in row.items() if k != "rounds"}), flush=True)
        results[mesh] = row

measured = (
    {row["mesh"]: row for row in json.loads(args.out.read_text())} if args.out.exists() else {}
)
args.out.write_text(json.dumps([*(measured | results).values()], indent=2) + "\n")
