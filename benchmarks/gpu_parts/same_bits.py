"""One SHA-256: in two runs, after a resume, on one replica and on two that share the card.

Two ranks of a NCCL communicator may not have the same card, so two processes that share one say
that they are on different hosts (`NCCL_HOSTID`) and talk over the loopback network. From NCCL 2.30
on `NCCL_MULTI_RANK_GPU_ENABLE=1` allows it outright; that is tried where the first way fails. If
neither works, the sums of groups of microbatches, added up on the host, still say whether it would
matter who ran which.

References:
    NCCL user guide, environment variables; `getHostHash` in its src/misc/utils.cc.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from report import Report, arguments

HERE = pathlib.Path(__file__).parent
APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
TOGETHER = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
args = arguments()
report = Report(args.out)
STEPS = 4 if args.dry else 12
SECONDS = 900.0 if args.dry else 60.0  # of a run


@contextlib.contextmanager
def started(options: list[str], variables: list[dict[str, str]]) -> Iterator[list]:
    """The processes of a run, one for each set of variables; ended when the block is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE / "bits_run.py"), *options, *(["--dry"] * args.dry)]
    own = []
    try:
        for rank, extra in enumerate(variables):
            env = os.environ | extra
            if len(variables) > 1:
                env |= {
                    "HXLA_COORDINATOR": f"127.0.0.1:{port}",
                    "HXLA_NUM_PROCESSES": str(len(variables)),
                    "HXLA_PROCESS_ID": str(rank),
                }
            log = tempfile.TemporaryFile("w+")
            started = subprocess.Popen(
                command, stdout=log, stderr=log, env=env, start_new_session=True
            )
            own.append((started, log))
        yield own
    finally:
        for process, log in own:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.close()


def finished(own: list, limit: float = SECONDS) -> dict:
    """What the first process of a run told.

    Raises:
        RuntimeError: With the last lines of a process that failed or is not done.
    """
    deadline = time.monotonic() + limit
    running, texts = dict(enumerate(own)), {}
    while running:
        for rank, (process, log) in list(running.items()):
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                texts[rank] = log.read()
                if process.poll() != 0:
                    lines = texts[rank].strip().splitlines()[-15:]
                    raise RuntimeError("\n".join([f"rank {rank}: {process.poll()}", *lines]))
                del running[rank]
        time.sleep(0.05)
    told = [line for line in texts[0].splitlines() if line.startswith("TOLD ")]
    return json.loads(told[-1][5:])


def pair(*options: str, way: str) -> dict:
    """Two replicas, each in a process of its own, on one card."""
    if way == "different hosts":
        variables = [APART | {"NCCL_HOSTID": f"replica-{rank}"} for rank in range(2)]
    else:
        variables = [APART | TOGETHER] * 2
    with started(["--steps", str(STEPS), *options], variables) as own:
        return finished(own)


def same(what: str, found: dict | None, expected: str) -> bool:
    if found is None:
        report.row(what, "did not run")
        return False
    report.detail(what, found)
    is_same = found["sha256"] == expected
    report.row(what, found["sha256"][:16], expected[:16], "same" if is_same else "OTHER")
    if not is_same:
        report.failure(f"{what}: {found['sha256'][:16]}, not {expected[:16]}")
    return is_same


def compared(what: str, found: dict | None, other: dict | None) -> None:
    """Of which nothing is promised."""
    if found is not None and other is not None:
        told = [f["sha256"][:16] for f in (found, other)]
        report.row(what, *told, "same" if told[0] == told[1] else "other")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Together, for most of each is imports and compilation.
        half = ["--steps", str(STEPS // 2), "--checkpoint-dir", folder]
        with alone() as first, alone() as again, started(half, [{}]) as begun:
            base = report.attempt("first run", lambda: finished(first))
            if base is None:
                return
            expected = base["sha256"]
            report.detail("first run", base)
            found = report.attempt("again", lambda: finished(again))
            same("again, in another process", found, expected)
            report.attempt("half a run", lambda: finished(begun))
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
        with (
            alone("--checkpoint-dir", folder) as resumed,
            alone(XLA_FLAGS=flags) as untuned,
            alone("--reduction", "float") as a_float,
            alone("--reduction", "float") as another,
        ):
            found = report.attempt("resumed", lambda: finished(resumed))
            same("resumed in mid-run", found, expected)
            if not args.dry:
                found = report.attempt("without autotuning", lambda: finished(untuned))
                compared("exact sums without autotuning (for information)", found, base)
            found, other = (report.attempt("float", lambda r=r: finished(r)) for r in (a_float, another))
            compared("two runs with float sums (for information)", found, other)
    shared(expected)
    grouped()


def alone(*options: str, **variables: str) -> contextlib.AbstractContextManager[list]:
    return started(["--steps", str(STEPS), *options], [variables])


def shared(expected: str) -> None:
    """Two replicas on one card, in the first way that works."""
    for way in ("different hosts",) if args.dry else ("different hosts", "several ranks a card"):
        name = f"two replicas share the card ({way}), 2 and 6 of 8 microbatches"
        try:
            found = pair("--counts", "2,6", way=way)
        except RuntimeError as error:
            report.detail(name, str(error))
            continue
        same(name, found, expected)
        even = report.attempt("even counts", lambda way=way: pair("--counts", "4,4", way=way))
        same("and 4 and 4", even, expected)
        return
    report.row("two replicas share the card", "could not be had here, see the details")
    report.failure("two replicas share the card: no way of sharing worked")


def grouped() -> None:
    ran = subprocess.run(
        [sys.executable, str(HERE / "grouping.py"), *(["--dry"] * args.dry)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    lines = ran.stdout.strip().splitlines()
    what = "sums of groups of microbatches, added up on the host"
    report.row(what, lines[-1] if not ran.returncode and lines else "failed")
    if ran.returncode:
        report.failure("\n".join(["groups of microbatches", *ran.stderr.splitlines()[-15:]]))


main()
