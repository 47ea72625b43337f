"""The environment variables of processes: for this machine's devices, and of batch systems."""

import os
import pathlib
import shlex
import sys
import zlib
from collections.abc import Callable, Sequence

from ..cluster import nvml as _nvml
from ..cluster.cluster import Device
from ..cluster.kinds import LOCAL_CLIENTS_VARIABLE, are_unlike, in_words, library_of
from ..cluster.mesh_file import load_cluster
from ..core.errors import LaunchError
from ..core.files import find
from .again import AGAIN_VARIABLES
from .channel import WAITS_VARIABLE
from .output import LIVE_VARIABLE, terminal_columns

#: The environment of a rank's process, without its place in the generation, from the rank, the
#: device, its place on its host and the path of the mesh file.
Environment = Callable[[int, Device, int, str], dict[str, str]]

# Sharded autotuning makes processes with different programs wait for each other's kernels.
_GPU_FLAGS = ("--xla_gpu_shard_autotuning=false",)
# Options of XLA without which unlike GPUs disagree; see docs/how-to/unlike-gpus.md.
_MIXED_GPU_FLAGS = (
    "--xla_gpu_all_reduce_combine_threshold_bytes=268435456",
    "--xla_gpu_all_gather_combine_threshold_bytes=268435456",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=268435456",
)
_MIXED_GPU_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}

#: JAX platform of each library.
_PLATFORMS = {"NCCL": "cuda", "RCCL": "rocm", "TPU": "tpu"}

# By default glibc returns the pages of large buffers and faults them in again at the next step: for
# a 26 MB sum that took up to four times as long as the sum. Huge pages, where the kernel grants
# them on request, are worth 3 to 6 % of a GPT's step.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def num_gpus() -> int:
    """Number of NVIDIA GPUs of this machine; 0 without a driver."""
    with _nvml.driver() as nvml:
        return 0 if nvml is None else int(nvml.nvmlDeviceGetCount())


def describe(mesh: str | None, number: int | None) -> tuple[Device, ...]:
    """The devices that get a process each.

    Raises:
        LaunchError: If `number` is below one or above the number of GPUs, or the mesh has several
            nodes.
        MeshError: If the mesh file is wrong.
    """
    if mesh is not None:
        cluster = load_cluster(mesh)
        if len(cluster.nodes) > 1:
            raise LaunchError(
                f"mesh file {cluster.name!r} describes {len(cluster.nodes)} nodes and hxla run "
                "starts the processes of one: start a task per accelerator with srun or mpirun"
            )
        return cluster.devices
    gpus = num_gpus()
    if number is not None and number < 1:
        raise LaunchError(f"-n {number}: start at least one process")
    if gpus:
        if number is not None and number > gpus:
            raise LaunchError(f"-n {number}: this machine has {gpus} GPUs")
        return (Device(kind="gpu"),) * (number or gpus)
    if number is None:
        print("hxla: no NVIDIA GPU here, starting one process on the CPU", file=sys.stderr)
    return (Device(kind="cpu"),) * (number or 1)


def elastic_environment(devices: Sequence[Device], mesh: str | None = None) -> Environment:
    """The environments of processes for this machine's devices; also prepares this process's.

    Raises:
        LaunchError: If the devices share no library for collectives.
    """
    cards = sum(device.kind != "cpu" for device in devices)
    if are_unlike([device.kind for device in devices]):
        raise LaunchError(f"{in_words([d.kind for d in devices])} share no library for collectives")
    if not cards:
        os.environ.setdefault(
            "JAX_COMPILATION_CACHE_DIR", _compilation_cache(f"cpu-{_cpu_digest()}")
        )
    # The next generation reuses all programs, so short compilations are cached, too.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # The fork server imports jax, which reads some variables at import.
    common = process_environment(0, devices[0], devices, mesh)
    os.environ |= {k: v for k, v in common.items() if k != "CUDA_VISIBLE_DEVICES"}

    def environment(_rank: int, device: Device, place: int, path: str) -> dict[str, str]:
        env = process_environment(place, device, devices, path)
        return env | ({WAITS_VARIABLE: "1"} if cards else {})

    return environment


def place_of(rank: int, devices: Sequence[Device]) -> int:
    """Index of a device of this machine among those of its library."""
    library = library_of(devices[rank].kind)
    return sum(library_of(other.kind) == library for other in devices[:rank])


