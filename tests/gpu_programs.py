"""Compiles what a plan runs for cards that are not here, and prints what the programs hold.

    python tests/gpu_programs.py PLAN CARD

A process of its own, because XLA reads its flags and the plugin its environment when they start:
see `test_gpu_compile.py`, which starts it.
"""

import json
import math
import pathlib
import re
import sys

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import gpt

import hxla
from hxla._lower._lower import Programs, lower
from hxla._lower._sum import _stacked

MICROBATCH_SIZE, FEWEST, LENGTH = 2, 4, 32

# Fields of `stream_executor::GpuDeviceInfoProto`, which CUDA's runtime calls `cudaDeviceProp`.
# Limits by compute capability: NVIDIA, "CUDA C++ Programming Guide", table "Technical
# Specifications per Compute Capability"; what a block may use of a core's shared memory without
# opting in is 48 KiB on all.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared_of_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: {cores}
  fpus_per_core: {fpus}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
CARDS = {
    # NVIDIA, "H100 Tensor Core GPU Architecture" (2022), tables of the SXM5 card; 3.35 TB/s by the
    # "H100 Tensor Core GPU" data sheet.
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "shared": 227 * 1024,
        "shared_of_core": 228 * 1024,
        "cores": 132,
        "fpus": 128,
        "cache": 50 * 2**20,
        "clock": 1.98,
        "bandwidth": 3_350_000_000_000,
        "memory": 80 * 2**30,
    },
    # NVIDIA, "Tesla V100 GPU Architecture" (2017), table 1; 900 GB/s by the "V100" data sheet.
    "v100": {
        "name": "Tesla V100-SXM2-32GB",
        "major": 7,
        "shared": 96 * 1024,
        "shared_of_core": 96 * 1024,
        "cores": 80,
        "fpus": 64,
        "cache": 6 * 2**20,
        "clock": 1.53,
        "bandwidth": 900_000_000_000,
        "memory": 32 * 2**30,
    },
}
PLANS = {
    "data": {"mesh": {"data": 2}},
    "data, float sums": {"mesh": {"data": 2}, "reduction": "float"},
    "tensor": {"mesh": {"data": 2, "tensor": 2}, "rules": "decoder"},
    "pipeline": {"mesh": {"data": 2, "stage": 2}},
    "pipeline of tensor stages": {"mesh": {"stage": 2, "tensor": 2}, "rules": "decoder"},
    "124 million parameters": {"mesh": {"data": 1}},
}
SIZES = {
    "124 million parameters": {
        "vocabulary": 50304,
        "length": 1024,
        "width": 768,
        "heads": 12,
        "layers": 12,
    }
}


def cards(name: str) -> tuple[str, tuple[jax.Device, ...]]:
    """The model name, and four such cards in one machine."""
    facts = CARDS[name]
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGET.format(**facts), topology="1x1x4"
    )
    return facts["name"], tuple(topology.devices)


def lowered(plan: str, card: str) -> Programs:
    """The programs of one of the plans, of a GPT whose arrays nobody made."""
    sizes = {"vocabulary": 64, "length": LENGTH, "width": 32, "heads": 4, "layers": 2}
    sizes |= SIZES.get(plan, {})
    model = nnx.eval_shape(lambda: gpt.GPT(nnx.Rngs(0), **sizes))
    data = {"text": jax.ShapeDtypeStruct((64, sizes["length"] + 1), np.int32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    batch_size = FEWEST * MICROBATCH_SIZE
    job = hxla.Job(model, data, gpt.loss, optimizer, batch_size=batch_size)
    kind, devices = cards(card)
    devices = devices[: math.prod(PLANS[plan]["mesh"].values())]
    described = hxla.Device(kind=kind, memory_bytes=CARDS[card]["memory"])
    cluster = hxla.Cluster(name="", devices=(described,) * len(devices))
    made = job.plan(cluster, auto=False, microbatch_size=MICROBATCH_SIZE, **PLANS[plan])
    traced = job._traced
    training, graph = traced.training(MICROBATCH_SIZE, 0), job.graph(MICROBATCH_SIZE)
    return lower(training, graph, made, devices)


def sums(programs: Programs) -> list:
    """The lowered programs with collectives between replicas."""
    reducer, tensors = programs.reducer, programs.tensors
    num, mesh = len(reducer.replicas), reducer.mesh
    limbs, dtype = programs.contribution.form.num_parts, programs.contribution.dtype

    def stacked(shape, spec=P(), dtype=np.int32):
        sharding = NamedSharding(mesh, _stacked(spec))
        return jax.ShapeDtypeStruct((num * shape[0], *shape[1:]), dtype, sharding=sharding)

    own = [stacked((3,)), stacked((len(tensors.floats),))]
    ints = [stacked((programs.plan.num_microbatches, 2))]
    out = []
    for k, bucket in enumerate(reducer.buckets):
        values = [(stacked(reducer._shapes[i], reducer._specs[i], dtype),) * limbs for i in bucket]
        small = (own, ints) if k == 0 else ([], [])
        out.append(reducer._programs[k].lower(*small, values))
    return out


def evaluation(programs: Programs) -> object:
    """The lowered program that evaluates a microbatch."""
    params, aux, _ = programs._shapes(0)
    [text] = programs.graph.batch_values
    shape = programs.graph.values[text].shape
    batch = {"text": programs._whole(0, shape, np.int32)}
    return programs.evaluation._run.lower(params, aux, np.int32(0), batch)


def _dtypes(collective) -> str:
    """Those that travel together; an array is written `f32[8,16]` or `2 x f32[8,16]`."""
    return "+".join(sorted({re.sub(r"\d+ x |\[.*", "", array) for array in collective.arrays}))


def told(compiled, card: str) -> dict:
    """What a compiled program holds."""
    program = hxla.inspect(compiled).main
    collectives = program.collectives
    text, stats = compiled.as_text(), compiled.memory_analysis()
    return {
        "collectives": sorted({f"{c.kind} of {_dtypes(c)} over {c.over}" for c in collectives}),
        "transfers": [t.kind for t in program.transfers],
        "problems": list(program.problems),
        "custom_calls": sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))),
        "fits": stats.argument_size_in_bytes + stats.temp_size_in_bytes < CARDS[card]["memory"],
    }


def main() -> None:
    plan, card = sys.argv[1:]
    programs = lowered(plan, card)
    [runner, *_] = programs.runners
    compiled = [program.compile() for program in programs._lowered_runner(0)]
    runner.adopt(compiled)
    assert runner.memory_bytes() > 0
    names = ["fill", "ticks", "finish"] if programs.pipelines else ["microbatch"]
    others = {}
    if plan not in SIZES:
        others = {"update": programs._lowered_update(0), "evaluation": evaluation(programs)}
        others |= {f"sum {k}": own for k, own in enumerate(sums(programs))}
    found = dict(zip(names, compiled, strict=True))
    found |= {name: own.compile() for name, own in others.items()}
    print(json.dumps({name: told(own, card) for name, own in found.items()}))


if __name__ == "__main__":
    main()
