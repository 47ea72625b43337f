"""A GPT in a pipeline on throttled processes: planned against even cut, PyTorch, prediction, bound.

    python benchmarks/pipeline.py [--torch PYTHON] [--mesh cpu-1.0-1.0 ...]

On each mesh the stages of examples/gpt.py run as real processes, 1F1B with residuals kept, once
with an even cut and once with the planner's; with an interpreter that has torch, a third job runs
PyTorch's 1F1B over Gloo on the same model in the same throttles (benchmarks/torch_pipeline.py), by
default with an even cut. The jobs take turns of a step (benchmarks/turns.py), each from the moment
it may go on until all its processes wait again, so that the machine's drift meets all of them;
ratios are medians over the rounds.

Reported: the planned cut's speed over the even one's and over PyTorch's; each measured step over
the one replayed from the pieces' own times, which the job measured when it started; and the planned
cut's share of its bound, the throughput of the devices' speeds together on this schedule without
any imbalance: `(m + S - 1) / (sum of the speeds)` for m microbatches and S stages, speeds in whole
microbatches a second by the times that the processes measured themselves. Writes its meshes' rows
of benchmarks/results/pipeline.json.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
from torch_ddp import finished, started
from torch_pipeline import WORKER
from turns import Turns

from hxla import load_cluster

ROOT = pathlib.Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "pipeline.json"
LENGTH = 128  # of a sequence of examples/gpt.py
LAYERS = 4

SCRIPT = r"""
import json, sys
import jax, optax
from flax import nnx
import hxla
sys.path[:0] = sys.argv[1:3]
import gpt
from turns import take_turn
num, micro, steps, even = (int(x) for x in sys.argv[3:7])
stages = jax.device_count()
schedule = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
result = hxla.train(
    gpt.GPT(nnx.Rngs(0)), gpt.library(), gpt.loss, schedule, batch_size=num * micro,
    microbatch_size=micro, steps=steps, stages=(1.0,) * stages if even else stages,
    callbacks=[lambda record, state: take_turn(sys.argv[7], jax.process_index())],
)
if jax.process_index() == 0:
    print("RESULT " + json.dumps({
        "reasons": result.plan.reasons, "sha256": result.sha256,
        "predicted_seconds": result.plan.step_seconds,
        "bound_seconds": result.plan.bound_seconds,
    }))
"""


class Job:
    """One of the jobs that take turns: what starts it, and the seconds of its steps."""

    def __init__(self, folder: pathlib.Path, num_processes: int):
        self.turns = Turns(folder, num_processes)
        self.seconds: list[float] = []

    def check(self) -> None:
        """Raise if a process has failed."""
        raise NotImplementedError

    def step(self) -> None:
        """Let it take one."""
        began = time.perf_counter()
        self.turns.give()
        self.turns.wait(self.check)
        self.seconds.append(time.perf_counter() - began)

    def summary(self) -> dict:
        """Its steps."""
        return {
            "step_seconds": statistics.median(self.seconds),
            "steps": [round(s, 4) for s in self.seconds],
        }


class Hxla(Job):
    """`hxla run` of the script above."""

    def __init__(self, folder: pathlib.Path, mesh: str, sizes: tuple[int, int, int], even: bool):
        super().__init__(folder, len(load_cluster(mesh).devices))
        script, self._log = folder / "script.py", folder / "log"
        script.write_text(SCRIPT)
        paths = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
        arguments = [*paths, *map(str, sizes), str(int(even)), str(folder)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hxla", "run", "--mesh", mesh, str(script), *arguments],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )

    def check(self) -> None:
        """See `Job`."""
        if self._process.poll():
            raise SystemExit(self._log.read_text()[-6000:])

    def result(self) -> dict:
        """What it says of itself, once it has ended."""
        self._process.wait()
        self.check()
        lines = self._log.read_text().splitlines()
        line = next(x for x in lines if "RESULT " in x)
        found = json.loads(line.split("RESULT ", 1)[1])
        summary = self.summary()
        if found["predicted_seconds"]:
            found["measured_over_predicted"] = summary["step_seconds"] / found["predicted_seconds"]
        return summary | found

    def close(self) -> None:
        """End it, if it has not."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()


