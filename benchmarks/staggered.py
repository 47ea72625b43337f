"""Copies of a pipeline that share network cards, started together and one after another.

    python benchmarks/staggered.py [--devices waiting computing] [--copies 2] [--megabits 30]

Processes of `hxla run`, of which those of all first stages are in one network namespace and those
of all second stages in another: two nodes, each with a card of its own that is paced each way. So
all copies of the pipeline send over the same two cards, and what is to be shown is whether a copy
that begins its step later than the one before finds them free. The same plan runs in turns with
different `start_seconds`: none, one transfer for each copy, an even part of a period for each copy,
and in the first rounds `apart`, where one copy begins when the one before has long ended.

Devices that are `waiting` sleep as long as an accelerator would compute, so that their times are
steady; those that are `computing` have shares of a core, whose times scatter by tens of
milliseconds. All else is the same: the plan, the programs of hxla, Gloo, and what is sent.

Beside it stands what tests/support/card_replay.py says of the same starts, from the time that a
device takes for a stage's forward and backward alone and the rate that was set; also of many random
starts within a transfer and within a period, as copies have them that came out of step by
themselves.
Needs Linux and root, as benchmarks/collectives.py does; its processes go before other work. Writes
benchmarks/results/staggered.json.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import paced_links
import results
import turns

import hxla

sys.path.insert(0, str(results.ROOT / "tests"))

from support.card_replay import card_replay

NUM_STAGES = 2
TOGETHER, TRANSFER, EVEN, APART = "together", "one transfer", "even parts of a period", "apart"
_PAYLOAD = 1448 / 1514  # of a packet, the rest of which are headers
WAITING, COMPUTING = "waiting", "computing"
_PASSED = ("microbatches", "rows", "width", "rounds", "apart")
_RANDOM = 50  # starts that are drawn


def replayed(
    args: argparse.Namespace, forward: float, backward: float, starts: Sequence[float]
) -> float:
    """Seconds of a step's microbatches, by the replay of all copies together."""
    layers = (1.0,) * NUM_STAGES
    group = types.SimpleNamespace(
        forward_seconds=[forward * x for x in layers],
        backward_seconds=[backward * x for x in layers],
    )
    chain = types.SimpleNamespace(groups=[group], output_bytes=[sent_bytes(args), 0.0])
    sort = types.SimpleNamespace(
        groups=[0] * NUM_STAGES, count=len(starts), num_microbatches=args.microbatches
    )
    staging = types.SimpleNamespace(cuts=range(NUM_STAGES), replicas=[sort])
    devices = [hxla.Device(kind="cpu", node=n) for _ in starts for n in range(NUM_STAGES)]
    cluster = hxla.Cluster(
        name="two nodes",
        devices=tuple(devices),
        nodes=tuple(hxla.Node(name=f"n{n}") for n in range(NUM_STAGES)),
        default_link=hxla.Link(bytes_per_second=args.megabits * 1e6 / 8 * _PAYLOAD),
    )
    copies = [[(NUM_STAGES * i + n,) for n in range(NUM_STAGES)] for i in range(len(starts))]
    return max(card_replay(chain, staging, copies, cluster, starts))


def sent_bytes(args: argparse.Namespace) -> float:
    """Of a microbatch from stage to stage, in either direction."""
    return 4.0 * args.rows * args.width


def transfer_seconds(args: argparse.Namespace) -> float:
    """Of one alone."""
    return sent_bytes(args) / (args.megabits * 1e6 / 8 * _PAYLOAD)


