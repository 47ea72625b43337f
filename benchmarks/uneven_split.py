"""Seconds of a step of a Transformer split over two unlike devices, in unlike and in even parts.

    python benchmarks/uneven_split.py [--meshes cpu-1.0-0.5 cpu-1.0-0.33 cpu-1.0-1.0 pairs]

For each mesh the GPT of examples/gpt.py (a layer of 16 heads, 1024 wide) trains split over both
devices: with the sizes that are planned by default, by what the devices were measured to work in a
trial; with those that are estimated from the shares of a core; and with even ones. On equal devices
it trains in the even form and in that of unlike parts. All jobs take turns of a step.
`pairs` is data parallelism over two pairs of 0.66 and 0.33 of a core, on four processes.

The bound is made of what was measured beside it: a step of the same model with all of its heads and
columns and with a half of them, on each share of a core alone, whose difference is the time of a
unit and the rest what every device repeats; and as many all-reduces as a step has, alone on these
processes. The units of the bound may be any fraction. That of two pairs is a pair's for its half of
the batch: the sum over both is not in it. Writes benchmarks/results/uneven_split.json.
"""

import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import jobs
import results
import turns

import hxla

SETTLING = 2
WORKER = jobs.ROOT / "benchmarks" / "uneven_split_worker.py"
UNITS, HALF = 16, 8
MICROBATCHES = 4
#: Of a microbatch of one layer: its embedding and its logits have one each, its attention and its
#: MLP one forward and one backward.
ALL_REDUCES = 6
PAIRS = (0.66, 0.33)


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


def mesh_of(shares: Sequence[float], path: pathlib.Path) -> str:
    """A mesh file of devices with these shares of a core."""
    devices = "".join(f'[[device]]\nkind = "cpu"\ncore_share = {s}\n' for s in shares)
    path.write_text(f'name = "{path.stem}"\n{devices}')
    return str(path)


def measured(mesh: str, rounds: int) -> dict:
    """One mesh."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        shares = list(PAIRS)
        if mesh == "pairs":
            mesh, pair = (
                mesh_of(2 * PAIRS, folder / "pairs.toml"),
                mesh_of(PAIRS, folder / "pair.toml"),
            )
            copies = 2
        else:
            shares = [device.core_share or 1.0 for device in hxla.load_cluster(mesh).devices]
            pair, copies = mesh, 1
        are_alike = len(set(shares)) == 1
        split = [WORKER, "--copies", copies]
        part = ["--batch-size", 32 // copies]
        turns_asked = ["--turns", SETTLING + rounds]
        asked: dict[str, dict[str, Any]] = {
            "even": {"script": [*split, "--shares", "1,1", *turns_asked], "mesh": mesh}
        }
        if are_alike:
            manual = ["--shares", "1,1", "--manual", *turns_asked]
            asked["unlike"] = {"script": [*split, *manual], "mesh": mesh}
        else:
            asked["unlike"] = {"script": [*split, *turns_asked], "mesh": mesh}
            estimated = [*split, "--estimated", *turns_asked]
            asked["unlike, estimated"] = {"script": estimated, "mesh": mesh}
        num = ALL_REDUCES * MICROBATCHES // copies
        asked["collectives"] = {
            "script": [WORKER, "--collectives", num, *turns_asked],
            "mesh": pair,
        }
        for share in dict.fromkeys(shares):
            one = mesh_of([share], folder / f"{share}.toml")
            for units in (UNITS, HALF):
                asked[f"{share} alone, {units} units"] = {
                    "script": [WORKER, "--units", units, *part, *turns_asked],
                    "mesh": one,
                }
        seconds, told = jobs.timed(asked, rounds, settling=SETTLING)
    splits = [name for name in asked if name.startswith(("even", "unlike"))]
    middle = {n: statistics.median(own) for n, own in seconds.items()}
    limit = bound(middle, shares)
    return {
        "seconds of a step": {n: round(s, 4) for n, s in turns.medians(seconds).items()},
        "unlike over even": turns.over(seconds["even"], seconds["unlike"]),
        "bound": round(limit, 4),
        "bound over": {n: round(limit / middle[n], 4) for n in splits},
        "advised": {n: told[n]["better_shares"] for n in splits if told[n]["better_shares"]},
        "shares": {n: told[n]["shares"] for n in splits},
        "bytes of parameters on a device": {n: told[n]["device_parameter_bytes"] for n in splits},
        "losses": {n: told[n]["losses"][-1] for n in splits},
        "seconds": {n: [round(s, 4) for s in own] for n, own in seconds.items()},
    }


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "uneven_split")
    parser.add_argument(
        "--meshes", nargs="+", default=["cpu-1.0-0.5", "cpu-1.0-0.33", "cpu-1.0-1.0", "pairs"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        rows[mesh] = results.row(measured(mesh, args.rounds))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
