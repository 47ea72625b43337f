"""Share four unlike devices among three jobs by a policy: each ends with the same bits as alone.

    python examples/14_schedule.py

Each job trains the GPT of 12_elastic.py under `hxla schedule run`. The first begins on all four
devices, shares of this machine's cores. Two shorter jobs arrive later and get some of them. When
they have ended, the first job gets these devices back. Each job ends with the SHA-256 of an
undisturbed run on one process. At the end `hxla schedule replay` repeats the decisions.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

SCRIPT = pathlib.Path(__file__).with_name("12_elastic.py")
HXLA = [sys.executable, "-m", "hxla"]
DEVICES = """
name = "shared out"
device = [
    {kind = "cpu", core_share = 0.5, count = 2},
    {kind = "cpu", core_share = 0.4, count = 2},
]
"""
JOB = """
[[job]]
name = "{name}"
script = "{script}"
arguments = ["--steps", "{steps}", "--batch-size", "{batch_size}"]
steps = {steps}
microbatches = {microbatches}
min_devices = {min_devices}
arrival_seconds = {arrival}
seconds = {{"cpu@0.5" = 0.05, "cpu@0.4" = 0.06}}
"""

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--arrival", type=float, default=20, help="seconds until the shorter jobs")
parser.add_argument("--draw", help="file for a picture of the job of each device over time")
args = parser.parse_args()
#: Name, microbatches (maxP), fewest devices (minP), steps, arrival.
jobs = [
    ("first", 8, 1, args.steps, 0),
    ("pair", 2, 2, args.steps // 4, args.arrival),
    ("small", 1, 1, args.steps // 6, args.arrival),
]


def digest(text):
    """What a job prints in the end."""
    [found] = [line.split()[-1] for line in text.splitlines() if "sha256" in line]
    return found


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    (folder / "devices.toml").write_text(DEVICES)
    with (folder / "jobs.toml").open("w") as file:
        for name, microbatches, min_devices, steps, arrival in jobs:
            own = {"name": name, "script": SCRIPT, "steps": steps, "arrival": arrival}
            own |= {"microbatches": microbatches, "min_devices": min_devices}
            file.write(JOB.format(**own, batch_size=4 * microbatches))
    where = ["--mesh", str(folder / "devices.toml"), "--out", str(folder / "out")]
    command = [*HXLA, "schedule", "run", str(folder / "jobs.toml"), "--policy", "weighing", *where]
    ran = subprocess.run([*command, "--move-seconds", "2"], stderr=subprocess.PIPE, text=True)
    print(ran.stderr, end="")
    replay = [*HXLA, "schedule", "replay", str(folder / "out" / "record.jsonl")]
    replay += ["--draw", args.draw] if args.draw else []
    again = subprocess.run(replay, stdout=subprocess.PIPE, text=True)
    print(again.stdout, end="")
    is_equal = not ran.returncode and not again.returncode
    for name, microbatches, _, steps, _ in jobs:
        alone = [*HXLA, "run", "-n", "1", str(SCRIPT), "--steps", str(steps)]
        alone += ["--batch-size", str(4 * microbatches)]
        undisturbed = subprocess.run(alone, capture_output=True, text=True, check=True).stdout
        shared = (folder / "out" / f"{name}.log").read_text()
        print(f"{name}: sha256 {digest(shared)}, undisturbed {digest(undisturbed)}")
        is_equal &= digest(shared) == digest(undisturbed)
sys.exit(not is_equal)
