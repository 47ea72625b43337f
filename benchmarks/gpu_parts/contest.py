"""Lets jobs, each a process of its own, train in turns on one card: all meet the same clock.

A job that fails is reported and left out; the others go on. Processes of their own also have peaks
of memory of their own.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from report import Report

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from turns import Turns


class _Job:
    def __init__(self, name: str, command: list[str], folder: pathlib.Path, rounds: int):
        self.name, self._is_ended = name, False
        self.out, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self.turns = Turns(folder / name, 1)
        command = [*command, "--turns", str(folder / name), "--rounds", str(rounds)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--out", str(self.out)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self, deadline: float) -> None:
        if self.process.poll() is not None or time.monotonic() > deadline:
            code = self.process.poll()
            how = "is not done in time" if code is None else f"exit code {code}"
            lines = self._log.read_text().strip().splitlines()[-15:]
            raise RuntimeError("\n".join([f"{self.name}: {how}", *lines]))

    def end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.turns.close()


def contest(
    commands: dict[str, list[str]], report: Report, *, rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """What each job told.

    Args:
        commands: By name; each takes `--turns`, `--rounds` and `--out`. The first one is ready
            before the others begin: it may measure its kernels alone.
        report: Is told of jobs that fail.
        rounds: Turns of each.
        seconds: After which those that are not done have failed.
    """
    deadline = time.monotonic() + seconds
    jobs: dict[str, _Job] = {}
    found: dict[str, dict[str, Any]] = {}

    def lost(name: str, error: Exception) -> None:
        report.failure(str(error))
        jobs.pop(name).end()

    def ready(name: str) -> None:
        job = jobs[name]
        try:
            job.turns.wait(lambda: job.check(deadline))
        except RuntimeError as error:
            lost(name, error)

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for i, (name, command) in enumerate(commands.items()):
            jobs[name] = _Job(name, command, pathlib.Path(folder), rounds)
            stack.callback(jobs[name].end)
            if i == 0:
                ready(name)
        for name in list(jobs)[1:] if next(iter(commands)) in jobs else list(jobs):
            ready(name)
        for turn in range(rounds):
            for name, job in list(jobs.items()):
                job.turns.give()
                if turn + 1 < rounds:
                    ready(name)
                    continue
                try:
                    code = job.process.wait(timeout=max(1.0, deadline - time.monotonic()))
                    if code:
                        job.check(deadline)
                    found[name] = json.loads(job.out.read_text())
                except subprocess.TimeoutExpired:
                    lost(name, RuntimeError(f"{name}: is not done in time"))
                except (RuntimeError, OSError) as error:
                    lost(name, error)
    for name, told in found.items():
        report.detail(name, told)
    return found
