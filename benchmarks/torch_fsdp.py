"""PyTorch's FSDP2 over Gloo beside hxla with all of its state shared out, both at their best.

    python benchmarks/torch_fsdp.py --torch PYTHON [--meshes cpu-1.0-1.0 cpu-1.0-0.5]

PYTHON is an interpreter that has torch; hxla does not depend on it. All jobs train the model of
examples/gpt.py with the same global batch and the same microbatch, in processes that `hxla run`
starts and throttles:

- hxla with `memory.zero=3`, keeping residuals, or what crosses between layers,
- FSDP2 with even counts, and where the shares of a core differ with counts set by hand from them or
  from measured speeds, with the fastest of its switches (benchmarks/torch_fsdp_worker.py),
- FSDP2 with the least memory: it drops parameters and sums gradients in every microbatch, and
  recomputes blocks.

They take turns of a step, until the update is done; the first turns, in which counts settle, do not
count. Gloo has no reduce-scatter: PyTorch makes one of an all-reduce, of which each process keeps
its part, so FSDP2's sums cost twice the traffic that they need. Its fastest switches, all off, sum
once a step, so that this is little of it, and hold parameters and gradients whole meanwhile.
`memory` is what the first process holds at most of arrays and temporaries: for hxla what the
compiled programs say, of all devices, for FSDP2 what PyTorch's profiler saw in a step.
`resident_bytes` is the most that it holds in any of its turns with all else, which for so small a
model is mainly the framework. Writes its meshes' rows of
benchmarks/results/torch_fsdp.json.
"""

import argparse
from typing import Any

import fsdp
import jobs
import results
import turns

import hxla

SETTLING, LENGTH = 6, 128
OURS = {f"hxla, {form}": fsdp.FORMS[form] for form in ("ZeRO 3", "ZeRO 3, boundaries")}
LEAST = "FSDP2, least memory"
SWITCHES = ("reshard_after_forward", "reshard_after_backward", "gradient_sync")


def measured(mesh: str, args: argparse.Namespace) -> dict[str, Any]:
    """One mesh."""
    shares = [device.core_share for device in hxla.load_cluster(mesh).devices]
    common = ["--turns", SETTLING + args.rounds, "--batch-size", args.batch_size]
    sizes = ["--microbatch-sizes", *(args.microbatch_sizes or [args.microbatch_size])]
    by_hand = ["--shares", *shares] if len(set(shares)) > 1 else []

    def fsdp2(*options: object) -> dict[str, Any]:
        own = [*common, *sizes, *options]
        return jobs.torch(args.torch, "torch_fsdp_worker.py", own, mesh=mesh)

    asked = {}
    for name, given in OURS.items():
        script = [jobs.GPT, *common, "--microbatch-size", args.microbatch_size]
        settings = {f"HXLA_{key}": value for key, value in given.items()}
        asked[name] = {"script": script, "mesh": mesh, "settings": settings}
    theirs = {"FSDP2, counts by hand": fsdp2(*by_hand)} if by_hand else {}
    theirs |= {"FSDP2, even counts": fsdp2(), LEAST: fsdp2("--least-memory", *by_hand)}
    seconds, told = jobs.timed(asked | theirs, args.rounds, settling=SETTLING)
    last_losses = {name: own["losses"][-1] for name, own in told.items()}
    turns.check_alike(last_losses, 0.1)
    medians = turns.medians(seconds)
    ours_best, theirs_best = (min(names, key=medians.__getitem__) for names in (OURS, theirs))
    pairs = {(ours_best, name): None for name in (theirs_best, *theirs)}
    pairs |= {(name, LEAST): None for name in OURS}
    return {
        "batch_size": args.batch_size,
        "microbatch_size": args.microbatch_size,
        "torch": told[theirs_best]["torch"],
        "tokens_per_second": {
            name: round(args.batch_size * LENGTH / median) for name, median in medians.items()
        },
        "fastest": [ours_best, theirs_best],
        "ratios": {f"{a} / {b}": turns.over(seconds[b], seconds[a]) for a, b in pairs},
        "memory": {name: own["memory_bytes"] for name, own in told.items()},
        "resident_bytes": {name: own["resident_bytes"] for name, own in told.items()},
        "counts": {name: told[name]["counts"][-1] for name in OURS},
        "FSDP2's settings": {
            name: {
                key: told[name][key] for key in ("counts", "microbatch_size", *SWITCHES, "tried")
            }
            for name in theirs
        },
        "last_losses": last_losses,
        "seconds": {name: [round(s, 4) for s in own] for name, own in seconds.items()},
    }


def main() -> None:
    """Every mesh."""
    parser = results.parser(__doc__, "torch_fsdp")
    parser.add_argument("--torch", required=True, metavar="PYTHON")
    parser.add_argument("--meshes", nargs="+", default=["cpu-1.0-1.0", "cpu-1.0-0.5"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--microbatch-sizes", type=int, nargs="+", help="FSDP2's, if others too")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    rows = results.read(args.out).get("meshes", {})
    for mesh in args.meshes:
        rows[mesh] = results.row(measured(mesh, args))
        results.write(args.out, {"meshes": rows})


if __name__ == "__main__":
    main()
