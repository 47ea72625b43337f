"""ZeRO's stages beside FSDP by hand in plain JAX, on two processes with a core each.

    python benchmarks/fsdp.py [--meshes cpu-1.0-1.0 cpu-1.0-0.5] [--rounds 8]

The model of examples/gpt.py trains with the same global batch and the same microbatch of a device.
All take turns of a step, until its update is done. `memory` is what the compiled programs say that
one device holds at most, arguments and temporaries. By hand, each microbatch gathers every layer
twice and reduces its gradients; hxla does so once a step. Writes benchmarks/results/fsdp.json.
"""

import pathlib

import jobs
import results
import turns

SETTLING = 3
BY_HAND = "FSDP by hand"


LEAST = {"MEMORY_ZERO": "3", "MEMORY_RECOMPUTE": "boundaries"}
FORMS = {
    "ZeRO 1": {"MEMORY_ZERO": "1"},
    "ZeRO 1, chain": {"MEMORY_ZERO": "1", "MEMORY_RECOMPUTE": "none"},
    "ZeRO 2": {"MEMORY_ZERO": "2", "MEMORY_RECOMPUTE": "none"},
    "ZeRO 3": {"MEMORY_ZERO": "3", "MEMORY_RECOMPUTE": "none"},
    "ZeRO 3, boundaries": LEAST,
    "ZeRO 3, boundaries, one limb": LEAST | {"COMMUNICATION_LIMBS": "1"},
}


def measured(
    mesh: str, batch_size: int, microbatch_size: int, rounds: int, forms: dict[str, dict[str, str]]
) -> dict:
    """One mesh."""
    options = ["--turns", SETTLING + rounds, "--batch-size", batch_size]
    options += ["--microbatch-size", microbatch_size]
    by_hand = pathlib.Path(__file__).parent / "fsdp_by_hand.py"
    asked = {BY_HAND: {"script": [by_hand, *options], "mesh": mesh}}
    for form, given in forms.items():
        settings = {f"HXLA_{key}": value for key, value in given.items()}
        asked[form] = {"script": [jobs.GPT, *options], "mesh": mesh, "settings": settings}
    seconds, told = jobs.timed(asked, rounds, settling=SETTLING)
    turns.check_alike({name: own["losses"][-1] for name, own in told.items()}, 0.1)
    by_hand_bytes = told[BY_HAND]["memory_bytes"]
    others = (BY_HAND, "ZeRO 1", "ZeRO 3, boundaries, one limb")
    chains = [name for name in told if name not in others]
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
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatch-size", type=int, default=2)
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        forms = {name: FORMS[name] for name in args.forms}
        found = measured(mesh, args.batch_size, args.microbatch_size, args.rounds, forms)
        rows[mesh if len(forms) == len(FORMS) else f"{mesh}, some"] = results.row(found)
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
