"""Sums over the host beside sums over the devices, on two equal processes.

    python benchmarks/host_sums.py [--rounds 30] [--only zero-0 zero-1]

Jobs that train the model of examples/gpt.py with even counts on two CPU processes and take turns of
a step, until its update is done. Each process has two devices on one thread. `device`: it trains on
the second, and its sums are collectives of these devices. `host`: `communication.over = "host"`,
and it trains on the first, on which hosts add, as CPU jobs do; nothing is copied. `apart`: it
trains on the second and its host adds on the first, so that every limb and every sum is copied as
from an accelerator, if only within one memory. A ratio is of the seconds to those of `device`,
round by round: above 1 it is slower. All must end with the same bits.
Writes benchmarks/results/host_sums.json.
"""

import jobs
import results
import turns

#: Where sums go, and the devices that train.
PLACES = {"device": ("device", "[1, 3]"), "host": ("host", "[0, 2]"), "apart": ("host", "[1, 3]")}


def measured(stage, args):
    """All three, with a stage of ZeRO."""
    script = [jobs.GPT, "--turns", args.rounds + 1, "--batch-size", args.batch_size]
    asked = {
        name: {
            "script": [*script, "--counts", "even"],
            "mesh": "cpu-1.0-1.0",
            "settings": {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                "NPROC": "1",
                "HXLA_COMMUNICATION_OVER": over,
                "HXLA_CLUSTER_VISIBLE_DEVICES": devices,
                "HXLA_MEMORY_ZERO": stage,
            },
        }
        for name, (over, devices) in PLACES.items()
    }
    seconds, told = jobs.timed(asked, args.rounds)
    jobs.check_same_bits(told)
    return {
        "step_seconds": turns.medians(seconds),
        "over the seconds of device": {
            name: turns.over(own, seconds["device"])
            for name, own in seconds.items()
            if name != "device"
        },
        "sha256": told["device"]["sha256"],
        "seconds": {name: [round(s, 4) for s in own] for name, own in seconds.items()},
    }


def main():
    """Both stages."""
    parser = results.parser(__doc__, "host_sums")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--only", nargs="+", default=["zero-0", "zero-1"])
    args = parser.parse_args()
    rows = {}
    for name in args.only:
        rows[name] = measured(name.removeprefix("zero-"), args)
        print(name, {k: v for k, v in rows[name].items() if k != "seconds"}, flush=True)
        results.write(args.out, {"jobs": rows})


if __name__ == "__main__":
    main()
