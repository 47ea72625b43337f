"""One SHA-256: in two runs, after a resume, on one replica and on two that share the card.

Two ranks of a NCCL communicator may not have the same card, so two processes that share one say
that they are on different hosts (`NCCL_HOSTID`) and talk over the loopback network. From NCCL 2.30
on `NCCL_MULTI_RANK_GPU_ENABLE=1` allows it outright; that is tried where the first way fails.
Whether or not they may share it, a step whose microbatches come in another order says whether it
matters what is added to what.

References:
    NCCL user guide, environment variables; `getHostHash` in its src/misc/utils.cc.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from report import Report, arguments

APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
WAYS = {  # environment of each process
    "as if on two hosts": [APART | {"NCCL_HOSTID": f"replica-{rank}"} for rank in range(2)],
    "as NCCL 2.30 allows": [APART | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}] * 2,
}
args = arguments()
report = Report(args.out)
STEPS, SECONDS = (4, 900) if args.tiny else (12, 60)


class Run:
    """A run of train_gpt.py that has begun, of one process or two.

    Args:
        stack: Ends it.
        folder: For its files.
        options: Of the script.
        variables: Environment of each process.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: pathlib.Path,
        *options: str,
        variables: list[dict[str, str]] = [{}],  # noqa: B006
    ):
        self._out = folder / f"{len(list(folder.glob('*.log')))}.json"
        self._processes, self._logs = [], []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        script = [sys.executable, str(pathlib.Path(__file__).with_name("train_gpt.py"))]
        script += ["--steps", str(STEPS), "--out", str(self._out), *["--tiny"] * args.tiny]
        for rank, own in enumerate(variables):
            join = ["--join", f"{rank},{port}"] if len(variables) > 1 else []
            self._logs.append(self._out.with_suffix(f".{rank}.log"))
            with self._logs[-1].open("w") as log:
                process = subprocess.Popen(
                    [*script, *join, *options],
                    stdout=log,
                    stderr=log,
                    env=os.environ | own,
                )  # in the part's process group, which ends with the part
            self._processes.append(process)
            stack.callback(self._end, process)

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        process.kill()
        process.wait()

    def told(self) -> dict[str, Any]:
        """What it told at its end.

        Raises:
            RuntimeError: With the last lines of a process that failed or is not done.
        """
        deadline = time.monotonic() + SECONDS
        while not all(process.poll() == 0 for process in self._processes):
            for process, log in zip(self._processes, self._logs, strict=True):
                if process.poll() or time.monotonic() > deadline:
                    lines = log.read_text().strip().splitlines()[-15:]
                    raise RuntimeError("\n".join([f"exit code {process.poll()}", *lines]))
            time.sleep(0.05)
        return json.loads(self._out.read_text())


def compared(what: str, run: Run, base: dict | None, *, is_law: bool = True) -> None:
    """Whether a run ended as another one did.

    Args:
        what: In words.
        run: That has begun.
        base: What the other one told.
        is_law: Whether it must.
    """
    found = report.attempt(what, run.told)
    if found is None or base is None:
        report.row(what, "NOT KNOWN")
        return
    report.detail(what, found)
    report.bits(what, found["sha256"], base["sha256"], is_law=is_law)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        kept = ["--checkpoint-dir", str(folder / "kept")]

        def begin(*options: str, **more: Any) -> Run:
            return Run(stack, folder, *options, **more)

        # Several at once, for most of each is imports and compilation.
        first, again = begin(), begin()
        half = begin(*kept, "--steps", str(STEPS // 2))
        forward, backward = begin("--order", "forward"), begin("--order", "backward")
        base = report.attempt("first run", first.told)
        report.detail("first run", base)
        compared("again, in another process", again, base)
        ordered = report.attempt("microbatches in order", forward.told)
        compared("microbatches in the opposite order", backward, ordered)
        if report.attempt("half a run", half.told) is not None:
            compared("resumed from half a run", begin(*kept), base)
        way = shared(begin, base)
        if way is not None:
            even = begin("--counts", "4", "4", variables=WAYS[way])
            compared("and 4 and 4", even, base)
        over = begin("--counts", "2", "6", variables=[{"HXLA_COMMUNICATION_OVER": "host"}] * 2)
        compared("two replicas that meet in host memory, 2 and 6", over, base)
        runs = [begin("--reduction", "float") for _ in range(2)]
        a_float = report.attempt("float sums", runs[0].told)
        compared("two runs with float sums (nothing is promised)", runs[1], a_float, is_law=False)


def shared(begin: Any, base: dict | None) -> str | None:
    """The first way in which two replicas can share the card."""
    what = "two replicas share the card, 2 and 6 of 8 microbatches"
    for way, variables in WAYS.items():
        run = begin("--counts", "2", "6", variables=variables)
        try:
            run.told()
        except RuntimeError as error:
            report.detail(f"{what}, {way}", str(error))
            continue
        compared(f"{what}, {way}", run, base)
        return way
    report.row(what, "COULD NOT BE HAD, see gpu.json")
    return None


main()
