"""A change of throttle in mid-run: how many steps until the speed is back, and what was compiled.

    python benchmarks/rethrottle.py

Trains on 1.0/0.33 of a core, swaps the shares to 0.33/1.0 at a step, and compares the settled
speed after with the settled speed before. Writes benchmarks/results/rethrottle.json.
"""

import json
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile

import results

ROOT = pathlib.Path(__file__).parent.parent
STEPS, SWAP = 28, 10
parser = results.parser(__doc__, "rethrottle")
parser.add_argument("--batch-size", type=int, default=128)
args = parser.parse_args()


def mesh(path, shares):
    tables = "".join(f'[[device]]\nkind = "cpu"\ncore_share = {s}\n' for s in shares)
    path.write_text('name = "swap"\n' + tables)


with tempfile.TemporaryDirectory() as folder:
    path, summary = pathlib.Path(folder, "mesh.toml"), pathlib.Path(folder, "summary.json")
    mesh(path, (1.0, 0.33))
    command = [sys.executable, "-m", "hxla", "run", "--mesh", str(path)]
    command += [str(ROOT / "examples/train_gpt.py"), "--steps", str(STEPS), "--dropout", "0"]
    command += ["--batch-size", str(args.batch_size), "--summary", str(summary)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    swapped = None
    for line in job.stdout:
        found = re.search(r"step (\d+)/", line)
        if "counts" in line:
            print(line.strip())
        if found and swapped is None and int(found[1]) >= SWAP:
            mesh(path, (0.33, 1.0))
            job.send_signal(signal.SIGUSR1)
            swapped = int(found[1])
    if job.wait():
        sys.exit(f"{' '.join(command)} failed with {job.returncode}")
    run = json.loads(summary.read_text())

seconds = run["seconds"]
before = statistics.median(seconds[3:SWAP])
later = range(swapped, STEPS)
back = next((i for i in later if max(seconds[i : i + 3]) <= before / 0.95), None)
rows = {
    "settled_seconds_before": round(before, 3),
    "settled_seconds_after": round(statistics.median(seconds[-8:]), 3),
    "swapped_after_step": swapped,
    "steps_until_back_at_0.95": "never" if back is None else back - swapped,
    "counts": [run["counts"][SWAP - 1], run["counts"][-1]],
    "recompilations": run["num_compilations"],
    "seconds": [round(s, 3) for s in seconds],
}
results.write(args.out, rows)
