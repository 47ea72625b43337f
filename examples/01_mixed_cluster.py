"""The main job: one model, two unequal devices, all of their speed, the same bits.

    python examples/01_mixed_cluster.py        (or: make demo)

Two processes share this machine, one with a whole core and one with a third of a core. Each is
first timed alone; then the same training runs twice on both, with even counts and with planned
ones. The time of a step under even counts is set by the slow device: at most 2 x 0.33 of a core's
work. Planned counts reach the sum, 1.33.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from matplotlib.figure import Figure

HERE = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, help="default: as many as fit into the time")
parser.add_argument("--seconds", type=float, default=270)
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/demo"))
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)
begun = time.perf_counter()


def train(name: str, mesh: str, *options: str) -> dict:
    print(f"\n--- {name} ---", flush=True)
    summary = args.folder / f"{name}.json"
    command = [sys.executable, "-m", "hxla", "run", "--mesh", mesh, str(HERE / "train_gpt.py")]
    command += ["--summary", str(summary), "--run-dir", str(args.folder / name)]
    started = time.perf_counter()
    subprocess.run([*command, "--batch-size", "48", *options], check=True)
    run = json.loads(summary.read_text())
    # Start, compilation and the measurement of the devices: what is not steps.
    return run | {"overhead": time.perf_counter() - started - sum(run["seconds"])}


def speed(run: dict) -> float:
    """Tokens per second: the median step, without the first, which waits for compilation."""
    return run["tokens_per_step"] / statistics.median(run["seconds"][1:])


alone = []
with tempfile.TemporaryDirectory() as folder:
    for share in (1.0, 0.33):
        mesh = pathlib.Path(folder, f"{share}.toml")
        mesh.write_text(f'name = "{share}"\n[[device]]\nkind = "cpu"\ncore_share = {share}\n')
        alone.append(train(f"alone-{share}", str(mesh), "--steps", "3"))
fast, slow = map(speed, alone)
attainable = fast + slow
tokens = alone[0]["tokens_per_step"]
left = args.seconds - (time.perf_counter() - begun) - 2 * alone[1]["overhead"]
fitting = int(left / (tokens / (2 * slow) + tokens / attainable))
num_steps = args.steps or min(max(fitting, 12), 60)
print(f"\n{num_steps} steps, first with even counts, then with planned ones")
steps = ["--steps", str(num_steps)]
even = train("even", "cpu-1.0-0.33", *steps, "--split", "even")
planned = train("planned", "cpu-1.0-0.33", *steps, "--sample", "300")

print("\n--- result ---")
print(
    f"even counts     {speed(even):7,.0f} tokens/s   {speed(even) / attainable:.2f} of attainable"
)
print(
    f"planned counts  {speed(planned):7,.0f} tokens/s   "
    f"{speed(planned) / attainable:.2f} of attainable"
)
print(f"speed-up        {speed(planned) / speed(even):7.2f}")
print(f"parameters      {'identical' if even['sha256'] == planned['sha256'] else 'DIFFERENT'}")
print(f"  even     {even['sha256']}\n  planned  {planned['sha256']}")

figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=150)
bars, losses = figure.subplots(1, 2)
for row, (name, run) in enumerate({"even": even, "planned": planned}.items()):
    last = slice(-10, None)
    seconds = statistics.median(run["seconds"][last])
    for d, device in enumerate(("1.0 core", "0.33 core")):
        busy = statistics.median(b[d] for b in run["busy_seconds"][last])
        label = f"{name}, {device}: {run['counts'][-1][d]} microbatches"
        bars.barh(label, busy, color="#2f6f9f", label="busy" if row + d == 0 else None)
        idle = max(0.0, seconds - busy)
        bars.barh(label, idle, left=busy, color="#d9a441", label="idle" if row + d == 0 else None)
    losses.plot(run["loss"], label=name, lw=3 - 2 * row, color=("#d9a441", "#2f6f9f")[row])
bars.invert_yaxis()
bars.set_xlabel("seconds per step")
bars.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
losses.set_xlabel("step")
losses.set_ylabel("loss (nats per byte)")
losses.set_title("the same bits", fontsize=10)
losses.legend(frameon=False)
picture = args.folder / "mixed_cluster.png"
figure.savefig(picture)
print(f"picture: {picture}\nreport: {args.folder / 'planned' / 'report.html'}")
sys.exit(even["sha256"] != planned["sha256"])
