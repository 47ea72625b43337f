"""`hxla run`: one process per accelerator, or per described device."""

import os
import pathlib
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence

from .._cluster import _nvml
from .._cluster._cluster import Device
from .._cluster._libraries import are_unlike, in_words
from .._cluster._mesh_file import load_cluster
from .._core._catalogue import find
from .._core._errors import LaunchError
from .._elastic._membership import MembershipRules
from .._plan._plan import Plan
from ._elastic_run import ElasticRun
from ._event_log import EventLog
from ._host import Hosts, LocalHost, ThisMachine
from ._output import Logs, Output
from ._processes import Processes, Start
from ._warm import WAITS_VARIABLE
from ._workers import Environment, Streams

# Processes that compile programs of their own would wait for each other's measured kernels.
_GPU_FLAGS = ("--xla_gpu_shard_autotuning=false",)
# Options of XLA without which unlike GPUs disagree; see docs/running.md.
_MIXED_GPU_FLAGS = (
    "--xla_gpu_all_reduce_combine_threshold_bytes=268435456",
    "--xla_gpu_all_gather_combine_threshold_bytes=268435456",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=268435456",
)
_MOST_PROCESSES = 65536
_HAND_OVER_SECONDS = 30.0  # members end the step at hand and write their state
_PREPARE_SECONDS = 600.0  # members trace and compile
_MIXED_GPU_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}


def num_gpus() -> int:
    """NVIDIA GPUs of this machine; 0 without a driver, which is a normal case."""
    with _nvml.driver() as nvml:
        return 0 if nvml is None else int(nvml.nvmlDeviceGetCount())


