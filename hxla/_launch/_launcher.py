"""`hxla run`: one process per accelerator, or per described device."""

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from .._cluster import _nvml
from .._cluster._cluster import Cluster, Device
from .._cluster._mesh_file import load_cluster
from .._core._catalogue import find
from .._core._errors import HxlaError, LaunchError
from .._plan._plan import Plan
from ._throttle import Cgroup, Throttle, make_throttle, pack

# Processes that compile programs of their own would wait for each other's measured kernels.
_GPU_FLAGS = ("--xla_gpu_shard_autotuning=false",)
# Options of XLA without which unlike GPUs disagree; see docs/running.md.
_MIXED_GPU_FLAGS = (
    "--xla_gpu_all_reduce_combine_threshold_bytes=268435456",
    "--xla_gpu_all_gather_combine_threshold_bytes=268435456",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=268435456",
)
_MIXED_GPU_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Child:
    process: subprocess.Popen[bytes]
    readers: tuple[threading.Thread, ...]
    throttle: Throttle | None


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
        grace_seconds: Between SIGTERM and SIGKILL once a process has failed.
        dump: New folder for what XLA makes of each program, `process-0` and so on below it.
        program: Module that runs the command in each process, and its own arguments.

    Returns:
        0 if all returned 0, else the exit code of the process that failed first (128 plus the
        signal's number if it was killed).
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
    if not pathlib.Path(command[0]).is_file():
        raise LaunchError(f"no script {command[0]!r} in {os.getcwd()}")
    return _Processes(
        [devices[rank] for rank in ranks],
        [*program, *command],
        mesh,
        ranks,
        settings,
        grace_seconds,
        new_dump(dump),
    ).wait()


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


class _Processes:
    def __init__(
        self,
        devices: Sequence[Device],
        command: Sequence[str],
        mesh: str | None,
        ranks: Sequence[int],
        settings: Mapping[str, str],
        grace: float,
        dump: str | None,
    ):
        self._ranks, self._settings = ranks, settings
        self._dump = dump
        self._devices = devices
        self._mesh = mesh
        self._grace = grace
        self._lock = threading.Lock()
        self._interrupts = 0
        self._signals: list[int] = []
        self._wake = threading.Event()
        cores = sorted(os.sched_getaffinity(0))
        shares = [d.core_share for d in devices if d.core_share is not None]
        packed = iter(pack(shares, cores)) if shares else iter(())
        self._janitor = _start_janitor()
        self._children: list[_Child] = []
        address = f"127.0.0.1:{_free_port()}"
        self._before = self._handle_signals()
        try:
            for rank, device in enumerate(devices):
                core = next(packed) if device.core_share is not None else None
                self._start(rank, device, core, command, address)
        except BaseException:
            self._kill_all()
            self._tidy()
            raise

    def _start(
        self, rank: int, device: Device, core: int | None, command: Sequence[str], address: str
    ) -> None:
        env = _environment(rank, device, self._devices, self._mesh, address) | dict(self._settings)
        if self._dump is not None:
            env |= dumping(env, self._dump, str(rank))
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._janitor.write(f"{process.pid}\n".encode())
        throttle = None
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        if device.core_share is not None:
            throttle, how = make_throttle(process.pid, rank, device.core_share)
            if isinstance(throttle, Cgroup):
                self._janitor.write(f"{throttle.folder}\n".encode())
            print(
                f"hxla: rank {rank} has {device.core_share:g} of core {core}, by {how}",
                file=sys.stderr,
            )
        assert process.stdout is not None
        assert process.stderr is not None
        readers = tuple(
            threading.Thread(target=self._forward, args=(rank, pipe, out), daemon=True)
            for pipe, out in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            )
        )
        for reader in readers:
            reader.start()
        self._children.append(_Child(process=process, readers=readers, throttle=throttle))

    def _forward(self, rank: int, pipe: IO[bytes], out: IO[bytes]) -> None:
        """Prefix each line; one that ends in a carriage return is a live line, replaced later."""
        prefix = f"[{rank}] ".encode()
        terminal = out.isatty()
        pending = b""
        clear = b"\r\x1b[2K" if terminal else b""

        def write(line: bytes) -> None:
            with self._lock:
                out.write(line)
                out.flush()

        while chunk := os.read(pipe.fileno(), 65536):
            *lines, pending = re.split(rb"(?<=[\r\n])", pending + chunk)
            for line in lines:
                live = terminal and line.endswith(b"\r")
                write(clear + prefix + line[:-1] + (b"" if live else b"\n"))
        if pending:
            write(prefix + pending + b"\n")

    # -- signals -----------------------------------------------------------------------------

    def _handle_signals(self) -> dict[int, object]:
        if threading.current_thread() is not threading.main_thread():
            return {}

        def handle(number: int, frame: object) -> None:
            self._signals.append(number)
            self._wake.set()

        passed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        return {number: signal.signal(number, handle) for number in passed}

    def _serve_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGUSR1:
                self._reread_shares()
                continue
            self._interrupts += number == signal.SIGINT
            self._send(signal.SIGKILL if self._interrupts > 1 else number)

    def _reread_shares(self) -> None:
        if self._mesh is None:
            return
        try:
            cluster: Cluster = load_cluster(self._mesh)
            if len(cluster.devices) <= max(self._ranks):
                raise LaunchError(f"{self._mesh} now has {len(cluster.devices)} devices")
        except HxlaError as error:
            print(f"hxla: shares stay as they are: {error}", file=sys.stderr)
            return
        devices = [cluster.devices[rank] for rank in self._ranks]
        for child, device in zip(self._children, devices, strict=True):
            if child.throttle is not None and device.core_share is not None:
                child.throttle.set_share(device.core_share)
        shares = [d.core_share for d in devices]
        print(f"hxla: core shares are now {shares}", file=sys.stderr)

    def _send(self, number: int) -> None:
        for child in self._children:
            if child.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, number)
                    os.killpg(child.process.pid, signal.SIGCONT)

    # -- the end -----------------------------------------------------------------------------

    def wait(self) -> int:
        """Wait for all; end all when one fails."""
        failed: tuple[int, int] | None = None
        deadline = 0.0
        codes: dict[int, int] = {}
        try:
            while len(codes) < len(self._children):
                self._wake.wait(0.05)
                self._wake.clear()
                self._serve_signals()
                for rank, child in enumerate(self._children):
                    code = child.process.poll()
                    if code is None or rank in codes:
                        continue
                    codes[rank] = code
                    if code and failed is None:
                        failed = rank, code
                        deadline = time.monotonic() + self._grace
                        with self._lock:
                            print(f"hxla: rank {rank} {_how(code)}", file=sys.stderr, flush=True)
                        if code != 75:  # all ranks checkpoint and leave together
                            self._send(signal.SIGTERM)
                if failed and time.monotonic() > deadline:
                    self._send(signal.SIGKILL)
        finally:
            self._kill_all()
            for child in self._children:
                for reader in child.readers:
                    reader.join(timeout=2)
            self._tidy()
        if failed is None:
            return 0
        return failed[1] if failed[1] > 0 else 128 - failed[1]

    def _kill_all(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):  # grandchildren too
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()

    def _tidy(self) -> None:
        for child in self._children:
            if child.throttle is not None:
                child.throttle.close()
        with contextlib.suppress(OSError):
            self._janitor.write(b"done\n")
            self._janitor.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}; ending the others"
    return f"exited with code {code}; ending the others"


