"""PyTorch's DDP over Gloo beside hxla on unequal processes, both at their best.

    python benchmarks/torch_ddp.py --torch PYTHON [--mesh cpu-1.0-0.5]

PYTHON is an interpreter that has torch; hxla does not depend on it. All jobs train the model of
examples/gpt.py with the same global batch, in processes that `hxla run` starts and throttles:

- hxla with measured counts and with even ones, microbatches of the size that it chooses,
- DDP with even counts, and with counts set by hand from measured speeds or from the shares of a
  core, its gradients weighted by them; with the fastest microbatch size, and sums that stay local
  until the last one (benchmarks/torch_ddp_worker.py). `torch.compile` gained nothing for this model
  on a CPU.

They take turns of a step, until the update is done. hxla's first turns, in which its counts settle,
do not count. Writes benchmarks/results/torch_ddp.json.
"""

from typing import Any

import jobs
import results
import turns

import hxla

SETTLING, LENGTH = 6, 128


def main() -> None:
    """One mesh."""
    parser = results.parser(__doc__, "torch_ddp")
    parser.add_argument("--torch", required=True, metavar="PYTHON")
    parser.add_argument("--mesh", default="cpu-1.0-0.5")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatch-sizes", type=int, nargs="+", default=[2, 8, 32], help="DDP's")
    parser.add_argument("--microbatch-size", type=int, default=0, help="hxla's; 0: its choice")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    common = ["--turns", SETTLING + args.rounds, "--batch-size", args.batch_size]
    sizes = ["--microbatch-sizes", *args.microbatch_sizes]
    shares = [device.core_share for device in hxla.load_cluster(args.mesh).devices]

    def ours(counts: str) -> dict[str, Any]:
        own = ["--microbatch-size", args.microbatch_size, "--counts", counts]
        return {"script": [jobs.GPT, *common, *own], "mesh": args.mesh}

    def ddp(*options: object) -> dict[str, Any]:
        own = [*common, *sizes, *options]
        return jobs.torch(args.torch, "torch_ddp_worker.py", own, mesh=args.mesh)

    asked = {
        "hxla, measured counts": ours("measured"),
        "hxla, even counts": ours("even"),
        "DDP, counts by hand": ddp("--shares", *shares),
        "DDP, even counts": ddp(),
    }
    seconds, told = jobs.timed(asked, args.rounds, settling=SETTLING)
    tokens = args.batch_size * LENGTH
    hxla_best, hxla_even, ddp_best, ddp_even = asked
    pairs = [
        (hxla_best, ddp_best),
        (hxla_best, ddp_even),
        (hxla_even, ddp_even),
        (ddp_best, ddp_even),
    ]
    result = {
        "mesh": args.mesh,
        "batch_size": args.batch_size,
        "torch": told[ddp_even]["torch"],
        "tokens_per_second": {n: round(tokens / s) for n, s in turns.medians(seconds).items()},
        "ratios": {f"{a} / {b}": turns.over(seconds[b], seconds[a]) for a, b in pairs},
        "hxla's settings": {
            n: {"counts": told[n]["counts"][-1], "microbatch_size": told[n]["microbatch_size"]}
            for n in (hxla_best, hxla_even)
        },
        "DDP's settings": {
            n: {key: told[n][key] for key in ("counts", "microbatch_size", "tried")}
            for n in (ddp_best, ddp_even)
        },
        "last_losses": {n: own["losses"][-1] for n, own in told.items()},
        "seconds": {n: [round(s, 4) for s in own] for n, own in seconds.items()},
    }
    results.write(args.out, result)


if __name__ == "__main__":
    main()