def describe(mesh: str | None, number: int | None) -> tuple[Device, ...]:
    """The devices to start a process for.

    Raises:
        LaunchError: If more GPUs are asked for than there are, or none at all, or the mesh has
            several nodes.
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


def run(
    command: Sequence[str],
    *,
    mesh: str | None = None,
    number: int | None = None,
    plan: str | None = None,
    grace_seconds: float = 5.0,
    dump: str | None = None,
    program: Sequence[str] = ("hxla._launch",),
) -> int:
    """Start the processes, pass on their output and signals, and wait for them.

    Args:
        command: A Python script and its arguments.
        mesh: Built-in name or path of a mesh file.
        number: Processes to start, instead of a mesh.
        plan: File of a plan to run: only the devices that take part are started.
        grace_seconds: From SIGTERM to SIGKILL; a process that finishes a step and saves it may
            take longer.
        dump: New folder for what XLA makes of each program, `process-0` and so on below it.
        program: Module that runs the command in each process, and its own arguments.

    Returns:
        0 if all returned 0, else the exit code of the process that failed first (128 plus the
        signal's number if it was killed), or of how the user ended the job: see docs/running.md.

    Raises:
        LaunchError: If the devices share no library for collectives, and as `describe`.
    """
    asked = Plan.read(plan) if plan is not None else None
    if asked is not None and mesh is None and number is None:
        mesh, number = asked.cluster or None, len(asked.devices)
    devices = describe(mesh, None if mesh is not None else number)
    ranks: Sequence[int] = range(len(devices))
    settings: dict[str, str] = {}
    if plan is not None and asked is not None:
        ranks = _planned_ranks(asked, len(devices))
        settings = {"HXLA_PLAN": os.path.abspath(plan)}
        if len(ranks) < len(devices):
            settings["HXLA_DEVICES"] = ",".join(map(str, ranks))
    address, folder = f"127.0.0.1:{_free_port()}", new_dump(dump)
    chosen = [devices[rank] for rank in ranks]
    kinds = [device.kind for device in chosen]
    if are_unlike(kinds):
        raise LaunchError(
            f"{in_words(kinds)} share no library for collectives, and the backend of an "
            "accelerator waits for every process of a job to have one: a plan for them can be "
            "made, with sums over the host, but hxla run starts devices of one sort only"
        )
    starts = []
    for number_here, device in enumerate(chosen):
        env = _environment(number_here, device, chosen, mesh) | settings
        env |= {
            "HXLA_COORDINATOR": address,
            "HXLA_NUM_PROCESSES": str(len(chosen)),
            "HXLA_PROCESS_ID": str(number_here),
        }
        if folder is not None:
            env |= dumping(env, folder, str(number_here))
        starts.append(Start(env=env, core_share=device.core_share))

    def reread_shares() -> list[float | None]:
        cluster = load_cluster(str(mesh))
        if len(cluster.devices) <= max(ranks):
            raise LaunchError(f"{mesh} now has {len(cluster.devices)} devices")
        return [cluster.devices[rank].core_share for rank in ranks]

    return Processes(
        starts,
        ["-m", *program, *command],
        grace_seconds=grace_seconds,
        reread_shares=reread_shares if mesh is not None else None,
    ).wait()


def run_elastic(
    command: Sequence[str],
    *,
    mesh: str | None = None,
    number: int | None = None,
    ray: str | None = None,
    least: int = 1,
    most: int | None = None,
    heartbeat_seconds: float = 10.0,
    grace_seconds: float = 5.0,
    events: str | None = None,
) -> int:
    """Run a script whose processes come and go with the devices, until it has trained.

    Args:
        command: A Python script and its arguments.
        mesh: Built-in name or path of a mesh file, which is read again when it changes.
        number: Processes to start, instead of a mesh.
        ray: Address of a Ray cluster whose nodes give the devices, instead of a mesh.
        least: The fewest devices to train on (minP).
        most: The most (maxP); None: one for each microbatch.
        heartbeat_seconds: How long a process may be silent.
        grace_seconds: The notice that a SIGTERM gives.
        events: File for what happens, one line of JSON each.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: As `describe`, or if the numbers contradict each other.
    """
    most = _MOST_PROCESSES if most is None else most
    if not 1 <= least <= most:
        raise LaunchError(f"--min {least} --max {most}: use 1 <= min <= max")
    rules = MembershipRules(
        min_devices=least,
        max_devices=most,
        num_steps=sys.maxsize,
        num_microbatches=1,
        heartbeat_seconds=heartbeat_seconds,
        hand_over_seconds=_HAND_OVER_SECONDS,
        prepare_seconds=_PREPARE_SECONDS,
        form_seconds=_PREPARE_SECONDS,
        ports=tuple(_free_port() for _ in range(4)),
    )
    log, (streams, closed) = EventLog(events), _streams()
    if ray is not None:
        hosts: Hosts = _ray_hosts(ray, command, streams)
    else:
        devices = describe(mesh, None if mesh is not None else number)
        host = LocalHost(command, elastic_environment(devices, mesh), streams)
        hosts = ThisMachine(host, lambda: devices if mesh is None else describe(mesh, None))
    run = ElasticRun(hosts, streams, rules, grace_seconds, log)
    closed.append(lambda: run.receive(signal.SIGTERM))
    return run.wait()


def _ray_hosts(address: str, command: Sequence[str], streams: Streams) -> Hosts:
    try:
        from ._ray_host import RayHosts
    except ModuleNotFoundError:
        raise LaunchError("--ray needs Ray: pip install 'hxla[ray]', on every node") from None
    return RayHosts(address, command, streams)


def elastic_environment(devices: Sequence[Device], mesh: str | None = None) -> Environment:
    """What processes for devices of this machine get; this one's environment is made ready too.

    Args:
        devices: Those that are there.
        mesh: File of them.

    Raises:
        LaunchError: If they share no library for collectives.
    """
    cards = sum(device.kind != "cpu" for device in devices)
    if are_unlike([device.kind for device in devices]):
        raise LaunchError(f"{in_words([d.kind for d in devices])} share no library for collectives")
    if not cards:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache_of(f"cpu-{_processor()}"))
    # A generation's programs are those of the one before, however quickly they are compiled.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # Processes are forked from one that has imported jax, which reads some of them then.
    common = _environment(0, devices[0], devices, mesh)
    os.environ |= {k: v for k, v in common.items() if k != "CUDA_VISIBLE_DEVICES"}

    def environment(device: Device, place: int, path: str) -> dict[str, str]:
        env = _environment(place, device, devices, path)
        return env | ({WAITS_VARIABLE: "1"} if cards else {})

    return environment


def _streams() -> tuple[Streams, list[Callable[[], None]]]:
    """Standard output and error, and what is called when nobody reads the output any more."""
    lock, closed = threading.Lock(), list[Callable[[], None]]()

    def is_closed(_: Exception) -> None:
        for tell in closed:
            tell()

    return Streams(
        out=Output(sys.stdout.buffer, lock, is_closed),
        err=Output(sys.stderr.buffer, lock, lambda _: None),
        logs=Logs(),
    ), closed


def _planned_ranks(plan: Plan, num_devices: int) -> Sequence[int]:
    """The devices of a plan, by their numbers in the cluster.

    Where some are not there, a process may have several of them, and if none has, the job says
    so beside all else in which the plan differs: then every process is started.
    """
    ranks = sorted(device.rank for device in plan.devices)
    return range(num_devices) if ranks[-1] >= num_devices else ranks


def new_dump(folder: str | None) -> str | None:
    """The absolute path of a folder that holds no other dump.

    Raises:
        LaunchError: If there is anything in it.
    """
    if folder is None:
        return None
    path = pathlib.Path(folder).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise LaunchError(f"--dump {folder}: it is not empty; name a new folder for each run")
    return str(path)


def dumping(env: Mapping[str, str], folder: str, process: str) -> dict[str, str]:
    """Environment variables that make a process dump its programs.

    Args:
        env: Of the process so far.
        folder: Of all processes.
        process: Number of this one.
    """
    wanted = (
        f"--xla_dump_to={folder}/process-{process}",
        "--xla_dump_hlo_as_text",
        "--xla_dump_hlo_as_proto",  # it holds the buffer assignment whole
    )
    return {
        "XLA_FLAGS": " ".join([env.get("XLA_FLAGS", ""), *wanted]).strip(),
        # A program from the cache is not compiled, and what is not compiled is not dumped.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


# glibc gives the pages of every large buffer back and faults them in again at the next step: on a
# 26 MB sum that took up to four times as long as the sum itself.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}


def _environment(
    place: int, device: Device, devices: Sequence[Device], mesh: str | None
) -> dict[str, str]:
    """Of a process, but for its place in the job.

    Args:
        place: Of the device on this machine.
        device: The process's.
        devices: All that may be used together.
        mesh: File of them.
    """
    env = dict(os.environ)
    env |= {
        "HXLA_LAUNCHER_PID": str(os.getpid()),
        "HXLA_LIVE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    flags = env.get("XLA_FLAGS", "")
    if mesh is not None:
        env["HXLA_MESH"] = str(find("meshes", mesh))
    if device.kind == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
        # XLA cuts long contractions and sums by the threads it has, whatever its flags say, so the
        # cores that a process may use would change bits.
        if "xla_force_host_platform_device_count" not in flags:
            env.setdefault("NPROC", "1")
        wanted: tuple[str, ...] = (
            "--xla_cpu_multi_thread_eigen=false",
            # A fast process may wait long for a slow one; the watchdog ends jobs that are stuck.
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600",
            "--xla_cpu_collective_call_terminate_timeout_seconds=7200",
            "--xla_cpu_collective_timeout_seconds=7200",
        )
        for key, value in _KEEP_MEMORY.items():
            env.setdefault(key, value)
    else:
        visible = env.get("CUDA_VISIBLE_DEVICES")
        cards = visible.split(",") if visible else None
        env["CUDA_VISIBLE_DEVICES"] = cards[place] if cards else str(place)
        kind = device.kind.lower().replace(" ", "-")
        env.setdefault("JAX_COMPILATION_CACHE_DIR", _cache_of(kind))
        mixed = len({d.kind for d in devices}) > 1
        wanted = _GPU_FLAGS + (_MIXED_GPU_FLAGS if mixed else ())
        for key, value in _MIXED_GPU_NCCL.items() if mixed else ():
            env.setdefault(key, value)
    added = [flag for flag in wanted if flag.split("=")[0] not in flags]
    env["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    return env


def _cache_of(kind: str) -> str:
    """Where programs that were compiled for devices of a kind are kept."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return f"{cache}/hxla/xla/{kind}"


def _processor() -> str:
    """What programs compiled for this machine's processor may not be run without."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    known = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return f"{zlib.crc32(chr(10).join(sorted(known)).encode()):08x}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
