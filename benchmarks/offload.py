"""The optimizer's state in host memory and on a disk: what a step takes.

    python benchmarks/offload.py [--rounds 12] [--directory /scratch]

Jobs train the model of examples/gpt.py on two CPU processes with `memory.zero = 1` in turns, the
optimizer's state on the device, on the host, on the disk. All must end with the same bits. On a CPU
the host's memory is the device's own, so `host` shows what the groups cost, not what a link does.
What the disk gives is measured by tests/support/disk_speed.py. Writes `step` in
benchmarks/results/offload.json.
"""

import json
import tempfile

import jobs
import results
import turns

TIERS = ("device", "host", "disk")


def of_steps(args):
    """The three tiers in turns."""
    script = [jobs.GPT, "--turns", args.rounds + 1, "--batch-size", 32, "--counts", "even"]
    asked = {
        tier: {
            "script": script,
            "mesh": "cpu-1.0-1.0",
            "settings": {
                "NPROC": "1",
                "HXLA_MEMORY_ZERO": "1",
                "HXLA_MEMORY_OFFLOAD": json.dumps({"optimizer": tier, "directory": args.directory}),
            },
        }
        for tier in TIERS
    }
    seconds, told = jobs.timed(asked, args.rounds)
    jobs.check_same_bits(told)
    return {
        "step_seconds": turns.medians(seconds),
        "over the seconds of device": {
            tier: turns.over(seconds[tier], seconds["device"]) for tier in TIERS[1:]
        },
        "sha256": told["device"]["sha256"],
        "seconds": {name: [round(s, 4) for s in own] for name, own in seconds.items()},
    }


def main():
    """All tiers."""
    parser = results.parser(__doc__, "offload")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    known = {name: own for name, own in results.read(args.out).items() if name == "disk"}
    results.write(args.out, known | {"step": of_steps(args)})


if __name__ == "__main__":
    main()
