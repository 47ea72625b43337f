"""A GPT in a pipeline on throttled processes: measured against predicted, planned against even cut.

    python benchmarks/pipeline.py [--torch PYTHON] [--mesh cpu-1.0-1.0 ...]

On each mesh the stages of examples/gpt.py run as real processes, 1F1B with residuals kept, with an
even cut and with the planner's. Reported: the measured median step over the one replayed from the
pieces' own times; the planned cut's speed over the even one's; and the planned cut's share of its
bound, the throughput of the devices' speeds together on this schedule without any imbalance:
`(m + S - 1) / (sum of the speeds)` for m microbatches and S stages, speeds in whole microbatches a
second by the times that the processes measured themselves. With an interpreter that has torch,
PyTorch's 1F1B over Gloo with its even cut runs right after, in the same throttles
(benchmarks/torch_pipeline.py). Writes its meshes' rows of benchmarks/results/pipeline.json.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

from hxla import load_cluster

ROOT = pathlib.Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "pipeline.json"

SCRIPT = r"""
import json, os, statistics, sys
import jax, optax
from flax import nnx
import hxla
sys.path.insert(0, sys.argv[1])
import gpt
num, micro, steps, even = (int(x) for x in sys.argv[2:6])
stages = jax.device_count()
schedule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
result = hxla.train(
    gpt.GPT(nnx.Rngs(0)), gpt.library(), gpt.loss, schedule, batch_size=num * micro,
    microbatch_size=micro, steps=steps, stages=(1.0,) * stages if even else stages,
)
if jax.process_index() == 0:
    own = result.history.steps[2:]
    print("RESULT " + json.dumps({
        "step_seconds": statistics.median(s.seconds for s in own),
        "busy_seconds": statistics.median(s.busy_seconds[0] for s in own),
        "tokens_per_second": num * micro * gpt.LENGTH / statistics.median(s.seconds for s in own),
        "reasons": result.plan.reasons, "sha256": result.sha256,
        "predicted_seconds": result.plan.step_seconds,
        "bound_seconds": result.plan.bound_seconds,
    }))
"""


def run(mesh: str, num: int, micro: int, steps: int, *, even: bool) -> dict:
    """One job; its own report."""
    script = ROOT / "runs" / "pipeline_script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    arguments = [str(ROOT / "examples"), str(num), str(micro), str(steps), str(int(even))]
    done = subprocess.run(
        [sys.executable, "-m", "hxla", "run", "--mesh", mesh, str(script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    line = next((x for x in done.stdout.splitlines() if "RESULT " in x), None)
    if line is None:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(line.split("RESULT ", 1)[1])


def torch(python: str, mesh: str, cut: str, num: int, micro: int, steps: int) -> float:
    """Tokens per second of PyTorch's 1F1B."""
    command = [sys.executable, str(ROOT / "benchmarks" / "torch_pipeline.py"), "--torch", python]
    command += ["--mesh", mesh, "--cut", cut, "--microbatches", str(num)]
    command += ["--microbatch-size", str(micro), "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return float(json.loads(done.stdout)["tokens_per_second"])


def main() -> None:
    """Every mesh: even, planned, torch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch")
    parser.add_argument("--mesh", nargs="*", default=["cpu-1.0-1.0", "cpu-1.0-0.5"])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    sizes = (args.microbatches, args.microbatch_size, args.steps)
    table = json.loads(RESULT.read_text()) if RESULT.exists() else {"meshes": {}}
    for mesh in args.mesh:
        row = {"even": run(mesh, *sizes, even=True), "planned": run(mesh, *sizes, even=False)}
        for kind in ("even", "planned"):
            own = row[kind]
            own["measured_over_predicted"] = own["step_seconds"] / own["predicted_seconds"]
        row["planned_over_even"] = row["even"]["step_seconds"] / row["planned"]["step_seconds"]
        row["share_of_bound"] = row["planned"]["bound_seconds"] / row["planned"]["step_seconds"]
        if args.torch:
            stages = len(load_cluster(mesh).devices)
            cut = ",".join([str(4 // stages)] * stages)
            row["torch_tokens_per_second"] = torch(args.torch, mesh, cut, *sizes)
            row["over_torch"] = row["planned"]["tokens_per_second"] / row["torch_tokens_per_second"]
        table["meshes"][mesh] = row
        table["date"] = time.strftime("%Y-%m-%d")
        shown = {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}
        ratio = {k: round(row[k]["measured_over_predicted"], 3) for k in ("even", "planned")}
        print(mesh, shown, "measured over predicted", ratio, flush=True)
        RESULT.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