def process_environment(
    place: int, device: Device, devices: Sequence[Device], mesh: str | None
) -> dict[str, str]:
    """The environment of a process, without its place in the job.

    Args:
        place: Index of an accelerator among those of this machine.
        devices: All devices of the job.

    Raises:
        LaunchError: If fewer cards are visible than are described, or `JAX_PLATFORMS` asks for an
            accelerator and the device is a CPU.
    """
    env = {name: x for name, x in os.environ.items() if name not in AGAIN_VARIABLES}
    is_unlike = are_unlike(other.kind for other in devices)
    if is_unlike:
        env[LOCAL_CLIENTS_VARIABLE] = "1"
    env |= {
        "HXLA_COMMAND": shlex.join(["hxla", *sys.argv[1:]]),  # for the report
        "HXLA_LAUNCHER_PID": str(os.getpid()),
        LIVE_VARIABLE: str(terminal_columns()),
        "PYTHONUNBUFFERED": "1",
    }
    flags = env.get("XLA_FLAGS", "")
    if mesh is not None:
        env["HXLA_MESH"] = str(find("meshes", mesh))
    # A fast process may wait long for a slow one; the watchdog ends stuck jobs.
    patient = (
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600",
        "--xla_cpu_collective_call_terminate_timeout_seconds=7200",
        "--xla_cpu_collective_timeout_seconds=7200",
    )
    if device.kind == "cpu":
        asked = env.get("JAX_PLATFORMS", "")
        if asked and "cpu" not in asked.split(","):
            raise LaunchError(
                f"JAX_PLATFORMS={asked} asks for an accelerator, and this process would have the "
                "CPU: a driver shows none here, or the mesh file describes none; unset it, "
                "or set JAX_PLATFORMS=cpu"
            )
        env["JAX_PLATFORMS"] = "cpu"
        # XLA divides long contractions and sums by its number of threads, whatever its flags say,
        # so the number of cores would change bits.
        if "xla_force_host_platform_device_count" not in flags:
            env.setdefault("NPROC", "1")
        wanted: tuple[str, ...] = (
            "--xla_cpu_multi_thread_eigen=false",
            *patient,
        )
        for key, value in _KEEP_MEMORY.items():
            env.setdefault(key, value)
    else:
        if is_unlike:  # processes communicate through the CPU backend
            env["JAX_PLATFORMS"] = f"cpu,{_PLATFORMS[library_of(device.kind)]}"
        visible = env.get("CUDA_VISIBLE_DEVICES")
        cards = visible.split(",") if visible else None
        if cards and place >= len(cards):
            raise LaunchError(
                f"CUDA_VISIBLE_DEVICES={visible} names {len(cards)} cards, and a process is to "
                f"have number {place + 1} of those described: name all, or leave it out"
            )
        env["CUDA_VISIBLE_DEVICES"] = cards[place] if cards else str(place)
        kind = device.kind.lower().replace(" ", "-")
        env.setdefault("JAX_COMPILATION_CACHE_DIR", _compilation_cache(kind))
        mixed = len({d.kind for d in devices if d.kind != "cpu"}) > 1
        wanted = _GPU_FLAGS + (_MIXED_GPU_FLAGS if mixed else ())
        wanted += patient if is_unlike else ()
        for key, value in _MIXED_GPU_NCCL.items() if mixed else ():
            env.setdefault(key, value)
    added = [flag for flag in wanted if flag.split("=")[0] not in flags]
    env["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    return env


def _compilation_cache(kind: str) -> str:
    """The folder for compiled programs of a device kind."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return f"{cache}/hxla/xla/{kind}"


def _cpu_digest() -> str:
    """A digest of the CPU features on which compiled programs depend."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    known = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return f"{zlib.crc32(chr(10).join(sorted(known)).encode()):08x}"


_TASK_COUNTS = {
    "Slurm": "SLURM_NTASKS",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
}


def cluster_in_sight() -> str | None:
    """The batch job of several processes with this one, in words; None without one."""
    if "SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        for name, variable in _TASK_COUNTS.items():
            number = os.environ.get(variable, "1")
            if number.isdigit() and int(number) > 1:
                return f"{name} with {number} tasks"
    return None
