"""Islands over a slow link: a GPT's loss and time beside one sum in every step, at equal tokens.

    python benchmarks/islands.py [--megabits 50] [--every 20] [--steps 240]

Two processes of one CPU device each, joined over Gloo, sit behind a link of their own
(`paced_links.py`, for root on Linux). Both sessions train the GPT of examples/gpt.py on the same
bytes of Python's library, and take turns of `every` steps, the meeting included. The loss is that
of examples that were held back. The result is in benchmarks/results/islands.json.
"""

import json
import statistics
import sys

import paced_links
import results
import turns

TOGETHER, ISLANDS = "together", "islands"
_SIZES = ("every", "steps", "batch", "microbatch", "length", "width", "layers")


def main() -> None:
    """Both sessions in turns."""
    parser = results.parser(__doc__, "islands")
    parser.add_argument("--megabits", type=float, default=50.0, help="a second, of each link")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="steps between meetings")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()
    paced_links.enter_own_network()
    options = {name: getattr(args, name) for name in (*_SIZES, "rate")}
    worker, num = results.ROOT / "benchmarks" / "islands_worker.py", args.processes
    command = [sys.executable, str(worker), f"{paced_links.address(0)}:5321", str(num)]
    command.append(json.dumps(options))
    first, *others = paced_links.results_of(command, num, args.megabits * 1e6)
    for other in others:
        for name in (TOGETHER, ISLANDS):
            assert other[name]["sha256"] == first[name]["sha256"]
    seconds = {name: first[name]["seconds"] for name in (TOGETHER, ISLANDS)}
    row = {
        "parameters": first[ISLANDS]["parameters"],
        "loss": {name: round(first[name]["loss"], 4) for name in seconds},
        "step_seconds": {
            name: round(statistics.median(own) / args.every, 4) for name, own in seconds.items()
        },
        "bytes_sent_a_step": {
            name: round(statistics.median(first[name]["bytes"]) / args.every) for name in seconds
        },
        "ratios": {
            "seconds of islands / together": turns.over(seconds[ISLANDS], seconds[TOGETHER]),
            "loss of islands / together": round(
                first[ISLANDS]["loss"] / first[TOGETHER]["loss"], 4
            ),
        },
        "sha256": {name: first[name]["sha256"] for name in seconds},
        "trained_losses": {
            name: [round(x, 3) for x in first[name]["trained_losses"][:: args.every]]
            for name in seconds
        },
    }
    told = {"megabits_per_second": args.megabits, "processes": args.processes, **options}
    results.write(args.out, told | results.row(row))


if __name__ == "__main__":
    main()
