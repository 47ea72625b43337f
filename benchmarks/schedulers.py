"""Mean completion of published traces of jobs under fixed and elastic schedulers.

    python benchmarks/schedulers.py --traces FOLDER

FOLDER holds `easyscale/test.csv` and `pollux/workload-N.csv`, of the artifacts of EasyScale (SC'23)
and of Sia (SOSP'23, which ships Pollux's). `hxla schedule simulate` replays them at several costs
of a move; 20 s is what EasyScale's simulation assumes. The figures are the same on any machine.
Writes benchmarks/results/schedulers.json and the picture docs/pictures/schedulers.png.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import results

ROOT = pathlib.Path(__file__).parent.parent
PICTURE = ROOT / "docs/pictures/schedulers.png"
MOVE = 20.0  # seconds
SETS = ("one-at-a-time", "backfill", "shortest-remaining")
#: Options for Pollux's traces: the gangs that were asked for, larger ones, and jobs whose batch is
#: not cut, which can use no more devices than were asked for.
POLLUX = {
    "gangs as asked for": [],
    "gangs of all microbatches": ["--gangs", "most"],
    "not cut into microbatches": ["--uncut"],
}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def simulated(trace: pathlib.Path, move_seconds: float, *options: str) -> dict[str, Any]:
    """All policies over a trace, and how much sooner than the best fixed sets `weighing` ends."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "hxla", "schedule", "simulate", str(trace)]
        command += ["--move-seconds", str(move_seconds), "--json", file.name, *options]
        subprocess.run(command, env=ENVIRONMENT, check=True)
        found = json.loads(pathlib.Path(file.name).read_text())
    means = {name: row["mean_completion_seconds"] for name, row in found.items()}
    best = min(SETS, key=lambda name: means[name])
    return {
        "policies": found,
        "best of fixed sets": best,
        "best of fixed sets / weighing": round(means[best] / means["weighing"], 3),
    }


def main() -> None:
    """All traces."""
    parser: argparse.ArgumentParser = results.parser(__doc__, "schedulers")
    parser.add_argument("--traces", type=pathlib.Path, required=True)
    parser.add_argument("--workloads", nargs="+", type=int, default=[2, 6], help="of Pollux")
    parser.add_argument("--draw", type=pathlib.Path, default=PICTURE)
    args = parser.parse_args()
    easyscale = args.traces / "easyscale/test.csv"
    rows = {
        "EasyScale's trace, as it was published": simulated(easyscale, MOVE, "--only-at-intervals")
    }
    for seconds in (1.0, 5.0, MOVE, 60.0):
        draw = ["--draw", str(args.draw)] if seconds == MOVE else []
        rows[f"EasyScale's trace, move {seconds:g} s"] = simulated(easyscale, seconds, *draw)
    for number in args.workloads:
        trace = args.traces / f"pollux/workload-{number}.csv"
        for name, options in POLLUX.items():
            row = f"Pollux's workload {number}, {name}, move {MOVE:g} s"
            rows[row] = simulated(trace, MOVE, *options)
    results.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