# glibc gives the pages of every large buffer back and faults them in again at the next step: on a
# 26 MB sum that took up to four times as long as the sum itself.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}


def _environment(
    rank: int, device: Device, devices: Sequence[Device], mesh: str | None, address: str
) -> dict[str, str]:
    env = dict(os.environ)
    env |= {
        "HXLA_COORDINATOR": address,
        "HXLA_NUM_PROCESSES": str(len(devices)),
        "HXLA_PROCESS_ID": str(rank),
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
        cards = visible.split(",") if visible else [str(i) for i in range(len(devices))]
        env["CUDA_VISIBLE_DEVICES"] = cards[rank]
        kind = device.kind.lower().replace(" ", "-")
        cache = env.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        env.setdefault("JAX_COMPILATION_CACHE_DIR", f"{cache}/hxla/xla/{kind}")
        mixed = len({d.kind for d in devices}) > 1
        wanted = _GPU_FLAGS + (_MIXED_GPU_FLAGS if mixed else ())
        for key, value in _MIXED_GPU_NCCL.items() if mixed else ():
            env.setdefault(key, value)
    added = [flag for flag in wanted if flag.split("=")[0] not in flags]
    env["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_JANITOR = """
import os, signal, sys, time
lines = sys.stdin.read().split("\\n")
if "done" in lines:
    sys.exit()
for line in lines:
    if line.isdigit():
        try:
            os.killpg(int(line), signal.SIGKILL)
        except OSError:
            pass
for line in lines:
    for _ in range(100 if line.startswith("/") else 0):
        try:
            os.rmdir(line)
        except FileNotFoundError:
            break
        except OSError:
            time.sleep(0.02)
        else:
            break
"""


def _start_janitor() -> IO[bytes]:
    """A process that outlives the launcher and ends what it left: it reads until the pipe closes.

    The launcher has ended everything itself by then, unless it was killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _JANITOR], bufsize=0, stdin=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    return process.stdin
