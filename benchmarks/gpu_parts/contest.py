"""Processes that train the same on one card, in turns: what parts of benchmarks/gpu.py compare."""

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from report import Report

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from turns import Turns


class Contender:
    """A process that trains when it is its turn."""

    def __init__(self, name: str, command: list[str], folder: pathlib.Path):
        own = folder / name.replace(" ", "-")
        self.name, self._log, self._out = name, own.with_suffix(".log"), own.with_suffix(".json")
        self.turns, self._is_closed = Turns(own, 1), False
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--turns", str(own), "--out", str(self._out)],
                stdout=log,
                stderr=log,
            )  # in the part's process group, which ends with the part

    def ready(self, deadline: float) -> None:
        """Wait for it; raises RuntimeError if it fails."""
        self.turns.wait(lambda: self._check(deadline))

    def told(self, deadline: float) -> dict[str, Any]:
        """What it wrote at its end; raises RuntimeError if it fails."""
        while not self._out.exists() or self._process.poll() is None:
            self._check(deadline, is_over=True)
            time.sleep(0.05)
        return json.loads(self._out.read_text())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._process.kill()
        self._process.wait()
        self.turns.close()

    def _check(self, deadline: float, is_over: bool = False) -> None:
        code = self._process.poll()
        if time.monotonic() < deadline and (code is None or (is_over and code == 0)):
            return
        how = "is not done in time" if code is None else f"exit code {code}"
        lines = self._log.read_text().strip().splitlines()[-15:]
        raise RuntimeError("\n".join([how, *lines]))


def contest(
    report: Report,
    commands: Mapping[str, Sequence[str]],
    num_turns: int,
    seconds: float,
    quiet: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """What each contender told; those that fail are reported and left out.

    Args:
        report: To write to.
        commands: Of the contenders, those of `quiet` first.
        num_turns: Of each.
        seconds: After which the others are ended.
        quiet: Those that time their kernels: nobody else begins before they are ready.
    """
    deadline, found = time.monotonic() + seconds, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running: list[Contender] = []
        waiting: list[Contender] = []

        def settle() -> None:
            for own in waiting:
                if report.attempt(own.name, lambda own=own: own.ready(deadline) or True):
                    running.append(own)
                else:
                    own.close()
            waiting.clear()

        for name, command in commands.items():
            waiting.append(Contender(name, list(command), pathlib.Path(folder)))
            stack.callback(waiting[-1].close)
            if name in quiet:
                settle()
        settle()
        for turn in range(num_turns):
            for own in list(running):
                own.turns.give()
                wait = own.told if turn + 1 == num_turns else own.ready
                told = report.attempt(own.name, lambda wait=wait: wait(deadline) or {})
                if told is None:
                    running.remove(own)
                elif told:
                    found[own.name] = told
    return found


def compare(
    report: Report, found: Mapping[str, Mapping[str, Any]], pairs: Sequence[tuple[str, str]]
) -> None:
    """Rows of tokens a second and of peak memory for pairs of contenders, and each one's losses."""
    for name, told in found.items():
        report.detail(name, told)
    # The first turn warms up.
    rates = {
        name: told["tokens_per_step"] / statistics.median(told["seconds_per_step"][1:])
        for name, told in found.items()
    }
    peaks = {name: (told["peak_bytes"] or 0) / 2**30 for name, told in found.items()}
    for ours, other in pairs:
        if ours in found and other in found:
            own, theirs = rates[ours], rates[other]
            what = f"{ours} beside {other}"
            report.row(f"{what}: tokens/s", f"{own:.0f}", f"{theirs:.0f}", f"{own / theirs:.3f}x")
            memory = (f"{peak:.2f} GiB" if peak else "?" for peak in (peaks[ours], peaks[other]))
            report.row(f"{what}: peak memory", *memory)
    for name, told in found.items():
        losses = told["losses"]
        ready = f"{told['seconds_to_first_step']:.0f} s to the first step"
        report.row(f"{name}: loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}", ready)


def gpt_options(
    num_sequences: int, num_turns: int, num_steps: int, *, is_tiny: bool, attention: str = "unfused"
) -> list[str]:
    """The options of gpt_run.py and torch_run.py, all alike."""
    options = {
        "attention": attention,
        "size": "tiny" if is_tiny else "124m",
        "micro": num_sequences,
        "rounds": num_turns,
        "steps": num_steps,
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def torch_command(report: Report, python: str, *, is_tiny: bool) -> list[str]:
    """The command of torch_run.py; empty, with a row of the report, without torch."""
    device = "cpu" if is_tiny else "cuda"
    probe = f"import torch; assert {is_tiny} or torch.cuda.is_available(); torch.zeros(1)"
    try:
        subprocess.run([python, "-c", probe], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        report.row("beside torch.compile", "LEFT OUT", f"{python} has no torch for {device}")
        return []
    return [python, str(pathlib.Path(__file__).with_name("torch_run.py")), "--device", device]


def microbatch_size(gib: float | None, num_contenders: int, *, is_tiny: bool) -> int:
    """Sequences: a contender takes some 4 GiB and 2 GiB for each."""
    if is_tiny or gib is None:
        return 2
    room = (gib / num_contenders - 4) / 2
    return max(b for b in (1, 2, 4, 8) if b == 1 or b <= room)
