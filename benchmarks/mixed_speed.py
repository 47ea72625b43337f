"""Tokens per second on unequal devices, beside what each device reaches alone.

    python benchmarks/mixed_speed.py [--meshes cpu-1.0-0.33 cpu-1.0-0.5 ...] [--torch PYTHON]

For each mesh the model of examples/gpt.py trains with the same global batch on every share of a
core alone, and on all devices together with measured and with even counts, and with measured counts
and the optimizer's state shared out by speed (ZeRO stage 1), so that a slow device also updates
less, with two limbs and with one (half of what travels); with an interpreter that has torch also by
DDP, its counts set by hand (benchmarks/torch_ddp_worker.py). All jobs take turns of a step, until
its update is done, so that the machine's drift meets all of them; the first turns, in which counts
settle, do not count. `attainable` is the joint speed over the sum of the speeds alone, round by
round. `attainable side by side` is over the sum of the speeds of jobs that run at the same time and
have nothing to do with each other, for cores share caches and memory: a step of the slowest, and
steps of the others as long as it lasts. Writes its meshes' rows of
benchmarks/results/mixed_speed.json.
"""

import argparse
import concurrent.futures
import os
import pathlib
import statistics
import tempfile
import threading
from collections.abc import Mapping

import jobs
import results
import turns

import hxla

SETTLING, LENGTH = 4, 128
FORMS = {
    "measured counts": ([], {}),
    "shared state": ([], {"HXLA_MEMORY_ZERO": "1"}),
    "shared state, one limb": ([], {"HXLA_MEMORY_ZERO": "1", "HXLA_COMMUNICATION_LIMBS": "1"}),
    "even counts": (["--counts", "even"], {}),
}
DDP = "DDP, counts by hand"


def side_by_side(alone: Mapping[str, jobs.Job]) -> dict[str, float]:
    """Seconds of a step of jobs that run at the same time, the last of which is the slowest."""
    *others, slowest = alone.values()
    is_over = threading.Event()

    def repeated(job: jobs.Job) -> float:
        steps = [job.step()]
        while not is_over.is_set():
            steps.append(job.step())
        return statistics.mean(steps[:-1] or steps)  # the last had company for a part of it

    with concurrent.futures.ThreadPoolExecutor(len(alone)) as pool:
        found = [pool.submit(repeated, job) for job in others]
        last = slowest.step()
        is_over.set()
        return dict(zip(alone, [*(own.result() for own in found), last], strict=True))


def taken(
    asked: Mapping[str, Mapping], num_together: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, dict]]:
    """Seconds of all jobs by themselves, of those alone side by side, and what the others say.

    Args:
        asked: Arguments of `jobs.Job`, by name; those alone last.
        num_together: The others.
        rounds: Turns of each.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        jobs.started(asked, pathlib.Path(folder)) as running,
    ):
        together = dict(list(running.items())[:num_together])
        alone = dict(list(running.items())[num_together:])
        jobs.in_turns(together, SETTLING)
        seconds, beside = {n: [] for n in running}, {n: [] for n in alone}
        for n in range(rounds):
            for name in list(running)[:: -1 if n % 2 else 1]:
                seconds[name].append(running[name].step())
            for name, own in side_by_side(alone).items():
                beside[name].append(own)
        return seconds, beside, {name: job.finish() for name, job in together.items()}


def measured(mesh: str, args: argparse.Namespace) -> dict:
    """One mesh."""
    shares = [device.core_share for device in hxla.load_cluster(mesh).devices]
    batch = ["--batch-size", args.batch_size]
    options = ["--turns", SETTLING + args.rounds, *batch]
    size = ["--microbatch-size", args.microbatch_size]
    with tempfile.TemporaryDirectory() as folder:
        asked = {}
        for form in args.forms:
            more, settings = FORMS[form]
            script = [jobs.GPT, *options, *size, *more]
            asked[form] = {"script": script, "mesh": mesh, "settings": settings}
        if args.torch:
            own = [*options, "--microbatch-sizes", 2, 8, 32, "--shares", *shares]
            asked[DDP] = jobs.torch(args.torch, "torch_ddp_worker.py", own, mesh=mesh)
        together = list(asked)
        for core, share in sorted(enumerate(shares), key=lambda pair: -pair[1]):
            one = pathlib.Path(folder, f"{core}.toml")
            one.write_text(f'name = "one"\n[[device]]\nkind = "cpu"\ncore_share = {share}\n')
            script = [jobs.GPT, "--turns", 1 << 20, *batch, *size, "--core", core % os.cpu_count()]
            asked[f"{share} of core {core} alone"] = {"script": script, "mesh": str(one)}
        seconds, beside, told = taken(asked, len(together), args.rounds)

    def at_most(of: Mapping[str, list[float]]) -> list[float]:
        return [1 / sum(1 / of[name][n] for name in beside) for n in range(args.rounds)]

    tokens = args.batch_size * LENGTH
    ours = {n: told[n] for n in args.forms}
    return {
        "batch_size": args.batch_size,
        "microbatch_size": next(iter(ours.values()))["microbatch_size"],
        "tokens_per_second": {n: round(tokens / s) for n, s in turns.medians(seconds).items()},
        "tokens_per_second side by side": {
            n: round(tokens / s) for n, s in turns.medians(beside).items()
        },
        "attainable": {n: turns.over(at_most(seconds), seconds[n]) for n in together},
        "attainable side by side": {n: turns.over(at_most(beside), seconds[n]) for n in together},
        "beside the first": {n: turns.over(seconds[n], seconds[together[0]]) for n in together[1:]},
        "counts": {n: own["counts"][-1] for n, own in ours.items()},
        "sha256": {n: own["sha256"] for n, own in ours.items()},
        "DDP": {k: told[DDP][k] for k in ("counts", "microbatch_size", "torch")}
        if args.torch
        else {},
        "seconds": {n: [round(s, 4) for s in own] for n, own in seconds.items()},
        "seconds side by side": {n: [round(s, 4) for s in own] for n, own in beside.items()},
    }


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "mixed_speed")
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=["cpu-1.0-0.33", "cpu-1.0-0.5", "cpu-1.0-1.0", "cpu-4-unequal"],
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has torch")
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        rows[f"{mesh}, batch {args.batch_size}"] = results.row(measured(mesh, args))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