class Torch(Job):
    """PyTorch's 1F1B."""

    def __init__(
        self,
        folder: pathlib.Path,
        mesh: str,
        sizes: tuple[int, int, int],
        python: str,
        cut: str,
        stack: contextlib.ExitStack,
    ):
        num_stages = len(cut.split(","))
        super().__init__(folder, num_stages)
        shares = [d.core_share for d in load_cluster(mesh).devices][:num_stages]
        numbers = (*sizes, cut, str(ROOT / "benchmarks"), str(folder))
        self._workers = stack.enter_context(started(python, WORKER, shares, numbers))

    def check(self) -> None:
        """See `Job`."""
        if any(worker.poll() for worker in self._workers):
            raise SystemExit("PyTorch failed, see above")

    def losses(self) -> list[float]:
        """Of its steps, once it has ended."""
        lines = finished(self._workers)[-1].splitlines()
        return [float(x.split()[1]) for x in lines if x.startswith("loss")]


def measure(mesh: str, num: int, micro: int, steps: int, python: str | None, cut: str) -> dict:
    """All jobs on one mesh."""
    sizes = (num, micro, steps + 1)  # the first compiles
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        jobs: dict[str, Job] = {}
        # One after another: each measures its pieces and compiles while the others wait.
        for name in ("even", "planned"):
            jobs[name] = own = Hxla(folder / name, mesh, sizes, name == "even")
            stack.callback(own.close)
            stack.callback(own.turns.close)
            own.turns.wait(own.check)
        if python is not None:
            jobs["torch"] = torch = Torch(folder / "torch", mesh, sizes, python, cut, stack)
            stack.callback(torch.turns.close)
            torch.turns.wait(torch.check)
        for _ in range(steps):
            for job in jobs.values():
                job.step()
        row: dict = {"microbatches": num, "microbatch_size": micro}
        for name, job in jobs.items():
            job.turns.give()
            if isinstance(job, Hxla):
                row[name] = job.result()
        tokens = num * micro * LENGTH

        def over(other: str) -> float:
            pairs = zip(jobs[other].seconds, jobs["planned"].seconds, strict=True)
            return statistics.median(theirs / own for theirs, own in pairs)

        planned = row["planned"]
        row["tokens_per_second"] = tokens / planned["step_seconds"]
        row["planned_over_even"] = over("even")
        if planned["bound_seconds"]:
            row["share_of_bound"] = planned["bound_seconds"] / planned["step_seconds"]
        if python is not None:
            losses = [round(x, 4) for x in torch.losses()]
            row["torch"] = {"cut": cut, **torch.summary(), "losses": losses}
            row["torch_tokens_per_second"] = tokens / row["torch"]["step_seconds"]
            row["over_torch"] = over("torch")
        return row


def main() -> None:
    """Every mesh."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch")
    parser.add_argument("--mesh", nargs="*", default=["cpu-1.0-1.0", "cpu-1.0-0.5"])
    parser.add_argument("--cut", help="layers of each of PyTorch's stages; default: even")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    args = parser.parse_args()
    table = json.loads(args.out.read_text()) if args.out.exists() else {"meshes": {}}
    for mesh in args.mesh:
        stages = len(load_cluster(mesh).devices)
        if LAYERS % stages and not args.cut:
            parser.error(f"{mesh}: PyTorch cannot cut {LAYERS} layers into {stages} even stages")
        cut = args.cut or ",".join([str(LAYERS // stages)] * stages)
        sizes = (args.microbatches, args.microbatch_size, args.steps)
        row = measure(mesh, *sizes, args.torch, cut)
        table["meshes"][mesh] = row
        table["date"], table["jax"] = time.strftime("%Y-%m-%d"), jax.__version__
        shown = {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}
        ratio = {k: round(row[k].get("measured_over_predicted", 0), 3) for k in ("even", "planned")}
        print(mesh, shown, "measured over predicted", ratio, flush=True)
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
