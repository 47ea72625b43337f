"""Jobs of `hxla run` that take turns of a step with each other."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turns import Turns

import hxla

ROOT = pathlib.Path(__file__).parent.parent
GPT = ROOT / "benchmarks" / "train_in_turns.py"
#: A job that waits for its turn is not stuck.
_PATIENT = {"HXLA_WATCHDOG_PROGRESS_TIMEOUT_SECONDS": "36000"}


class Job:
    """A job that stands still after its first step, and then takes one whenever it may.

    Its script gets the folder of its turns as first argument, calls `turns.take_turn` in every
    process after every step and once more than it is given turns, and may print a line of `RESULT`
    and JSON.

    Args:
        folder: A new one for this job alone.
        script: And its further arguments.
        mesh: Mesh file, or the name of one; None: that of the plan, or one process that is not
            throttled.
        plan: File of what is to run, if the script does not say.
        options: Further options of `hxla run`.
        checkout: The hxla that runs it.
        settings: Variables of its environment.

    Attributes:
        seconds: Of each turn, until every process waits again.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        script: Sequence[str | pathlib.Path],
        *,
        mesh: str | None = None,
        plan: pathlib.Path | None = None,
        options: Sequence[str] = (),
        checkout: pathlib.Path = ROOT,
        settings: Mapping[str, str] | None = None,
    ):
        self.seconds: list[float] = []
        num = 1
        if plan is not None:
            num = len(hxla.Plan.read(plan).devices)
        elif mesh is not None:
            num = len(hxla.load_cluster(mesh).devices)
        self._turns, self._log = Turns(folder, num), folder / "log"
        where = ["--mesh", mesh] if mesh is not None else ["-n", "1"] if plan is None else []
        where += [*(["--plan", str(plan)] if plan is not None else []), *options]
        first, *others = map(str, script)
        command = [sys.executable, "-m", "hxla", "run", *where, first, str(folder), *others]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=folder,  # not a checkout, whose hxla would come before that of PYTHONPATH
                env=environment | _PATIENT | {"PYTHONPATH": str(checkout)} | dict(settings or {}),
            )

    def wait(self) -> None:
        """Until every process waits for its turn.

        Raises:
            SystemExit: If the job ends instead, with the end of what it said.
        """
        self._turns.wait(self._check)

    def step(self) -> float:
        """Let it take one; returns its seconds."""
        began = time.perf_counter()
        self._turns.give()
        self.wait()
        self.seconds.append(time.perf_counter() - began)
        return self.seconds[-1]

    def finish(self) -> dict[str, Any]:
        """Let it end; returns what it says of itself."""
        self._turns.give()
        self._process.wait()
        text = self._log.read_text()
        if self._process.returncode:
            raise SystemExit(text[-6000:])
        lines = [line.split("RESULT ", 1)[1] for line in text.splitlines() if "RESULT " in line]
        return json.loads(lines[-1]) if lines else {}

    def close(self) -> None:
        """End it, if it has not."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._turns.close()

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(self._log.read_text()[-6000:])


@contextlib.contextmanager
def started(
    jobs: Mapping[str, Mapping[str, Any]], folder: pathlib.Path
) -> Iterator[dict[str, Job]]:
    """Jobs, each of which has done its first step.

    They start one after another: each measures and compiles while the others stand still.

    Args:
        jobs: Arguments of `Job`, by name.
        folder: For their folders.
    """
    with contextlib.ExitStack() as stack:
        running = {}
        for n, (name, arguments) in enumerate(jobs.items()):
            running[name] = job = Job(folder / f"job{n}", **arguments)
            stack.callback(job.close)
            job.wait()
        yield running


def in_turns(jobs: Mapping[str, Job], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each job in each round; every second round goes backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for n in range(num_rounds):
        for name in list(jobs)[:: -1 if n % 2 else 1]:
            seconds[name].append(jobs[name].step())
    return seconds


def timed(
    jobs: Mapping[str, Mapping[str, Any]], num_rounds: int, *, settling: int = 1
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Jobs from start to end: seconds of a step in each round, and what each says of itself.

    Args:
        jobs: Arguments of `Job`, by name.
        num_rounds: That count.
        settling: Rounds before them, in which caches are cold and counts settle.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        started(jobs, pathlib.Path(folder)) as running,
    ):
        in_turns(running, settling)
        seconds = in_turns(running, num_rounds)
        return seconds, {name: job.finish() for name, job in running.items()}


def check_same_bits(told: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a comparison of jobs that ended with other parameters.

    Raises:
        SystemExit: With all fingerprints.
    """
    if len({own["sha256"] for own in told.values()}) > 1:
        raise SystemExit(f"bits differ: { {name: own['sha256'] for name, own in told.items()} }")


def torch(python: str, script: str, arguments: Sequence[object], *, mesh: str) -> dict[str, Any]:
    """Arguments of `Job` for a script of PyTorch, in the same throttles as a job of hxla.

    Args:
        python: An interpreter that has torch.
        script: In this folder.
        arguments: Of the script.
        mesh: See `Job`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = ROOT / "benchmarks"
    python = os.path.abspath(shutil.which(python) or python)  # a job has a folder of its own
    return {
        "script": [here / "run_torch.py", port, python, here / script, *map(str, arguments)],
        "mesh": mesh,
    }
