"""Loader processes that the devices of a host share, beside a set of them for each.

    python benchmarks/data_workers.py

Four processes train a small model on examples that take Python some milliseconds each: waiting, as
for a disk or a network, or computing. Grain's loader processes make them, a set of `--loaders` for
each of the four (`data.share=false`), or one set for all; or hxla's (`data.workers`) do. Each job
runs alone, in turns with the others. Then a job is resumed after more and more steps: the examples
that it makes before its first own step say whether it replays.
Writes benchmarks/results/data_workers.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import grain
import jax
import numpy as np
import optax
import results
from absl import flags
from flax import nnx

import hxla

SIZE = 16


class Make:
    """Makes an example in Python, and tells of it."""

    def __init__(self, seconds, computes, told):
        self.seconds, self.computes, self.told = seconds, computes, told

    def __call__(self, i):
        """Example `i`."""
        if self.told:
            with open(self.told, "a") as file:
                file.write(f"{i}\n")
        if self.computes:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(self.seconds)
        x = np.random.default_rng(int(i)).normal(size=16).astype(np.float32)
        return {"x": x, "y": x[:4] ** 2}


def generated(make):
    """Global batches whose position cannot be kept."""
    for i in range(1 << 30):
        examples = [make(k) for k in range(i * SIZE, (i + 1) * SIZE)]
        yield {k: np.stack([e[k] for e in examples]) for k in ("x", "y")}


def dataset(make, loaders):
    """Global batches of Grain."""
    flags.FLAGS.mark_as_parsed()  # Grain reads some before it starts processes
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    examples = grain.MapDataset.range(1 << 20).map(make).to_iter_dataset(options)
    if loaders:
        examples = examples.mp_prefetch(grain.MultiprocessingOptions(num_workers=loaders))
    return examples.batch(SIZE)


def loss(model, batch):
    """Squares."""
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)


def num_children(pid):
    """Processes below one that make examples, by what Linux says of them."""
    parents, makes = {}, set()
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat[1])
            if b"spawn_main" in command or b"hxla._src.data.worker" in command:
                makes.add(int(folder.name))

    def is_below(child):
        while child in parents and child != pid:
            child = parents[child]
        return child == pid

    return sum(map(is_below, makes))


def train(args):
    """In each of the four processes."""
    make = Make(args.milliseconds / 1000, args.computes, args.told)
    kinds = {
        "grain": lambda: dataset(make, args.loaders),
        "generator": lambda: generated(make),
        "function": lambda: make,
    }
    seconds = []
    result = hxla.train(
        hxla.Job(
            nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
            kinds[args.data](),
            loss,
            optax.sgd(1e-2),
            batch_size=SIZE,
            config={"data": {"share": not args.alone, "workers": args.workers}},
        ),
        microbatch_size=2,
        counts="even",
        steps=args.steps,
        checkpoint_dir=args.checkpoints,
        callbacks=[lambda record, session: seconds.append(record.seconds)],
    )
    if jax.process_index() == 0:
        late = seconds[len(seconds) // 4 :]  # what was loaded ahead of the first is used up
        told = {"seconds": sum(late) / max(len(late), 1), "sha256": result.sha256}
        print("told " + json.dumps(told), flush=True)


def job(num, *options):
    """Run one; returns what it told, and its loader processes."""
    command = [sys.executable, "-m", "hxla", "run", "-n", str(num), __file__, "--train", *options]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        most = 0
        while process.poll() is None:
            most = max(most, num_children(process.pid))
            time.sleep(0.2)
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{text[-3000:]}")
    [line] = [line for line in text.splitlines() if "told {" in line]
    return json.loads(line[line.index("{") :]), most


def measured(args):
    """Speed and processes of each way."""
    loaders = str(args.loaders)
    ways = {
        "Grain's, a set for each": ("--data", "grain", "--loaders", loaders, "--alone"),
        "Grain's, one set": ("--data", "grain", "--loaders", loaders),
        "hxla's, one set": ("--data", "function", "--workers", loaders),
    }
    table = {}
    for name, milliseconds, extra in (
        ("waiting", args.milliseconds, ()),
        ("computing", args.milliseconds / 4, ("--computes",)),
    ):
        seconds, processes, digests = {}, {}, {}
        for _ in range(args.rounds):
            for way, options in ways.items():
                steps = ("--steps", str(args.steps), "--milliseconds", str(milliseconds))
                told, most = job(4, *options, *steps, *extra)
                seconds.setdefault(way, []).append(told["seconds"])
                processes[way] = most
                print(name, way, most, told["seconds"], flush=True)
                digests.setdefault(way.startswith("Grain"), set()).add(told["sha256"])
        assert all(len(found) == 1 for found in digests.values()), digests
        table[f"{name}, {milliseconds:g} ms an example"] = {
            way: {"processes": processes[way], "seconds a step": statistics.median(own)}
            for way, own in seconds.items()
        }
    return table


def resumed(args):
    """Examples that a resumed job makes for one step, after more and more steps."""
    table = {}
    for data in ("grain", "generator"):
        for steps in (10, 160):
            with tempfile.TemporaryDirectory() as folder:
                own = ("--data", data, "--milliseconds", "0", "--checkpoints", f"{folder}/saved")
                job(1, *own, "--steps", str(steps))
                job(1, *own, "--steps", str(steps + 1), "--told", f"{folder}/told")
                made = len(pathlib.Path(folder, "told").read_text().splitlines())
            table.setdefault(data, {})[f"after {steps} steps"] = made
    return table


def main():
    """Compare, or train."""
    parser = results.parser(__doc__, "data_workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loaders", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    for option in ("--train", "--alone", "--computes"):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    for option in ("--data", "--told", "--checkpoints"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    os.environ.setdefault("PYTHONPATH", str(results.ROOT))
    speed = measured(args)
    load = f"{os.getloadavg()[1]:.1f} over five minutes on {os.cpu_count()} cores"
    found = {"examples made for one step after a resume": resumed(args), "load": load}
    results.write(args.out, {"four processes": speed, **found})


if __name__ == "__main__":
    main()
