"""ZeRO's stages beside FSDP by hand in plain JAX, on two processes with a core each.

    python benchmarks/fsdp.py [--meshes cpu-1.0-1.0 cpu-1.0-0.5] [--rounds 8]

The model of examples/gpt.py trains with the same global batch and the same microbatch of a device.
All take turns of a step, until its update is done. `memory` is what the compiled programs say that
one device holds at most, arguments and temporaries. By hand, each microbatch gathers every layer
twice and reduces its gradients; hxla does so once a step. Writes benchmarks/results/fsdp.json.
"""

import pathlib
import tempfile

import jobs
import results
import turns

SETTLING = 3
BY_HAND = "FSDP by hand"


def measured(mesh: str, batch_size: int, microbatch_size: int, rounds: int) -> dict:
    """One mesh."""
    options = ["--turns", SETTLING + rounds, "--batch-size", batch_size]
    options += ["--microbatch-size", microbatch_size]
    forms = {
        "ZeRO 1": {"ZERO": "1"},
        "ZeRO 1, chain": {"ZERO": "1", "RECOMPUTE": "none"},
        "ZeRO 2": {"ZERO": "2", "RECOMPUTE": "none"},
        "ZeRO 3": {"ZERO": "3", "RECOMPUTE": "none"},
        "ZeRO 3, boundaries": {"ZERO": "3", "RECOMPUTE": "boundaries"},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        by_hand = pathlib.Path(__file__).parent / "fsdp_by_hand.py"
        asked = {BY_HAND: {"script": [by_hand, *options], "mesh": mesh}}
        for form, memory in forms.items():
            settings = {f"HXLA_MEMORY_{key}": value for key, value in memory.items()}
            asked[form] = {"script": [jobs.GPT, *options], "mesh": mesh, "settings": settings}
        with jobs.started(asked, folder) as running:
            jobs.in_turns(running, SETTLING)
            seconds = jobs.in_turns(running, rounds)
            told = {name: job.finish() for name, job in running.items()}
    turns.check_alike({name: own["losses"][-1] for name, own in told.items()}, 0.05)
    by_hand_bytes = told[BY_HAND]["memory_bytes"]
    chains = [name for name in told if name not in (BY_HAND, "ZeRO 1")]
    return {
        "batch_size": batch_size,
        "microbatch_size": microbatch_size,
        "seconds": turns.medians(seconds),
        "step of FSDP by hand / step": {
            name: turns.over(seconds[BY_HAND], seconds[name]) for name in forms
        },
        "memory": {name: own["memory_bytes"] for name, own in told.items()},
        "memory / FSDP by hand": {
            name: round(told[name]["memory_bytes"] / by_hand_bytes, 3) for name in forms
        },
        "counts": {name: told[name]["counts"][-1] for name in forms},
        "same bits of all stages of a chain": len({told[n]["sha256"] for n in chains}) == 1,
    }


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "fsdp")
    parser.add_argument("--meshes", nargs="+", default=["cpu-1.0-1.0", "cpu-1.0-0.5"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatch-size", type=int, default=2)
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        found = measured(mesh, args.batch_size, args.microbatch_size, args.rounds)
        rows[mesh] = results.row(found)
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
