"""Seconds of a step of a Transformer split over two unlike devices, in unlike and in even parts.

    python benchmarks/uneven_split.py [--meshes cpu-1.0-0.5 cpu-1.0-0.33 cpu-1.0-1.0]

For each mesh the GPT of examples/gpt.py (a layer of 16 heads, 1024 wide) trains split over both
devices, with sizes that follow their speeds and with even ones. On equal devices it trains in the
even form and in that of unlike parts. All jobs take turns of a step.

The bound is made of what was measured beside it: a step of the same model with all of its heads and
columns and with a half of them, on each share of a core alone, whose difference is the time of a
unit and the rest what every device repeats; and as many all-reduces as a step has, alone on these
processes. The units of the bound may be any fraction. Writes benchmarks/results/uneven_split.json.
"""

import pathlib
import statistics
import tempfile

import jobs
import results
import turns

import hxla

SETTLING = 2
WORKER = jobs.ROOT / "benchmarks" / "uneven_split_worker.py"
UNITS, HALF = 16, 8
#: Of a step of four microbatches of one layer: its embedding and its logits have one each, its
#: attention and its MLP one forward and one backward.
ALL_REDUCES = 4 * 6


def bound(seconds: dict[str, float], shares: list[float]) -> float:
    """Seconds of a step in parts with which all devices would end together."""
    unit, fixed = {}, {}
    for share in set(shares):
        whole, half = (seconds[f"{share} alone, {n} units"] for n in (UNITS, HALF))
        unit[share] = (whole - half) / (UNITS - HALF)
        fixed[share] = max(whole - UNITS * unit[share], 0.0)
    # All end at t: the units that each does until then add up to all.
    rates = sum(1 / unit[s] for s in shares)
    t = (UNITS + sum(fixed[s] / unit[s] for s in shares)) / rates
    return t + seconds["collectives"]


def measured(mesh: str, rounds: int) -> dict:
    """One mesh."""
    devices = hxla.load_cluster(mesh).devices
    shares = [device.core_share or 1.0 for device in devices]
    script = [WORKER, "--turns", SETTLING + rounds]
    copies = ["--copies", len(devices) // 2]
    other = ["--shares", "1,1", "--manual"] if len(set(shares)) == 1 else []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        asked = {
            "unlike": {"script": [*script, *copies, *other], "mesh": mesh},
            "even": {"script": [*script, *copies, "--shares", "1,1"], "mesh": mesh},
        }
        if len(devices) == 2:
            asked["collectives"] = {"script": [*script, "--collectives", ALL_REDUCES], "mesh": mesh}
            for share in dict.fromkeys(shares):
                one = folder / f"{share}.toml"
                one.write_text(f'name = "one"\n[[device]]\nkind = "cpu"\ncore_share = {share}\n')
                for units in (UNITS, HALF):
                    asked[f"{share} alone, {units} units"] = {
                        "script": [*script, "--units", units],
                        "mesh": str(one),
                    }
        with jobs.started(asked, folder) as running:
            jobs.in_turns(running, SETTLING)
            seconds = jobs.in_turns(running, rounds)
            told = {name: job.finish() for name, job in running.items()}
    row = {
        "seconds of a step": {n: round(s, 4) for n, s in turns.medians(seconds).items()},
        "unlike over even": turns.over(seconds["even"], seconds["unlike"]),
        "sizes": told["unlike"]["sizes"],
        "bytes of parameters on a device": {
            n: told[n]["device_parameter_bytes"] for n in ("unlike", "even")
        },
        "losses": {n: told[n]["losses"][-1] for n in ("unlike", "even")},
        "seconds": {n: [round(s, 4) for s in own] for n, own in seconds.items()},
    }
    if len(devices) == 2:
        middle = {n: statistics.median(own) for n, own in seconds.items()}
        row["bound"] = round(bound(middle, shares), 4)
        row["bound over unlike"] = round(row["bound"] / middle["unlike"], 4)
    return row


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "uneven_split")
    parser.add_argument(
        "--meshes", nargs="+", default=["cpu-1.0-0.5", "cpu-1.0-0.33", "cpu-1.0-1.0"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        rows[mesh] = results.row(measured(mesh, args.rounds))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
