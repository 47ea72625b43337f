"""XLA's compiler for NVIDIA GPUs on a machine without one, and what its programs launch and move.

The cards are described by data sheets. XLA reads its flags and the plugin its environment when they
start, so programs are compiled in a process of its own, with `environment`.
"""

import collections
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies

from support.inside.inspect import Costs, _hlo_text
from support.inside.launch import _GPU_FLAGS, _MIXED_GPU_FLAGS
from support.inside.lower import Programs
from support.paths import PYTHONPATH

FOLDER = pathlib.Path(os.environ.get("GPU_COMPILER", pathlib.Path(sys.prefix, "gpu-compiler")))
#: The assembler of CUDA 12, which still knows Volta and Pascal.
ASSEMBLER = FOLDER / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"


def is_here() -> bool:
    """Whether the compiler is installed; `make test` does it."""
    return any((FOLDER / "jax_plugins" / f"xla_cuda{n}").is_dir() for n in (12, 13))


def environment(*flags: str) -> dict[str, str]:
    """That of a process that compiles, with more flags of XLA."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "PATH": os.pathsep.join([str(ASSEMBLER.parent), os.environ["PATH"]]),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join([PYTHONPATH, str(FOLDER)]),
        # A flag that XLA does not know ends the process.
        "XLA_FLAGS": " ".join([*_GPU_FLAGS, *_MIXED_GPU_FLAGS, *flags]),
    }


# -- cards ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What XLA's compiler asks of a card.

    Fields of `stream_executor::GpuDeviceInfoProto`, which CUDA's runtime calls `cudaDeviceProp`.
    Limits by compute capability: NVIDIA, "CUDA C++ Programming Guide", table "Technical
    Specifications per Compute Capability"; 2048 threads and 65536 registers a core on all of these,
    and what a block may use of a core's shared memory without opting in is 48 KiB.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    lanes: int  # float32 units of a core
    clock_ghz: float
    l2_mib: int
    memory_gib: int
    bytes_per_second: float
    shared_kib: tuple[int, int]  # of a core, and of a block that opts in
    cudnn: tuple[int, int] = (9, 10)

    @property
    def target(self) -> str:
        """As XLA reads it."""
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {self.shared_kib[1] * 2**10}
  shared_memory_per_core: {self.shared_kib[0] * 2**10}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  l2_cache_size: {self.l2_mib * 2**20}
  clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {self.bytes_per_second:.0f}
  device_memory_size: {self.memory_gib * 2**30}
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  driver_version: "12.9.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: {self.cudnn[0]} minor: {self.cudnn[1]} }}
device_description_str: "{self.kind}"
"""


CARDS = {
    # NVIDIA, "H100 Tensor Core GPU Architecture" (2022), tables of the SXM5 card; 3.35 TB/s by the
    # "H100 Tensor Core GPU" data sheet.
    "h100": Card(
        kind="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        lanes=128,
        clock_ghz=1.98,
        l2_mib=50,
        memory_gib=80,
        bytes_per_second=3.35e12,
        shared_kib=(228, 227),
    ),
    # NVIDIA, "A100 Tensor Core GPU Architecture" (2020), tables of the 40 GB SXM4 card.
    "a100": Card(
        kind="NVIDIA A100-SXM4-40GB",
        capability=(8, 0),
        cores=108,
        lanes=64,
        clock_ghz=1.41,
        l2_mib=40,
        memory_gib=40,
        bytes_per_second=1.555e12,
        shared_kib=(164, 163),
    ),
    # NVIDIA, "Tesla V100 GPU Architecture" (2017), tables of the SXM2 card.
    "v100": Card(
        kind="Tesla V100-SXM2-16GB",
        capability=(7, 0),
        cores=80,
        lanes=64,
        clock_ghz=1.53,
        l2_mib=6,
        memory_gib=16,
        bytes_per_second=900e9,
        shared_kib=(96, 96),
    ),
    # NVIDIA, "Tesla P100" (2016), tables of the SXM2 card; its blocks cannot opt in to more.
    "p100": Card(
        kind="Tesla P100-SXM2-16GB",
        capability=(6, 0),
        cores=56,
        lanes=64,
        clock_ghz=1.48,
        l2_mib=4,
        memory_gib=16,
        bytes_per_second=732e9,
        shared_kib=(64, 48),
    ),
}


