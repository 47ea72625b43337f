"""`hxla run`: one process per accelerator, or per described device."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..cluster.libraries import are_unlike, in_words
from ..cluster.mesh_file import load_cluster
from ..core.errors import LaunchError
from .elastic_run import ElasticRun
from .environment import describe, elastic_environment, place_of, process_environment
from .event_log import EventLog
from .host import Hosts, LocalHost, ThisMachine
from .membership import MembershipRules
from .output import Logs, Output
from .processes import Processes, Start
from .user_signals import handing_on_signals
from .workers import Streams

if TYPE_CHECKING:
    from ..plan.plan import Plan


_MOST_PROCESSES = 65536
_HAND_OVER_SECONDS = 30.0  # members end the step at hand and write their state
_PREPARE_SECONDS = 600.0  # members trace and compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What is asked of an elastic run, but for where its devices come from.

    Attributes:
        command: A Python script and its arguments.
        nodes: File of the IDs of the nodes of a Ray cluster that may be used; None: all.
        least: The fewest devices to train on (minP).
        most: The most (maxP); None: one for each microbatch.
        heartbeat_seconds: How long a process may be silent.
        grace_seconds: The notice that a SIGTERM gives.
        events: File for what happens, one line of JSON each.

    Raises:
        LaunchError: If the numbers contradict each other.
    """

    command: Sequence[str]
    nodes: str | None = None
    least: int = 1
    most: int | None = None
    heartbeat_seconds: float = 10.0
    grace_seconds: float = 5.0
    events: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self._most:
            raise LaunchError(f"--min {self.least} --max {self._most}: use 1 <= min <= max")

    @property
    def _most(self) -> int:
        return _MOST_PROCESSES if self.most is None else self.most

    def rules(self) -> MembershipRules:
        """What the run keeps to; its ports are free ones of this machine."""
        return MembershipRules(
            min_devices=self.least,
            max_devices=self._most,
            num_steps=sys.maxsize,
            num_microbatches=1,
            heartbeat_seconds=self.heartbeat_seconds,
            hand_over_seconds=_HAND_OVER_SECONDS,
            prepare_seconds=_PREPARE_SECONDS,
            form_seconds=_PREPARE_SECONDS,
            ports=tuple(free_port() for _ in range(4)),
        )


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    command: Sequence[str],
    *,
    mesh: str | None = None,
    number: int | None = None,
    plan: str | None = None,
    grace_seconds: float = 5.0,
    dump: str | None = None,
    program: Sequence[str] = ("hxla._src.launch",),
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
        LaunchError: As `describe`.
    """
    asked = None
    if plan is not None:
        from ..plan.plan import Plan  # with jax, which a launcher does without

        asked = Plan.read(plan)
    if asked is not None and mesh is None and number is None:
        mesh, number = _mesh_of(asked, str(plan)), len(asked.devices)
    devices = describe(mesh, None if mesh is not None else number)
    ranks: Sequence[int] = range(len(devices))
    settings: dict[str, str] = {}
    if plan is not None and asked is not None:
        ranks = _planned_ranks(asked, len(devices))
        settings = {"HXLA_PLAN": os.path.abspath(plan)}
        if len(ranks) < len(devices):
            settings["HXLA_DEVICES"] = ",".join(map(str, ranks))
    address, folder = f"127.0.0.1:{free_port()}", new_dump(dump)
    chosen = [devices[rank] for rank in ranks]
    kinds = [device.kind for device in chosen]
    if are_unlike(kinds):
        said = f"{in_words(kinds)} share no library for collectives: they meet in their hosts"
        print(f"hxla: {said}", file=sys.stderr)
    starts = []
    for number_here, (rank, device) in enumerate(zip(ranks, chosen, strict=True)):
        env = process_environment(place_of(rank, devices), device, chosen, mesh) | settings
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
    wishes: ElasticOptions,
    *,
    mesh: str | None = None,
    number: int | None = None,
    ray: str | None = None,
) -> int:
    """Run a script whose processes come and go with the devices, until it has trained.

    Args:
        wishes: What is asked of the run.
        mesh: Built-in name or path of a mesh file, which is read again when it changes.
        number: Processes to start, instead of a mesh.
        ray: Address of a Ray cluster whose nodes give the devices, instead of a mesh.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: As `describe`, or if there is no such cluster.
    """
    streams, closed = _streams()
    rules, log = wishes.rules(), EventLog(wishes.events)
    if ray is not None:
        with _needing_ray():
            from .ray_cluster import RayHosts
        hosts: Hosts = RayHosts(ray, wishes.command, streams, wishes.nodes)
    else:
        devices = describe(mesh, None if mesh is not None else number)
        host = LocalHost(wishes.command, elastic_environment(devices, mesh), streams)
        hosts = ThisMachine(host, lambda: devices if mesh is None else describe(mesh, None))
    run = ElasticRun(hosts, streams, rules, wishes.grace_seconds, log)
    closed.append(lambda: run.receive(signal.SIGTERM))
    with handing_on_signals(run.receive):
        return run.wait()


@contextlib.contextmanager
def _needing_ray() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError:
        raise LaunchError("--ray needs Ray: pip install 'hxla[ray]', on every node") from None


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


def _mesh_of(plan: "Plan", file: str) -> str | None:
    """The mesh file of a plan: built in, where it was, or beside the plan; None: it had none.

    Raises:
        LaunchError: If it is nowhere there.
    """
    if not plan.mesh_file:
        return plan.cluster or None
    own = pathlib.Path(plan.mesh_file)
    for path in (own, pathlib.Path(file).with_name(own.name)):
        if path.is_file():
            return str(path)
    raise LaunchError(
        f"plan {file} is for the mesh file {plan.cluster!r}, which is not at {own} and not beside "
        "the plan: put it there, or pass --mesh FILE"
    )


def _planned_ranks(plan: "Plan", num_devices: int) -> Sequence[int]:
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
