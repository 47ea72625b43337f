"""Tokens per second on unequal devices, beside what each device reaches alone.

    python benchmarks/mixed_speed.py [--meshes cpu-1.0-0.33 cpu-1.0-0.5 ...]

For each mesh the model of examples/gpt.py trains with the same global batch on every share of a
core alone, and on all devices together with measured and with even counts, and with measured counts
and the optimizer's state shared out by speed (ZeRO stage 1), so that a slow device also updates
less. All jobs take turns of a
step, until its update is done, so that the machine's drift meets all of them; the first turns, in
which counts settle, do not count. `attainable` is the joint speed over the sum of the speeds alone,
round by round. Writes its meshes' rows of benchmarks/results/mixed_speed.json.
"""

import pathlib
import tempfile

import jobs
import results
import turns

import hxla

SETTLING, LENGTH = 6, 128
MEASURED, EVEN = "together, measured counts", "together, even counts"
SHARED = "together, measured counts, shared state"


def measured(mesh: str, batch_size: int, rounds: int) -> dict:
    """One mesh."""
    shares = [device.core_share for device in hxla.load_cluster(mesh).devices]
    options = ["--turns", SETTLING + rounds, "--batch-size", batch_size]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        asked = {
            MEASURED: {"script": [jobs.GPT, *options], "mesh": mesh},
            SHARED: {
                "script": [jobs.GPT, *options],
                "mesh": mesh,
                "settings": {"HXLA_MEMORY_ZERO": "1"},
            },
            EVEN: {"script": [jobs.GPT, *options, "--counts", "even"], "mesh": mesh},
        }
        for share in dict.fromkeys(shares):
            one = folder / f"{share}.toml"
            one.write_text(f'name = "one"\n[[device]]\nkind = "cpu"\ncore_share = {share}\n')
            asked[f"{share} of a core alone"] = {"script": [jobs.GPT, *options], "mesh": str(one)}
        with jobs.started(asked, folder) as running:
            jobs.in_turns(running, SETTLING)
            seconds = jobs.in_turns(running, rounds)
            told = {name: job.finish() for name, job in running.items()}
    attainable = [
        1 / sum(1 / seconds[f"{share} of a core alone"][n] for share in shares)
        for n in range(rounds)
    ]
    tokens = batch_size * LENGTH
    return {
        "batch_size": batch_size,
        "tokens_per_second": {n: round(tokens / s) for n, s in turns.medians(seconds).items()},
        "attainable, measured counts": turns.over(attainable, seconds[MEASURED]),
        "attainable, shared state": turns.over(attainable, seconds[SHARED]),
        "attainable, even counts": turns.over(attainable, seconds[EVEN]),
        "measured counts / even counts": turns.over(seconds[EVEN], seconds[MEASURED]),
        "shared state / whole state": turns.over(seconds[MEASURED], seconds[SHARED]),
        "counts": told[MEASURED]["counts"][-1],
        "same bits": len({each["sha256"] for each in told.values()}) == 1,
        "seconds": {n: [round(s, 4) for s in own] for n, own in seconds.items()},
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
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        rows[mesh] = results.row(measured(mesh, args.batch_size, args.rounds))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