def cards(num: int, card: str = "h100") -> tuple[jax.Device, ...]:
    """Some of four cards in one machine."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=CARDS[card].target, topology="1x1x4"
    )
    return tuple(topology.devices)[:num]


# -- programs ------------------------------------------------------------------------------------


def compiled_programs(programs: Programs) -> list[tuple[str, Any]]:
    """Names and programs of the first replica and of the sums; all are compiled and adopted."""
    made: list[Any] = []

    def over(compile_one: Callable[[Any], Any], lowered: Any) -> list[Any]:
        found = list(map(compile_one, lowered))
        made.extend(found)
        return found

    programs.compile(over)
    if programs.step_program is not None:
        programs.compile_each(over)
    names = ["step"] * (programs.step_program is not None)
    names += [*programs.runners[0].names, *programs._updates.each[0].names]
    names += [f"sum {k}" for k in range(programs.reducer.layout.num_buckets)]
    return list(zip(names, made, strict=False))


def launch_files() -> Iterator[tuple[str, pathlib.Path]]:
    """Names of compiled modules, and XLA's lists of what they launch in `--xla_dump_to`."""
    folder = re.findall(r"--xla_dump_to=(\S+)", os.environ["XLA_FLAGS"])[-1]
    for path in pathlib.Path(folder).glob("*.thunk_sequence_after_thunk_passes.txt"):
        yield path.name.split(".")[1], path


#: A line of such a list; what is inside a graph or a loop is indented.
_LAUNCH = re.compile(r"( *)\d+: (k\w+)\s+\[[^]]*\] ?(\S*)(?: grid: \[(\d+), (\d+), (\d+)\])?")
_KERNELS = ("kKernel", "kCustomKernel")


def launches(text: str, trips: int = 1) -> dict[str, int]:
    """What a program launches in one call.

    Args:
        trips: How often the bodies of its outermost loops run; inner bodies count once.
    """
    found: collections.Counter[str] = collections.Counter()
    loop: int | None = None  # the indent of the loop around a line
    for line in map(_LAUNCH.match, text.splitlines()):
        if line is None:
            continue
        indent, kind, name, *grid = line.groups()
        loop = None if loop is not None and len(indent) <= loop else loop
        times = 1 if loop is None else trips
        is_sort = kind in _KERNELS and name.startswith("sort")
        found["graphs"] += times * (kind == "kCommandBuffer")
        found["kernels"] += times * (kind in _KERNELS)
        found["products"] += times * bool(re.match("kCu(blas|dnn)|kConvolution", kind))
        found["copies"] += times * bool(re.match("kCopy|kMem", kind))
        found["loops"] += kind == "kWhile"
        found["sorts"] += times * is_sort
        found["wide_sorts"] += times * (is_sort and grid != ["1", "1", "1"])
        if kind == "kWhile" and loop is None:
            loop = len(indent)
    return dict(found)


def moved_bytes(text: str, trips: int = 1) -> int:
    """Bytes that the kernels of a program read and write, without workspaces of libraries.

    Of slices and updates in place only what they touch counts.

    Args:
        text: Optimized HLO.
        trips: How often loops run whose HLO does not say it.
    """
    module = _hlo_text.read_module(text)
    costs = Costs(module)

    def of(name: str) -> int:
        computation, total = module.computations[name], 0
        for one in computation.instructions.values():
            if one.opcode == "while":
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', one.rest)
                [body] = one.called("body")
                total += of(body) * (int(known[1]) if known else trips)
            elif one.opcode in ("call", "conditional"):
                total += sum(map(of, _called(one)))
            else:
                total += costs.of(one, computation)[1] - _workspace_bytes(one)
        return total

    return of(module.entry)


def _called(instruction: Any) -> list[str]:
    keys = "to_apply", "branch_computations", "true_computation", "false_computation"
    return [name for key in keys for name in instruction.called(key)]


def _workspace_bytes(instruction: Any) -> int:
    if instruction.opcode != "custom-call" or '"__cu' not in instruction.rest:
        return 0
    *_, last = _hlo_text.tuple_elements(instruction.shape)
    is_bytes = re.match(r"[su]8\[\d+\]", last) and instruction.shape.startswith("(")
    return _hlo_text.shape_bytes(last) if is_bytes else 0
