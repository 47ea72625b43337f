"""A GPT of 124 million parameters: hxla beside plain Flax under `jax.jit` and `torch.compile`.

Eight microbatches a step, as large as lets all contenders onto the card: they stay there and take
turns, so that its clock's drift meets all of them. Exact sums ask XLA for deterministic operations
and untimed kernels; float sums compiled so show which part of the difference that is.
"""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from report import Report, arguments

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from turns import Turns

HERE = pathlib.Path(__file__).parent
AS_EXACT = (
    "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0 "
    "--xla_gpu_enable_triton_gemm=false"
)
args = arguments()
report = Report(args.out)
ROUNDS, STEPS, SECONDS = (2, 1, 900) if args.tiny else (5, 4, 230)


def microbatch_size() -> int:
    """Sequences: a contender takes some 4 GiB and 2 GiB for each."""
    if args.tiny or args.gib is None:
        return 2
    room = (args.gib / 5 - 4) / 2
    return max(b for b in (1, 2, 4, 8) if b == 1 or b <= room)


def commands() -> dict[str, list[str]]:
    """Of the contenders, those first that time their kernels."""
    options = ["--size", "tiny" if args.tiny else "124m", "--steps", str(STEPS)]
    options += ["--rounds", str(ROUNDS), "--micro", str(microbatch_size())]
    of_jax = [sys.executable, str(HERE / "gpt_run.py")]
    found = {"plain": [*of_jax, "plain", *options], "hxla float": [*of_jax, "float", *options]}
    device = "cpu" if args.tiny else "cuda"
    probe = f"import torch; assert {args.tiny} or torch.cuda.is_available(); torch.zeros(1)"
    try:
        subprocess.run([args.torch, "-c", probe], check=True, capture_output=True)
        torch = [args.torch, str(HERE / "torch_run.py"), "--device", device]
        found["torch.compile"] = [*torch, *options]
    except (OSError, subprocess.CalledProcessError):
        report.row("beside torch.compile", "LEFT OUT", f"{args.torch} has no torch for {device}")
    found["hxla exact"] = [*of_jax, "exact", *options]
    if not args.tiny:
        found["hxla float, compiled as exact"] = ["env", f"XLA_FLAGS={AS_EXACT}", *of_jax, "float"]
        found["hxla float, compiled as exact"] += options
    return found


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
                start_new_session=True,
            )

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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.turns.close()

    def _check(self, deadline: float, is_over: bool = False) -> None:
        code = self._process.poll()
        if time.monotonic() < deadline and (code is None or (is_over and code == 0)):
            return
        how = "is not done in time" if code is None else f"exit code {code}"
        lines = self._log.read_text().strip().splitlines()[-15:]
        raise RuntimeError("\n".join([how, *lines]))


def contest() -> dict[str, dict[str, Any]]:
    """What each contender told; those that fail are reported and left out."""
    deadline, found = time.monotonic() + SECONDS, {}
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

        for name, command in commands().items():
            waiting.append(Contender(name, command, pathlib.Path(folder)))
            stack.callback(waiting[-1].close)
            if not name.endswith("exact"):
                settle()  # it measures its kernels, so nobody else is busy meanwhile
        settle()
        for turn in range(ROUNDS):
            for own in list(running):
                own.turns.give()
                wait = own.told if turn + 1 == ROUNDS else own.ready
                told = report.attempt(own.name, lambda wait=wait: wait(deadline) or {})
                if told is None:
                    running.remove(own)
                elif told:
                    found[own.name] = told
    return found


def main() -> None:
    found = contest()
    for name, told in found.items():
        report.detail(name, told)
    # The first turn warms up.
    rates = {
        name: told["tokens_per_step"] / statistics.median(told["seconds_per_step"][1:])
        for name, told in found.items()
    }
    peaks = {name: (told["peak_bytes"] or 0) / 2**30 for name, told in found.items()}
    pairs = [("hxla exact", other) for other in rates if other != "hxla exact"]
    pairs += [("hxla float", other) for other in ("plain", "torch.compile")]
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
    report.row("microbatches of", f"{microbatch_size()} sequences")


main()