@contextlib.contextmanager
def running(command: Sequence[str], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that ends with this process or before."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    own = {"PYTHONPATH": str(results.ROOT), "HXLA_WATCHDOG_PROGRESS_TIMEOUT_SECONDS": "3600"}
    with log.open("w") as said:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", "nice", "-n", "-10", *command],
            stdout=said,
            stderr=said,
            env=kept | own,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def measured(
    args: argparse.Namespace, devices: str, starts: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """What every process says."""
    num = args.copies * NUM_STAGES
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        device = f'[[device]]\nkind = "cpu"\ncore_share = {args.share}\n'
        (folder / "mesh.toml").write_text('name = "staggered"\n' + device * num)
        nodes = stack.enter_context(paced_links.nodes(NUM_STAGES, args.megabits * 1e6))
        script = [results.ROOT / "benchmarks" / "staggered_worker.py", folder]
        sizes = {n: getattr(args, n) for n in _PASSED}
        options = [x for n, size in sizes.items() for x in (f"--{n}", size)]
        options += ["--layers", args.layers if devices == COMPUTING else 0]
        options += ["--computing", args.computing]
        options += ["--starts", json.dumps(starts), "--nodes", *nodes]
        command = [sys.executable, "-m", "hxla", "run", "--mesh", folder / "mesh.toml"]
        whole = [str(x) for x in (*command, *script, *options)]
        process = stack.enter_context(running(whole, folder / "log"))
        if process.wait():
            raise SystemExit((folder / "log").read_text()[-6000:])
        return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(num)]


def row(args: argparse.Namespace, devices: str) -> dict[str, Any]:
    """All starts in turns, on devices of one sort."""
    num, alone = args.copies, transfer_seconds(args)
    period = args.computing + 2 * alone
    far = 1.5 * (args.microbatches + 1) * period
    each = {TOGETHER: 0.0, TRANSFER: alone, EVEN: period / num, APART: far}
    starts = {name: [round(i * own, 4) for i in range(num)] for name, own in each.items()}
    found = measured(args, devices, starts)
    seconds = found[0]["seconds"]
    # What is left of a step without the last start is a step of one copy alone.
    seconds[APART] = [own - starts[APART][-1] for own in seconds[APART]]
    forward, backward = (
        statistics.median(own["computing_seconds"][i] for own in found) for i in range(2)
    )
    predicted = {n: replayed(args, forward, backward, own) for n, own in starts.items()}
    predicted[APART] -= starts[APART][-1]
    rng, period = random.Random(0), forward + backward + 2 * alone
    for name, within in (("a transfer", alone), ("a period", period)):
        drawn = [[within * rng.random() for _ in range(num)] for _ in range(_RANDOM)]
        own = [replayed(args, forward, backward, one) for one in drawn]
        predicted[f"random starts within {name}"] = statistics.median(own)
    return {
        "forward_seconds": round(forward, 4),
        "backward_seconds": round(backward, 4),
        "start_seconds": starts,
        "step_seconds": turns.medians(seconds),
        "predicted_seconds": {n: round(own, 4) for n, own in predicted.items()},
        "ratios": {
            f"{name} / {TOGETHER}": turns.over(seconds[TOGETHER], seconds[name])
            | {"predicted": round(predicted[TOGETHER] / predicted[name], 4)}
            for name in (TRANSFER, EVEN)
        },
        "seconds": {n: [round(own, 4) for own in each] for n, each in seconds.items()},
    }


def main() -> None:
    """Devices of every sort."""
    parser = results.parser(__doc__, "staggered")
    parser.add_argument("--devices", nargs="+", default=[WAITING, COMPUTING])
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--megabits", type=float, default=30.0, help="a second, of each card")
    parser.add_argument("--share", type=float, default=0.34, help="of a core, of each")
    parser.add_argument("--microbatches", type=int, default=12, help="of a copy")
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=40, help="of a stage that computes")
    parser.add_argument("--computing", type=float, default=0.3, help="seconds of a microbatch")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--apart", type=int, default=2, help="rounds that have these starts, too")
    args = parser.parse_args()
    if unknown := {*args.devices} - {WAITING, COMPUTING}:
        parser.error(f"--devices {' '.join(unknown)}: use {WAITING} or {COMPUTING}")
    paced_links.enter_own_network()
    told = {
        "copies": args.copies,
        "microbatches of a copy": args.microbatches,
        "megabits_per_second": args.megabits,
        "core_share": args.share,
        "bytes_sent": sent_bytes(args),
        "transfer_seconds": round(transfer_seconds(args), 4),
    }
    rows: dict[str, Any] = {}
    for devices in args.devices:
        rows[devices] = results.row(row(args, devices))
        results.write(args.out, told | {"devices": rows})


if __name__ == "__main__":
    main()
