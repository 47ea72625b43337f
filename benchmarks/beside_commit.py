"""Another commit of hxla beside this one, step by step in turns: is a change slower?

    python benchmarks/beside_commit.py COMMIT [--rounds 30] [--only data ...]

Jobs that train the model of examples/gpt.py: data parallel over two processes with even counts,
also with its layers as one scan, with ZeRO 1 to 3, recomputed, or with the optimizer's state on the
host; a model that rules cut over two fake devices of one process, or in a ratio over two unlike
processes; and a pipeline of two stages in two processes. The other commit is checked out into a
folder of its own, which is removed in the end. Each job runs with both at once; they take turns of
a step, until its update is done. A ratio is of the other's seconds to this one's, round by round:
above 1 this checkout is faster. Bytes are of process 0 after a step: what is resident, and its
arrays with the temporaries of its hungriest program. Losses must be alike. The other commit may be
of 0.1.0 or later: benchmarks/train_in_turns.py, which both run, knows what they call things.
Writes benchmarks/results/beside_commit.json.
"""

import argparse
import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import jobs
import numpy as np
import results
import turns

JOBS = {
    **{
        name: {"options": ["--counts", "even"], "mesh": "cpu-1.0-1.0", "settings": settings}
        for name, settings in {
            "data": {},
            "zero 1": {"HXLA_MEMORY_ZERO": "1"},
            "zero 2": {"HXLA_MEMORY_ZERO": "2"},
            "zero 3": {"HXLA_MEMORY_ZERO": "3"},
            "recompute": {"HXLA_MEMORY_RECOMPUTE": "boundaries"},
            "offload": {"HXLA_MEMORY_OFFLOAD": '{"optimizer": "host"}'},
        }.items()
    },
    "tensor": {"options": ["--tensor", 2], "mesh": None},
    "scanned": {"options": ["--counts", "even", "--scanned"], "mesh": "cpu-1.0-1.0"},
    "uneven": {"options": ["--shares", "3,1"], "mesh": "cpu-1.0-0.33"},
    "pipeline": {"options": ["--stages", "1,1"], "mesh": "cpu-1.0-1.0"},
}


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[pathlib.Path]:
    """A work tree of a commit of this repository, while it is needed."""
    git = ["git", "-C", str(jobs.ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "checkout").resolve()
        ran = subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(path), commit],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(f"{commit} cannot be checked out of {jobs.ROOT}: {ran.stderr.strip()}")
        try:
            yield path
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(path)], check=False)


def measured(name: str, other: pathlib.Path, args: argparse.Namespace) -> dict:
    """One job with both checkouts."""
    options = ["--turns", args.rounds + 1, "--batch-size", args.batch_size, *JOBS[name]["options"]]
    asked = {
        side: {
            "script": [jobs.GPT, *options],
            "mesh": JOBS[name]["mesh"],
            "checkout": checkout,
            "settings": JOBS[name].get("settings"),
        }
        for side, checkout in (("other", other), ("this", jobs.ROOT))
    }
    seconds, told = jobs.timed(asked, args.rounds)
    for side, checkout in (("other", other), ("this", jobs.ROOT)):
        if pathlib.Path(told[side]["hxla"]).parent.parent != checkout:
            raise SystemExit(f"{checkout} was asked for, but {told[side]['hxla']} ran")
    losses = [told[side]["losses"] for side in told]
    if not np.allclose(*losses, rtol=1e-3):
        raise SystemExit(f"{name}: the losses are not alike: {losses}")

    def ratio(num_bytes: Callable[[dict], int]) -> float:
        return round(num_bytes(told["this"]) / num_bytes(told["other"]), 3)

    return {
        "step_seconds": turns.medians(seconds),
        "other / this": turns.over(seconds["other"], seconds["this"]),
        "resident bytes, this / other": ratio(lambda one: one["resident_bytes"]),
        "arrays and temporaries, this / other": ratio(
            lambda one: one["live_bytes"] + one["temporary_bytes"]
        ),
        "same bits": told["other"]["sha256"] == told["this"]["sha256"],
        "seconds": {side: [round(s, 4) for s in own] for side, own in seconds.items()},
    }


def main() -> None:
    """All of them."""
    parser = results.parser(__doc__, "beside_commit")
    parser.add_argument("commit", help="the other one: whatever git can check out")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    args = parser.parse_args()
    rows = {}
    with checked_out(args.commit) as checkout:
        other = {"commit": results.commit(checkout), "hxla": results.version(checkout)}
        for name in args.only:
            rows[name] = measured(name, checkout, args)
            print(name, {k: v for k, v in rows[name].items() if k != "seconds"}, flush=True)
            results.write(args.out, {"other": other, "jobs": rows})  # a run may be cut off


if __name__ == "__main__":
    main()
