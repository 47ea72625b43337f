"""Seconds of a step over long texts, on two unlike devices that share tokens or heads.

    python benchmarks/long_sequence.py [--meshes cpu-1.0-0.5 cpu-1.0-0.33] [--length 4096]

A decoder of one layer (4 heads, 128 wide) trains on windows of 4,096 bytes of Python's library, one
in a microbatch. `tokens by speed` is `mesh={"sequence": 2}`, `tokens even` states 1:1; `heads by
speed` and `heads even` are the same of a `tensor` axis with the rules `decoder`. All jobs take
turns of a step. Writes benchmarks/results/long_sequence.json.
"""

from typing import Any

import jobs
import results
import turns

WORKER = jobs.ROOT / "benchmarks" / "long_sequence_worker.py"
SETTLING = 2
FORMS = {
    "tokens by speed": ["--axis", "sequence"],
    "tokens even": ["--axis", "sequence", "--shares", "1,1"],
    "heads by speed": ["--axis", "tensor"],
    "heads even": ["--axis", "tensor", "--shares", "1,1"],
}


def measured(mesh: str, rounds: int, length: int) -> dict[str, Any]:
    """One mesh."""
    sizes = ["--length", length, "--turns", SETTLING + rounds]
    asked = {
        name: {"script": [WORKER, *form, *sizes], "mesh": mesh} for name, form in FORMS.items()
    }
    seconds, told = jobs.timed(asked, rounds, settling=SETTLING)
    turns.check_alike({name: own["losses"][-1] for name, own in told.items()}, 1e-3)
    best, *others = FORMS
    return {
        "length": length,
        "seconds of a step": turns.medians(seconds),
        f"{best} over": {n: turns.over(seconds[n], seconds[best]) for n in others},
        "shares": {n: own["shares"] for n, own in told.items()},
        "sent bytes": {n: own["sent_bytes"] for n, own in told.items()},
        "worked": {n: own["worked"] for n, own in told.items()},
        "rounds": rounds,
        "spread": round(max(max(s) / min(s) for s in seconds.values()), 3),
    }


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "long_sequence")
    parser.add_argument("--meshes", nargs="+", default=["cpu-1.0-0.5", "cpu-1.0-0.33"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--length", type=int, default=4096)
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        rows[mesh] = results.row(measured(mesh, args.rounds, args.length))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
