"""Time and step of plans for many devices, by search, tracing included.

    OMP_NUM_THREADS=1 python benchmarks/planner_scale.py [--decoders 1.3e9 ...]

Decoders of examples/gpt.py as shapes only: one of 0.35 billion parameters planned for 9 devices,
and those of 1.3 to 173 billion for 768. A third of the devices each are A100 with 80 GB, A100 with
40 GB and V100 with 32 GB; speeds and links are those of data sheets. A batch has two sequences of
2,048 tokens for each device, a microbatch one. Seconds are those that the processor spent, so that
other work beside disturbs little. Writes benchmarks/results/planner_scale.json.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import pathlib
import resource
import sys
import time

import jax
import numpy as np
import optax
import results
from flax import nnx

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import gpt

import hxla

LENGTH, VOCABULARY = 2048, 50304
# Memory, its bandwidth, float32 rate, and the bandwidth between cards of a node.
CARDS = {
    "A100-80": (80, 2039e9, 19.5e12, 200e9),
    "A100-40": (40, 1555e9, 19.5e12, 200e9),
    "V100-32": (32, 900e9, 15.7e12, 68.28e9),
}
DECODERS = {
    "0.35e9": {"width": 1024, "heads": 16, "layers": 24},
    "1.3e9": {"width": 2048, "heads": 16, "layers": 24},
    "2.7e9": {"width": 2560, "heads": 32, "layers": 32},
    "6.7e9": {"width": 4096, "heads": 32, "layers": 32},
    "13e9": {"width": 5120, "heads": 40, "layers": 40},
    "100e9": {"width": 10240, "heads": 80, "layers": 80},
    "173e9": {"width": 12288, "heads": 96, "layers": 96},
}
SMALL = "0.35e9"  # for a few devices; the others for all


def cluster(num_nodes: int, num_each: int) -> hxla.Cluster:
    """So many nodes of each kind, with so many devices each."""
    devices, nodes = [], []
    for kind, (memory, bandwidth, rate, link) in CARDS.items():
        device = hxla.Device(
            kind=kind,
            memory_bytes=memory * 2**30,
            memory_bytes_per_second=bandwidth,
            rates=(hxla.Rate(dtype="float32", flops_per_second=rate),),
        )
        for n in range(num_nodes):
            devices += [device.model_copy(update={"node": len(nodes)})] * num_each
            joined = hxla.Link(bytes_per_second=link, latency_seconds=3.4e-6)
            nodes.append(hxla.Node(name=f"{kind}-{n}", link=joined))
    return hxla.Cluster(
        name=f"mixed-{len(devices)}",
        devices=tuple(devices),
        nodes=tuple(nodes),
        default_link=hxla.Link(bytes_per_second=12.5e9, latency_seconds=14e-6),
    )


def planned(sizes: dict[str, int], devices: hxla.Cluster) -> dict[str, object]:
    """One instance."""
    began, clock = time.process_time(), time.perf_counter()
    model = nnx.eval_shape(
        lambda: gpt.GPT(nnx.Rngs(0), vocabulary=VOCABULARY, length=LENGTH, **sizes)
    )
    batch_size = 2 * len(devices.devices)
    text = jax.ShapeDtypeStruct((batch_size, LENGTH + 1), np.int32)
    job = hxla.Job(model, {"text": text}, gpt.loss, optax.adamw(1e-4), batch_size=batch_size)
    plan = job.plan(devices, microbatch_size=1)
    return {
        "devices": len(devices.devices),
        "seconds": round(time.process_time() - began, 2),
        "wall_seconds": round(time.perf_counter() - clock, 2),
        "stages": plan.num_stages,
        "tensor": plan.axis_sizes.get("tensor", 1),
        "copies": len(plan.replicas),
        "step_seconds": round(plan.prediction.step_seconds, 3),
        "bound_seconds": round(plan.prediction.bound_seconds, 3),
    }


def main() -> None:
    """Every decoder asked for."""
    parser = results.parser(__doc__, "planner_scale")
    parser.add_argument("--decoders", nargs="+", choices=list(DECODERS), default=list(DECODERS))
    args = parser.parse_args()
    rows = {}
    for name in args.decoders:
        devices = cluster(1, 3) if name == SMALL else cluster(32, 8)
        row = planned(DECODERS[name], devices)
        rows[f"{name} parameters, {row['devices']} devices"] = row
        print(name, row, flush=True)
    # Of all so far: the largest decides.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.write(args.out, {"rows": rows, "peak_bytes": peak})


if __name__ == "__main__":
    main()
