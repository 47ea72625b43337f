"""Seconds of a step of a Transformer split over two unlike devices, in unlike and in even parts.

    python benchmarks/uneven_split.py [--meshes cpu-1.0-0.5 cpu-1.0-0.33 cpu-1.0-1.0]

For each mesh the GPT of examples/gpt.py (a layer of 12 heads, 768 wide) trains split over both
devices, with sizes that follow their speeds and with even ones, and whole on each share of a core
alone. On equal devices it trains in the even form and in that of unlike parts.
All jobs take turns of a step. The bound is the sum of the speeds alone: it takes what every device
repeats for work that is shared, and collectives for free, so no split reaches it. Writes
benchmarks/results/uneven_split.json.
"""

import pathlib
import tempfile

import jobs
import results
import turns

import hxla

SETTLING = 2
WORKER = jobs.ROOT / "benchmarks" / "uneven_split_worker.py"


def measured(mesh: str, rounds: int) -> dict:
    """One mesh."""
    shares = [device.core_share or 1.0 for device in hxla.load_cluster(mesh).devices]
    script = [WORKER, "--turns", SETTLING + rounds]
    other = ["--shares", "1,1", "--manual"] if len(set(shares)) == 1 else []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        asked = {
            "unlike": {"script": [*script, *other], "mesh": mesh},
            "even": {"script": [*script, "--shares", "1,1"], "mesh": mesh},
        }
        for share in dict.fromkeys(shares):
            one = folder / f"{share}.toml"
            one.write_text(f'name = "one"\n[[device]]\nkind = "cpu"\ncore_share = {share}\n')
            asked[f"{share} alone"] = {"script": [*script, "--whole"], "mesh": str(one)}
        with jobs.started(asked, folder) as running:
            jobs.in_turns(running, SETTLING)
            seconds = jobs.in_turns(running, rounds)
            told = {name: job.finish() for name, job in running.items()}
    bound = [1 / sum(1 / seconds[f"{share} alone"][n] for share in shares) for n in range(rounds)]
    return {
        "seconds of a step": {n: round(s, 4) for n, s in turns.medians(seconds).items()},
        "unlike over even": turns.over(seconds["even"], seconds["unlike"]),
        "bound over unlike": turns.over(bound, seconds["unlike"]),
        "sizes": told["unlike"]["sizes"],
        "bytes of parameters on a device": {
            n: told[n]["device_parameter_bytes"] for n in ("unlike", "even")
        },
        "losses": {n: own["losses"][-1] for n, own in told.items()},
        "seconds": {n: [round(s, 4) for s in own] for n, own in seconds.items()},
    }


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
